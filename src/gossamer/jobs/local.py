"""Running what `train` and `compare` configured: on local workers, as one worker of a job, or on virtual workers."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from gossamer.lab import LabCluster, WorkerPool
    from gossamer.predict.methods import Method
    from gossamer.recipes.config import RunConfig
    from gossamer.recipes.graceful_stop import StopHere
    from gossamer.recipes.loop import Progress, Row
    from gossamer.recipes.strategy import Wrap
    from gossamer.recipes.task import Task
    from gossamer.trace import Trace

FOREVER = 20 * 86400.0  # the launcher's limit on a run; longer ones overflow its poll


def make_task_for(config: RunConfig) -> Task:
    """The task, with a first look at every worker's data, so that bad input is one sentence before anything starts."""
    from gossamer.recipes.task import make_task

    task = make_task(config.task, config.options)
    for worker in {0, config.workers - 1}:
        task.batches(worker, config.workers, seed=config.seed)
    return task


def start(config: RunConfig, folder: Path, task: Any, cluster: str | None, link: str | None) -> dict[str, Any]:
    """Make the run's folder; what its times mean."""
    from gossamer.jobs.clock import simulated_on
    from gossamer.lab import why_unavailable
    from gossamer.predict.methods import parse
    from gossamer.recipes.run import prepare
    from gossamer.report.record import command_line, environment
    from gossamer.trace import write_chrome

    method = parse(config.method)
    clock: dict[str, Any] = {"kind": "measured", "link": link}
    if link is not None:
        clock["network"] = "paced" if why_unavailable() else "namespaces"
    trace: Trace | None = None
    if config.virtual:
        clock, trace = simulated_on(cluster or "a40", config)
    facts = {"method": str(method), "clock": clock, "command": command_line(), "environment": environment()}
    prepare(folder, config, method, task, facts)
    if trace is not None:
        write_chrome(trace, folder / "predicted.json")
    return clock


def watchers(
    folder: Path, config: RunConfig, label: str, unit: str, board: bool, quiet: bool
) -> tuple[Callable[[Row], None], Any]:
    from gossamer.jobs.progress import Display, tensorboard

    display = Display(label, config.steps, unit, 1 if config.virtual else config.workers, quiet=quiet)
    if not board:
        return display, display
    write = tensorboard(folder)

    def both(row: Row) -> None:
        display(row)
        write(row)

    return both, display


def work(rank: int, folder: str, resume: bool) -> dict[str, Any]:
    """One local worker's whole run, on a process of the lab."""
    from gossamer.comm.world import join_world, leave_world

    join_world()
    outcome = train_here(Path(folder), rank, resume)
    leave_world()
    return outcome


def train_here(folder: Path, rank: int, resume: bool, watch: Callable[[Row], None] | None = None) -> dict[str, Any]:
    """Train as worker `rank` of the process group, as the folder's configuration says."""
    from gossamer.predict.methods import parse
    from gossamer.recipes.run import read_config, run
    from gossamer.recipes.task import make_task

    config, _ = read_config(folder)
    method = parse(config.method)
    task = make_task(config.task, config.options)
    with _all_reduced(config, method, folder, rank) as wrap:
        return _outcome(run(config, task, method, folder, rank=rank, resume=resume, watch=watch, wrap=wrap))


@contextlib.contextmanager
def _all_reduced(config: RunConfig, method: Method, folder: Path, rank: int) -> Iterator[Wrap]:
    """Torch's DDP as the run wants it: bucket size, wire, and a timeline if asked for."""
    from gossamer.comm.baseline import DdpTimeline, ddp
    from gossamer.topology import Layout
    from gossamer.trace import TraceWriter

    how: dict[str, Any] = {"bucket_mb": config.ddp_bucket_mb, "wire": method.wire}
    if not config.trace or method.algorithm != "ddp":
        yield lambda model, optimizer: ddp(model, **how)
        return
    with TraceWriter(folder / "trace", rank, Layout.of(config.per_node).node) as writer:
        timeline = DdpTimeline(writer)

        def wrap(model: nn.Module, optimizer: Optimizer) -> nn.Module:
            wrapped = ddp(model, sent=timeline.sent, **how)
            timeline.attach(wrapped, optimizer)
            return wrapped

        yield wrap


def _outcome(progress: Progress) -> dict[str, Any]:
    return {**progress.state_dict(), "stopped": progress.stopped, **progress.evaluation}


def run_virtual(
    config: RunConfig,
    task: Task,
    folder: Path,
    clock: Mapping[str, Any],
    resume: bool,
    watch: Callable[[Row], None],
    stop: StopHere,
) -> dict[str, Any]:
    """Run all workers in this process, until the end or until `stop` says so."""
    from gossamer.predict.methods import parse
    from gossamer.recipes.run import run

    def time_after(steps: int) -> float:
        return float(steps * clock["step_seconds"])

    method = parse(config.method)
    return _outcome(run(config, task, method, folder, resume=resume, watch=watch, clock=time_after, stop=stop))


@contextlib.contextmanager
def stop_when_asked() -> Iterator[StopHere]:
    """For virtual workers: Ctrl-C asks them to stop."""
    from gossamer.recipes.graceful_stop import StopHere

    stop = StopHere()

    def ask() -> None:
        stop.asked = True

    with interrupts(ask):
        yield stop


def run_pool(pool: WorkerPool, folder: Path, resume: bool, watch: Callable[[Row], None]) -> dict[str, Any]:
    """Run on local workers; Ctrl-C asks them to stop after the same step."""
    from gossamer.lab import WorkerFailed
    from gossamer.recipes import graceful_stop as stop

    stop.clear(folder)
    try:
        with following(folder / "metrics-00000.jsonl", watch), interrupts(lambda: stop.request(folder)):
            outcome: dict[str, Any] = pool.run(work, str(folder), resume, timeout=FOREVER)[0]
    except WorkerFailed as failed:
        if isinstance(failed.__cause__, GossamerError):
            raise failed.__cause__ from None
        raise
    finally:
        stop.clear(folder)
    return outcome


@contextlib.contextmanager
def interrupts(ask: Callable[[], None], signals: Sequence[int] = (signal.SIGINT, signal.SIGTERM)) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks, the second one ends."""

    def handler(number: int, frame: Any) -> None:
        ask()
        for s in signals:
            signal.signal(s, signal.default_int_handler)
        typer.echo("\nstopping after this step, with a checkpoint (again: at once, without)", err=True)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [signal.signal(s, handler) for s in signals]
    try:
        yield
    finally:
        for s, old in zip(signals, before, strict=True):
            signal.signal(s, old)


@contextlib.contextmanager
def following(path: Path, watch: Callable[[Row], None]) -> Iterator[None]:
    """Call `watch` with the rows that a worker appends to its file from now on."""
    over = threading.Event()
    start = path.stat().st_size if path.exists() else 0

    def follow() -> None:
        offset = start
        while True:
            last = over.is_set()
            if path.exists():
                with path.open() as file:
                    if path.stat().st_size < offset:
                        offset = 0  # a resumed run rewrites it
                    file.seek(offset)
                    text = file.read()
                whole, newline, _ = text.rpartition("\n")
                offset += len((whole + newline).encode())
                for line in whole.splitlines():
                    watch(json.loads(line))
            if last:
                return
            over.wait(0.2)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(5.0)


@contextlib.contextmanager
def lab_for(per_node: Sequence[int], link: str | None) -> Iterator[LabCluster]:
    """Local workers: on shaped links if a rate is given and this machine can, else paced by the transport."""
    from gossamer.lab import LabCluster, why_unavailable

    if link is None:
        lab = LabCluster(per_node=list(per_node), network="loopback")
    else:
        lab = LabCluster(per_node=list(per_node), link=link, network="paced" if why_unavailable() else "namespaces")
    with lab:
        yield lab


def default_folder(task: str) -> Path:
    return Path("runs") / f"{task}-{time.strftime('%Y%m%d-%H%M%S')}"
