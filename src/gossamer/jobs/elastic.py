"""The launcher of a run that outlives its workers: it hosts the directory, and replaces those that die."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.errors import GossamerError, InputError

if TYPE_CHECKING:
    from gossamer.lab import LabCluster, Worker, WorkerPool
    from gossamer.recipes.config import RunConfig
    from gossamer.recipes.loop import Row


def work(rank: int, folder: str, resume: bool) -> dict[str, Any]:
    """One worker's run, or what is left of it; without a process group, whose members could not come and go."""
    from gossamer.predict.methods import parse
    from gossamer.recipes.run import read_config, run
    from gossamer.recipes.task import make_task

    config, _ = read_config(Path(folder))
    task = make_task(config.task, config.options)
    done = run(config, task, parse(config.method), Path(folder), rank=rank, resume=resume)
    return {**done.state_dict(), "stopped": done.stopped, "unsaved": done.unsaved, **done.evaluation}


def run_elastic(
    lab: LabCluster,
    config: RunConfig,
    folder: Path,
    resume: bool,
    watch: Callable[[Row], None],
    tell: Callable[[str], None] = lambda text: print(f"gossamer: {text}", file=sys.stderr, flush=True),
) -> dict[str, Any]:
    """Run on local workers that may die: the outcome of the first that holds the final evaluation, and `deaths`.

    A worker that dies or raises is replaced, `config.max_replacements` times in a run, as long as others train. Bad
    input and the death of the last one end the run.
    """
    from gossamer.checkpoint.files import sweep
    from gossamer.jobs.local import interrupts
    from gossamer.recipes import graceful_stop as stop

    stop.clear(folder)
    sweep(folder / "checkpoints")  # nobody is writing yet
    try:
        with (
            lab.directory() as address,
            lab.pool(env={"GOSSAMER_DIRECTORY": address}) as pool,
            _following_all(folder, config.workers, watch),
            interrupts(lambda: stop.request(folder)),
        ):
            return _watch_over(pool, config, folder, resume, tell)
    finally:
        stop.clear(folder)


@contextlib.contextmanager
def _following_all(folder: Path, workers: int, watch: Callable[[Row], None]) -> Iterator[None]:
    """Call `watch` with each step's row of whichever worker has done it first, and with all evaluations."""
    from gossamer.jobs.local import following

    furthest, lock = 0, threading.Lock()

    def first(row: Row) -> None:
        nonlocal furthest
        with lock:
            if "loss" not in row:
                watch(row)
            elif row["step"] > furthest:
                furthest = row["step"]
                watch(row)

    with contextlib.ExitStack() as all_files:
        for rank in range(workers):
            all_files.enter_context(following(folder / f"metrics-{rank:05d}.jsonl", first))
        yield


def _watch_over(
    pool: WorkerPool, config: RunConfig, folder: Path, resume: bool, tell: Callable[[str], None]
) -> dict[str, Any]:
    from gossamer.lab import WorkerFailed
    from gossamer.recipes.loop import Diverged

    for rank in range(config.workers):
        pool.start(rank, work, str(folder), resume)
    began = time.time()
    deaths: list[dict[str, Any]] = []
    outcomes: dict[int, dict[str, Any]] = {}
    while pool.running:
        for worker in pool.poll(0.5):
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
            then = _next(pool, config, folder, resume, worker, len(deaths), outcomes)
            tell(f"worker {worker.rank} is gone ({why}); {then}")
            if not pool.running and not outcomes:
                raise WorkerFailed(f"the last worker is gone, worker {worker.rank}: {worker.why}", worker.rank)
    first = min(outcomes, key=lambda rank: (not outcomes[rank].get("final"), "averaged" not in outcomes[rank], rank))
    outcome = {**outcomes[first], "deaths": deaths, "unsaved": _unsaved(outcomes, folder)}
    if outcome["unsaved"] and outcome["stopped"]:
        raise GossamerError(outcome["unsaved"])  # not "go on with --resume": this step is not there
    if outcome["unsaved"]:
        tell(outcome["unsaved"])
    return outcome


def _unsaved(outcomes: dict[int, dict[str, Any]], folder: Path) -> str:
    """Why the run's last checkpoint could not be written; empty if some workers have written it."""
    from gossamer.checkpoint.files import steps_in

    newest = max(steps_in(folder / "checkpoints"), default=-1)
    told = (outcomes[rank]["unsaved"] for rank in sorted(outcomes) if outcomes[rank]["step"] > newest)
    return next((why for why in told if why), "")


def _begun(folder: Path, since: float) -> bool:
    """Whether workers have come together: then each one's file of metrics was made, or made anew."""
    return any(file.stat().st_mtime >= since for file in folder.glob("metrics-*.jsonl"))


def _next(
    pool: WorkerPool,
    config: RunConfig,
    folder: Path,
    resume: bool,
    dead: Worker,
    count: int,
    outcomes: dict[int, dict[str, Any]],
) -> str:
    """Replace a dead worker if that makes sense; what was done."""
    if count > config.max_replacements:
        return f"the others go on without it: {config.max_replacements} were replaced already (--max-replacements)"
    if outcomes or not pool.running:
        return "the run ends without it"
    pool.start(dead.rank, work, str(folder), resume)  # it loads only if the job has not begun
    return f"replaced ({count} of at most {config.max_replacements})"
