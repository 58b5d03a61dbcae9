"""The report of a folder of runs: one HTML page that needs no network, or Markdown, or CSV."""

from __future__ import annotations

import csv
import html
import io
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from gossamer.errors import GossamerError
from gossamer.report.html import page
from gossamer.report.noise import noise_line, rounded
from gossamer.report.plots.curves import ends_sentence, legend, line_chart
from gossamer.report.plots.style import check_matplotlib, write_text
from gossamer.report.plots.timeline import timeline_figure, timeline_note
from gossamer.report.runs import Found, Group, Run, find_runs, grouped, mean_std, read_object, summary
from gossamer.report.verdict import verdict
from gossamer.report.waits import waits_in
from gossamer.trace import Trace, merge, read_chrome

TIMELINE_STEPS = 5
TIMELINES = 4  # methods whose timeline is shown
TITLED = 4  # methods that the title names
POINTS = 400  # of a training curve; more cannot be distinguished
WAITS = 24  # rows of a table of waits

Column = tuple[str, Callable[[dict[str, Any]], str]]


def write_html(folder: str | Path, path: str | Path) -> Path:
    """Read the runs below `folder` and write the page."""
    check_matplotlib()
    return write_text(Path(path), _page(Path(folder), find_runs(folder)))


def write_markdown(folder: str | Path, path: str | Path) -> Path:
    """Read the runs below `folder` and write the verdict and the table as Markdown."""
    return write_text(Path(path), markdown(find_runs(folder), Path(folder).name))


def write_csv(folder: str | Path, path: str | Path) -> Path:
    """Read the runs below `folder` and write `summary`'s rows as CSV."""
    rows = summary(grouped(find_runs(folder).runs))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return write_text(Path(path), text.getvalue())


def markdown(found: Found, title: str) -> str:
    """Return the verdict and the table as Markdown."""
    groups = grouped(found.runs)
    columns, rows = _columns(groups), summary(groups)
    lines = [f"# {title}", "", verdict(groups), "", *([found.left_out, ""] if found.left_out else [])]
    lines.append("| " + " | ".join(name for name, _ in columns) + " |")
    lines.append("|" + "---|" * len(columns))
    lines += ["| " + " | ".join(cell(r) for _, cell in columns) + " |" for r in rows]
    return "\n".join([*lines, "", _note(groups), ""])


def _columns(groups: Sequence[Group]) -> list[Column]:
    """Return the columns of the table, without empty ones."""
    rows = summary(groups)
    metric = rows[0]["metric"]

    def spread(name: str) -> Callable[[dict[str, Any]], str]:
        return lambda r: f"{r[name + '_mean']:.4g}" + (f" ± {r[name + '_std']:.2g}" if r["seeds"] > 1 else "")

    def known(key: str, show: Callable[[float], str]) -> Callable[[dict[str, Any]], str]:
        return lambda r: "–" if r[key] is None else show(r[key])

    columns: list[Column] = [("method", lambda r: r["method"]), ("lr", lambda r: f"{r['lr']:g}")]
    if metric != "loss":
        columns.append((metric, spread("metric")))
        columns.append((f"{metric}, worker 0 alone", lambda r: f"{r['local_metric_mean']:.4g}"))
    columns += [
        ("validation loss", spread("loss")),
        ("ms per step", _milliseconds),
        ("predicted ms", known("predicted_step_seconds", lambda v: f"{v * 1e3:.1f}")),
        ("time against baseline", known("relative_time", lambda v: f"{v:.0%}")),
        ("time to the baseline's loss", known("seconds_to_baseline_loss", lambda v: f"{v:.3g} s")),
        ("MB per step", lambda r: f"{r['bytes_per_step'] / 1e6:.3g}"),
        ("waiting", known("waiting", lambda v: f"{v:.0%}")),
        ("longest deadline", known("deadline_seconds", lambda v: f"{v:.2g} s")),
        ("consensus distance", known("consensus_distance", lambda v: f"{v:.2g}")),
        (f"noise scale, {rows[0]['unit']}", known("noise_scale", rounded)),
    ]
    return [c for c in columns if any(c[1](r) != "–" for r in rows)]


def _milliseconds(row: dict[str, Any]) -> str:
    """Format the step time; only a measured one has a deviation over seeds."""
    spread = f" ± {row['step_seconds_std'] * 1e3:.1g}" if row["seeds"] > 1 and row["clock"] == "measured" else ""
    return f"{row['step_seconds'] * 1e3:.1f}{spread}"


def _note(groups: Sequence[Group]) -> str:
    runs = [r for g in groups for r in g.runs]
    places = _each(f"{_places(r.config['per_node'])} {'virtual ' * r.config['virtual']}workers" for r in runs)
    steps = _each(f"{r.config['steps']} steps" for r in runs)
    text = f"Task {runs[0].config['task']}, {places}, {max(g.seeds for g in groups)} seed(s), {steps}. "
    text += "Quality is that of the averaged model; ± is the standard deviation over seeds. Consensus distance is the "
    text += "root mean square distance of the workers' parameters to their mean. "
    text += f"Times are {_each(_times(r.clock) for r in runs)}. "
    text += "MB per step is what one worker sends. "
    line = noise_line(groups)
    return text + line[0].upper() + line[1:]


def _each(texts: Iterable[str]) -> str:
    """Join the different texts."""
    return " and ".join(dict.fromkeys(texts))


def _places(nodes: Sequence[int]) -> str:
    return f"{len(nodes)} nodes x {nodes[0]}" if len(set(nodes)) == 1 else f"nodes of {', '.join(map(str, nodes))}"


def _times(clock: dict[str, Any]) -> str:
    if clock["kind"] == "simulated":
        where = f"{clock['cluster'] or 'a described cluster'} ({clock['layout']})"
        return f"simulated on {where} with its own model of {clock['model_mb']:g} MB, not measured"
    return "measured medians of worker 0 without evaluations"


def _page(folder: Path, found: Found) -> str:
    groups = grouped(found.runs)
    columns, rows = _columns(groups), summary(groups)
    head = "".join(f"<th>{html.escape(name)}</th>" for name, _ in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell(r))}</td>" for _, cell in columns) + "</tr>" for r in rows)
    named = ", ".join(g.label for g in groups) if len(groups) <= TITLED else f"{len(groups)} methods"
    title = f"{groups[0].runs[0].config['task']}: {named}"
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="verdict">{html.escape(verdict(groups))}</p>',
        *([f"<p>{html.escape(found.left_out)}</p>"] if found.left_out else []),
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>',
        f'<p class="note">{html.escape(_note(groups))}</p>',
        *_charts(groups),
        *_timelines(groups),
        *_waits(groups),
        *_details(folder, groups),
    ]
    return page(title, parts)


def _charts(groups: Sequence[Group]) -> list[str]:
    metric = groups[0].runs[0].metric
    clock = "simulated time" if all(g.runs[0].clock["kind"] == "simulated" for g in groups) else "time"
    wanted: list[tuple[str, str, str]] = []
    for name in dict.fromkeys(["loss", metric]):
        label = "validation loss" if name == "loss" else name
        wanted += [(f"{label} against steps", name, "step"), (f"{label} against {clock}", name, "seconds")]
    wanted += [("training loss against steps", "train", "step"), ("consensus distance", "distance", "step")]
    drawn = []
    for title, name, axis in wanted:
        lines = {g.label: _mean_line(g, name, axis) for g in groups}
        small = name in ("loss", "train", "distance")  # values that fall toward 0
        unit = "step" if axis == "step" else "s"
        higher = name == metric != "loss" and bool(groups[0].runs[0].content["higher_is_better"])
        see = ends_sentence(lines, unit, higher=higher, distance=name == "distance")
        drawn.append(line_chart(lines, title=title, unit=unit, see=see, log_allowed=small))
    return ["<h2>Curves</h2>", legend([g.label for g in groups]), '<div class="grid">', *drawn, "</div>"]


def _series(run: Run, name: str, axis: str) -> list[tuple[float, float]]:
    if name == "train":
        stride = max(1, len(run.steps) // POINTS)
        return [
            (run.steps[i][axis], statistics.fmean(r["loss"] for r in run.steps[max(0, i - stride + 1) : i + 1]))
            for i in range(0, len(run.steps), stride)
        ]
    if name == "distance":
        return [(e[axis], e["consensus_distance"]) for e in run.evaluations]
    return [(e[axis], e["averaged"][name]) for e in run.evaluations]


def _mean_line(group: Group, name: str, axis: str) -> list[tuple[float, float, float]]:
    """Return (x, mean, standard deviation over seeds) of a curve."""
    points = zip(*(_series(r, name, axis) for r in group.runs), strict=False)
    return [(statistics.fmean(p[0] for p in same), *mean_std([p[1] for p in same])) for same in points]


def _timelines(groups: Sequence[Group]) -> list[str]:
    """Return some steps of each method's timeline on one time axis: the measured one if recorded, else the predicted.

    A timeline that cannot be read or drawn is left out; a note says why.
    """
    traces: list[Trace] = []
    notes: list[str] = []
    further = 0
    for group in groups:
        try:
            trace = _trace(group) if len(traces) < TIMELINES else None
        except GossamerError as error:
            notes.append(f"{group.label} has no timeline: {error}.")
            continue
        if trace is not None:
            traces.append(trace)
        elif len(traces) == TIMELINES:
            further += 1
    if further:
        notes.append(f"The first {TIMELINES} timelines are shown; {further} more methods were compared.")
    drawn = []
    if traces:
        try:
            drawn = [timeline_figure(traces), timeline_note()]
        except GossamerError as error:  # too many workers
            notes.append(f"The timelines are not drawn: {error}.")
    noted = [f'<p class="note">{html.escape(note)}</p>' for note in notes]
    return ["<h2>Timelines</h2>", *drawn, *noted] if drawn or noted else []


def _waits(groups: Sequence[Group]) -> list[str]:
    """Return for whom the workers of each elastic method waited, in its first run, beside the deadlines."""
    parts = []
    for group in groups:
        waits = [wait for wait in waits_in(group.runs[0].folder) if wait.deadline is not None]
        if not waits:
            continue
        waits.sort(key=lambda wait: -wait.seconds)
        rows = "".join(
            f"<tr><td>{w.worker}</td><td>{w.peer}</td><td>{w.seconds:.3g} s</td><td>{w.share:.1%}</td>"
            f"<td>{w.deadline:.2g} s</td></tr>"
            for w in waits[:WAITS]
        )
        head = "".join(
            f"<th>{name}</th>" for name in ("worker", "waited for", "in all", "of its time", "at most, per exchange")
        )
        more = f" The longest {WAITS} of {len(waits)} are shown." if len(waits) > WAITS else ""
        parts += [
            f'<p>{html.escape(group.label)}</p><div class="scroll"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>",
            f'<p class="note">The last column is the deadline after which the worker went on without that neighbor, as '
            f"it was at the end.{more}</p>",
        ]
    return ["<h2>Waits and deadlines</h2>", *parts] if parts else []


def _trace(group: Group) -> Trace | None:
    folder = group.runs[0].folder
    if (folder / "trace").is_dir():
        whole, label = merge(folder / "trace"), f"{group.label} (measured)"
    elif (folder / "predicted.json").exists():
        whole, label = read_chrome(folder / "predicted.json"), f"{group.label} (predicted)"
    else:
        return None
    steps = sorted({s.attrs["step"] for s in whole.spans if "step" in s.attrs})
    if not steps:
        return None
    begin = len(steps) // 2 if len(steps) > 2 * TIMELINE_STEPS else 0
    chosen = set(steps[begin : begin + TIMELINE_STEPS])
    inside = [s for s in whole.spans if s.attrs.get("step") in chosen]
    start, end = min(s.start for s in inside), max(s.end for s in inside)
    cut = [
        type(s)(s.category, s.worker, max(s.start, start) - start, min(s.end, end) - start, s.attrs)
        for s in whole.spans
        if s.end > start and s.start < end
    ]
    return Trace(tuple(cut), whole.node, label)


def _details(folder: Path, groups: Sequence[Group]) -> list[str]:
    first = groups[0].runs[0].content
    parts = ["<h2>Configuration</h2>", f"<pre>{html.escape(str(first.get('command', '')))}</pre>"]
    compared = folder / "compare.json"
    if compared.exists():
        try:
            sweep = read_object(compared).get("lr_sweep")
        except GossamerError as error:
            sweep = None
            parts.append(
                f'<p class="note">A learning-rate sweep, if there was one, is not shown: {html.escape(str(error))}.</p>'
            )
        if sweep:
            text = html.escape(json.dumps(sweep, indent=1))
            parts.append(f"<p>Learning-rate sweep (final metric by rate):</p><pre>{text}</pre>")
    for group in groups:
        content = {k: v for k, v in group.runs[0].content.items() if k not in ("environment", "command")}
        text = html.escape(json.dumps(content, indent=1))
        parts.append(f"<details><summary>{html.escape(group.label)}</summary><pre>{text}</pre></details>")
    where = html.escape(json.dumps(first.get("environment", {}), indent=1))
    parts.append(f"<details><summary>machine and versions</summary><pre>{where}</pre></details>")
    return parts
