"""Run methods beside each other in the lab: a sweep for everyone's best bucket size, then repeats in turn.

    results = run(Setup(), parse_list("ddp,dadam:aer"), steps=20, repeats=3)

Repeats are interleaved (A B C, A B C, ...), so that the machine's noise hits all methods alike, and every method sees
the same compute times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gossamer.errors import InputError
from gossamer.lab.bench_setup import Setup, bucket_sizes, why_not
from gossamer.lab.bench_stats import add_speedups, step_seconds, summarize
from gossamer.lab.bench_worker import Task, work
from gossamer.lab.cluster import Cluster
from gossamer.lab.launch import WorkerFailed, WorkerPool
from gossamer.runtime.methods import Method
from gossamer.trace import Span, Trace, merge

WARMUP = 5
SWEEP_STEPS = 6
TRACE_STEPS = 10
Progress = Callable[[str, int, int], None]  # what is done now, how many runs are done, of how many


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to measure. `bucket_mb` spares the sweep; `seconds` runs each method for a time instead of `steps`."""

    steps: int = 20
    repeats: int = 3
    seconds: float | None = None
    seed: int = 0
    bucket_mb: float | None = None
    sweep_steps: int = SWEEP_STEPS
    warmup: int = WARMUP
    trace: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)  # staleness, every: for Gossamer's methods

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("repeats", 1), ("warmup", 3), ("sweep_steps", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name} must be at least {least}, got {getattr(self, name)}; pass a positive number")
        if self.seconds is not None and not 0 < self.seconds < 86400:
            raise InputError(f"seconds must be more than 0 and less than a day, got {self.seconds}; pass e.g. 30")
        if self.bucket_mb is not None and not 0 < self.bucket_mb < 1e6:
            raise InputError(f"bucket_mb must be a positive number of MiB, got {self.bucket_mb}; pass e.g. 0.5")
        if self.seed < 0:
            raise InputError(f"the seed must be at least 0, got {self.seed}; pass e.g. 0")
        for name, least in (("staleness", 0), ("every", 1)):
            if self.options.get(name, least) < least:
                raise InputError(f"{name} must be at least {least}, got {self.options[name]}; leave it out for {least}")


class _Bench:
    def __init__(self, setup: Setup, plan: Plan, pool: WorkerPool, progress: Progress):
        self.setup, self.plan, self.pool, self.progress = setup, plan, pool, progress
        self.done = self.total = 0
        length = plan.warmup + (plan.steps if plan.seconds is None else 4096)  # a table starts over at its end
        self.table = setup.table(length, plan.seed)
        self.columns = tuple(tuple(map(float, column)) for column in self.table.T)

    def task(self, method: Method, bucket_mb: float | None, **changes: Any) -> Task:
        plan = self.plan
        options = plan.options if method.package == "gossamer" and method.algorithm != "ddp" else {}
        made = Task(method, self.setup, self.columns, plan.steps, plan.warmup, plan.seconds, bucket_mb, options)
        return replace(made, **changes)

    def run(self, what: str, task: Task) -> list[dict[str, Any]]:
        self.progress(f"{task.method}: {what}", self.done, self.total)
        told = self.pool.run(work, task, timeout=self.patience(task))
        self.done += 1
        return told

    def patience(self, task: Task) -> float:
        """Far longer than any method should need: compute and a whole all-reduce, one after the other, ten times."""
        rates = [r for r in (self.setup.rates.default, *self.setup.rates.pairs.values()) if r is not None]
        step = float(self.table.max()) + (2 * self.setup.model_bytes * 8 / min(rates) if rates else 0.0)
        steps = task.warmup + task.steps + 5
        return 120.0 + 10 * steps * step + 2 * (task.seconds or 0.0)

    def best_bucket(self, method: Method) -> tuple[float | None, list[dict[str, Any]]]:
        """The fastest bucket size of a short sweep, and the sweep."""
        if self.plan.bucket_mb is not None:
            return self.plan.bucket_mb, []
        sizes = bucket_sizes(method, self.setup)
        if not self.plan.sweep_steps:
            return sizes[0], []
        tried: list[dict[str, Any]] = []
        for size in sizes:
            task = self.task(method, size, steps=self.plan.sweep_steps, seconds=None, warmup=3)
            told = self.run(f"buckets of {size:.3g} MiB" if size else "its own buckets", task)
            tried.append({"bucket_mb": size, "step_ms": 1e3 * step_seconds(told)})
        best = min(tried, key=lambda t: float(t["step_ms"]))
        return best["bucket_mb"], tried


def run(
    setup: Setup, methods: Sequence[Method], plan: Plan | None = None, progress: Progress = lambda *_: None
) -> dict[str, Any]:
    """`{"results": [...], "cluster": {...}, ...}` of all methods; with `plan.trace` also one timeline a method."""
    plan = plan or Plan()
    if not methods:
        raise InputError("there is nothing to compare; name at least one method, e.g. ddp,dadam:aer")
    names = [str(m) for m in methods]
    if len(set(names)) < len(names):
        raise InputError(f"a method is listed twice in {','.join(names)}; list each once")
    refused = {m: why for m in methods if (why := why_not(m, setup)) is not None}
    with setup.cluster() as cluster, cluster.pool() as pool:
        results = _measure(_Bench(setup, plan, pool, progress), methods, refused)
    return _report(setup, plan, cluster, results)


def _measure(bench: _Bench, methods: Sequence[Method], refused: dict[Method, str]) -> list[dict[str, Any]]:
    plan = bench.plan
    taking_part = [m for m in methods if m not in refused]
    swept = 0 if plan.bucket_mb or not plan.sweep_steps else sum(len(bucket_sizes(m, bench.setup)) for m in taking_part)
    bench.total = swept + len(taking_part) * (plan.repeats + (plan.trace is not None))
    buckets: dict[Method, float | None] = {}
    sweeps: dict[Method, list[dict[str, Any]]] = {}
    runs: dict[Method, list[list[dict[str, Any]]]] = {m: [] for m in taking_part}

    for method in taking_part:
        with _may_refuse(method, refused):
            buckets[method], sweeps[method] = bench.best_bucket(method)
    for repeat in range(plan.repeats):
        for method in taking_part:
            if method not in refused:
                with _may_refuse(method, refused):
                    runs[method].append(bench.run(f"repeat {repeat + 1}", bench.task(method, buckets[method])))
    if plan.trace is not None:
        for method in taking_part:
            if method not in refused:
                where = str(trace_folder(plan.trace, method))
                bench.run("timeline", bench.task(method, buckets[method], steps=TRACE_STEPS, seconds=None, trace=where))
    mean = float(bench.table[plan.warmup :].mean())
    cores = os.cpu_count() or 1
    results: list[dict[str, Any]] = []
    for method in methods:
        if method in refused:
            results.append({"method": str(method), "skipped": refused[method]})
            continue
        made = summarize(method, bench.setup, runs[method], mean, buckets[method], cores)
        results.append({**made, "sweep": sweeps[method], "runs": runs[method]})
    add_speedups(results)
    return results


@contextmanager
def _may_refuse(method: Method, refused: dict[Method, str]) -> Iterator[None]:
    """What the user could put right (a topology that does not fit the layout) concerns one method, not the others."""
    try:
        yield
    except WorkerFailed as error:
        if not isinstance(error.__cause__, InputError):
            raise
        refused[method] = str(error.__cause__)


def _report(setup: Setup, plan: Plan, cluster: Cluster, results: list[dict[str, Any]]) -> dict[str, Any]:
    table = setup.table(plan.warmup + plan.steps, plan.seed)[plan.warmup :]
    mean, slowest = float(table.mean()), float(np.mean(table.max(axis=1)))
    return {
        "results": results,
        "cluster": {**cluster.describe(), **setup.describe()},
        "plan": {
            "steps": plan.steps,
            "repeats": plan.repeats,
            "seconds": plan.seconds,
            "seed": plan.seed,
            "warmup": plan.warmup,
            **plan.options,
        },
        # What DDP would reach if communication were free, and how much gossip could gain over that.
        "ideal": {
            "mean_compute_ms": 1e3 * mean,
            "ddp_ms": 1e3 * slowest,
            "speedup_vs_ddp": slowest / mean if mean else None,
        },
    }


def trace_folder(trace: Path, method: Method | str) -> Path:
    return trace / str(method).replace(":", "-")


def timeline(folder: Path, label: str, warmup: int = WARMUP, steps: int = TRACE_STEPS) -> Trace:
    """The measured timeline of a method after its warm-up, from time 0."""
    whole = merge(folder)
    inside = [s for s in whole.spans if warmup <= s.attrs.get("step", -1) < warmup + steps]
    if not inside:
        raise InputError(f"the trace in {folder} has no steps after its warm-up; record it again")
    begin, end = min(s.start for s in inside), max(s.end for s in inside)
    kept = [s for s in whole.spans if s.end > begin and s.start < end and (s in inside or "step" not in s.attrs)]
    moved = (Span(s.category, s.worker, max(s.start, begin) - begin, min(s.end, end) - begin, s.attrs) for s in kept)
    return Trace(tuple(moved), whole.node, label)
