"""Chaos runs for people: pictures of which worker trained when and which faults were injected, and tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossamer.errors import InputError
from gossamer.report.plots.style import DASHES, INK, check_output, new_figure, save, say, tidy

COLORS = {"kill": "#882255", "stop": "#e69f00", "cut": "#5d3a9b", "join": "#009e73", "slow": "#7f5f2a"}
COLORS |= {"pair": "#8c7ae6", "term": "#66c2a5"}
TRAINS, LOSS, CALM, STALLED = "#9ecae1", "#0072b2", "#8a8f98", "#d1342f"
MIN_STALL = 0.5  # seconds; shorter stalls cannot be seen in a picture of minutes


def draw_chaos(data: Mapping[str, Any], path: str | Path) -> Path:
    """Draw one row per worker: when it trained, the faults it suffered, and its stalls while it was healthy.

    Below are the losses of all workers over time, and the final losses of this run and of the runs without faults.
    """
    path = check_output(path)
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    ranks = sorted({life["worker"] for life in data["lives"]})
    rows = {rank: at for at, rank in enumerate(ranks)}
    height = 0.5 + 0.36 * len(ranks)
    figure = new_figure(11, height + 4.0)
    top, bottom = figure.subplots(2, 1, height_ratios=[height, 2.2], sharex=True)
    for life in data["lives"]:
        spans = _spans([s[0] for s in life["steps"]])
        top.broken_barh(spans, (rows[life["worker"]] - 0.36, 0.72), color=TRAINS, linewidth=0)
        if life["joined"] and life["steps"]:
            top.plot(life["steps"][0][0], rows[life["worker"]], ">", color=COLORS["join"], markersize=6, zorder=5)
        points = _smooth([(t, loss) for t, _, loss in life["steps"]])
        if points:
            bottom.plot(*zip(*points, strict=True), color=LOSS, alpha=0.5, linewidth=0.8)
    for fault in data["faults"]:
        until = fault["until"] if fault["until"] is not None else data["seconds"]
        color = COLORS[fault["kind"]]
        for victim in fault["victim"]:
            box = (rows[victim] - 0.42, 0.84)
            top.broken_barh([(fault["at"], until - fault["at"])], box, color=color, alpha=0.45)
        top.plot(fault["at"], rows[fault["victim"][0]] - 0.5, "v", color=color, markersize=7, zorder=6)
        bottom.axvspan(fault["at"], until, color=color, alpha=0.12, linewidth=0)
    for stall in data["stalls"]:
        if stall["seconds"] >= MIN_STALL:
            width = stall["to"] - stall["from"]
            top.broken_barh([(stall["from"], width)], (rows[stall["worker"]] - 0.36, 0.72), color=STALLED, zorder=4)
    kinds = [k for k in COLORS if any(f["kind"] == k for f in data["faults"])]
    handles = [Patch(color=TRAINS, label="trains"), *(Patch(color=COLORS[k], alpha=0.6, label=k) for k in kinds)]
    handles.append(Patch(color=STALLED, label=f"healthy worker stalled ≥ {MIN_STALL:g} s"))
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower center", frameon=False, fontsize=8)
    say(figure, _chaos_sentence(data))
    top.set_yticks(range(len(ranks)), [f"worker {rank}" for rank in ranks])
    top.set_ylim(len(ranks) - 0.4, -0.8)
    for calm in data["calm_final_losses"]:
        bottom.plot(data["seconds"], calm, "o", color=CALM, markersize=6, clip_on=False, zorder=5)
    if data["final_loss"] is not None:
        bottom.plot(data["seconds"], data["final_loss"], "D", color=INK, markersize=6, clip_on=False, zorder=6)
    finals = [
        Line2D([], [], color=LOSS, linewidth=1, label="a worker"),
        Line2D([], [], ls="", marker="D", color=INK, label="final"),
        Line2D([], [], ls="", marker="o", color=CALM, label="final without faults"),
    ]
    bottom.legend(handles=finals, loc="upper right", ncols=3, frameon=False, fontsize=8)
    bottom.set(ylabel="training loss", xlabel="time (s)", xlim=(0, data["seconds"]))
    tidy(top, bottom)
    top.grid(axis="y", visible=False)
    return save(figure, path)


def _chaos_sentence(data: Mapping[str, Any]) -> str:
    """Say whether the run passed, how long healthy workers stalled, and how the loss compares."""
    count, stall, final, calm = (
        len(data["faults"]),
        data["longest_stall_s"],
        data["final_loss"],
        data["calm_final_losses"],
    )
    text = f"{'Passed' if data['passed'] else 'Failed'}: {count} fault{'s' * (count != 1)} in {data['seconds']:.0f} s"
    if stall is not None:
        text += f", no healthy worker stalled for longer than {stall:.2g} s"
    if final is not None:
        text += f", final loss {final:.3g}"
        if calm:
            low, high = f"{min(calm):.3g}", f"{max(calm):.3g}"
            text += f" (without faults {low if low == high else f'{low} to {high}'})"
    return f"{text}."


def draw_soak(data: Mapping[str, Any], path: str | Path) -> Path:
    """Draw memory, file descriptors and threads of every worker over the run."""
    path = check_output(path)
    if not data["memory"]["workers"]:
        raise InputError("there is nothing to draw: no worker lived long enough; pass a longer --seconds")
    figure = new_figure(9, 5)
    top, bottom = figure.subplots(2, 1, sharex=True)
    for at, worker in enumerate(data["memory"]["workers"]):
        times, rss, descriptors, threads = zip(*worker["samples"], strict=True)
        dash = DASHES[at % len(DASHES)] or (None, None)  # the lines of equal workers lie on each other
        (line,) = top.plot(times, rss, linewidth=1.2, label=f"worker {process_name(worker)}", dashes=dash)
        bottom.plot(times, descriptors, linewidth=1, color=line.get_color())
        bottom.plot(times, threads, linewidth=1, linestyle=":", color=line.get_color())
    top.set_ylabel("resident memory (MB)")
    top.set_ylim(0, 1.2 * max(s[1] for w in data["memory"]["workers"] for s in w["samples"]))
    top.legend(frameon=False, ncols=4, loc="lower right")
    bottom.set(ylabel="number of files (—), threads (···)", xlabel="time (s)")
    bottom.set_ylim(bottom=0)
    bottom.set_xlim(left=0)
    workers = data["memory"]["workers"]
    growth = max(w["rss_growth_mb"] for w in workers)
    files, threads = (max(w[f"{what}_growth"] for w in workers) for what in ("descriptors", "threads"))
    say(
        figure,
        f"Flat lines are right: in {max(w['seconds'] for w in workers):.0f} s memory grew by at most {growth:+.2f} MB, "
        f"open files by {files:+g}, and threads by {threads:+g}.",
    )
    tidy(top, bottom)
    return save(figure, path)


def _spans(times: list[float], pause: float = 1.0) -> list[tuple[float, float]]:
    """Return (start, width) of each stretch in which steps follow each other without a pause."""
    spans: list[tuple[float, float]] = []
    for t in times:
        if spans and t - sum(spans[-1]) <= pause:
            spans[-1] = (spans[-1][0], t - spans[-1][0])
        else:
            spans.append((t, 0.0))
    return spans


def _smooth(points: list[tuple[float, float]], window: int = 20) -> list[tuple[float, float]]:
    """Return running means of the second value over `window` points."""
    found = []
    for k in range(window - 1, len(points), max(1, window // 4)):
        part = points[k - window + 1 : k + 1]
        found.append((points[k][0], sum(loss for _, loss in part) / window))
    return found


def markdown(data: Mapping[str, Any]) -> str:
    """Return the verdict and the faults as Markdown tables."""
    lines = [
        f"**{'Passed' if data['passed'] else 'Failed'}.** " + "".join(f"{p}. " for p in data["problems"]),
        stall_sentence(data),
        memory_sentence(data["memory"]),
        "",
        "| | |",
        "|---|---|",
    ]
    for name in ("hangs", "restarts", "longest_stall_s", "calm_longest_stalls_s", "rejoined", "rejoin_s"):
        lines.append(f"| {name} | {_text(data[name])} |")
    for name in ("meetings", "longest_meeting_s", "longest_meeting_of_a_victim_s", "meetings_that_differ"):
        lines.append(f"| {name} | {_text(data.get(name))} |")
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
    if data["memory"]["workers"]:
        lines += [
            "",
            "| worker | lived, s | RSS, MB | growth, MB | bound, MB | descriptors | growth | threads | growth | flat |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
    for w in data["memory"]["workers"]:
        lines.append(
            f"| {process_name(w)} | {w['seconds']:.0f} | {w['rss_mb']:.1f} | {w['rss_growth_mb']:+.2f} | "
            f"{w['rss_bound_mb']:.1f} | {w['descriptors']:g} | {w['descriptors_growth']:+g} | {w['threads']:g} | "
            f"{w['threads_growth']:+g} | {'yes' if w['flat'] else 'NO'} |"
        )
    if data["ddp"] is not None:
        lines += ["", f"torch's DDP under the first of these faults: {ddp_sentence(data['ddp'])}."]
    return "\n".join(lines)


def stall_sentence(data: Mapping[str, Any]) -> str:
    """Compare the longest stall of a worker without a fault with the limit."""
    stall, limit = data["longest_stall_s"], data["stall_limit_s"]
    if stall is None:
        return "No worker without a fault made two steps, so there is no stall to compare."
    text = f"The longest stall of a worker without a fault was {stall:.2f} s"
    if data["saturated"]:
        return f"{text}; the cores were saturated, so this is INVALID and not compared with the limit of {limit:g} s."
    return f"{text}, {'within' if stall <= limit else 'ABOVE'} the limit of {limit:g} s."


def memory_sentence(memory: Mapping[str, Any]) -> str:
    """Say whether memory, descriptors and threads were flat."""
    workers = memory["workers"]
    if not workers:
        return "Memory was not judged: no process lived for half of the run."
    return (
        f"Memory, descriptors and threads were flat in {sum(w['flat'] for w in workers)} of {len(workers)} processes "
        "that lived for at least half of the run (medians of the second and the last quarter of their lives)."
    )


def process_name(worker: Mapping[str, Any]) -> str:
    """The rank of a process; a replacement is numbered."""
    return f"{worker['worker']}" + (f" (replacement {worker['generation']})" if worker["generation"] else "")


def ddp_sentence(ddp: Mapping[str, Any]) -> str:
    """Describe how DDP ended."""
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
