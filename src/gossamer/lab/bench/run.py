"""Run methods beside each other in the lab: a sweep for everyone's best bucket size, then repeats in turn.

    results = run_bench(Setup(), parse_list("ddp,dadam:aer"), steps=20, repeats=3)

Repeats are interleaved (A B C, A B C, ...), so that the machine's noise hits all methods alike, and every method sees
the same compute times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gossamer.errors import InputError
from gossamer.lab.bench.setup import BUCKETS, Setup, bucket_sizes, why_not
from gossamer.lab.bench.stats import (
    add_speedups,
    all_reduced,
    compute_seconds,
    ideal,
    limit_seconds,
    note_drops,
    step_seconds,
    summarize,
)
from gossamer.lab.bench.worker import MethodRun, work
from gossamer.lab.cluster import LabCluster
from gossamer.lab.cpu import usable_cores
from gossamer.lab.workers import WorkerFailed, WorkerPool
from gossamer.predict.compute import Table
from gossamer.predict.methods import Method
from gossamer.trace import Span, Trace, merge

WARMUP = 5
SWEEP_STEPS, SWEEP_WARMUP = 6, 3
TRACE_STEPS = 10
START_SECONDS = 2.0  # of a run: a process group, connections, buffers
Progress = Callable[[str, int, int], None]  # what is done now, how many runs are done, of how many


USUAL = {"staleness": 0, "every": 1}  # settings that are the defaults of every policy


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """How to measure. `bucket_mb` spares the sweep; `seconds` runs each method for a time instead of `steps`."""

    steps: int = 20
    repeats: int = 3
    seconds: float | None = None
    seed: int = 0
    bucket_mb: float | None = None
    sweep_steps: int = SWEEP_STEPS
    sweep_buckets: tuple[int, ...] = BUCKETS  # how many buckets are tried, beside each package's own choice
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

    def table(self, setup: Setup) -> Table:
        """Compute times [steps, workers] of a run, warm-up included; it starts over at its end."""
        return setup.table(self.warmup + (self.steps if self.seconds is None else 4096), self.seed)

    def sizes(self, method: Method, setup: Setup) -> tuple[float | None, ...]:
        """The bucket sizes in question; a sweep decides if there are several."""
        if self.bucket_mb is not None:
            return (self.bucket_mb,)
        return bucket_sizes(method, setup, self.sweep_buckets if self.sweep_steps else ())

    def runs(self, method: Method, setup: Setup) -> list[int]:
        """The steps of each of a method's runs, warm-up included; with `seconds`, those of the warm-up."""
        tried = len(self.sizes(method, setup))
        sweep = [SWEEP_WARMUP + self.sweep_steps] * (tried if tried > 1 else 0)
        timeline = [] if self.trace is None else [self.warmup + TRACE_STEPS]
        return sweep + [self.warmup + (self.steps if self.seconds is None else 0)] * self.repeats + timeline


class _Bench:
    def __init__(self, setup: Setup, plan: BenchPlan, pool: WorkerPool, progress: Progress):
        self.setup, self.plan, self.pool, self.progress = setup, plan, pool, progress
        self.done = self.total = 0
        self.table = plan.table(setup)
        self.columns = tuple(tuple(map(float, column)) for column in self.table.T)

    def task(self, method: Method, bucket_mb: float | None, **changes: Any) -> MethodRun:
        plan = self.plan
        gossips = method.package == "gossamer" and method.algorithm != "ddp"
        options = {k: v for k, v in plan.options.items() if v != USUAL.get(k)} if gossips else {}
        made = MethodRun(
            method,
            self.setup,
            self.columns,
            plan.steps,
            plan.warmup,
            plan.seconds,
            bucket_mb=bucket_mb,
            options=options,
        )
        made = replace(made, **changes)
        return replace(made, timeout=self.patience(made))

    def run(self, what: str, task: MethodRun) -> list[dict[str, Any]]:
        self.progress(f"{task.method}: {what}", self.done, self.total)
        told = self.pool.run(work, task, timeout=2 * task.timeout)  # a worker says first whom it waits for
        self.done += 1
        return told

    def patience(self, task: MethodRun) -> float:
        """Far longer than any method should need: compute and a whole all-reduce, one after the other, five times."""
        rates = [r for r in (self.setup.rates.default, *self.setup.rates.pairs.values()) if r is not None]
        step = float(self.table.max()) + (2 * self.setup.model_bytes * 8 / min(rates) if rates else 0.0)
        steps = task.warmup + task.steps + 5
        return 120.0 + 5 * steps * step + (task.seconds or 0.0)

    def best_bucket(self, method: Method) -> tuple[float | None, list[dict[str, Any]]]:
        """The fastest bucket size of a short sweep, and the sweep."""
        sizes = self.plan.sizes(method, self.setup)
        if len(sizes) == 1:
            return sizes[0], []
        tried: list[dict[str, Any]] = []
        for size in sizes:
            task = self.task(method, size, steps=self.plan.sweep_steps, seconds=None, warmup=SWEEP_WARMUP)
            told = self.run(f"buckets of {size:.3g} MiB" if size else "its own buckets", task)
            tried.append({"bucket_mb": size, "step_ms": 1e3 * step_seconds(told)})
        best = min(tried, key=lambda t: float(t["step_ms"]))
        return best["bucket_mb"], tried


def run_bench(
    setup: Setup, methods: Sequence[Method], plan: BenchPlan | None = None, progress: Progress = lambda *_: None
) -> dict[str, Any]:
    """`{"results": [...], "cluster": {...}, ...}` of all methods; with `plan.trace` also one timeline a method."""
    plan = plan or BenchPlan()
    refused = _refused(setup, methods)
    with setup.cluster() as cluster, cluster.pool() as pool:
        results = _measure(_Bench(setup, plan, pool, progress), methods, refused)
    note_drops(results, cluster.dropped)
    return _report(setup, plan, cluster, results)


def expected(setup: Setup, methods: Sequence[Method], plan: BenchPlan) -> tuple[int, float]:
    """How many runs a benchmark has, and how many seconds they take at least: every step at its limit, DDP's by the
    bytes of a ring, gossip's by compute alone, and for every run its start and the model's way to all nodes."""
    refused, table, rate = _refused(setup, methods), plan.table(setup), setup.rates.default
    start = START_SECONDS + (2 * setup.model_bytes * 8 / rate if rate is not None and len(setup.per_node) > 1 else 0.0)
    count, seconds = 0, 0.0
    for method in methods:
        if method not in refused:
            moved = all_reduced(setup, method) if method.algorithm == "ddp" and len(setup.per_node) > 1 else None
            step, _ = limit_seconds(setup, compute_seconds(method, table), moved)
            runs = plan.runs(method, setup)
            count += len(runs)
            seconds += sum(runs) * step + len(runs) * start + plan.repeats * (plan.seconds or 0.0)
    return count, seconds


def _refused(setup: Setup, methods: Sequence[Method]) -> dict[Method, str]:
    """The methods that cannot take part, and why."""
    if not methods:
        raise InputError("there is nothing to compare; name at least one method, e.g. ddp,dadam:aer")
    names = [str(m) for m in methods]
    if len(set(names)) < len(names):
        raise InputError(f"a method is listed twice in {','.join(names)}; list each once")
    return {m: why for m in methods if (why := why_not(m, setup)) is not None}


def _measure(bench: _Bench, methods: Sequence[Method], refused: dict[Method, str]) -> list[dict[str, Any]]:
    plan = bench.plan
    taking_part = [m for m in methods if m not in refused]
    bench.total = sum(len(plan.runs(m, bench.setup)) for m in taking_part)
    buckets: dict[Method, float | None] = {}
    sweeps: dict[Method, list[dict[str, Any]]] = {}
    runs: dict[Method, list[list[dict[str, Any]]]] = {m: [] for m in taking_part}
    drawn: dict[Method, list[int]] = {}  # where each worker's measured steps begin in the timeline

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
                task = bench.task(method, buckets[method], steps=TRACE_STEPS, seconds=None, trace=where)
                drawn[method] = [t["warmed"] for t in bench.run("timeline", task)]
    results: list[dict[str, Any]] = []
    for method in methods:
        if method in refused:
            results.append({"method": str(method), "skipped": refused[method]})
            continue
        compute = compute_seconds(method, bench.table[plan.warmup :])
        made = summarize(method, bench.setup, runs[method], compute, buckets[method], usable_cores())
        made |= {"timeline_from": drawn[method]} if method in drawn else {}
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


def _report(setup: Setup, plan: BenchPlan, cluster: LabCluster, results: list[dict[str, Any]]) -> dict[str, Any]:
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
        "ideal": ideal(plan.table(setup)[plan.warmup :]),
    }


def trace_folder(trace: Path, method: Method | str) -> Path:
    return trace / str(method).replace(":", "-")


def timeline(folder: Path, label: str, first: Sequence[int], steps: int = TRACE_STEPS) -> Trace:
    """The measured timeline of a method, from time 0: of every worker the steps from its `first` on."""
    whole = merge(folder)
    inside = [s for s in whole.spans if 0 <= s.attrs.get("step", -1) - first[s.worker] < steps]
    if not inside:
        raise InputError(f"the trace in {folder} has no steps after its warm-up; record it again")
    begin, end = min(s.start for s in inside), max(s.end for s in inside)
    kept = [s for s in whole.spans if s.end > begin and s.start < end and (s in inside or "step" not in s.attrs)]
    moved = (Span(s.category, s.worker, max(s.start, begin) - begin, min(s.end, end) - begin, s.attrs) for s in kept)
    return Trace(tuple(moved), whole.node, label)
