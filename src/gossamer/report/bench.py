"""Benchmarks for people: a picture with one bar per method, and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.errors import InputError
from gossamer.predict.methods import parse
from gossamer.report.plots.style import INK, check_output, method_styles, new_figure, save, say, tidy

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from gossamer.report.plots.style import MethodStyle


def draw_bars(benches: Mapping[str, Any] | Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Draw step times with their spread, one panel per benchmark and one bar per method, named at its left.

    The number at a bar is its time and its speedup over DDP. A dashed line marks the mean compute time, which no
    synchronous method can beat; a dotted line marks the compute time of workers at their own pace, the limit of
    asynchronous methods. The bar of an invalid result is hatched.
    """
    path = check_output(path)
    groups = [benches] if isinstance(benches, Mapping) else list(benches)
    measured = [[r for r in g["results"] if "skipped" not in r] for g in groups]
    names = list(dict.fromkeys(r["method"] for results in measured for r in results))
    if not names:
        raise InputError("there is nothing to draw: every method was skipped")
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    styles = method_styles(names)
    rows = [max(1, len(results)) for results in measured]
    figure = new_figure(7.4, 1.3 + sum(0.5 + 0.3 * count for count in rows))
    axes = figure.subplots(len(groups), 1, sharex=True, squeeze=False, height_ratios=[0.6 + n for n in rows])[:, 0]
    for axis, group, results in zip(axes, groups, measured, strict=True):
        _draw_group(axis, group, results, styles)
    axes[-1].set_xlabel("step time (ms)")
    axes[-1].set_xlim(0, 1.22 * max(r["step_ms_spread"][1] for results in measured for r in results))
    handles: list[Artist] = [Line2D([], [], color=INK, linestyle="dashed", linewidth=1, label="mean compute")]
    if any(map(_asynchronous, groups)):
        handles.append(Line2D([], [], color=INK, linestyle="dotted", linewidth=1, label="compute, own pace"))
    if any(r.get("valid") is False for results in measured for r in results):
        handles.append(Patch(facecolor="white", edgecolor=INK, hatch="///", label="INVALID"))
    figure.legend(handles=handles, loc="outside lower right", ncols=3, fontsize=8, frameon=False)
    say(figure, " ".join(_sentence(group, results) for group, results in zip(groups, measured, strict=True) if results))
    return save(figure, path)


def _sentence(bench: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    """Say which method is fastest, and how close it is to what compute allows."""
    best = min(results, key=lambda r: r["step_ms"])
    speedup = best.get("speedup_vs_ddp")
    than = f", {speedup:.2f} times as fast as ddp" if speedup and best["method"] != "ddp" else ""
    compute = bench["ideal"]["mean_compute_ms"]
    return f"{best['method']} is fastest: {best['step_ms']:.0f} ms a step{than}; compute alone takes {compute:.0f} ms."


def _draw_group(
    axis: Axes, bench: Mapping[str, Any], results: Sequence[Mapping[str, Any]], styles: Mapping[str, MethodStyle]
) -> None:
    for y, r in enumerate(results):
        low, high = r["step_ms_spread"]
        axis.barh(
            y,
            r["step_ms"],
            0.72,
            color=styles[r["method"]].color,
            xerr=[[r["step_ms"] - low], [high - r["step_ms"]]],
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": INK},
            hatch="///" if r.get("valid") is False else None,
            edgecolor="white",
            linewidth=0.5,
        )
        text = f"{r['step_ms']:.0f} ms" + (f", {r['speedup_vs_ddp']:.2f}×" if r.get("speedup_vs_ddp") else "")
        axis.annotate(text, (high, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axis.axvline(bench["ideal"]["mean_compute_ms"], color=INK, linestyle="dashed", linewidth=1)
    if _asynchronous(bench):
        axis.axvline(bench["ideal"]["asynchronous_ms"], color=INK, linestyle="dotted", linewidth=1)
    axis.set_yticks(range(len(results)), [r["method"] for r in results], fontsize=8)
    axis.set_ylim(len(results) - 0.4, -0.6)
    axis.set_title(_label(bench), fontsize=8, loc="left")
    tidy(axis)
    axis.grid(axis="y", visible=False)


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
    return f"{name}{c['nodes']} nodes, {sum(c['per_node'])} workers, links {c['link']} ({c['network']}){gamma}{jitter}"


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
