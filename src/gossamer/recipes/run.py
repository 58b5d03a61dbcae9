"""A run and its folder.

RUN/config.json            the configuration, facts about the task, versions, the command
    metrics-00000.jsonl    one row per step and one per evaluation, one file per process
    trace/                 the timeline of each worker, with `trace`
    waits-RANK.json        for whom each worker of a finished run waited
    checkpoints/           see `gossamer.Checkpoints`
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import gossamer
from gossamer import InputError
from gossamer.recipes.config import RunConfig, make_config
from gossamer.recipes.graceful_stop import Stop
from gossamer.recipes.gradients import choose
from gossamer.recipes.loop import Clock, Progress, Row, train
from gossamer.recipes.methods import Method, learning_rate
from gossamer.recipes.metrics import Metrics
from gossamer.recipes.strategy import (
    DdpStrategy,
    ElasticStrategy,
    GossipStrategy,
    PeerStrategy,
    Strategy,
    VirtualStrategy,
    Wrap,
)
from gossamer.recipes.task import Task

LEAVE_WITHIN = 5.0  # seconds that a failed worker waits for the other parts of a checkpoint


def prepare(folder: Path, config: RunConfig, method: Method, task: Task, facts: Mapping[str, Any]) -> None:
    """Make the run's folder and write its configuration. One process does this, before the others start."""
    content = {
        "config": config.model_dump(mode="json"),
        "lr": learning_rate(method, config),
        "parameters": sum(p.numel() for p in task.model(config.seed).parameters()),
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "unit": task.unit,
        "task": task.describe(),
        **facts,
    }
    if (folder / "config.json").exists():
        raise InputError(f"{folder} already holds a run; resume it with --resume {folder}, or choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_config(folder, content)
    except OSError as error:
        raise InputError(
            f"cannot write to the run's folder {folder}: {error.strerror or error}; choose another --out"
        ) from None


def write_config(folder: Path, content: Mapping[str, Any]) -> None:
    """Write `config.json` atomically: a run without its configuration cannot be resumed."""
    beside = folder / ".config.json"
    beside.write_text(json.dumps(content, indent=1, default=str) + "\n")
    beside.replace(folder / "config.json")


def read_config(folder: Path) -> tuple[RunConfig, dict[str, Any]]:
    """Return the configuration of a prepared run, and the whole content of its file."""
    try:
        content = json.loads((folder / "config.json").read_text())
    except OSError as error:
        raise InputError(f"{folder} is not a run's folder: config.json: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{folder / 'config.json'} is damaged: {error}") from None
    return make_config(content["config"], str(folder / "config.json")), content


def run(
    config: RunConfig,
    task: Task,
    method: Method,
    folder: Path,
    *,
    rank: int = 0,
    resume: bool = False,
    watch: Callable[[Row], None] | None = None,
    clock: Clock | None = None,
    stop: Stop | None = None,
    wrap: Wrap | None = None,
) -> Progress:
    """Train as worker `rank`, or as all virtual workers; every worker must call it.

    `wrap` wraps the model into DDP, see `DdpStrategy`, or hands it to a peer, see `PeerStrategy`; `watch` receives the
    rows that are written.
    """
    if config.virtual:
        torch.set_num_threads(config.threads)
    strategy = make_strategy(config, task, method, folder, rank, wrap)
    stop = stop or strategy.make_stop(folder)
    progress = Progress(step=strategy.advanced(0))
    gradients, batched = choose(task, config, strategy.replicas)
    checkpoints = strategy.checkpoints(folder / "checkpoints", config.keep_last)
    if resume and not strategy.joined:
        saved = strategy.load(checkpoints)
        batched = saved.pop("batched")
        gradients, _ = choose(task, config.model_copy(update={"batched": batched}), strategy.replicas)
        progress = Progress(**saved)

    def save(now: Progress) -> None:
        strategy.save(checkpoints, now.step, {**now.state_dict(), "batched": batched})

    with Metrics(folder, rank, progress.step) as metrics, _failing(stop, checkpoints):

        def log(row: Row) -> None:
            metrics.write(row)
            if watch is not None:
                watch(row)

        timed = None if clock is None else continued(clock, progress)
        train(task, strategy, config, gradients, progress=progress, log=log, save=save, stop=stop, clock=timed)
        progress.unsaved = strategy.finish(checkpoints)
    waits = strategy.waits()
    if waits is not None:
        whole = {"worker": rank, "per_node": config.per_node, "seconds": progress.seconds, "waited": progress.waited}
        (folder / f"waits-{rank:05d}.json").write_text(json.dumps({**whole, **waits}) + "\n")
    strategy.close()
    return progress


def continued(clock: Clock, progress: Progress) -> Clock:
    """Return the clock of a resumed run, which may have had another clock (another number of workers) before."""
    before = progress.seconds - clock(progress.step)
    return clock if before == 0 else lambda step: before + clock(step)


@contextmanager
def _failing(stop: Stop, checkpoints: gossamer.Checkpoints) -> Iterator[None]:
    """If this worker fails, notify the others and let the checkpoint that is being written complete."""
    try:
        yield
    except BaseException:
        stop.failed()
        checkpoints.close(LEAVE_WITHIN)
        raise


def make_strategy(
    config: RunConfig, task: Task, method: Method, folder: Path, rank: int, wrap: Wrap | None
) -> Strategy:
    """Return the strategy that the configuration and the method ask for."""
    if config.virtual:
        return VirtualStrategy(task, method, config)
    if method.algorithm == "ddp":
        return DdpStrategy(task, method, config, rank, wrap)
    if method.algorithm == "local":
        assert wrap is not None
        return PeerStrategy(task, method, config, rank, wrap)
    kind = ElasticStrategy if config.on_failure == "continue" else GossipStrategy
    return kind(task, method, config, rank, folder / "trace" if config.trace else None)
