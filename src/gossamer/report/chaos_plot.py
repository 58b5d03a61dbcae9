"""Pictures and tables of chaos runs: who trained when, what was done to whom, and who was held up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossamer.errors import InputError
from gossamer.report.bench_plot import check_path

COLORS = {"kill": "#b3261e", "stop": "#e0a13c", "cut": "#7a5bb5", "join": "#2a9d8f", "slow": "#8a6d3b"}
TRAINS, ALONE, HELD = "#9fbfe0", "#d5dae0", "#e02020"
HELD_UP = 0.5  # seconds: shorter stalls cannot be seen in a picture of minutes


def draw_chaos(data: Mapping[str, Any], path: str | Path) -> Path:
    """A row a worker: blue where it trains (from step to step), faults as marked spans, stalls of survivors in red.

    Below, the loss of every worker over time, and the final losses of this run and of the calm ones.
    """
    path = check_path(path)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    ranks = sorted({life["worker"] for life in data["lives"]})
    rows = {rank: at for at, rank in enumerate(ranks)}
    figure, (top, bottom) = plt.subplots(
        2,
        1,
        figsize=(11, 1.9 + 0.36 * len(ranks) + 2.2),
        height_ratios=[0.5 + 0.36 * len(ranks), 2.2],
        sharex=True,
        layout="constrained",
    )
    for life in data["lives"]:
        spans = _spans([s[0] for s in life["steps"]])
        top.broken_barh(spans, (rows[life["worker"]] - 0.36, 0.72), color=TRAINS, linewidth=0)
        if life["joined"] and life["steps"]:
            top.plot(life["steps"][0][0], rows[life["worker"]], ">", color=COLORS["join"], markersize=6, zorder=5)
    for fault in data["faults"]:
        until = fault["until"] if fault["until"] is not None else data["seconds"]
        for victim in fault["victim"]:
            box = (rows[victim] - 0.42, 0.84)
            top.broken_barh([(fault["at"], until - fault["at"])], box, color=COLORS[fault["kind"]], alpha=0.45)
        top.plot(fault["at"], rows[fault["victim"][0]] - 0.5, "v", color=COLORS[fault["kind"]], markersize=7, zorder=6)
        bottom.axvspan(fault["at"], until, color=COLORS[fault["kind"]], alpha=0.12, linewidth=0)
    for stall in data["stalls"]:
        if stall["seconds"] >= HELD_UP:
            width = stall["to"] - stall["from"]
            top.broken_barh([(stall["from"], width)], (rows[stall["worker"]] - 0.36, 0.72), color=HELD, zorder=4)
    kinds = [k for k in COLORS if any(f["kind"] == k for f in data["faults"])]
    legend = [Patch(color=TRAINS, label="trains"), *(Patch(color=COLORS[k], alpha=0.6, label=k) for k in kinds)]
    legend.append(Patch(color=HELD, label=f"survivor held up ≥ {HELD_UP:g} s"))
    top.legend(handles=legend, ncols=len(legend), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    top.set_yticks(range(len(ranks)), [f"worker {rank}" for rank in ranks])
    top.set_ylim(len(ranks) - 0.4, -0.8)
    for life in data["lives"]:
        points = _smooth([(t, loss) for t, _, loss in life["steps"]])
        bottom.plot(*zip(*points, strict=True), color="#3b73b9", alpha=0.5, linewidth=0.8) if points else None
    for calm in data["calm_final_losses"]:
        bottom.plot(data["seconds"], calm, "o", color="#a3a7ad", markersize=6, clip_on=False, zorder=5)
    if data["final_loss"] is not None:
        bottom.plot(data["seconds"], data["final_loss"], "D", color="#b3261e", markersize=6, clip_on=False, zorder=6)
    bottom.set_ylabel("loss (final: ◆, calm: ●)")
    bottom.set_xlabel("seconds")
    bottom.set_xlim(0, data["seconds"])
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def draw_soak(data: Mapping[str, Any], path: str | Path) -> Path:
    """Memory and descriptors of every worker over the run."""
    path = check_path(path)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if not data["memory"]["workers"]:
        raise InputError("there is nothing to draw: no worker lived long enough; pass a longer --seconds")
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 5), sharex=True, layout="constrained")
    for worker in data["memory"]["workers"]:
        times, rss, descriptors, threads = zip(*worker["samples"], strict=True)
        label = f"worker {worker['worker']}"
        (line,) = top.plot(times, rss, linewidth=1, label=label)
        bottom.plot(times, descriptors, linewidth=1, color=line.get_color())
        bottom.plot(times, threads, linewidth=1, linestyle=":", color=line.get_color())
    top.set_ylabel("resident memory, MB")
    top.set_ylim(0, 1.2 * max(s[1] for w in data["memory"]["workers"] for s in w["samples"]))
    top.legend(frameon=False, ncols=4, loc="lower right")
    bottom.set_ylabel("descriptors (—), threads (···)")
    bottom.set_ylim(bottom=0)
    bottom.set_xlabel("seconds")
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _spans(times: list[float], pause: float = 1.0) -> list[tuple[float, float]]:
    """(start, width) of the stretches in which steps follow each other without a pause."""
    spans: list[tuple[float, float]] = []
    for t in times:
        if spans and t - sum(spans[-1]) <= pause:
            spans[-1] = (spans[-1][0], t - spans[-1][0])
        else:
            spans.append((t, 0.0))
    return spans


def _smooth(points: list[tuple[float, float]], window: int = 20) -> list[tuple[float, float]]:
    found = []
    for k in range(window - 1, len(points), max(1, window // 4)):
        part = points[k - window + 1 : k + 1]
        found.append((points[k][0], sum(loss for _, loss in part) / window))
    return found


def markdown(data: Mapping[str, Any]) -> str:
    """The verdict and its faults as tables."""
    lines = [
        f"**{'Passed' if data['passed'] else 'Failed'}.** " + ". ".join(data["problems"]),
        "",
        "| | |",
        "|---|---|",
    ]
    for name in ("hangs", "restarts", "longest_stall_s", "calm_longest_stalls_s", "rejoined", "rejoin_s"):
        lines.append(f"| {name} | {_text(data[name])} |")
    for name in ("final_loss", "calm_final_losses", "leaks", "valid", "cpu_use"):
        lines.append(f"| {name} | {_text(data[name])} |")
    if data["faults"]:
        lines += ["", "| at, s | fault | victims | undone at, s | back after, s |", "|---|---|---|---|---|"]
    for fault in data["faults"]:
        back = [r["seconds"] for r in data["rejoins"] if abs(r["at"] - fault["at"]) < 1e-9]
        what = f"{fault['kind']} {fault['how']}".strip()
        lines.append(
            f"| {fault['at']:.1f} | {what} | {_text(fault['victim'])} | {_text(fault['until'])} | {_text(back)} |"
        )
    if not data["faults"]:
        lines += [
            "",
            "| worker | RSS, MB | growth, MB | bound, MB | descriptors | growth |",
            "|---|---|---|---|---|---|",
        ]
        for w in data["memory"]["workers"]:
            lines.append(
                f"| {w['worker']} | {w['rss_mb']:.1f} | {w['rss_growth_mb']:+.2f} in {w['seconds']:.0f} s | "
                f"{w['rss_bound_mb']:.1f} | {w['descriptors']:.0f} | {w['descriptors_growth']:+.2f} |"
            )
    if data["ddp"] is not None:
        lines += ["", f"torch's DDP under the first of these faults: {ddp_sentence(data['ddp'])}."]
    return "\n".join(lines)


def ddp_sentence(ddp: Mapping[str, Any]) -> str:
    """How DDP ended, for people."""
    took = [r["after_s"] for r in ddp["ranks"] if r["after_s"] is not None and r["ending"] != "killed"]
    when = f" within {max(took):.2f} s" if took else ""
    last = ddp["last_step_after_s"]
    step = (
        "" if last is None else f"; its last step was {abs(last):.2f} s {'after' if last > 0 else 'before'} the fault"
    )
    return f"{ddp['failed']} of {ddp['of']} workers failed{when}{step}"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k.replace('_', ' ')} {_text(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text(v) for v in value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)
