"""The launcher of a run that outlives its workers: it hosts the directory, and replaces those that die."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.errors import InputError

if TYPE_CHECKING:
    from gossamer.lab import Cluster
    from gossamer.lab.faults import Worker, Workforce
    from gossamer.recipes.config import RunConfig
    from gossamer.recipes.loop import Row


def work(rank: int, folder: str, resume: bool) -> dict[str, Any]:
    """One worker's run, or what is left of it; without a process group, whose members could not come and go."""
    from gossamer.cli.training import train_here

    return train_here(Path(folder), rank, resume)


def run_surviving(
    lab: Cluster,
    config: RunConfig,
    folder: Path,
    resume: bool,
    watch: Callable[[Row], None],
    tell: Callable[[str], None] = lambda text: print(f"gossamer: {text}", file=sys.stderr, flush=True),
) -> dict[str, Any]:
    """Run on local workers that may die: the outcome of worker 0, or of the first that came to the end, and `deaths`.

    A worker that dies or raises is replaced, `config.max_replacements` times in a run, as long as others train. Bad
    input and the death of the last one end the run.
    """
    from gossamer.cli.training import following, interrupts
    from gossamer.recipes import stop

    stop.clear(folder)
    try:
        with (
            lab.directory() as directory,
            lab.workforce(env={"GOSSAMER_DIRECTORY": directory.address}) as force,
            following(folder / "metrics-00000.jsonl", watch),
            interrupts(lambda: stop.request(folder)),
        ):
            return _watch_over(force, config, folder, resume, tell)
    finally:
        stop.clear(folder)


def _watch_over(
    force: Workforce, config: RunConfig, folder: Path, resume: bool, tell: Callable[[str], None]
) -> dict[str, Any]:
    from gossamer.lab import WorkerFailed
    from gossamer.recipes.loop import Diverged

    for rank in range(config.workers):
        force.start(rank, work, str(folder), resume)
    began = time.time()
    deaths: list[dict[str, Any]] = []
    outcomes: dict[int, dict[str, Any]] = {}
    while force.running:
        for worker in force.poll(0.5):
            if worker.ending == "returned":
                outcomes[worker.rank] = worker.value
                continue
            if isinstance(worker.error, InputError | Diverged):
                raise worker.error  # a replacement would only say it again
            if worker.generation and outcomes:
                continue  # a replacement that came too late: the run is over
            why = worker.why.strip().rsplit("\n", 1)[-1]
            deaths.append({"worker": worker.rank, "why": why})
            if len(deaths) > config.max_replacements and not _begun(folder, began):
                raise WorkerFailed(
                    f"worker {worker.rank} is gone before the job had begun, and is not replaced: {worker.why}",
                    worker.rank,
                )
            tell(f"worker {worker.rank} is gone ({why}); {_next(force, config, folder, worker, len(deaths), outcomes)}")
            if not force.running and not outcomes:
                raise WorkerFailed(f"the last worker is gone, worker {worker.rank}: {worker.why}", worker.rank)
    first = min(outcomes)
    return {**outcomes[first], "deaths": deaths}


def _begun(folder: Path, since: float) -> bool:
    """Whether workers have come together: then each one's file of metrics was made, or made anew."""
    return any(file.stat().st_mtime >= since for file in folder.glob("metrics-*.jsonl"))


def _next(
    force: Workforce, config: RunConfig, folder: Path, dead: Worker, count: int, outcomes: dict[int, dict[str, Any]]
) -> str:
    """Replace a dead worker if that makes sense; what was done."""
    if count > config.max_replacements:
        return f"the others go on without it: {config.max_replacements} were replaced already (--max-replacements)"
    if outcomes or not force.running:
        return "the run ends without it"
    force.start(dead.rank, work, str(folder), False)
    return f"replaced ({count} of at most {config.max_replacements})"
