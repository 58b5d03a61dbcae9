"""Training one run on this machine: on local processes or on virtual workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gossamer.comm.baseline import DdpTimeline, ddp
from gossamer.comm.process_groups import join_world, leave_world
from gossamer.comm.torchft_peer import PeerName, TorchftPeer
from gossamer.errors import GossamerError
from gossamer.jobs.elastic import run_elastic
from gossamer.jobs.events import run_events
from gossamer.jobs.progress import Outcome, Watch, following
from gossamer.jobs.signals import interrupts, stop_when_asked
from gossamer.lab import LabCluster, WorkerFailed, WorkerPool, why_unavailable
from gossamer.predict.methods import Method, parse
from gossamer.recipes import graceful_stop
from gossamer.recipes.config import RunConfig
from gossamer.recipes.graceful_stop import StopHere
from gossamer.recipes.methods import outer_settings
from gossamer.recipes.run import read_config, run
from gossamer.recipes.strategy import Wrap
from gossamer.recipes.task import Task, make_task
from gossamer.topology import Layout
from gossamer.trace import TraceWriter

FOREVER = 20 * 86400.0  # the launcher's limit on a run; longer ones overflow its poll


def train_locally(
    config: RunConfig, task: Task, folder: Path, clock: Mapping[str, Any], watch: Watch, *, resume: bool
) -> Outcome:
    """Train the run that was prepared in `folder`, on virtual or on local workers; Ctrl-C stops and saves it."""
    if config.virtual:
        with stop_when_asked() as stop:
            return run_virtual(config, task, folder, clock, watch, stop, resume=resume)
    with lab_for(config.per_node, clock.get("link")) as lab:
        if config.on_failure == "continue":
            return run_elastic(lab, config, folder, watch, resume=resume)
        with lab.pool() as pool:
            return run_pool(pool, folder, watch, resume=resume)


def run_virtual(
    config: RunConfig,
    task: Task,
    folder: Path,
    clock: Mapping[str, Any],
    watch: Watch,
    stop: StopHere,
    *,
    resume: bool = False,
) -> Outcome:
    """Train all workers in this process, until the end or until `stop` is set."""

    def time_after(steps: int) -> float:
        return float(steps * clock["step_seconds"])

    method = parse(config.method)
    with run_events(folder):
        return run(config, task, method, folder, resume=resume, watch=watch, clock=time_after, stop=stop).outcome()


def run_pool(pool: WorkerPool, folder: Path, watch: Watch, *, resume: bool = False) -> Outcome:
    """Train on local workers; Ctrl-C asks them to stop after the same step."""
    graceful_stop.clear(folder)
    try:
        with (
            run_events(folder),
            following(folder / "metrics-00000.jsonl", watch),
            interrupts(lambda: graceful_stop.request(folder)),
        ):
            outcome: Outcome = pool.run(run_worker, str(folder), resume, timeout=FOREVER)[0]
    except WorkerFailed as failed:
        if isinstance(failed.__cause__, GossamerError):
            raise failed.__cause__ from None
        raise
    finally:
        graceful_stop.clear(folder)
    return outcome


def run_worker(rank: int, folder: str, resume: bool) -> Outcome:
    """Train as worker `rank` in a process of the pool."""
    join_world()
    outcome = train_here(Path(folder), rank, resume=resume)
    leave_world()
    return outcome


def train_here(folder: Path, rank: int, *, resume: bool, watch: Watch | None = None) -> Outcome:
    """Train as worker `rank` of the process group, by the configuration in the folder."""
    config, _ = read_config(folder)
    method = parse(config.method)
    task = make_task(config.task, config.options)
    with _ddp_wrapper(config, method, folder, rank) as wrap:
        return run(config, task, method, folder, rank=rank, resume=resume, watch=watch, wrap=wrap).outcome()


@contextmanager
def lab_for(per_node: Sequence[int], link: str | None) -> Iterator[LabCluster]:
    """Yield a cluster of local processes; with a rate on shaped links, or paced by the transport if links cannot be
    shaped here."""
    if link is None:
        lab = LabCluster(per_node=list(per_node), network="loopback")
    else:
        lab = LabCluster(per_node=list(per_node), link=link, network="paced" if why_unavailable() else "namespaces")
    with lab:
        yield lab


@contextmanager
def _ddp_wrapper(config: RunConfig, method: Method, folder: Path, rank: int) -> Iterator[Wrap]:
    """Yield a function that wraps a model into torch's DDP with the run's bucket size, wire and timeline, or that hands
    it to the peer package that trains it."""
    if method.algorithm == "local":
        name, every, outer = cast(PeerName, method.name), method.local_steps(config.every), outer_settings(config)
        yield lambda model, optimizer: TorchftPeer(
            name, model, optimizer, every=every, lr=outer["lr"], momentum=outer["momentum"]
        )
        return
    how: dict[str, Any] = {"bucket_mb": config.ddp_bucket_mb, "wire": method.wire}
    if not config.trace or method.algorithm != "ddp":
        yield lambda model, optimizer: ddp(model, **how)
        return
    with TraceWriter(folder / "trace", rank, Layout.of(config.per_node).node) as writer:
        timeline = DdpTimeline(writer)

        def wrap(model: nn.Module, optimizer: Optimizer) -> DistributedDataParallel:
            wrapped = ddp(model, sent=timeline.sent, **how)
            timeline.attach(wrapped, optimizer)
            return wrapped

        yield wrap
