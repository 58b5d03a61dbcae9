"""Runs on disk, and their summary: quality and time of each method over its seeds."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gossamer.errors import InputError
from gossamer.report.rows import read_rows
from gossamer.report.waits import deadlines_in
from gossamer.trace import read

WARM = 0.1  # share of the first steps that a measured step time leaves out: connections are made, caches fill
CLOCK = ("kind", "cluster", "link", "network")  # with the layout: where a run's times come from
ELSEWHERE = ("method", "seed", "lr", "options", "virtual")  # keys of a configuration that the grouping reads elsewhere
IGNORED = (*ELSEWHERE, "eval_every", "checkpoint_every", "batched", "trace", "threads")
NEEDED = {"config", "method", "lr", "metric", "higher_is_better"}  # in config.json
NEEDED_INSIDE = {"task", "steps", "seed", "per_node", "options"}  # in its "config"
NAMED = 6  # runs that a sentence names; the others are counted


@dataclass
class Run:
    """One run. `steps` has one row per step, with losses averaged over the workers; `evaluations` are as written."""

    folder: Path
    content: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.content["config"])

    @property
    def method(self) -> str:
        return str(self.content["method"])

    @property
    def name(self) -> str:
        return f"{self.method} seed {self.config['seed']}"

    @property
    def metric(self) -> str:
        return str(self.content["metric"])

    @property
    def clock(self) -> dict[str, Any]:
        return dict(self.content.get("clock", {"kind": "measured"}))

    @property
    def setting(self) -> str:
        """Where its times come from; times of different settings cannot be compared."""
        return json.dumps([self.config["per_node"], *(self.clock.get(k) for k in CLOCK)])

    @property
    def step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def finished(self) -> bool:
        """Whether all steps are done and the result is evaluated; earlier evaluations may use a part of the data."""
        return bool(self.evaluations) and self.evaluations[-1]["step"] >= self.config["steps"]

    @property
    def diverged(self) -> bool:
        """Whether its last evaluation is not a finite number."""
        return bool(self.evaluations) and not all(math.isfinite(self.final(name)) for name in ("loss", self.metric))

    @property
    def step_time(self) -> float:
        """Seconds per step: the simulated mean, or the measured median after the first tenth of the steps."""
        if self.clock["kind"] == "simulated":
            return float(self.clock["step_seconds"])
        times = [b["seconds"] - a["seconds"] for a, b in zip(self.steps, self.steps[1:], strict=False)]
        kept = times[math.ceil(WARM * len(times)) :] or times
        return statistics.median(kept) if kept else float(self.steps[0]["seconds"])

    @cached_property
    def waiting(self) -> float | None:
        """The share of the time that worker 0 waited; None if it was not recorded."""
        if self.clock["kind"] == "simulated":
            return float(self.clock["waiting"])
        last = self.steps[-1]
        if last["waited"] is not None and last["seconds"]:
            return float(last["waited"] / last["seconds"])
        try:
            recorded = read(self.folder / "trace" / "trace-00000.jsonl")[1]  # DDP's waits are known only from a trace
        except InputError:
            return None
        spans = [s for s in recorded if s.category != "exchange"]
        return sum(s.seconds for s in spans if s.category == "wait") / sum(s.seconds for s in spans) if spans else None

    @cached_property
    def deadline(self) -> float | None:
        """The longest time, in seconds, that an exchange waited for a neighbor; None if the run was not elastic."""
        found = deadlines_in(self.folder)
        return None if found is None else found[1]

    @property
    def noise_scale(self) -> float | None:
        """The task's noise scale in its unit: the median of the evaluations, infinite where no signal was found.

        None if it was not measured.
        """
        shares = [(e, float(e.get("noise_share", math.nan))) for e in self.evaluations]
        found = [math.inf if share == 1 else float(e["noise_scale"]) for e, share in shares if math.isfinite(share)]
        return statistics.median(found) if found else None

    @property
    def batches(self) -> tuple[float, float] | None:
        """The mean batch of a replica and that of all workers in a step, in the task's unit; None in old runs."""
        last = self.evaluations[-1]
        return (last["replica_batch"], last["global_batch"]) if "replica_batch" in last else None

    def final(self, name: str, of: str = "averaged") -> float:
        """Return a value of the last evaluation, of the averaged model or of worker 0's (`of="local"`)."""
        return float(self.evaluations[-1][of][name])


@dataclass
class Found:
    """The runs in a folder.

    `runs` are the ones to compare: the finished runs, or the unfinished ones if no run is finished.
    """

    runs: list[Run]
    unfinished: list[Run]
    diverged: list[Run]

    @property
    def left_out(self) -> str:
        """A sentence about the runs that are left out, empty if there are none."""
        parts = []
        if self.unfinished:
            what = "run that is" if len(self.unfinished) == 1 else "runs that are"
            parts.append(f"{len(self.unfinished)} {what} not finished ({progress(self.unfinished)})")
        if self.diverged:
            what = "run" if len(self.diverged) == 1 else "runs"
            parts.append(f"{len(self.diverged)} {what} that diverged ({_listed([r.name for r in self.diverged])})")
        return f"Left out: {' and '.join(parts)}." if parts else ""


def find_runs(folder: str | Path) -> Found:
    """Find the runs in a folder: the folder of one run, or of many below it."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; pass the --out of gossamer train or compare")
    files = [f for f in sorted(folder.rglob("config.json")) if "sweep" not in f.relative_to(folder).parts]
    if not files:
        raise InputError(
            f"{folder} holds no run (no config.json outside of a sweep); pass the --out of gossamer train or compare"
        )
    failed = _failed(folder)
    runs: list[Run] = []
    diverged: list[Run] = []
    for file in files:
        run = load_run(file.parent)
        (diverged if run.diverged or run.folder in failed else runs).append(run)
    if not runs:
        raise InputError(
            f"every run in {folder} diverged ({_listed([r.name for r in diverged])}); lower --lr, or lengthen --warmup"
        )
    finished = [r for r in runs if r.finished]
    if finished:
        return Found(finished, [r for r in runs if not r.finished], diverged)
    under_way = [r for r in runs if r.evaluations]
    if not under_way:
        raise InputError(
            f"no run in {folder} has reached its first evaluation ({progress(runs)}); train longer, resume, or lower "
            "--lr where the loss diverged"
        )
    return Found(under_way, [r for r in runs if not r.evaluations], diverged)


def load_runs(folder: str | Path) -> list[Run]:
    """Return the finished runs in a folder."""
    runs = find_runs(folder).runs
    if not runs[0].finished:
        raise InputError(
            f"no run in {folder} is finished ({progress(runs)}); train longer, resume, or lower --lr where the loss "
            "diverged"
        )
    return runs


def progress(runs: Sequence[Run]) -> str:
    """Describe how far each run is."""
    return _listed([f"{r.name} at step {r.step} of {r.config['steps']}" for r in runs])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _failed(folder: Path) -> set[Path]:
    """Return the runs that diverged according to `compare.json`: they may have no evaluation that shows it."""
    found: set[Path] = set()
    for path in folder.rglob("compare.json"):
        try:
            content = read_object(path)
            found |= {path.parent / Path(run).relative_to(content["folder"]) for run in content["failed"]}
        except (KeyError, TypeError, ValueError):
            continue  # damaged; the page mentions it
    return found


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}; check the file") from None
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}); restore it or move it away") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is damaged (no JSON object); restore it or move it away")
    return content


def load_run(folder: Path) -> Run:
    """Load one run, finished or not."""
    content = read_object(folder / "config.json")
    inside = content.get("config")
    lacking = NEEDED - set(content) or NEEDED_INSIDE - set(inside if isinstance(inside, dict) else ())
    if lacking:
        raise InputError(
            f"{folder / 'config.json'} is damaged (it lacks {', '.join(sorted(lacking))}); restore it or move it away"
        )
    by_step: dict[int, list[dict[str, Any]]] = {}
    evaluations: list[dict[str, Any]] = []
    for path in sorted(folder.glob("metrics-*.jsonl")):
        rows, evaluated = read_rows(path)
        evaluations += [_with_nan(row) for row in evaluated]
        for row in rows:
            by_step.setdefault(row["step"], []).append(row)
    steps = []
    for _, rows in sorted(by_step.items()):
        merged = dict(rows[0])
        merged["loss"] = statistics.fmean(math.nan if r["loss"] is None else r["loss"] for r in rows)
        merged["units"] = sum(r["units"] for r in rows)
        merged["bytes"] = statistics.fmean(r["bytes"] for r in rows)
        steps.append(merged)
    return Run(folder, content, steps, evaluations)


def _with_nan(row: dict[str, Any]) -> dict[str, Any]:
    """Return an evaluation with NaN where its file has null, which stands for every number that is not finite."""
    return {k: _with_nan(v) if isinstance(v, dict) else math.nan if v is None else v for k, v in row.items()}


@dataclass
class Group:
    """The runs of one method that differ only by their seed."""

    label: str
    runs: list[Run] = field(default_factory=list)

    def values(self, name: str) -> list[float]:
        """Return the final value of each run."""
        return [r.final(name) for r in self.runs]

    @property
    def all_reduce(self) -> bool:
        return self.runs[0].method.split(":")[0] == "ddp"  # with any wire

    @property
    def seeds(self) -> int:
        return len({r.config["seed"] for r in self.runs})

    @property
    def step_time(self) -> float:
        return statistics.fmean(r.step_time for r in self.runs)

    @property
    def noise_scale(self) -> float | None:
        """The median over the runs that measured it; None if there is none."""
        found = [r.noise_scale for r in self.runs if r.noise_scale is not None]
        return statistics.median(found) if found else None


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Group runs by method and by everything else that differs: configuration, clock, learning rates of one method.

    Methods may have different learning rates. All-reduce comes first.
    """
    flat = [
        {
            **{k: v for k, v in r.config.items() if k not in IGNORED},
            **r.config["options"],
            **{k: r.clock.get(k) for k in CLOCK},
        }
        for r in runs
    ]
    keys = sorted({k for f in flat for k in f})
    differing = [k for k in keys if len({json.dumps(f.get(k)) for f in flat}) > 1]
    by_rate: dict[str, dict[float, list[Run]]] = {}
    for run, values in zip(runs, flat, strict=True):
        label = run.method + "".join(_difference(k, values.get(k)) for k in differing)
        by_rate.setdefault(label, {}).setdefault(run.content["lr"], []).append(run)
    groups = [
        Group(label + (_difference("lr", rate) if len(rates) > 1 else ""), same)
        for label, rates in by_rate.items()
        for rate, same in rates.items()
    ]
    return sorted(groups, key=lambda g: (not g.all_reduce, g.label))


def _difference(key: str, value: Any) -> str:
    """Return what distinguishes a run from others of its method; a switch that is off is not mentioned."""
    if value is True:
        return f" {key.replace('_', '-')}"
    if key == "kind":
        return f" {value}"
    return "" if value is False or value is None else f" {key}={value}"


def by_setting(groups: Sequence[Group]) -> list[list[Group]]:
    """Return lists of groups whose times can be compared."""
    found: dict[str, list[Group]] = {}
    for g in groups:
        found.setdefault(g.runs[0].setting, []).append(g)
    return list(found.values())


def baseline(groups: Sequence[Group]) -> Group:
    """Return the all-reduce group if there is one, otherwise the first group."""
    return next((g for g in groups if g.all_reduce), groups[0])


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the sample standard deviation (0 for one value)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def reached(run: Run, loss: float) -> float | None:
    """Return the seconds until the averaged model's validation loss was `loss`, interpolated between evaluations."""
    before: tuple[float, float] | None = None
    for row in run.evaluations:
        now = float(row["seconds"]), float(row["averaged"]["loss"])
        if now[1] <= loss:
            if before is None or not before[1] > now[1]:  # it may be NaN
                return now[0]
            return before[0] + (now[0] - before[0]) * (before[1] - loss) / (before[1] - now[1])
        before = now
    return None


def summary(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return one row per method, for the table, the CSV and the JSON.

    A method is compared with the baseline of its setting. Unfinished runs are not compared, because each may be at
    another step.
    """
    bases = {g.label: baseline(same) for same in by_setting(groups) for g in same}
    finished = all(r.finished for g in groups for r in g.runs)
    rows = []
    for g in groups:
        base, metric = bases[g.label], g.runs[0].metric
        target = mean_std(base.values("loss"))[0]
        quality, loss = mean_std(g.values(metric)), mean_std(g.values("loss"))
        ends = [r.steps[-1] for r in g.runs]
        times = [reached(r, target) if finished else None for r in g.runs]
        waits, deadlines = [r.waiting for r in g.runs], [r.deadline for r in g.runs if r.deadline is not None]
        steps = min(r.step for r in g.runs)
        seconds, base_seconds = g.step_time * steps, base.step_time * base.runs[0].step
        to_target = statistics.fmean(t for t in times if t is not None) if None not in times else None
        distance = statistics.fmean(r.evaluations[-1]["consensus_distance"] for r in g.runs)
        batches = g.runs[0].batches or (None, None)
        rows.append(
            {
                "method": g.label,
                "lr": g.runs[0].content["lr"],
                "seeds": g.seeds,
                "steps": steps,
                "metric": metric,
                "metric_mean": quality[0],
                "metric_std": quality[1],
                "local_metric_mean": statistics.fmean(r.final(metric, "local") for r in g.runs),
                "loss_mean": loss[0],
                "loss_std": loss[1],
                "step_seconds": g.step_time,
                "step_seconds_std": mean_std([r.step_time for r in g.runs])[1],
                "seconds": seconds,
                "relative_time": seconds / base_seconds if finished and base_seconds else None,
                "seconds_to_baseline_loss": to_target,
                "bytes_per_step": statistics.fmean(e["bytes"] / e["step"] for e in ends),
                "waiting": None if None in waits else statistics.fmean(w for w in waits if w is not None),
                "deadline_seconds": max(deadlines, default=None),
                "consensus_distance": None if math.isnan(distance) else distance,
                "noise_scale": g.noise_scale,
                "replica_batch": batches[0],
                "global_batch": batches[1],
                "unit": g.runs[0].content.get("unit"),
                "clock": g.runs[0].clock["kind"],
                "predicted_step_seconds": g.runs[0].content.get("predicted_step_seconds"),
            }
        )
    return rows
