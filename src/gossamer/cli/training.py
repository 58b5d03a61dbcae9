"""What `train` and `compare` share: from flags to a configuration, and from a configuration to workers that train."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.errors import GossamerError, InputError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from gossamer.lab import Cluster as Lab
    from gossamer.lab import WorkerPool
    from gossamer.recipes.config import RunConfig
    from gossamer.recipes.crew import Wrap
    from gossamer.recipes.loop import Progress, Row
    from gossamer.recipes.task import Task
    from gossamer.runtime.cluster import Cluster
    from gossamer.runtime.methods import Method
    from gossamer.trace import Trace

FOREVER = 20 * 86400.0  # the launcher's limit on a run; longer ones overflow its poll
# Flags that are not named are keys of the configuration or of the task's options.
EXTRA: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
TRACED = 6  # steps in a predicted timeline

Task_ = Annotated[str | None, typer.Argument(metavar="TASK", help="vision, translate or lm.", show_default=False)]
Workers = Annotated[int | None, typer.Option(metavar="N", help="Start N local workers (default 4).")]
Virtual = Annotated[int | None, typer.Option(metavar="N", help="N workers in one process, on a simulated clock.")]
PerNode = Annotated[
    str | None, typer.Option(metavar="L", help="Workers on each node: 4, or 4,4,2 (default 4, 2 or 1).")
]
Steps = Annotated[int | None, typer.Option(metavar="K", help="Optimizer steps.")]
Batch = Annotated[int | None, typer.Option(metavar="B", help="Samples in one worker's batch.")]
Data = Annotated[str | None, typer.Option(metavar="PATH", help="A real data set (default: the embedded one).")]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="A .toml file; flags win.")]
Partition = Annotated[str | None, typer.Option(metavar="P", help="iid, or dirichlet:0.1 (label-skewed).")]
ExactInside = Annotated[
    bool | None, typer.Option("--exact-inside", help="Average gradients inside a node, gossip between nodes.")
]
ClusterName = Annotated[
    str | None, typer.Option(metavar="NAME|FILE", help="The cluster whose time --virtual shows (default a40).")
]
Link = Annotated[str | None, typer.Option(metavar="RATE", help="Shape the links between nodes, e.g. 20mbit (lab).")]


def build_config(
    task: str | None, file: Path | None, flags: Mapping[str, Any], extra: Sequence[str], **forced: Any
) -> RunConfig:
    """File, then flags, then what the command decides. Flags may be keys of the configuration or of the task."""
    from gossamer.recipes.config import RunConfig, make_config, read_toml
    from gossamer.recipes.task import options_type

    values = read_toml(file) if file is not None else {}
    if task is not None:
        values["task"] = task
    if "task" not in values:
        raise InputError("which task? write for example gossamer train vision; the tasks are vision, translate, lm")
    known = options_type(values["task"]).model_fields
    options = dict(values.get("options", {}))
    for key, value in {**{k: v for k, v in flags.items() if v is not None}, **_pairs(extra)}.items():
        name = key.replace("-", "_")
        if name in known:
            options[name] = value
        elif name in RunConfig.model_fields and name not in ("task", "options"):
            values[name] = value
        else:
            raise InputError(
                f"there is no option --{key}: task {values['task']!r} knows {', '.join(known)}; a run knows "
                f"{', '.join(f for f in RunConfig.model_fields if f not in ('task', 'options'))}"
            )
    for name in ("betas",):
        if isinstance(values.get(name), str):
            values[name] = values[name].split(",")
    return make_config({**values, "options": options, **{k: v for k, v in forced.items() if v is not None}})


def _pairs(extra: Sequence[str]) -> dict[str, Any]:
    """`--key value`, `--key=value` and `--key` (true) as a dictionary."""
    found: dict[str, Any] = {}
    rest = list(extra)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise InputError(f"{word!r} is not an option; write --name value, and the task's name first")
        key, equals, value = word[2:].partition("=")
        if equals:
            found[key] = value
        elif rest and not rest[0].startswith("--"):
            found[key] = rest.pop(0)
        else:
            found[key] = True
    return found


def per_node_from(workers: int | None, virtual: int | None, per_node: str | None) -> tuple[int, ...] | None:
    """Workers on each node; None when no flag says anything. Left to us, nodes have 4 workers, or 2, or 1: so many
    that there are two nodes or more."""
    if workers is not None and virtual is not None:
        raise InputError("--workers starts processes and --virtual needs none; pass one of them")
    n = workers if workers is not None else virtual
    if n is not None and not 1 <= n <= 4096:
        flag = "--workers" if workers is not None else "--virtual"
        raise InputError(f"{flag} must be between 1 and 4096, got {n}; pass a positive whole number")
    if per_node is None:
        if n is None:
            return None
        size = next((s for s in (4, 2) if n % s == 0 and n > s), 1)
        return (size,) * (n // size)
    try:
        counts = [int(piece) for piece in per_node.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise InputError(f"--per-node must be a positive number or a comma list of them, got {per_node!r}; e.g. 4")
    if len(counts) == 1 and n is not None:
        if n % counts[0]:
            raise InputError(f"{n} workers cannot be put {counts[0]} on a node; choose --per-node that divides {n}")
        counts *= n // counts[0]
    if n is not None and sum(counts) != n:
        raise InputError(f"--per-node {per_node} makes {sum(counts)} workers, not {n}; pass one of the two")
    return tuple(counts)


def make_task_for(config: RunConfig) -> Task:
    """The task, with a first look at every worker's data, so that bad input is one sentence before anything starts."""
    from gossamer.recipes.task import make_task

    task = make_task(config.task, config.options)
    for worker in {0, config.workers - 1}:
        task.batches(worker, config.workers, seed=config.seed)
    return task


# -- simulated time -------------------------------------------------------------------------------------------------


def described_cluster(source: str, per_node: Sequence[int]) -> Cluster:
    """The cluster's machines and model, with as many workers as the run has."""
    from gossamer.runtime.cluster import load
    from gossamer.topology import Layout

    return load(source).resized(Layout.of(per_node))


def simulated(method: Method, config: RunConfig, cluster: Cluster) -> tuple[dict[str, Any], Trace]:
    """The clock of a virtual run: the predicted step time on the cluster, and a predicted timeline."""
    from dataclasses import replace

    from gossamer.runtime.predict import default_policy, predict, predicted_trace
    from gossamer.topology import Layout

    setting = cluster
    if config.exact_inside and method.algorithm != "ddp":
        # A node is one replica whose compute is a DDP step of its workers; it sends the model once.
        mean = float(cluster.compute.means(config.workers).mean())
        same = {"seconds": mean, "reference_workers": None, "fixed_seconds": 0.0}
        alone = cluster.changed(compute=same).resized(Layout.of(config.per_node[:1]))
        inside = predict("ddp", alone, steps=200)
        setting = cluster.resized(Layout.of([1] * len(config.per_node))).changed(
            compute={
                "seconds": inside.step_time,
                "samples": tuple(map(float, inside.durations)),
                "reference_workers": None,
                "fixed_seconds": 0.0,
            }
        )
    policy = default_policy(setting, method)
    if method.algorithm == "awc":
        policy = replace(
            policy,
            every=config.every,
            staleness=config.staleness,
            combine=config.combine,
            average_every=config.average_every // config.every,
        )
    result = predict(method, setting, steps=200, policy=policy, trace_steps=TRACED)
    clock = {
        "kind": "simulated",
        "cluster": cluster.name,
        "layout": str(cluster.layout),
        "model_mb": cluster.model.mb,
        "step_seconds": result.step_time,
        "waiting": result.waiting,
    }
    return clock, predicted_trace(method, setting, result)


# -- running --------------------------------------------------------------------------------------------------------


def work(rank: int, folder: str, resume: bool) -> dict[str, Any]:
    """One local worker's whole run, on a process of the lab."""
    from gossamer.comm.world import join_world, leave_world

    join_world()
    outcome = train_here(Path(folder), rank, resume)
    leave_world()
    return outcome


def train_here(folder: Path, rank: int, resume: bool, watch: Callable[[Row], None] | None = None) -> dict[str, Any]:
    """Train as worker `rank` of the process group, as the folder's configuration says."""
    from gossamer.recipes.run import read_config, run
    from gossamer.recipes.task import make_task
    from gossamer.runtime.methods import parse

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
    config: RunConfig, task: Task, folder: Path, clock: Mapping[str, Any], resume: bool, watch: Callable[[Row], None]
) -> dict[str, Any]:
    from gossamer.recipes.run import run
    from gossamer.recipes.stop import StopHere
    from gossamer.runtime.methods import parse

    stop = StopHere()

    def ask() -> None:
        stop.asked = True

    def time_after(steps: int) -> float:
        return float(steps * clock["step_seconds"])

    with interrupts(ask):
        return _outcome(
            run(
                config,
                task,
                parse(config.method),
                folder,
                resume=resume,
                watch=watch,
                clock=time_after,
                stop=stop,
            )
        )


def run_pool(pool: WorkerPool, folder: Path, resume: bool, watch: Callable[[Row], None]) -> dict[str, Any]:
    """Run on local workers; Ctrl-C asks them to stop after the same step."""
    from gossamer.lab import WorkerFailed
    from gossamer.recipes import stop

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
def interrupts(ask: Callable[[], None], signals: Sequence[int] = (signal.SIGINT,)) -> Iterator[None]:
    """The first Ctrl-C asks, the second one ends."""

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
def lab_for(per_node: Sequence[int], link: str | None) -> Iterator[Lab]:
    """Local workers: on shaped links if a rate is given and this machine can, else paced by the transport."""
    from gossamer.lab import Cluster as Lab
    from gossamer.lab import why_unavailable

    if link is None:
        lab = Lab(per_node=list(per_node), network="loopback")
    else:
        lab = Lab(per_node=list(per_node), link=link, network="paced" if why_unavailable() else "namespaces")
    with lab:
        yield lab


def default_folder(task: str) -> Path:
    return Path("runs") / f"{task}-{time.strftime('%Y%m%d-%H%M%S')}"
