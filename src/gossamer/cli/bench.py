"""`gossamer bench`: measure methods side by side on a cluster emulated on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli.common import (
    Json,
    Nodes,
    PerNode,
    command_app,
    count_of,
    layout_from,
    print_json,
    print_rich,
    refuse_launcher,
    table,
)
from gossamer.errors import InputError
from gossamer.recipes.metrics import finite

if TYPE_CHECKING:
    from gossamer.lab.bench import Setup
    from gossamer.predict.methods import Method

app = command_app()

STEPS, REPEATS = 20, 3
CLUSTER_STEPS, CLUSTER_REPEATS, CLUSTER_BUCKETS = 10, 2, (8,)  # steps of large clusters are long: ten minutes in total
METHODS = "ddp,ddp:bf16,decent-dp:aer,dadam:aer,dadam:aer:bf16"
EXAMPLE = (
    "Examples: gossamer bench --nodes 4 --per-node 2 --link 50mbit --compute 0.4 --model-mb 4 | "
    "gossamer bench --cluster a40 --plot figure.svg | "
    "gossamer bench --link none --jitter lognormal:0.3 --methods ddp,dadam:aer --staleness 1"
)


@app.command(epilog=EXAMPLE, no_args_is_help=False)
def bench(
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE", help="A preset (a40, a100, t4) or a .toml or .json file, at the lab's scale."
        ),
    ] = None,
    nodes: Nodes = None,
    per_node: PerNode = None,
    link: Annotated[str | None, typer.Option(metavar="RATE", help="Every node's link: 50mbit, or none.")] = None,
    links: Annotated[
        str | None, typer.Option(metavar="LIST", help="Pairs of nodes that differ: 0-3=10mbit,1-2=none.")
    ] = None,
    compute: Annotated[float | None, typer.Option(metavar="S", help="Mean seconds of compute per step.")] = None,
    model_mb: Annotated[float | None, typer.Option(metavar="MB", help="Parameters in MB (1e6 bytes).")] = None,
    layers: Annotated[int, typer.Option(help="Layers of the emulated model.")] = 8,
    jitter: Annotated[str | None, typer.Option(metavar="TEXT", help="none, lognormal:0.3, slow-worker:4, ...")] = None,
    methods: Annotated[
        str, typer.Option(metavar="LIST", help="NAME[:TOPOLOGY[:WIRE]], separated by commas.")
    ] = METHODS,
    steps: Annotated[
        int | None, typer.Option(help=f"Measured steps of a run: {STEPS}, with --cluster {CLUSTER_STEPS}.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help=f"Runs of each method, in turn: {REPEATS}, with --cluster {CLUSTER_REPEATS}.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(metavar="S", help="Run each method for this long instead of --steps.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the compute times, equal for all methods.")] = 0,
    staleness: Annotated[
        int, typer.Option(help="Gossamer: steps that may proceed while a late exchange is in flight.")
    ] = 0,
    every: Annotated[
        int, typer.Option(help="Gossamer, diloco, localsgd: steps between two exchanges. The latter two: by default 8.")
    ] = 1,
    outer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Gossamer's outer step: nesterov, heavy-ball, accelerated, slowmo."),
    ] = None,
    outer_lr: Annotated[float | None, typer.Option(help="Learning rate of the outer step, also of diloco.")] = None,
    outer_momentum: Annotated[float | None, typer.Option(help="Momentum of the outer step, also of diloco.")] = None,
    fragments: Annotated[int, typer.Option(help="Gossamer: exchange one of so many parts of the model at a time.")] = 1,
    average_every: Annotated[int, typer.Option(help="Gossamer: steps between exact averages; 0 makes none.")] = 0,
    bucket_mb: Annotated[
        float | None, typer.Option(metavar="MIB", help="One bucket size for all methods, instead of the best of each.")
    ] = None,
    sweep: Annotated[bool, typer.Option(help="First look for the best bucket size of each method.")] = True,
    network: Annotated[
        str | None, typer.Option(metavar="KIND", help="namespaces, paced or loopback; see docs/lab.md.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a bar chart (.svg, .png, .pdf).")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Record a timeline of each method, and draw timeline.svg.")
    ] = None,
    predict: Annotated[
        bool, typer.Option("--predict", help="Probe first, and print the predicted step time beside the measured one.")
    ] = False,
    busy: Annotated[bool, typer.Option("--busy", help="Compute on the cores instead of sleeping.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a record: raw samples, table, charts.")] = None,
    as_json: Json = False,
) -> None:
    """Measure the step times of methods side by side, on nodes and links emulated on this machine."""
    from gossamer.lab.bench import BUCKETS, SWEEP_STEPS, BenchPlan, expected, run_bench
    from gossamer.predict.methods import parse_list
    from gossamer.report.plots import check_matplotlib, check_output
    from gossamer.report.record import check_record_folder, environment

    chosen = parse_list(methods)
    if plot is not None:
        check_output(plot)
    if trace is not None or out is not None:
        check_matplotlib()
    small = cluster is None
    plan = BenchPlan(
        steps=steps if steps is not None else STEPS if small else CLUSTER_STEPS,
        repeats=repeats if repeats is not None else REPEATS if small else CLUSTER_REPEATS,
        seconds=seconds,
        seed=seed,
        bucket_mb=bucket_mb,
        trace=trace,
        staleness=staleness,
        every=every,
        outer=outer,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        fragments=fragments,
        average_every=average_every,
        sweep_steps=SWEEP_STEPS if sweep else 0,
        sweep_buckets=BUCKETS if small else CLUSTER_BUCKETS,
    )
    refuse_launcher("bench")
    setup, note = _setup(cluster, nodes, per_node, link, links, compute, model_mb, layers, jitter, network)
    setup = replace(setup, busy=busy)
    if out is not None:
        check_record_folder(out)
    if not as_json:
        print(_duration(*expected(setup, chosen, plan)), file=sys.stderr)
    machine = environment()  # before the run: the load of other programs
    with _progress(quiet=as_json) as tell:
        measured = run_bench(setup, chosen, plan, tell, measure=_probe_worker() if predict else None)
    data = finite({**measured, "environment": machine})
    if note:
        data["cluster"]["note"] = note
    _write(data, chosen, plot, trace, out)
    if as_json:
        print_json({**data, "results": [{k: v for k, v in r.items() if k != "runs"} for r in data["results"]]})
        return
    print_rich(*_shown(data, setup))


def _probe_worker() -> Any:
    from gossamer.jobs.probe import lab_worker

    return lab_worker


def _setup(
    cluster: str | None,
    nodes: str | None,
    per_node: str | None,
    link: str | None,
    links: str | None,
    compute: float | None,
    model_mb: float | None,
    layers: int,
    jitter: str | None,
    network: str | None,
) -> tuple[Setup, str]:
    """Return the setup, and a note if it is not what was asked for."""
    from gossamer.cli.simulate import cluster_from
    from gossamer.lab.bench import Setup, dilated, parse_links
    from gossamer.lab.namespaces import why_unavailable
    from gossamer.lab.shaping import parse_rate

    if network not in (None, "namespaces", "paced", "loopback"):
        raise InputError(f"--network must be namespaces, paced or loopback, got {network!r}; see docs/lab.md")
    changes: dict[str, Any] = {"layers": layers}
    if link is not None:
        parse_rate(link)
        changes["link"] = link
    if links is not None:
        changes["links"] = parse_links(links)
    if jitter is not None:
        changes["jitter"] = jitter
    if cluster is not None:
        described = cluster_from(cluster, nodes, per_node, None, None, None)
        setup = dilated(described, compute=compute, model_mb=model_mb)
    else:
        given = nodes is not None or per_node is not None
        if given:
            per_node = per_node if per_node is not None else "2"
            nodes = nodes if nodes is not None or "," in per_node else "4"
        setup = Setup(per_node=layout_from(nodes, per_node, None).per_node) if given else Setup()
        changes |= {} if compute is None else {"compute": compute}
        changes |= {} if model_mb is None else {"model_mb": model_mb}
    reason = why_unavailable() if network is None else None
    note = f"links are paced, not shaped: {reason}" if reason else ""
    changes["network"] = network or ("paced" if reason else "namespaces")
    if changes["network"] == "loopback" and link is None and links is None:
        changes |= {"link": None, "links": {}}  # loopback has no rates
    return replace(setup, **changes), note


def _duration(runs: int, seconds: float) -> str:
    long = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
    return f"{count_of(runs, 'run')}, at least {long}"


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar on a terminal, else one line per run, on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if not sys.stderr.isatty():
        yield lambda text, done, total: None if quiet else print(f"[{done + 1}/{total}] {text}", file=sys.stderr)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        shown = bar.add_task("starting the cluster", total=None)
        yield lambda text, done, total: bar.update(shown, description=text, completed=done, total=total)


def _write(
    data: dict[str, Any], chosen: tuple[Method, ...], plot: Path | None, trace: Path | None, out: Path | None
) -> None:
    from gossamer.lab.bench import timeline, trace_folder
    from gossamer.report.bench import draw_bars, invalid_note, markdown
    from gossamer.report.plots import draw_timeline
    from gossamer.report.record import write_record

    if trace is not None:
        first = {r["method"]: r["timeline_from"] for r in data["results"] if "skipped" not in r}
        lines = [timeline(trace_folder(trace, m), str(m), first[str(m)]) for m in chosen if str(m) in first]
        draw_timeline(lines, trace / "timeline.svg")
    if plot is not None:
        draw_bars(data, plot)
    if out is not None:
        write_record(out, data=data, summary=markdown(data), note=invalid_note(data), environment=data["environment"])
        draw_bars(data, out / "bars.svg")


def _shown(data: dict[str, Any], setup: Setup) -> Iterator[Any]:
    """Yield the table and notes on how to read it."""
    from rich.text import Text  # a method's colons are not emoji

    from gossamer.lab.bench import format_links
    from gossamer.report.bench import ideal_words

    where = data["cluster"]
    gamma = "" if where["gamma"] is None else f", γ {where['gamma']:.2f}"
    yield Text(
        f"{len(setup.per_node)} nodes of {', '.join(map(str, sorted(set(setup.per_node))))} workers, "
        f"links {format_links(setup)} ({where['network']}), compute {setup.compute * 1e3:.0f} ms, "
        f"jitter {setup.jitter}, {setup.model_mb:g} MB{gamma}"
    )
    if "note" in where:
        yield Text(where["note"], style="yellow")
    predicted = any("predicted_ms" in r for r in data["results"])
    more = ["predicted", "error"] if predicted else []
    made = table("method", "ms", *more, "spread", "× DDP", "× limit", "wait", "MB", "bucket", "CPU")
    for r in data["results"]:
        if "skipped" in r:
            made.add_row(Text(r["method"]), "-")
            continue
        low, high = r["step_ms_spread"]
        made.add_row(
            Text(r["method"]),
            f"{r['step_ms']:.1f}",
            *([f"{r['predicted_ms']:.1f}", f"{r['prediction_error']:+.1%}"] if predicted else []),
            f"{low:.0f}-{high:.0f}" if low >= 100 else f"{low:.1f}-{high:.1f}",
            "-" if r["speedup_vs_ddp"] is None else f"{r['speedup_vs_ddp']:.2f}",
            "-" if r["multiple_of_limit"] is None else f"{r['multiple_of_limit']:.2f}",
            f"{sum(r['waiting_ms'].values()):.1f}",
            "-" if r["bytes_per_step"] is None else f"{r['bytes_per_step'] / 1e6:.2f}",
            "own" if r["bucket_mb"] is None else f"{r['bucket_mb']:.2g}",
            "-" if r["cpu_use"] is None else f"{r['cpu_use']:.0%}",
        )
    yield made
    for r in data["results"]:
        if "skipped" in r:
            yield Text(f"{r['method']}: skipped, {r['skipped']}")
        elif r["valid"] is False:
            yield Text(f"{r['method']}: INVALID, {r['invalid_because']}", style="bold red")
        elif data["plan"]["seconds"] is not None:
            rates = ", ".join(f"{x:.2f}" for x in r["steps_per_second_by_worker"])
            yield Text(f"{r['method']}: steps per second by worker {rates}")
    best = data["ideal"]
    if best["speedup_vs_ddp"] and best["speedup_vs_ddp"] > 1.001:
        yield Text(f"With this jitter and free links: {ideal_words(data)}.")
