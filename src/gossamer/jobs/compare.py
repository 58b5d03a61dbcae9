"""Training many configurations: one after the other on one pool of local workers, or side by side if virtual."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from ctypes import c_byte
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

from gossamer.errors import GossamerError, InputError
from gossamer.jobs.clock import predict_measured
from gossamer.jobs.local import lab_for, run_pool, run_virtual
from gossamer.jobs.prepare import checked_task, prepare_folder
from gossamer.jobs.progress import Display, Finished, Outcome
from gossamer.jobs.signals import Stopped, interrupts, stop_when_asked
from gossamer.lab import WorkerPool
from gossamer.recipes.config import RunConfig
from gossamer.recipes.graceful_stop import StopHere
from gossamer.recipes.loop import Diverged
from gossamer.recipes.metrics import finite
from gossamer.recipes.run import read_config
from gossamer.report.noise import noise_line
from gossamer.report.page import write_html
from gossamer.report.record import command_line
from gossamer.report.runs import grouped, load_run, load_runs, summary
from gossamer.report.verdict import verdict

Wanted = Sequence[tuple[RunConfig, Path]]
Sweep = dict[str, dict[str, float | None]]
"""By method and learning rate: the final metric; None if the run diverged."""


class Trainer:
    """Train configurations: one after the other on one pool of local workers, virtual ones side by side."""

    def __init__(self, first: RunConfig, cluster: str | None, link: str | None, jobs: int | None, quiet: bool):
        self._virtual, self._cluster, self._link, self._quiet = first.virtual, cluster, link, quiet
        self._jobs = jobs or os.cpu_count() or 1
        self.higher_is_better = checked_task(first).higher_is_better
        self._stack = ExitStack()
        self._pool: WorkerPool | None = None
        if not first.virtual:
            with ExitStack() as stack:
                lab = stack.enter_context(lab_for(first.per_node, link))
                self._pool = stack.enter_context(lab.pool())
                self._stack = stack.pop_all()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def run(self, wanted: Wanted) -> dict[str, str]:
        """Train all that are not finished yet; returns by folder why some runs failed (diverged).

        Raises `Stopped` after Ctrl-C.
        """
        wanted = [(config, folder) for config, folder in wanted if not finished_before(config, folder)]
        if not wanted:
            return {}
        if not self._quiet:
            at_once = f", {min(self._jobs, len(wanted))} side by side" if self._virtual else ""
            runs = f"{len(wanted)} run{'s' * (len(wanted) != 1)}"
            print(f"{runs} of {wanted[0][0].steps} steps{at_once}", file=sys.stderr, flush=True)
        outcomes = self._side_by_side(wanted) if self._virtual else self._one_by_one(wanted)
        halted = [folder for folder, outcome in outcomes.items() if outcome.get("stopped")]
        done = len(outcomes) - len(halted)
        if done < len(wanted):
            how = ", ".join(f"gossamer train --resume {folder}" for folder in halted)
            raise Stopped(
                f"stopped; {done} of {len(wanted)} runs are done, which gossamer report reads; train the rest by the "
                "same command with --continue" + (f", or first resume with: {how}" if how else "")
            )
        return {str(folder): why for folder, outcome in outcomes.items() if (why := _why_failed(outcome))}

    def _one_by_one(self, wanted: Wanted) -> dict[Path, Outcome]:
        """Train on the pool of local workers; after Ctrl-C the remaining runs are not started."""
        assert self._pool is not None
        outcomes: dict[Path, Outcome] = {}
        for config, folder in wanted:
            task = checked_task(config)
            prepare_folder(config, folder, task, link=self._link)
            label = f"{config.method} seed {config.seed}"
            with Display(config, task.unit, label=label, quiet=self._quiet) as display:
                try:
                    outcomes[folder] = run_pool(self._pool, folder, display)
                except Diverged as error:
                    outcomes[folder] = {"diverged": str(error)}
            if outcomes[folder].get("stopped"):
                break
        return outcomes

    def _side_by_side(self, wanted: Wanted) -> dict[Path, Outcome]:
        """Train virtual runs; after Ctrl-C the remaining runs are not started."""
        jobs = min(self._jobs, len(wanted))
        finished = Finished(len(wanted), quiet=self._quiet)
        if jobs > 1:
            return self._in_processes(wanted, jobs, finished)
        outcomes: dict[Path, Outcome] = {}
        with stop_when_asked() as stop:
            for config, folder in wanted:
                _note(outcomes, finished, config, folder, _train_virtual(config, folder, self._cluster, stop))
        return outcomes

    def _in_processes(self, wanted: Wanted, jobs: int, finished: Finished) -> dict[Path, Outcome]:
        context = get_context("spawn")
        asked = context.RawValue(c_byte, 0)

        def ask() -> None:
            asked.value = 1

        outcomes: dict[Path, Outcome] = {}
        with ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(asked,)) as pool, interrupts(ask):
            running = {pool.submit(_train_virtual, c, f, self._cluster): (c, f) for c, f in wanted}
            try:
                for future in as_completed(running):
                    _note(outcomes, finished, *running[future], future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list((pool._processes or {}).values()):
                    process.terminate()
                raise
        return outcomes


def finished_before(config: RunConfig, folder: Path) -> bool:
    """Whether the folder holds this very run, finished. An unfinished one is removed, another run is an error."""
    if not (folder / "config.json").exists():
        return False
    before, after = read_config(folder)[0].model_dump(), config.model_dump()
    differ = [key for key in after if before[key] != after[key]]
    if differ:
        key = differ[0]
        raise InputError(
            f"{folder} holds a run with {key} = {before[key]!r}, not {after[key]!r}; choose another --out, or remove it"
        )
    if load_run(folder).finished:
        return True
    shutil.rmtree(folder)
    return False


def reuse_sweep(wanted: Wanted, swept: Path) -> None:
    """Copy the runs of the sweep that are wanted again, so that they are not trained twice."""
    for config, folder in wanted:
        trial = swept / slug(config.method) / f"lr-{config.lr or 0:g}"
        if (trial / "config.json").exists() and not folder.exists() and read_config(trial)[0] == config:
            shutil.copytree(trial, folder)


def _why_failed(outcome: Outcome) -> str:
    if "diverged" in outcome:
        return str(outcome["diverged"])
    loss = outcome["averaged"]["loss"]
    return (
        "" if math.isfinite(loss) else f"the validation loss is {loss} at the end; lower --lr, or lengthen the warm-up"
    )


def _note(
    outcomes: dict[Path, Outcome], finished: Finished, config: RunConfig, folder: Path, outcome: Outcome | None
) -> None:
    """Keep the outcome of a run that was started, and print its line if the run has finished."""
    if outcome is None:
        return
    outcomes[folder] = outcome
    if not outcome.get("stopped"):
        finished(config, outcome)


class _Flag(Protocol):
    value: int


class _StopWithParent(StopHere):
    """The stop of a child process: the parent handles Ctrl-C and sets a shared byte."""

    def __init__(self, asked: _Flag) -> None:
        super().__init__()
        self._parent = asked

    def __call__(self, step: int) -> bool:
        return bool(self._parent.value)


_stop = StopHere()


def _begin(asked: _Flag) -> None:
    """Prepare a process for its runs."""
    global _stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _stop = _StopWithParent(asked)


def _train_virtual(
    config: RunConfig, folder: Path, cluster: str | None, stop: StopHere | None = None
) -> Outcome | None:
    """Train one virtual run, in a child process, or in this process with `stop`; returns None if it was not started."""
    stop = stop or _stop
    if stop(0):
        return None
    task = checked_task(config)
    clock = prepare_folder(config, folder, task, cluster=cluster)
    try:
        return run_virtual(config, task, folder, clock, lambda row: None, stop)
    except Diverged as error:
        return {"diverged": str(error)}


class _Runs(Protocol):
    def run(self, wanted: Wanted) -> dict[str, str]: ...


def sweep(
    trainer: _Runs,
    methods: Sequence[str],
    rates: Sequence[float],
    configured: Callable[[str, float], RunConfig],
    folder: Path,
) -> Sweep:
    """Train every method once at every rate; returns the final metric of each."""
    wanted = [(configured(m, rate), folder / slug(m) / f"lr-{rate:g}") for m in methods for rate in rates]
    failed = trainer.run(wanted)
    found: Sweep = {}
    for config, where in wanted:
        run = None if str(where) in failed else load_run(where)
        found.setdefault(config.method, {})[f"{config.lr:g}"] = None if run is None else run.final(run.metric)
    return found


def best(tried: dict[str, float | None], method: str, *, higher_is_better: bool) -> float:
    """Return the rate with the best metric among those that did not diverge."""
    sign = 1 if higher_is_better else -1
    scores = {rate: sign * value for rate, value in tried.items() if value is not None and math.isfinite(value)}
    if not scores:
        raise GossamerError(f"{method} diverged at every rate of the sweep ({', '.join(tried)}); try smaller rates")
    return float(max(scores, key=scores.__getitem__))


def slug(method: str) -> str:
    """Return the method as a folder's name."""
    return "".join(c if c.isalnum() or c in "-." else "-" for c in method)


def summarize(folder: Path, swept: Sweep, failed: dict[str, str], html: Path | None) -> dict[str, Any]:
    """Compare the runs in the folder; writes `compare.json`, and the report if `html` is given."""
    groups = grouped([r for r in load_runs(folder) if str(r.folder) not in failed])
    predict_measured(groups)
    content = {
        "command": command_line(),
        "verdict": verdict(groups),
        "noise": noise_line(groups),
        "methods": summary(groups),
        "lr_sweep": swept,
        "failed": failed,
        "higher_is_better": groups[0].runs[0].content["higher_is_better"],
        "folder": str(folder),
    }
    (folder / "compare.json").write_text(json.dumps(finite(content), indent=1) + "\n")
    if html is not None:
        write_html(folder, html)
    return content
