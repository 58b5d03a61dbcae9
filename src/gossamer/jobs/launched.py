"""Training as one worker of a job that a launcher such as torchrun or Slurm started."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from gossamer.comm.process_groups import join_world, leave_world, said_by_first, workers_per_node
from gossamer.errors import GossamerError, InputError
from gossamer.jobs.events import run_events
from gossamer.jobs.local import train_here
from gossamer.jobs.prepare import checked_task, prepare_folder, resume_folder
from gossamer.jobs.progress import Display, tensorboard
from gossamer.jobs.signals import interrupts
from gossamer.recipes import graceful_stop
from gossamer.recipes.config import RunConfig
from gossamer.recipes.run import read_config

Configured = Callable[[tuple[int, ...]], RunConfig]
"""From the number of workers on each node to the run's configuration."""


def train_launched(
    configured: Configured,
    out: Path | None,
    *,
    resume: Path | None,
    steps: int | None,
    board: bool,
    quiet: bool,
    serving: Callable[[Path], AbstractContextManager[None]] | None = None,
) -> tuple[dict[str, Any], Path, RunConfig] | None:
    """Join the job and train; returns the outcome, the run's folder and its configuration on worker 0, else None.

    Worker 0 makes the folder, which all workers must see, and its errors are raised on every worker. It also opens
    `serving(folder)`, the live page, while it trains.
    """
    rank, _ = join_world()
    places = workers_per_node()
    if resume is None:
        config = configured(places)
        _refuse_elastic(config)
        task = checked_task(config)  # on every worker: bad input ends all of them, and none waits for another
        # without --out the name must be the same on every worker: it comes from the launcher, not from a clock
        job = f"{config.task}-{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}-{os.environ['MASTER_PORT']}"
    folder = resume or out or Path("runs") / job
    problem = ""
    if rank == 0:
        graceful_stop.clear(folder)
        try:
            if resume is None:
                prepare_folder(config, folder, task)
            else:
                _refuse_elastic(read_config(folder)[0])
                resume_folder(folder, steps=steps, launched=places)
        except GossamerError as error:
            problem = str(error)
    if problem := said_by_first(problem):
        raise InputError(problem)
    config, content = read_config(folder)
    also = tensorboard(folder) if board and rank == 0 else None
    display = Display(config, content["unit"], label=content["method"], also=also, quiet=quiet or rank > 0)
    noted = run_events(folder) if rank == 0 else nullcontext()
    page = serving(folder) if serving is not None and rank == 0 else nullcontext()
    with page, display, noted, interrupts(lambda: graceful_stop.request(folder)):
        outcome = train_here(folder, rank, resume=resume is not None, watch=display if rank == 0 else None)
    leave_world()
    if rank > 0:
        return None
    graceful_stop.clear(folder)
    return outcome, folder, config


def _refuse_elastic(config: RunConfig) -> None:
    if config.on_failure == "continue":
        raise InputError(
            "--on-failure continue has its own launcher; start it without torchrun or srun (under which your own "
            'script may use decentralize(..., on_failure="continue"))'
        )
