"""Pictures and tables of benchmarks: bars of step times as in the papers, loss against wall time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.errors import InputError
from gossamer.predict.methods import parse

SUFFIXES = (".svg", ".png", ".pdf")
BASELINE, PEER, OURS = "#a3a7ad", "#e0a13c", ("#3b73b9", "#2a9d8f", "#7a5bb5", "#74a9d8", "#1d3f6e")
LINES = ("#a3a7ad", "#3b73b9", "#2a9d8f", "#e0a13c", "#7a5bb5")


def check_path(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise InputError(f"cannot draw to {str(path)!r}; name a file that ends in {', '.join(SUFFIXES)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def draw_bars(benches: Mapping[str, Any] | Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """One group of bars a benchmark: step times with their spread, DDP grey, peers amber, Gossamer blue and green.

    The number on a bar is its speed-up over DDP; a line marks the mean compute time, which no method in step can beat,
    a dotted one that of workers at their own pace, for asynchronous methods; an invalid bar is hatched.
    """
    path = check_path(path)
    groups = [benches] if isinstance(benches, Mapping) else list(benches)
    if not any("skipped" not in r for g in groups for r in g["results"]):
        raise InputError("there is nothing to draw: every method was skipped")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = list(dict.fromkeys(r["method"] for g in groups for r in g["results"] if "skipped" not in r))
    colors = _colors(names)
    width = 0.82 / len(names)
    figure, axis = plt.subplots(figsize=(max(4.6, 1.6 + 0.62 * len(names) * len(groups)), 3.8), layout="constrained")
    invalid = False
    for at, group in enumerate(groups):
        left = at - 0.41
        for r in group["results"]:
            if "skipped" in r:
                continue
            x = left + (names.index(r["method"]) + 0.5) * width
            low, high = r["step_ms_spread"]
            bad = r.get("valid") is False
            invalid |= bad
            axis.bar(
                x,
                r["step_ms"],
                width * 0.92,
                color=colors[r["method"]],
                yerr=[[r["step_ms"] - low], [high - r["step_ms"]]],
                error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#333333"},
                hatch="///" if bad else None,
                edgecolor="white",
                linewidth=0.5,
            )
            if r.get("speedup_vs_ddp"):
                axis.annotate(
                    f"{r['speedup_vs_ddp']:.2f}×",
                    (x, high),
                    xytext=(0, 4),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                )
        compute = group["ideal"]["mean_compute_ms"]
        axis.hlines(compute, left, left + 0.82, colors="#333333", linestyles="dashed", linewidth=1)
        if _asynchronous(group):
            own_pace = group["ideal"]["asynchronous_ms"]
            axis.hlines(own_pace, left, left + 0.82, colors="#333333", linestyles="dotted", linewidth=1)
    axis.set_xticks(range(len(groups)), [_label(g) for g in groups], fontsize=8)
    axis.set_ylabel("step time (ms)")
    axis.margins(y=0.12)
    axis.set_ylim(bottom=0)
    for spine in ("top", "right"):
        axis.spines[spine].set_visible(False)
    handles: list[Any] = [Patch(color=colors[name], label=name) for name in names]
    handles.append(Line2D([], [], color="#333333", linestyle="dashed", linewidth=1, label="mean compute"))
    if any(map(_asynchronous, groups)):
        handles.append(Line2D([], [], color="#333333", linestyle="dotted", linewidth=1, label="compute, own pace"))
    if invalid:
        handles.append(Patch(facecolor="white", edgecolor="#333333", hatch="///", label="INVALID"))
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _colors(names: Sequence[str]) -> dict[str, Any]:
    made, ours, ddps = {}, 0, 0
    for name in names:
        if name.startswith("ddp"):
            made[name] = (BASELINE, "#6d7278", "#c9ccd1")[min(ddps, 2)]
            ddps += 1
        elif name.startswith("decent-dp"):
            made[name] = PEER
        else:
            made[name] = OURS[ours % len(OURS)]
            ours += 1
    return made


def _asynchronous(bench: Mapping[str, Any]) -> bool:
    """Whether an asynchronous method was measured, and its limit is known (older records lack it)."""
    measured = (r["method"] for r in bench["results"] if "skipped" not in r)
    return "asynchronous_ms" in bench["ideal"] and any(parse(m).asynchronous for m in measured)


def invalid_note(bench: Mapping[str, Any]) -> str:
    """Which results are worth nothing and why; empty if none is known to be."""
    reasons: dict[str, list[str]] = {}
    for r in bench["results"]:
        if r.get("valid") is False:
            reasons.setdefault(r["invalid_because"], []).append(r["method"])
    told = "; ".join(f"{reason} ({', '.join(methods)})" for reason, methods in reasons.items())
    return f"INVALID: {told}." if told else ""


def ideal_words(bench: Mapping[str, Any]) -> str:
    """What jitter alone allows, in words."""
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
    """The results as a table for a record's README."""
    c, plan = bench["cluster"], bench["plan"]
    length = f"{plan['steps']} steps" if plan.get("seconds") is None else f"{plan['seconds']:g} s"
    lines = [
        f"{c['nodes']} nodes, workers {c['per_node']}, links {c['link']} {c['links'] or ''} ({c['network']}), compute "
        f"{c['compute_seconds']:g} s, jitter {c['jitter']}, {c['model_mb']:g} MB, γ {_number(c['gamma'])}; "
        f"{plan['repeats']} repeats of {length}, in turn.",
        "",
        "| method | ms a step | spread | × DDP | × limit | limit by | waiting ms | MB a step | bucket MiB | CPU |",
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


def draw_loss(curves: Mapping[str, Sequence[tuple[float, float]]], path: str | Path, *, target: float) -> Path:
    """Loss against wall time, a line a method; the dotted line is the loss whose time is compared."""
    path = check_path(path)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    for (name, points), color in zip(curves.items(), LINES, strict=False):
        axis.plot([t for t, _ in points], [v for _, v in points], label=name, color=color, linewidth=1.6)
    axis.axhline(target, color="#333333", linestyle="dotted", linewidth=1)
    axis.set_xlabel("wall time (s)")
    axis.set_ylabel("loss, mean over workers")
    axis.set_xlim(left=0)
    for spine in ("top", "right"):
        axis.spines[spine].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
