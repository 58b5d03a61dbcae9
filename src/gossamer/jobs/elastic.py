"""The launcher of an elastic run: it hosts the directory and replaces workers that die."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gossamer.checkpoint.files import steps_in, sweep
from gossamer.errors import GossamerError, InputError
from gossamer.jobs.events import RunEvents, run_events
from gossamer.jobs.progress import Outcome, Row, Watch, following
from gossamer.jobs.signals import interrupts
from gossamer.lab import LabCluster, Worker, WorkerFailed, WorkerPool
from gossamer.predict.methods import parse
from gossamer.recipes import graceful_stop
from gossamer.recipes.config import RunConfig
from gossamer.recipes.loop import Diverged
from gossamer.recipes.run import read_config, run
from gossamer.recipes.task import make_task

LEFT = "it left after SIGTERM"


def run_member(rank: int, folder: str, resume: bool) -> Outcome:
    """Train as member `rank` of an elastic job, which has no process group: members may join and leave."""
    config, _ = read_config(Path(folder))
    task = make_task(config.task, config.options)
    return run(config, task, parse(config.method), Path(folder), rank=rank, resume=resume).outcome()


def _to_stderr(text: str) -> None:
    print(f"gossamer: {text}", file=sys.stderr, flush=True)


def run_elastic(
    lab: LabCluster,
    config: RunConfig,
    folder: Path,
    watch: Watch,
    *,
    resume: bool = False,
    tell: Callable[[str], None] = _to_stderr,
) -> Outcome:
    """Train on local workers that may die; returns the outcome of the worker with the final evaluation, and `deaths`.

    A worker that dies, raises or leaves after SIGTERM is replaced while others train, at most `config.max_replacements`
    times per run. Bad input and the death of the last worker end the run; if all workers that are left get SIGTERM,
    they save a checkpoint.
    """
    graceful_stop.clear(folder)
    sweep(folder / "checkpoints")  # no worker is writing yet
    try:
        with (
            run_events(folder) as events,
            lab.directory() as address,
            lab.pool(env={"GOSSAMER_DIRECTORY": address}) as pool,
            _following_all(folder, config.workers, watch),
            interrupts(lambda: graceful_stop.request(folder)),
        ):
            return _watch_over(pool, config, folder, resume, tell, events)
    finally:
        graceful_stop.clear(folder)


@contextmanager
def _following_all(folder: Path, workers: int, watch: Watch) -> Iterator[None]:
    """Call `watch` with the row of the first worker that completes each step, and with all evaluations."""
    furthest, lock = 0, threading.Lock()

    def first(row: Row) -> None:
        nonlocal furthest
        with lock:
            if "loss" not in row:
                watch(row)
            elif row["step"] > furthest:
                furthest = row["step"]
                watch(row)

    with ExitStack() as all_files:
        for rank in range(workers):
            all_files.enter_context(following(folder / f"metrics-{rank:05d}.jsonl", first))
        yield


def _watch_over(
    pool: WorkerPool,
    config: RunConfig,
    folder: Path,
    resume: bool,
    tell: Callable[[str], None],
    events: RunEvents,
) -> Outcome:
    """Start all workers, replace those that die, and return the run's outcome when none is left."""
    for rank in range(config.workers):
        pool.start(rank, run_member, str(folder), resume)
    began = time.time()
    deaths: list[dict[str, Any]] = []
    outcomes: dict[int, Outcome] = {}
    while pool.running:
        for worker in pool.poll(0.5):
            left = worker.ending == "returned" and "left" in worker.value
            if worker.ending == "returned" and not left:
                outcomes[worker.rank] = worker.value
                continue
            if isinstance(worker.error, InputError | Diverged):
                raise worker.error  # a replacement would raise the same error
            if worker.generation and outcomes:
                continue  # a replacement that joined too late: the run is over
            why = LEFT if left else worker.why.strip().rsplit("\n", 1)[-1]
            deaths.append({"worker": worker.rank, "why": why})
            events.write("gone", worker=worker.rank, why=why)
            if len(deaths) > config.max_replacements and not left and not _begun(folder, began):
                raise WorkerFailed(
                    f"worker {worker.rank} is gone before the job had begun, and is not replaced: {worker.why}",
                    worker.rank,
                )
            then = _next(pool, config, folder, resume, worker, len(deaths), outcomes)
            if pool.current(worker.rank) is not worker:
                events.write("replaced", worker=worker.rank)
            tell(f"worker {worker.rank} is gone ({why}); {then}")
            if not pool.running and not outcomes:
                raise WorkerFailed(f"the last worker is gone, worker {worker.rank}: {worker.why or why}", worker.rank)
    first = min(outcomes, key=lambda rank: (not outcomes[rank].get("final"), "averaged" not in outcomes[rank], rank))
    outcome = {**outcomes[first], "deaths": deaths, "unsaved": _unsaved(outcomes, folder)}
    if outcome["unsaved"] and outcome["stopped"]:
        raise GossamerError(outcome["unsaved"])  # there is no checkpoint of this step to resume from
    if outcome["unsaved"]:
        tell(outcome["unsaved"])
    return outcome


def _unsaved(outcomes: dict[int, Outcome], folder: Path) -> str:
    """Return why the run's last checkpoint could not be written; empty if some workers have written it."""
    newest = max(steps_in(folder / "checkpoints"), default=-1)
    reasons = (outcomes[rank]["unsaved"] for rank in sorted(outcomes) if outcomes[rank]["step"] > newest)
    return next((why for why in reasons if why), "")


def _begun(folder: Path, since: float) -> bool:
    """Return whether the workers have started training: each then makes its file of metrics, or rewrites it."""
    return any(file.stat().st_mtime >= since for file in folder.glob("metrics-*.jsonl"))


def _next(
    pool: WorkerPool,
    config: RunConfig,
    folder: Path,
    resume: bool,
    dead: Worker,
    count: int,
    outcomes: dict[int, Outcome],
) -> str:
    """Replace a dead worker if the run still needs it; returns what was done, as text."""
    if count > config.max_replacements:
        return f"the others continue without it: {config.max_replacements} were replaced already (--max-replacements)"
    if outcomes or not pool.running:
        return "the run ends without it"
    pool.start(dead.rank, run_member, str(folder), resume)  # it loads a checkpoint only if the job has not begun
    return f"replaced ({count} of at most {config.max_replacements})"
