"""`gossamer trace`: merge, compare, explain and draw timelines, predicted or measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gossamer.cli.common import Json, Output, command_app, print_json, print_rich, table

if TYPE_CHECKING:
    from gossamer.trace import Trace

app = command_app(help="Timelines of real and simulated runs.")

Source = Annotated[Path, typer.Argument(metavar="TRACE", help="A trace .json, or a run's directory of trace-*.jsonl.")]


def _open(path: Path) -> Trace:
    from gossamer.trace import merge, read_chrome

    return merge(path) if path.is_dir() else read_chrome(path)


@app.command(epilog="Example: gossamer trace merge runs/today -o trace.json")
def merge(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of trace-*.jsonl files.")],
    output: Output = Path("trace.json"),
    as_json: Json = False,
) -> None:
    """Merge the workers' files of a run into one Chrome trace; open it on ui.perfetto.dev."""
    from gossamer.trace import merge as merge_files
    from gossamer.trace import summarize, write_chrome

    trace = merge_files(run)
    write_chrome(trace, output)
    summary = summarize(trace)
    if as_json:
        facts = {"workers": trace.workers, "spans": len(trace.spans), "steps": summary.steps}
        print_json({"output": str(output), **facts, "step_time": summary.step_time, **summary.seconds})
        return
    print_rich(
        f"{output}: {trace.workers} workers, {summary.steps} steps, {summary.step_time * 1e3:.1f} ms per step, "
        f"{summary.seconds['waiting'] / (summary.step_time or 1.0):.1%} of it waiting"
    )


@app.command(epilog="Example: gossamer trace diff predicted.json trace.json")
def diff(predicted: Source, measured: Source, as_json: Json = False) -> None:
    """Compare a predicted with a measured timeline: step time and seconds per step by kind of time."""
    from gossamer.trace import diff as compare

    rows = compare(_open(predicted), _open(measured))
    if as_json:
        entries = [{"what": r.what, "predicted": r.predicted, "measured": r.measured, "error": r.error} for r in rows]
        print_json({"step_time_error": rows[0].error, "rows": entries})
        return
    made = table("per step", "predicted", "measured", "error")
    for r in rows:
        error = f"{r.error:+.1%}" if r.measured else "-"
        made.add_row(r.what, f"{r.predicted * 1e3:.2f} ms", f"{r.measured * 1e3:.2f} ms", error)
    print_rich(made)


@app.command(epilog="Example: gossamer trace stragglers trace.json")
def stragglers(trace: Source, as_json: Json = False) -> None:
    """List the workers and links that the others waited for the longest."""
    from gossamer.trace import stragglers as blame

    found = blame(_open(trace))
    if as_json:
        keys = ("cause", "seconds", "share", "waits", "mostly")
        print_json({"stragglers": [{k: getattr(b, k) for k in keys} for b in found]})
        return
    if not found:
        print_rich("no worker waited")
        return
    made = table("cause", "cost", "of all time", "waits", "mostly by")
    for b in found:
        made.add_row(b.cause, f"{b.seconds * 1e3:.1f} ms", f"{b.share:.2%}", str(b.waits), b.mostly)
    print_rich(made)


@app.command(epilog="Example: gossamer trace plot predicted.json trace.json -o timeline.html")
def plot(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Traces, drawn one above the other.")],
    output: Output = Path("timeline.html"),
    as_json: Json = False,
) -> None:
    """Draw timelines: a web page (.html) or a picture (.svg, .png); predicted first stands above measured."""
    from gossamer.report.plots import check_output, draw_timeline
    from gossamer.report.plots.style import PICTURES_AND_PAGES

    check_output(output, PICTURES_AND_PAGES)
    path = draw_timeline([_open(t) for t in traces], output)
    if as_json:
        print_json({"output": str(path)})
    else:
        print_rich(str(path))
