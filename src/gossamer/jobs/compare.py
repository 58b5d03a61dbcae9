"""Training many configurations: on one gang of local workers one after the other, virtual ones side by side."""

from __future__ import annotations

import math
import os
import signal
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gossamer.errors import GossamerError
from gossamer.recipes.graceful_stop import StopHere

if TYPE_CHECKING:
    from gossamer.jobs.progress import Rows
    from gossamer.recipes.config import RunConfig

Outcome = dict[str, Any]


class Trainer:
    """Runs configurations: on one gang of local workers one after the other, virtual ones side by side."""

    def __init__(self, first: RunConfig, cluster: str | None, link: str | None, jobs: int | None, quiet: bool):
        self._first, self._cluster, self._link, self._quiet = first, cluster, link, quiet
        self._jobs = jobs or os.cpu_count() or 1
        self._stack = ExitStack()
        self._pool: Any = None

    def __enter__(self) -> Trainer:
        from gossamer.jobs.local import lab_for, make_task_for

        self.higher_is_better = make_task_for(self._first).higher_is_better
        if not self._first.virtual:
            lab = self._stack.enter_context(lab_for(self._first.per_node, self._link))
            self._pool = self._stack.enter_context(lab.pool())
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def run(self, wanted: list[tuple[RunConfig, Path]]) -> dict[str, str]:
        """Train all; why some failed (diverged), by folder. Ctrl-C ends the comparison."""
        outcomes = self._side_by_side(wanted) if self._first.virtual else self._one_by_one(wanted)
        halted = [folder for folder, outcome in outcomes.items() if outcome.get("stopped")]
        done = len(outcomes) - len(halted)
        if done < len(wanted):
            how = ", ".join(f"gossamer train --resume {folder}" for folder in halted)
            typer.echo(
                f"stopped; {done} of {len(wanted)} runs are done, which gossamer report reads"
                + (f"; go on with: {how}" if how else ""),
                err=True,
            )
            raise typer.Exit(130)
        return {str(folder): why for folder, outcome in outcomes.items() if (why := _why_failed(outcome))}

    def _one_by_one(self, wanted: list[tuple[RunConfig, Path]]) -> dict[Path, Outcome]:
        """On the gang of real workers."""
        from gossamer.jobs.local import make_task_for, run_pool, start, watchers
        from gossamer.recipes.loop import Diverged

        outcomes: dict[Path, Outcome] = {}
        for config, folder in wanted:
            task = make_task_for(config)
            start(config, folder, task, None, self._link)
            watch, display = watchers(
                folder, config, f"{config.method} seed {config.seed}", task.unit, False, self._quiet
            )
            with display:
                try:
                    outcomes[folder] = run_pool(self._pool, folder, False, watch)
                except Diverged as error:
                    outcomes[folder] = {"diverged": str(error)}
            if outcomes[folder].get("stopped"):
                break
        return outcomes

    def _side_by_side(self, wanted: list[tuple[RunConfig, Path]]) -> dict[Path, Outcome]:
        """Virtual runs; those that were not begun when Ctrl-C was pressed are left out."""
        from gossamer.jobs.local import stop_when_asked
        from gossamer.jobs.progress import Rows

        jobs = min(self._jobs, len(wanted))
        with Rows(len(wanted), quiet=self._quiet) as rows:
            if jobs > 1:
                return self._in_processes(wanted, jobs, rows)
            outcomes: dict[Path, Outcome] = {}
            with stop_when_asked() as stop:
                for config, folder in wanted:
                    _note(outcomes, rows, config, folder, _virtual(config, folder, self._cluster, stop))
            return outcomes

    def _in_processes(self, wanted: list[tuple[RunConfig, Path]], jobs: int, rows: Rows) -> dict[Path, Outcome]:
        from gossamer.jobs.local import interrupts

        context = get_context("spawn")
        asked = context.RawValue("b", 0)

        def ask() -> None:
            asked.value = 1

        outcomes: dict[Path, Outcome] = {}
        with ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(asked,)) as pool, interrupts(ask):
            running = {pool.submit(_virtual, c, f, self._cluster): (c, f) for c, f in wanted}
            try:
                for future in as_completed(running):
                    _note(outcomes, rows, *running[future], future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list((pool._processes or {}).values()):
                    process.terminate()
                raise
        return outcomes


def _why_failed(outcome: Outcome) -> str:
    if "diverged" in outcome:
        return str(outcome["diverged"])
    loss = outcome["averaged"]["loss"]
    return (
        "" if math.isfinite(loss) else f"the validation loss is {loss} at the end; lower --lr, or lengthen the warm-up"
    )


def _note(outcomes: dict[Path, Outcome], rows: Rows, config: RunConfig, folder: Path, outcome: Outcome | None) -> None:
    """Keep what came of a run that was begun, and print its line if it has ended."""
    if outcome is None:
        return
    outcomes[folder] = outcome
    if not outcome.get("stopped"):
        rows.done(config, outcome, {}, folder)


class _StopWithParent(StopHere):
    """In a process of its own: Ctrl-C is the parent's to handle, which says so by a shared byte."""

    def __init__(self, asked: Any) -> None:
        super().__init__()
        self._parent = asked

    def __call__(self, step: int) -> bool:
        return bool(self._parent.value)


_stop = StopHere()


def _begin(asked: Any) -> None:
    """In each process, before its first run."""
    global _stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _stop = _StopWithParent(asked)


def _virtual(config: RunConfig, folder: Path, cluster: str | None, stop: StopHere | None = None) -> Outcome | None:
    """One virtual run; in a process of its own, or here with its `stop`. None: it was not begun."""
    from gossamer.jobs.local import make_task_for, run_virtual, start
    from gossamer.recipes.loop import Diverged

    stop = stop or _stop
    if stop(0):
        return None
    task = make_task_for(config)
    clock = start(config, folder, task, cluster, None)
    try:
        return run_virtual(config, task, folder, clock, False, lambda row: None, stop)
    except Diverged as error:
        return {"diverged": str(error)}


def sweep(
    trainer: Trainer, methods: Any, seed: int, rates: list[float], configured: Any, folder: Path
) -> dict[str, dict[str, float | None]]:
    """Every method at every rate, once; the final metric of each (None: diverged)."""
    from gossamer.report.runs import load_run

    wanted = [(configured(m, seed, rate), folder / slug(str(m)) / f"lr-{rate:g}") for m in methods for rate in rates]
    failed = trainer.run(wanted)
    found: dict[str, dict[str, float | None]] = {}
    for config, where in wanted:
        run = None if str(where) in failed else load_run(where)
        found.setdefault(config.method, {})[f"{config.lr:g}"] = None if run is None else run.final(run.metric)
    return found


def best(tried: dict[str, float | None], method: str, *, higher_is_better: bool) -> float:
    """The rate with the best metric; one that diverged never is."""
    sign = 1 if higher_is_better else -1
    scores = {rate: sign * value for rate, value in tried.items() if value is not None and math.isfinite(value)}
    if not scores:
        raise GossamerError(f"{method} diverged at every rate of the sweep ({', '.join(tried)}); try smaller ones")
    return float(max(scores, key=scores.__getitem__))


def slug(method: str) -> str:
    return "".join(c if c.isalnum() or c in "-." else "-" for c in method)
