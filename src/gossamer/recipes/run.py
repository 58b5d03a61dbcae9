"""A run and its folder.

RUN/config.json            the configuration, the task's facts, versions, the command
    metrics-00000.jsonl    a row a step and a row an evaluation, one file a process
    trace/                 each worker's timeline, if asked for
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
from gossamer import GossamerError, InputError
from gossamer.recipes.config import RunConfig, make_config
from gossamer.recipes.graceful_stop import Stop, StopAlone, StopHere
from gossamer.recipes.gradients import choose
from gossamer.recipes.loop import Clock, Progress, Row, train
from gossamer.recipes.methods import Method, learning_rate
from gossamer.recipes.metrics import Metrics
from gossamer.recipes.strategy import DdpStrategy, GossipStrategy, Strategy, VirtualStrategy, Wrap
from gossamer.recipes.task import Task

LEAVE_WITHIN = 5.0  # seconds that a worker which failed waits for the other parts of a checkpoint


def prepare(folder: Path, config: RunConfig, method: Method, task: Task, facts: Mapping[str, Any]) -> None:
    """Make the run's folder and say in it what will be run. One process does this, before the others start."""
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
        raise InputError(f"{folder} already holds a run; continue it with --resume {folder}, or choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_config(folder, content)
    except OSError as error:
        raise InputError(
            f"cannot write to the run's folder {folder}: {error.strerror or error}; choose another --out"
        ) from None


def write_config(folder: Path, content: Mapping[str, Any]) -> None:
    """All or nothing: a run without its configuration cannot be resumed."""
    beside = folder / ".config.json"
    beside.write_text(json.dumps(content, indent=1, default=str) + "\n")
    beside.replace(folder / "config.json")


def read_config(folder: Path) -> tuple[RunConfig, dict[str, Any]]:
    """The configuration of a run that was prepared, and everything else its file says."""
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
    stop: Stop | StopHere | None = None,
    wrap: Wrap | None = None,
) -> Progress:
    """Train as worker `rank`, or as all virtual workers; every worker must call it. `wrap`: see `DdpStrategy`."""
    if config.virtual:
        torch.set_num_threads(config.threads)
    crew = make_strategy(config, task, method, folder, rank, wrap)
    if stop is None:
        everyone = Stop(folder, rank, config.workers, lockstep=crew.lockstep)
        stop = StopHere() if config.virtual else StopAlone(folder) if crew.survives else everyone
    done = crew.advanced(0)
    progress = Progress(step=done)
    gradients, batched = choose(task, config, crew.replicas)
    checkpoints = crew.checkpoints(folder / "checkpoints", config.keep_last)
    if resume and not crew.joined:
        saved = crew.load(checkpoints)
        batched = saved.pop("batched")
        gradients, _ = choose(task, config.model_copy(update={"batched": batched}), crew.replicas)
        progress = Progress(**saved)

    def save(now: Progress) -> None:
        crew.save(checkpoints, now.step, {**now.state_dict(), "batched": batched})

    with Metrics(folder, rank, progress.step) as metrics, _leaving(stop, checkpoints):

        def log(row: Row) -> None:
            metrics.write(row)
            if watch is not None:
                watch(row)

        timed = None if clock is None else going_on(clock, progress)
        train(task, crew, config, gradients, progress=progress, log=log, save=save, stop=stop, clock=timed)
        try:
            checkpoints.wait()
        except GossamerError as error:
            if not crew.survives:
                raise
            progress.unsaved = str(error)  # the others go on, or have it; the launcher knows
    crew.close()
    return progress


def going_on(clock: Clock, progress: Progress) -> Clock:
    """The simulated clock of a run that may have had another one, with another number of workers, so far."""
    before = progress.seconds - clock(progress.step)
    return clock if before == 0 else lambda step: before + clock(step)


@contextmanager
def _leaving(stop: Stop | StopHere, checkpoints: gossamer.Checkpoints) -> Iterator[None]:
    """A worker that fails tells the others, and lets the checkpoint under way be finished."""
    try:
        yield
    except BaseException:
        stop.left()
        checkpoints.close(LEAVE_WITHIN)
        raise


def make_strategy(
    config: RunConfig, task: Task, method: Method, folder: Path, rank: int, wrap: Wrap | None
) -> Strategy:
    if config.virtual:
        return VirtualStrategy(task, method, config)
    if method.algorithm == "ddp":
        return DdpStrategy(task, method, config, rank, wrap)
    return GossipStrategy(task, method, config, rank, folder / "trace" if config.trace else None)
