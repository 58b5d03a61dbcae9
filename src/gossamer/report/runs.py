"""Reading runs from disk, and what they say together: quality and time of each method over its seeds."""

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
from gossamer.trace import read

WARM = 0.1  # share of the steps that a measured step time leaves out: connections are made, caches fill
IGNORED = ("method", "seed", "lr", "options", "eval_every", "checkpoint_every", "batched", "trace", "threads")


@dataclass
class Run:
    """One run: `steps` are its rows by step (losses averaged over the workers' files), `evaluations` as written."""

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
    def metric(self) -> str:
        return str(self.content["metric"])

    @property
    def clock(self) -> dict[str, Any]:
        return dict(self.content.get("clock", {"kind": "measured"}))

    @property
    def finished(self) -> bool:
        return bool(self.evaluations) and self.steps[-1]["step"] == self.config["steps"]

    @property
    def step_time(self) -> float:
        """Mean seconds of a step after the first tenth; the median when measured, as hiccups are not the method's."""
        if self.clock["kind"] == "simulated":
            return float(self.clock["step_seconds"])
        times = [b["seconds"] - a["seconds"] for a, b in zip(self.steps, self.steps[1:], strict=False)]
        kept = times[math.ceil(WARM * len(times)) :] or times
        return statistics.median(kept) if kept else float(self.steps[0]["seconds"])

    @cached_property
    def waiting(self) -> float | None:
        """The share of the time that worker 0 stood still; None where it cannot be told."""
        if self.clock["kind"] == "simulated":
            return float(self.clock["waiting"])
        last = self.steps[-1]
        if last["waited"] is not None and last["seconds"]:
            return float(last["waited"] / last["seconds"])
        timeline = self.folder / "trace" / "trace-00000.jsonl"  # DDP's waiting is known if it was recorded
        spans = [s for s in read(timeline)[1] if s.category != "exchange"] if timeline.exists() else []
        return sum(s.seconds for s in spans if s.category == "wait") / sum(s.seconds for s in spans) if spans else None

    def final(self, name: str, of: str = "averaged") -> float:
        return float(self.evaluations[-1][of][name])


@dataclass
class Group:
    """The runs of one method that differ by seed only."""

    label: str
    runs: list[Run] = field(default_factory=list)

    def values(self, name: str) -> list[float]:
        return [r.final(name) for r in self.runs]

    @property
    def step_time(self) -> float:
        return statistics.fmean(r.step_time for r in self.runs)


def load_runs(folder: str | Path) -> list[Run]:
    """The finished runs in a folder: of one run, or of many below it."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; pass the --out of gossamer train or compare")
    files = sorted(folder.rglob("config.json"))
    if not files:
        raise InputError(f"{folder} holds no run (no config.json); pass the --out of gossamer train or compare")
    runs = [load_run(f.parent) for f in files if "sweep" not in f.relative_to(folder).parts]
    found = [r for r in runs if r is not None and r.evaluations]
    if not found:
        raise InputError(f"no run in {folder} has come to its first evaluation; train longer, or resume it")
    return found


def load_run(folder: Path) -> Run | None:
    content = json.loads((folder / "config.json").read_text())
    by_step: dict[int, list[dict[str, Any]]] = {}
    evaluations: list[dict[str, Any]] = []
    for path in sorted(folder.glob("metrics-*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                break  # torn when the run was killed
            if "averaged" in row:
                evaluations.append(row)
            else:
                by_step.setdefault(row["step"], []).append(row)
    if not by_step:
        return None
    steps = []
    for _, rows in sorted(by_step.items()):
        merged = dict(rows[0])
        merged["loss"] = statistics.fmean(r["loss"] for r in rows)
        merged["units"] = sum(r["units"] for r in rows)
        merged["bytes"] = statistics.fmean(r["bytes"] for r in rows)
        steps.append(merged)
    return Run(folder, content, steps, evaluations)


def grouped(runs: Sequence[Run]) -> list[Group]:
    """By method, and by whatever else in the configuration differs between the runs; all-reduce first."""
    flat = [{**{k: v for k, v in r.config.items() if k not in IGNORED}, **r.config["options"]} for r in runs]
    keys = sorted({k for f in flat for k in f})
    differing = [k for k in keys if len({json.dumps(f.get(k)) for f in flat}) > 1]
    groups: dict[str, Group] = {}
    for run, values in zip(runs, flat, strict=True):
        label = run.method + "".join(_difference(k, values.get(k)) for k in differing)
        groups.setdefault(label, Group(label)).runs.append(run)
    return sorted(groups.values(), key=lambda g: (g.runs[0].method != "ddp", g.label))


def _difference(key: str, value: Any) -> str:
    """What tells a run from others of its method; a switch that is off goes without saying."""
    if value is True:
        return f" {key.replace('_', '-')}"
    return "" if value is False or value is None else f" {key}={value}"


def baseline(groups: Sequence[Group]) -> Group:
    """All-reduce if it is there, else the first."""
    return next((g for g in groups if g.runs[0].method == "ddp"), groups[0])


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 for one value)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def reached(run: Run, loss: float) -> float | None:
    """Seconds until the averaged model's validation loss was `loss`, by a straight line between evaluations."""
    before: tuple[float, float] | None = None
    for row in run.evaluations:
        now = float(row["seconds"]), float(row["averaged"]["loss"])
        if now[1] <= loss:
            if before is None or before[1] <= now[1]:
                return now[0]
            return before[0] + (now[0] - before[0]) * (before[1] - loss) / (before[1] - now[1])
        before = now
    return None


def summary(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """A row a method: what the table, the CSV and the JSON show."""
    base = baseline(groups)
    target = mean_std(base.values("loss"))[0]
    rows = []
    for g in groups:
        metric = g.runs[0].metric
        quality, loss = mean_std(g.values(metric)), mean_std(g.values("loss"))
        ends = [r.steps[-1] for r in g.runs]
        times = [reached(r, target) for r in g.runs]
        waits = [r.waiting for r in g.runs]
        seconds = g.step_time * ends[0]["step"]
        base_seconds = base.step_time * base.runs[0].steps[-1]["step"]
        to_target = statistics.fmean(t for t in times if t is not None) if None not in times else None
        rows.append(
            {
                "method": g.label,
                "lr": g.runs[0].content["lr"],
                "seeds": len(g.runs),
                "steps": ends[0]["step"],
                "metric": metric,
                "metric_mean": quality[0],
                "metric_std": quality[1],
                "local_metric_mean": statistics.fmean(r.final(metric, "local") for r in g.runs),
                "loss_mean": loss[0],
                "loss_std": loss[1],
                "step_seconds": g.step_time,
                "step_seconds_std": mean_std([r.step_time for r in g.runs])[1],
                "seconds": seconds,
                "relative_time": seconds / base_seconds if base_seconds else None,
                "seconds_to_baseline_loss": to_target,
                "bytes_a_step": statistics.fmean(e["bytes"] / e["step"] for e in ends),
                "waiting": None if None in waits else statistics.fmean(w for w in waits if w is not None),
                "consensus_distance": statistics.fmean(r.evaluations[-1]["consensus_distance"] for r in g.runs),
                "clock": g.runs[0].clock["kind"],
                "predicted_step_seconds": g.runs[0].content.get("predicted_step_seconds"),
            }
        )
    return rows
