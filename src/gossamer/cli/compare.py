"""`gossamer compare`: train a task by several methods with the same iteration budget; quality and time in one table."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli.options import Json, command_app
from gossamer.cli.output import print_json, print_rich, table
from gossamer.cli.training import (
    EXTRA,
    Batch,
    ClusterName,
    ConfigFile,
    Data,
    ExactInside,
    Link,
    Partition,
    PerNode,
    Steps,
    Task_,
    Virtual,
    Workers,
)
from gossamer.errors import GossamerError, InputError

if TYPE_CHECKING:
    from gossamer.recipes.config import RunConfig
    from gossamer.report.runs import Group
    from gossamer.runtime.methods import Method

app = command_app()

EXAMPLE = (
    "Examples: gossamer compare translate --virtual 8 --methods ddp,dadam:aer,accumadam:aer --steps 200 --seeds 2 "
    "--out runs/numbers | gossamer compare vision --workers 4 --link 20mbit --methods ddp,accumadam:aer"
)


@app.command(epilog=EXAMPLE, context_settings=EXTRA)
def compare(
    context: typer.Context,
    task: Task_ = None,
    methods: Annotated[
        str, typer.Option(metavar="LIST", help="NAME[:TOPOLOGY[:WIRE]], separated by commas.")
    ] = "ddp,accumadam:aer",
    steps: Steps = None,
    seeds: Annotated[int, typer.Option(metavar="S", help="Runs of each method.")] = 1,
    workers: Workers = None,
    virtual: Virtual = None,
    per_node: PerNode = None,
    lr: Annotated[
        str | None, typer.Option(metavar="LR", help="Peak learning rate, or a method each: ddp=1e-3,dadam:aer=2e-3.")
    ] = None,
    lr_sweep: Annotated[
        str | None, typer.Option(metavar="LIST", help="Try these rates with every method, keep each one's best.")
    ] = None,
    batch: Batch = None,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    data: Data = None,
    partition: Partition = None,
    exact_inside: ExactInside = None,
    cluster: ClusterName = None,
    link: Link = None,
    config: ConfigFile = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The folder of all runs.")] = None,
    jobs: Annotated[int | None, typer.Option(metavar="J", help="Virtual runs side by side (default: cores).")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as well.")] = None,
    as_json: Json = False,
) -> None:
    """Train by every method and seed, with equal steps, and compare quality, time, bytes and consensus."""
    from gossamer.cli.training import build_config, default_folder, per_node_from
    from gossamer.runtime.methods import parse_list

    chosen = parse_list(methods)
    if not chosen or len({str(m) for m in chosen}) < len(chosen):
        raise InputError(f"--methods {methods!r} must name one or more methods, each once; e.g. ddp,accumadam:aer")
    if seeds < 1:
        raise InputError(f"--seeds must be at least 1, got {seeds}")
    if virtual is None and workers is None and per_node is None:
        workers = 4
    if virtual is None and cluster is not None:
        raise InputError("--cluster supplies the clock of --virtual workers; real workers have their own")
    if virtual is not None and link is not None:
        raise InputError("--link shapes the links of real workers; with --virtual describe the cluster by --cluster")
    flags = {"steps": steps, "batch": batch, "data": data, "partition": partition, "exact_inside": exact_inside}
    places = per_node_from(workers, virtual, per_node)
    rates = _rates(lr, chosen)

    def configured(method: Method, number: int, rate: float | None) -> RunConfig:
        forced = {"method": str(method), "seed": number, "lr": rate, "per_node": places, "virtual": virtual is not None}
        inside = {"exact_inside": False} if method.algorithm == "ddp" else {}
        return build_config(task, config, {**flags}, context.args, **forced, **inside)

    first = configured(chosen[0], seed, None)
    folder = out or default_folder(f"compare-{first.task}")
    if (folder / "compare.json").exists():
        raise InputError(f"{folder} already holds a comparison; choose another --out, or remove it")
    trainer = _Trainer(first, cluster, link, jobs, as_json)
    with trainer:
        swept: dict[str, dict[str, float | None]] = {}
        if lr_sweep is not None:
            swept = _sweep(trainer, chosen, seed, _numbers(lr_sweep), configured, folder / "sweep")
            rates = {name: _best(tried, name) for name, tried in swept.items()}
        wanted = [
            (configured(m, seed + s, rates.get(str(m))), folder / _slug(str(m)) / f"seed-{seed + s}")
            for m in chosen
            for s in range(seeds)
        ]
        failed = trainer.run(wanted)
    _finish(folder, swept, failed, html, as_json)


class _Trainer:
    """Runs configurations: on one gang of local workers one after the other, virtual ones side by side."""

    def __init__(self, first: RunConfig, cluster: str | None, link: str | None, jobs: int | None, quiet: bool):
        from contextlib import ExitStack

        self._first, self._cluster, self._link, self._quiet = first, cluster, link, quiet
        self._jobs = jobs or os.cpu_count() or 1
        self._stack = ExitStack()
        self._pool: Any = None

    def __enter__(self) -> _Trainer:
        from gossamer.cli.training import lab_for, make_task_for

        make_task_for(self._first)
        if not self._first.virtual:
            lab = self._stack.enter_context(lab_for(self._first.per_node, self._link))
            self._pool = self._stack.enter_context(lab.pool())
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def run(self, wanted: list[tuple[RunConfig, Path]]) -> dict[str, str]:
        """Train all; why some failed (diverged), by folder."""
        from gossamer.cli.train import start, watchers
        from gossamer.cli.training import make_task_for, run_pool

        failed: dict[str, str] = {}
        if self._first.virtual:
            return self._side_by_side(wanted)
        from gossamer.recipes.loop import Diverged

        for config, folder in wanted:
            task = make_task_for(config)
            start(config, folder, task, None, self._link)
            watch, display = watchers(
                folder, config, f"{config.method} seed {config.seed}", task.unit, False, self._quiet
            )
            with display:
                try:
                    outcome = run_pool(self._pool, folder, False, watch)
                except Diverged as error:
                    failed[str(folder)] = str(error)
                    continue
            if outcome["stopped"]:
                typer.echo(f"stopped in {folder}; finished runs are kept, and gossamer report reads them", err=True)
                raise typer.Exit(130)
        return failed

    def _side_by_side(self, wanted: list[tuple[RunConfig, Path]]) -> dict[str, str]:
        from gossamer.cli.progress import Rows

        failed: dict[str, str] = {}
        jobs = min(self._jobs, len(wanted))
        with Rows(len(wanted), quiet=self._quiet) as rows:
            if jobs == 1:
                for config, folder in wanted:
                    rows.done(config, _virtual(config, folder, self._cluster), failed, folder)
                return failed
            with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_quiet_interrupts) as pool:
                running = {pool.submit(_virtual, c, f, self._cluster): (c, f) for c, f in wanted}
                try:
                    for future in as_completed(running):
                        config, folder = running[future]
                        rows.done(config, future.result(), failed, folder)
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    for process in list((pool._processes or {}).values()):
                        process.terminate()
                    raise
        return failed


def _quiet_interrupts() -> None:
    """Ctrl-C is the parent's to handle."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _virtual(config: RunConfig, folder: Path, cluster: str | None) -> dict[str, Any]:
    """One virtual run; in a process of its own, or here."""
    from gossamer.cli.train import start
    from gossamer.cli.training import make_task_for, run_virtual
    from gossamer.recipes.loop import Diverged

    task = make_task_for(config)
    clock = start(config, folder, task, cluster, None)
    try:
        return run_virtual(config, task, folder, clock, False, lambda row: None)
    except Diverged as error:
        return {"diverged": str(error)}


def _sweep(
    trainer: _Trainer, methods: Any, seed: int, rates: list[float], configured: Any, folder: Path
) -> dict[str, dict[str, float | None]]:
    """Every method at every rate, once; the final metric of each (None: diverged)."""
    from gossamer.report.runs import load_run

    wanted = [(configured(m, seed, rate), folder / _slug(str(m)) / f"lr-{rate:g}") for m in methods for rate in rates]
    failed = trainer.run(wanted)
    found: dict[str, dict[str, float | None]] = {}
    for config, where in wanted:
        run = None if str(where) in failed else load_run(where)
        value = None
        if run is not None:
            value = run.final(run.metric) * (1 if run.content["higher_is_better"] else -1)
        found.setdefault(config.method, {})[f"{config.lr:g}"] = value
    return found


def _best(tried: dict[str, float | None], method: str) -> float:
    scores = {rate: value for rate, value in tried.items() if value is not None}
    if not scores:
        raise GossamerError(f"{method} diverged at every rate of the sweep ({', '.join(tried)}); try smaller ones")
    return float(max(scores, key=scores.__getitem__))


def _rates(text: str | None, methods: Any) -> dict[str, float]:
    """Learning rates by method: one number for all, or METHOD=RATE pairs."""
    if text is None:
        return {}
    if "=" not in text:
        return {str(m): rate for m in methods for rate in _numbers(text)[:1]}
    from gossamer.runtime.methods import parse

    pairs = [piece.partition("=") for piece in text.split(",")]
    return {str(parse(name)): _numbers(rate)[0] for name, _, rate in pairs}


def _numbers(text: str) -> list[float]:
    try:
        values = [float(piece) for piece in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) <= 0:
        raise InputError(f"learning rates must be positive numbers separated by commas, got {text!r}; e.g. 1e-3,2e-3")
    return values


def _slug(method: str) -> str:
    return "".join(c if c.isalnum() or c in "-." else "-" for c in method)


def _finish(
    folder: Path, swept: dict[str, dict[str, float | None]], failed: dict[str, str], html: Path | None, as_json: bool
) -> None:
    import json

    from gossamer.cli.output import finite
    from gossamer.report.record import command_line
    from gossamer.report.runs import grouped, load_runs, summary, verdict

    groups = grouped([r for r in load_runs(folder) if str(r.folder) not in failed])
    _predict(groups)
    rows, sentence = summary(groups), verdict(groups)
    content = {
        "command": command_line(),
        "verdict": sentence,
        "methods": rows,
        "lr_sweep": swept,
        "failed": failed,
        "folder": str(folder),
    }
    (folder / "compare.json").write_text(json.dumps(finite(content), indent=1) + "\n")
    if html is not None:
        from gossamer.report.page import write_html

        write_html(folder, html)
    if as_json:
        print_json(content)
        return
    print_table(rows)
    for name, tried in swept.items():
        print_rich(
            f"sweep of {name}: " + ", ".join(f"{r} {'diverged' if v is None else f'{v:.4g}'}" for r, v in tried.items())
        )
    for where, why in failed.items():
        print_rich(f"{where}: {why}")
    print_rich(
        f"[bold]{sentence}[/]", f"report: {html}" if html else f"report: gossamer report {folder} --html report.html"
    )


def _predict(groups: list[Group]) -> None:
    """Beside each measured step time on shaped links the one that the runtime model predicts for them, with the compute
    time that the gossiping workers had: their step without waiting."""
    import json

    from gossamer.lab import parse_rate
    from gossamer.runtime.cluster import Cluster, Compute, Ddp, Link, Links, Model
    from gossamer.runtime.predict import predict
    from gossamer.topology import Layout

    runs = [run for g in groups for run in g.runs]
    computes = [run.step_time * (1 - run.waiting) for run in runs if run.waiting is not None]
    rate = parse_rate(runs[0].clock.get("link"))
    if runs[0].clock["kind"] != "measured" or rate is None or not computes:
        return
    for g in groups:
        content = g.runs[0].content
        config = content["config"]
        if config["exact_inside"]:
            continue  # the model describes gossip between workers, and all-reduce
        layout = Layout.of(config["per_node"])
        described = Cluster(
            nodes=layout.nodes,
            per_node=layout.per_node,
            links=Links(inter=Link(bandwidth_gbps=rate / 1e9), intra=Link(bandwidth_gbps=10)),
            compute=Compute(seconds=min(computes)),
            model=Model(mb=content["parameters"] * 4 / 1e6),
            ddp=Ddp(bucket_mb=config["ddp_bucket_mb"] or 25.0),
        )
        predicted = predict(content["method"], described, steps=100).step_time
        for run in g.runs:
            run.content["predicted_step_seconds"] = predicted
            (run.folder / "config.json").write_text(json.dumps(run.content, indent=1) + "\n")


def print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.text import Text  # a method's colons are no emoji

    metric = rows[0]["metric"]
    columns = [
        "method",
        "lr",
        *([metric] if metric != "loss" else []),
        "loss",
        "ms/step",
        "time",
        "MB/step",
        "waits",
        "spread",
    ]
    made = table(*columns)
    for r in rows:
        spread = r["seeds"] > 1

        def figure(key: str, row: dict[str, Any] = r, spread: bool = spread) -> str:
            return f"{row[key + '_mean']:.4g}" + (f"±{row[key + '_std']:.1g}" if spread else "")

        made.add_row(
            Text(r["method"]),
            f"{r['lr']:g}",
            *([figure("metric")] if metric != "loss" else []),
            figure("loss"),
            f"{r['step_seconds'] * 1e3:.1f}",
            "-" if r["relative_time"] is None else f"{r['relative_time']:.0%}",
            f"{r['bytes_a_step'] / 1e6:.3g}",
            "-" if r["waiting"] is None else f"{r['waiting']:.0%}",
            f"{r['consensus_distance']:.2g}",
        )
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(made)  # a file has room
