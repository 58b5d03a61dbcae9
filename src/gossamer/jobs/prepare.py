"""Preparing a run: its task, its folder, and what a resumed run changes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gossamer.checkpoint.files import latest_in
from gossamer.errors import InputError
from gossamer.jobs.clock import simulated_on
from gossamer.jobs.configure import check_method, per_node_from
from gossamer.lab import parse_rate, why_unavailable
from gossamer.predict.methods import parse
from gossamer.recipes.config import RunConfig, make_config
from gossamer.recipes.run import prepare, read_config, write_config
from gossamer.recipes.task import Task, make_task
from gossamer.report.record import command_line, environment
from gossamer.trace import write_chrome


def default_folder(task: str) -> Path:
    """Return a new folder's name: the task and the time."""
    return Path("runs") / f"{task}-{time.strftime('%Y%m%d-%H%M%S')}"


def checked_task(config: RunConfig) -> Task:
    """Make the task and the data of its first and last worker, so that bad input is an error before anything starts."""
    task = make_task(config.task, config.options)
    for worker in {0, config.workers - 1}:
        task.batches(worker, config.workers, seed=config.seed)
    return task


def prepare_folder(
    config: RunConfig, folder: Path, task: Task, *, cluster: str | None = None, link: str | None = None
) -> dict[str, Any]:
    """Make the run's folder and return its clock, which says whether times are measured or simulated, and for what."""
    method = parse(config.method)
    clock: dict[str, Any] = {"kind": "measured", "link": link}
    if link is not None:
        clock["network"] = "paced" if why_unavailable() else "namespaces"
        clock["link_bits_per_second"] = parse_rate(link)
    trace = None
    if config.virtual:
        clock, trace = simulated_on(cluster or "a40", config)
    facts = {"method": str(method), "clock": clock, "command": command_line(), "environment": environment()}
    prepare(folder, config, method, task, facts)
    if trace is not None:
        write_chrome(trace, folder / "predicted.json")
    return clock


def resume_folder(
    folder: Path,
    *,
    steps: int | None,
    workers: int | None = None,
    virtual: int | None = None,
    per_node: str | None = None,
    launched: Sequence[int] | None = None,
) -> tuple[RunConfig, Task]:
    """Return the configuration and task of a run that is resumed, with the new number of steps and workers if given.

    `launched` is the number of workers per node that a launcher has started. If these workers leave a run that averages
    gradients exactly inside nodes on a single node, or with one worker per node, all of them gossip from now on. The
    run's file is changed only after everything was checked.
    """
    before, content = read_config(folder)
    at = latest_in(folder / "checkpoints")
    if (virtual if not before.virtual else workers) is not None:
        wrong, right = ("--workers", "--virtual") if before.virtual else ("--virtual", "--workers")
        raise InputError(f"{folder} is a run with {right[2:]}; resume it with {right} N, not with {wrong}")
    places = launched or per_node_from(workers, virtual, per_node) or before.per_node
    changed: dict[str, Any] = {"steps": before.steps if steps is None else steps, "per_node": tuple(places)}
    if before.exact_inside and len(before.per_node) > 1 and not 1 < len(places) < sum(places):
        changed["exact_inside"] = False
    config = make_config({**before.model_dump(), **changed})
    if at >= config.steps:
        raise InputError(f"{folder} has completed all {config.steps} steps; pass a larger --steps to continue")
    check_method(config)
    task = checked_task(config)
    if config != before:
        if config.virtual and config.per_node != before.per_node:
            clock = content["clock"]
            content["clock"], _ = simulated_on(clock.get("description") or clock["cluster"], config)
        resumed = [*content.get("resumed", []), {"step": at, "workers_before": before.workers}]
        write_config(folder, {**content, "config": config.model_dump(mode="json"), "resumed": resumed})
    return config, task
