"""Training many configurations: on one gang of local workers one after the other, virtual ones side by side."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from gossamer.recipes.config import RunConfig


class Trainer:
    """Runs configurations: on one gang of local workers one after the other, virtual ones side by side."""

    def __init__(self, first: RunConfig, cluster: str | None, link: str | None, jobs: int | None, quiet: bool):
        self._first, self._cluster, self._link, self._quiet = first, cluster, link, quiet
        self._jobs = jobs or os.cpu_count() or 1
        self._stack = ExitStack()
        self._pool: Any = None

    def __enter__(self) -> Trainer:
        from gossamer.cli.training import lab_for, make_task_for

        make_task_for(self._first)
        if not self._first.virtual:
            lab = self._stack.enter_context(lab_for(self._first.per_node, self._link))
            self._pool = self._stack.enter_context(lab.pool())
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def run(self, wanted: list[tuple[RunConfig, Path]]) -> dict[str, str]:
        """Train all; why some failed (diverged), by folder."""
        from gossamer.cli.training import make_task_for, run_pool, start, watchers

        failed: dict[str, str] = {}
        if self._first.virtual:
            return self._side_by_side(wanted)
        from gossamer.recipes.loop import Diverged

        for config, folder in wanted:
            task = make_task_for(config)
            start(config, folder, task, None, self._link)
            watch, display = watchers(
                folder, config, f"{config.method} seed {config.seed}", task.unit, False, self._quiet
            )
            with display:
                try:
                    outcome = run_pool(self._pool, folder, False, watch)
                except Diverged as error:
                    failed[str(folder)] = str(error)
                    continue
            if outcome["stopped"]:
                typer.echo(f"stopped in {folder}; finished runs are kept, and gossamer report reads them", err=True)
                raise typer.Exit(130)
        return failed

    def _side_by_side(self, wanted: list[tuple[RunConfig, Path]]) -> dict[str, str]:
        from gossamer.cli.progress import Rows

        failed: dict[str, str] = {}
        jobs = min(self._jobs, len(wanted))
        with Rows(len(wanted), quiet=self._quiet) as rows:
            if jobs == 1:
                for config, folder in wanted:
                    rows.done(config, _virtual(config, folder, self._cluster), failed, folder)
                return failed
            with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_quiet_interrupts) as pool:
                running = {pool.submit(_virtual, c, f, self._cluster): (c, f) for c, f in wanted}
                try:
                    for future in as_completed(running):
                        config, folder = running[future]
                        rows.done(config, future.result(), failed, folder)
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    for process in list((pool._processes or {}).values()):
                        process.terminate()
                    raise
        return failed


def _quiet_interrupts() -> None:
    """Ctrl-C is the parent's to handle."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _virtual(config: RunConfig, folder: Path, cluster: str | None) -> dict[str, Any]:
    """One virtual run; in a process of its own, or here."""
    from gossamer.cli.training import make_task_for, run_virtual, start
    from gossamer.recipes.loop import Diverged

    task = make_task_for(config)
    clock = start(config, folder, task, cluster, None)
    try:
        return run_virtual(config, task, folder, clock, False, lambda row: None)
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
        value = None
        if run is not None:
            value = run.final(run.metric) * (1 if run.content["higher_is_better"] else -1)
        found.setdefault(config.method, {})[f"{config.lr:g}"] = value
    return found


def best(tried: dict[str, float | None], method: str) -> float:
    scores = {rate: value for rate, value in tried.items() if value is not None}
    if not scores:
        raise GossamerError(f"{method} diverged at every rate of the sweep ({', '.join(tried)}); try smaller ones")
    return float(max(scores, key=scores.__getitem__))


def slug(method: str) -> str:
    return "".join(c if c.isalnum() or c in "-." else "-" for c in method)
