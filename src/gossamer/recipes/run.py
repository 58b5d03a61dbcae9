"""A run and its folder.

RUN/config.json            the configuration, the task's facts, versions, the command
    metrics-00000.jsonl    a row a step and a row an evaluation, one file a process
    trace/                 each worker's timeline, if asked for
    checkpoints/           see `checkpoint`
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from gossamer import InputError
from gossamer.recipes import checkpoint
from gossamer.recipes.config import RunConfig, make_config
from gossamer.recipes.crew import Crew, DdpCrew, GossipCrew, VirtualCrew, Wrap
from gossamer.recipes.gradients import choose
from gossamer.recipes.loop import Clock, Progress, Row, train
from gossamer.recipes.methods import Method, learning_rate
from gossamer.recipes.stop import Stop, StopHere
from gossamer.recipes.task import Task


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
        (folder / "config.json").write_text(json.dumps(content, indent=1, default=str) + "\n")
    except OSError as error:
        raise InputError(
            f"cannot write to the run's folder {folder}: {error.strerror or error}; choose another --out"
        ) from None


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
    """Train as worker `rank`, or as all of them if they are virtual; every worker must call it. `wrap`: `DdpCrew`'s."""
    if config.virtual:
        torch.set_num_threads(config.threads)
    at = checkpoint.latest(folder) if resume else 0  # before anybody can write a newer one
    crew = make_crew(config, task, method, folder, rank, wrap)
    stop = stop or (StopHere() if config.virtual else Stop(folder, rank, config.workers, lockstep=crew.lockstep))
    progress = Progress()
    gradients, batched = choose(task, config, crew.replicas)
    if at:
        states = [checkpoint.load(folder, at, place) for place in crew.places]
        saved = states[0].pop("progress")
        batched = saved.pop("batched")
        gradients, _ = choose(task, config.model_copy(update={"batched": batched}), crew.replicas)
        progress = Progress(**saved)
        crew.load(states)

    def save(now: Progress) -> None:
        for place, state in zip(crew.places, crew.states(), strict=True):
            state["progress"] = {**now.state_dict(), "batched": batched}
            checkpoint.save(folder, now.step, place, crew.total, state)
        if crew.leads:
            checkpoint.prune(folder)

    with _Metrics(folder, rank, at) as metrics:

        def log(row: Row) -> None:
            metrics.write(row)
            if watch is not None:
                watch(row)

        train(task, crew, config, gradients, progress=progress, log=log, save=save, stop=stop, clock=clock)
    crew.close()
    return progress


def make_crew(config: RunConfig, task: Task, method: Method, folder: Path, rank: int, wrap: Wrap | None) -> Crew:
    if config.virtual:
        return VirtualCrew(task, method, config)
    if method.algorithm == "ddp":
        return DdpCrew(task, method, config, rank, wrap)
    return GossipCrew(task, method, config, rank, folder / "trace" if config.trace else None)


class _Metrics:
    """One process's rows. A resumed run forgets those after its checkpoint."""

    def __init__(self, folder: Path, rank: int, at: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"metrics-{rank:05d}.jsonl"
        kept = []
        if at and self._path.exists():
            for line in self._path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    break  # torn when the run was killed
                if row["step"] <= at:
                    kept.append(line)
        beside = self._path.with_suffix(f".{os.getpid()}")
        beside.write_text("".join(f"{line}\n" for line in kept))
        beside.replace(self._path)
        self._file: TextIO | None = None

    def __enter__(self) -> _Metrics:
        self._file = self._path.open("a", buffering=1)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._file is not None
        self._file.close()

    def write(self, row: Row) -> None:
        assert self._file is not None
        self._file.write(json.dumps(row) + "\n")
