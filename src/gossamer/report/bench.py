"""Benchmarks for people: a picture with one bar per method, and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.errors import InputError
from gossamer.predict.methods import parse
from gossamer.report.plots.style import INK, check_output, method_styles, new_figure, save, tidy

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from gossamer.report.plots.style import MethodStyle


def draw_bars(benches: Mapping[str, Any] | Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Draw step times with their spread, one panel per benchmark.

    The number on a bar is its speedup over DDP. A dashed line marks the mean compute time, which no synchronous method
    can beat; a dotted line marks the compute time of workers at their own pace, the limit of asynchronous methods. The
    bar of an invalid result is hatched.
    """
    path = check_output(path)
    groups = [benches] if isinstance(benches, Mapping) else list(benches)
    names = list(dict.fromkeys(r["method"] for g in groups for r in g["results"] if "skipped" not in r))
    if not names:
        raise InputError("there is nothing to draw: every method was skipped")
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    styles = method_styles(names)
    figure = new_figure(max(4.6, len(groups) * (0.8 + 0.62 * len(names))), 4.2)
    axes = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axis, group in zip(axes, groups, strict=True):
        _draw_group(axis, group, styles)
    axes[0].set_ylabel("step time (ms)")
    axes[0].margins(y=0.12)
    axes[0].set_ylim(bottom=0)
    handles: list[Artist] = [Line2D([], [], color=INK, linestyle="dashed", linewidth=1, label="mean compute")]
    if any(map(_asynchronous, groups)):
        handles.append(Line2D([], [], color=INK, linestyle="dotted", linewidth=1, label="compute, own pace"))
    if any(r.get("valid") is False for g in groups for r in g["results"]):
        handles.append(Patch(facecolor="white", edgecolor=INK, hatch="///", label="INVALID"))
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    return save(figure, path)


def _draw_group(axis: Axes, bench: Mapping[str, Any], styles: Mapping[str, MethodStyle]) -> None:
    results = [r for r in bench["results"] if "skipped" not in r]
    for x, r in enumerate(results):
        low, high = r["step_ms_spread"]
        axis.bar(
            x,
            r["step_ms"],
            0.75,
            color=styles[r["method"]].color,
            yerr=[[r["step_ms"] - low], [high - r["step_ms"]]],
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": INK},
            hatch="///" if r.get("valid") is False else None,
            edgecolor="white",
            linewidth=0.5,
        )
        if r.get("speedup_vs_ddp"):
            text = f"{r['speedup_vs_ddp']:.2f}×"
            axis.annotate(text, (x, high), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=8)
    axis.axhline(bench["ideal"]["mean_compute_ms"], color=INK, linestyle="dashed", linewidth=1)
    if _asynchronous(bench):
        axis.axhline(bench["ideal"]["asynchronous_ms"], color=INK, linestyle="dotted", linewidth=1)
    labels = [r["method"] for r in results]
    axis.set_xticks(range(len(results)), labels, fontsize=8, rotation=30, ha="right", rotation_mode="anchor")
    axis.set_title(_label(bench), fontsize=8)
    tidy(axis)
    axis.grid(axis="x", visible=False)


def _asynchronous(bench: Mapping[str, Any]) -> bool:
    """Return whether an asynchronous method was measured and its limit is known (older records lack the limit)."""
    measured = (r["method"] for r in bench["results"] if "skipped" not in r)
    return "asynchronous_ms" in bench["ideal"] and any(parse(m).asynchronous for m in measured)


def invalid_note(bench: Mapping[str, Any]) -> str:
    """Return which results are invalid and why; empty if none is known to be."""
    reasons: dict[str, list[str]] = {}
    for r in bench["results"]:
        if r.get("valid") is False:
            reasons.setdefault(r["invalid_because"], []).append(r["method"])
    listed = "; ".join(f"{reason} ({', '.join(methods)})" for reason, methods in reasons.items())
    return f"INVALID: {listed}." if listed else ""


def ideal_words(bench: Mapping[str, Any]) -> str:
    """Describe the speedup that free links would allow, where only jitter costs time."""
    best = bench["ideal"]
    text = (
        f"DDP needs at least {best['ddp_ms']:.1f} ms; mean compute is {best['mean_compute_ms']:.1f} ms, so gossip can "
        f"gain {_number(best['speedup_vs_ddp'])} times"
    )
    if not _asynchronous(bench):
        return text
    return (
        f"{text}, and workers at their own pace need {best['asynchronous_ms']:.1f} ms, so asynchronous gossip can gain "
        f"{_number(best['asynchronous_speedup_vs_ddp'])} times"
    )


def _label(bench: Mapping[str, Any]) -> str:
    c = bench["cluster"]
    name = f"{c['name']}, " if c["name"] else ""
    gamma = "" if c["gamma"] is None else f", γ {c['gamma']:.2g}"
    jitter = "" if c["jitter"] == "none" else f", {c['jitter']}"
    return f"{name}{c['nodes']} nodes, {sum(c['per_node'])} workers\nlinks {c['link']} ({c['network']}){gamma}{jitter}"


def markdown(bench: Mapping[str, Any]) -> str:
    """Return the results as a table for a record's README."""
    c, plan = bench["cluster"], bench["plan"]
    length = f"{plan['steps']} steps" if plan.get("seconds") is None else f"{plan['seconds']:g} s"
    lines = [
        f"{c['nodes']} nodes, workers {c['per_node']}, links {c['link']} {c['links'] or ''} ({c['network']}), compute "
        f"{c['compute_seconds']:g} s, jitter {c['jitter']}, {c['model_mb']:g} MB, γ {_number(c['gamma'])}; "
        f"{plan['repeats']} repeat{'s' * (plan['repeats'] != 1)} of {length}, in turn.",
        "",
        "| method | ms per step | spread | × DDP | × limit | limit by | waiting ms | MB per step | bucket MiB | CPU |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in bench["results"]:
        if "skipped" in r:
            lines.append(f"| {r['method']} | skipped: {r['skipped']} | | | | | | | | |")
            continue
        low, high = r["step_ms_spread"]
        waits = ", ".join(f"{cause} {ms:.1f}" for cause, ms in r["waiting_ms"].items()) or "0"
        size = None if r["bytes_per_step"] is None else r["bytes_per_step"] / 1e6
        busy = "-" if r["cpu_use"] is None else f"{100 * r['cpu_use']:.0f} %"
        lines.append(
            f"| {r['method']} | {r['step_ms']:.1f} | {low:.1f} to {high:.1f} | {_number(r['speedup_vs_ddp'])} | "
            f"{_number(r['multiple_of_limit'])} | {r['limit_by']} | {waits} | {_number(size)} | "
            f"{_number(r['bucket_mb'])} | {busy}{'' if r['valid'] is not False else ' INVALID'} |"
        )
    lines += ["", f"With free links {ideal_words(bench)}."]
    return "\n".join(lines)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
