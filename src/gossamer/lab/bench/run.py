"""Measure several methods in the lab: first a sweep for the best bucket size of each, then interleaved repeats.

    results = run_bench(Setup(), parse_list("ddp,dadam:aer"), BenchPlan(steps=20, repeats=3))

Repeats are interleaved (A B C, A B C, ...), so that noise of the machine affects all methods alike, and every method
gets the same compute times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gossamer
from gossamer.errors import InputError
from gossamer.lab.bench.predicted import Probed, ProbeWorker, probe
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
from gossamer.predict.methods import DILOCO_LR, DILOCO_MOMENTUM, Method, parse
from gossamer.topology import Layout
from gossamer.topology.resolve import resolve
from gossamer.trace import Span, Trace, merge

WARMUP = 5
SWEEP_STEPS, SWEEP_WARMUP = 6, 3
MOST_BUCKETS = 64  # that a sweep tries
TRACE_STEPS = 10
START_SECONDS = 2.0  # estimate for the start of a run: process group, connections, buffers
Progress = Callable[[str, int, int], None]  # called with the current run, the number of runs done, and their total


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """How to measure."""

    steps: int = 20
    repeats: int = 3
    seconds: float | None = None  # run each method for this long instead of for `steps`
    seed: int = 0
    bucket_mb: float | None = None  # MiB, for all methods; None finds the best size of each by a sweep
    sweep_steps: int = SWEEP_STEPS
    sweep_buckets: tuple[int, ...] = BUCKETS  # numbers of buckets to try, besides each package's default size
    warmup: int = WARMUP
    trace: Path | None = None
    staleness: int = 0  # of Gossamer's synchronous methods
    every: int = 1  # of Gossamer's synchronous methods; of diloco and localsgd if more than 1
    outer: str | None = None  # of Gossamer's synchronous methods
    outer_lr: float | None = None  # of Gossamer's outer step and of diloco
    outer_momentum: float | None = None
    fragments: int = 1  # of Gossamer's synchronous methods
    average_every: int = 0  # of Gossamer's synchronous methods

    def __post_init__(self) -> None:
        least = {"steps": 1, "repeats": 1, "warmup": 3, "sweep_steps": 0, "staleness": 0, "every": 1}
        least |= {"fragments": 1, "average_every": 0}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise InputError(f"{name} must be at least {smallest}, got {getattr(self, name)}; pass a larger number")
        gossamer.AWC(
            every=self.every, staleness=self.staleness, fragments=self.fragments, average_every=self.average_every
        )  # raises if they do not fit together
        if self.seconds is not None and not 0 < self.seconds < 86400:
            raise InputError(f"seconds must be more than 0 and less than a day, got {self.seconds}; pass e.g. 30")
        if self.bucket_mb is not None and not 0 < self.bucket_mb < 1e6:
            raise InputError(f"bucket_mb must be a positive number of MiB, got {self.bucket_mb}; pass e.g. 0.5")
        gossamer.outer_named(self.outer or "nesterov", self.outer_lr, self.outer_momentum)  # refuses bad values
        if self.seed < 0:
            raise InputError(f"the seed must be at least 0, got {self.seed}; pass e.g. 0")

    def turn(self, method: Method) -> int:
        """The steps in which every bucket is exchanged once: runs take a multiple of it."""
        return method.local_steps(self.every) * (self.fragments if _in_rounds(method) else 1)

    def cycle(self, method: Method, setup: Setup) -> int:
        """The steps after which the load on the links repeats, which is with the topology if it has a short period."""
        return self.turn(method) * (_period(method, setup) if _in_rounds(method) else 1)

    def measured_steps(self, method: Method, setup: Setup) -> int:
        """The steps of a repeat: at least `steps`, in whole cycles, or in whole periods of exact averages."""
        if _in_rounds(method) and self.average_every:
            return _up(self.steps, math.lcm(self.turn(method), self.average_every))
        return _up(self.steps, self.cycle(method, setup))

    def table(self, setup: Setup) -> Table:
        """Compute times [steps, workers] of a run, warm-up included; a longer run starts over with the first row."""
        return setup.table(self.warmup + (self.steps if self.seconds is None else 4096), self.seed)

    def sizes(self, method: Method, setup: Setup) -> tuple[float | None, ...]:
        """The bucket sizes to try; with more than one, a sweep finds the best."""
        if self.bucket_mb is not None:
            return (self.bucket_mb,)
        counts = self.sweep_buckets if self.sweep_steps else ()
        if _in_rounds(method):  # of every fragment
            counts = tuple(c * self.fragments for c in counts if c * self.fragments <= MOST_BUCKETS)
        return bucket_sizes(method, setup, counts)

    def runs(self, method: Method, setup: Setup) -> list[int]:
        """The number of steps of each run of a method, warm-up included; with `seconds` only those of the warm-up."""
        tried = len(self.sizes(method, setup))
        turn, cycle = self.turn(method), self.cycle(method, setup)
        sweep = [_up(SWEEP_WARMUP, turn) + _up(self.sweep_steps, cycle)] * (tried if tried > 1 else 0)
        timeline = [] if self.trace is None else [_up(self.warmup, turn) + _up(TRACE_STEPS, turn)]
        measured = 0 if self.seconds is not None else self.measured_steps(method, setup)
        return sweep + [_up(self.warmup, turn) + measured] * self.repeats + timeline


def _up(steps: int, turn: int) -> int:
    """`steps`, rounded up to a multiple of `turn`."""
    return -(-steps // turn) * turn


def _in_rounds(method: Method) -> bool:
    """Whether a method is Gossamer's own and gossips in rounds."""
    return method.package == "gossamer" and method.algorithm in ("awc", "atc")


def _period(method: Method, setup: Setup) -> int:
    """The rounds after which the topology repeats, if these are few."""
    try:
        period = resolve(method.topology or "aer", Layout.of(setup.per_node)).period
    except InputError:  # the method is refused by its workers, with the reason
        return 1
    return period if period <= 8 else 1


class _Bench:
    def __init__(self, setup: Setup, plan: BenchPlan, methods: Sequence[Method], pool: WorkerPool, progress: Progress):
        self.setup, self.plan, self.methods, self.pool, self.progress = setup, plan, methods, pool, progress
        self.done, self.total = 0, sum(len(plan.runs(method, setup)) for method in methods)
        self.table = plan.table(setup)
        self.columns = tuple(tuple(map(float, column)) for column in self.table.T)

    def method_run(self, method: Method, bucket_mb: float | None, **changes: Any) -> MethodRun:
        plan = self.plan
        # Asynchronous algorithms have none of these settings and refuse other values than the defaults.
        usual = {"staleness": 0, "every": 1, "fragments": 1, "average_every": 0}
        options: dict[str, Any] = {name: value for name in usual if (value := getattr(plan, name)) != usual[name]}
        if plan.outer is not None:
            options["outer"] = gossamer.outer_named(plan.outer, plan.outer_lr, plan.outer_momentum)
        if method.algorithm == "local":
            options = {"every": method.local_steps(plan.every)}
        if method.name == "diloco":
            options |= {"lr": DILOCO_LR if plan.outer_lr is None else plan.outer_lr}
            options |= {"momentum": DILOCO_MOMENTUM if plan.outer_momentum is None else plan.outer_momentum}
        made = MethodRun(
            method,
            self.setup,
            self.columns,
            plan.measured_steps(method, self.setup),
            plan.warmup,
            plan.seconds,
            bucket_mb=bucket_mb,
            options=options,
        )
        made = replace(made, **changes)
        turn = plan.turn(method)
        made = replace(made, steps=_up(made.steps, turn), warmup=_up(made.warmup, turn))
        return replace(made, timeout=self.timeout(made))

    def measure(self, what: str, run: MethodRun) -> list[dict[str, Any]]:
        self.progress(f"{run.method}: {what}", self.done, self.total)
        # Twice the timeout of the workers: their own error, which names the peer, comes first.
        answers = self.pool.run(work, run, timeout=2 * run.timeout)
        self.done += 1
        return answers

    def timeout(self, run: MethodRun) -> float:
        """A limit that no method should reach: five times the compute and an all-reduce of the model, in every step."""
        rates = [r for r in (self.setup.rates.default, *self.setup.rates.pairs.values()) if r is not None]
        step = float(self.table.max()) + (2 * self.setup.model_bytes * 8 / min(rates) if rates else 0.0)
        steps = run.warmup + run.steps + 5
        return 120.0 + 5 * steps * step + (run.seconds or 0.0)

    def best_bucket(self, method: Method) -> tuple[float | None, list[dict[str, Any]]]:
        """The bucket size that is fastest in a short sweep, and the sweep."""
        sizes = self.plan.sizes(method, self.setup)
        if len(sizes) == 1:
            return sizes[0], []
        tried: list[dict[str, Any]] = []
        for size in sizes:
            steps = _up(self.plan.sweep_steps, self.plan.cycle(method, self.setup))
            run = self.method_run(method, size, steps=steps, seconds=None, warmup=SWEEP_WARMUP)
            answers = self.measure(f"buckets of {size:.3g} MiB" if size else "default buckets", run)
            tried.append({"bucket_mb": size, "step_ms": 1e3 * step_seconds(answers)})
        best = min(tried, key=lambda t: float(t["step_ms"]))
        return best["bucket_mb"], tried


def run_bench(
    setup: Setup,
    methods: Sequence[Method],
    plan: BenchPlan | None = None,
    progress: Progress = lambda *_: None,
    measure: ProbeWorker | None = None,
) -> dict[str, Any]:
    """Measure all methods; return `{"results": [...], "cluster": {...}, ...}`.

    With `plan.trace`, each method also writes a timeline to that folder. With `measure`, the worker function of
    `gossamer probe`, the lab is probed first, and every result has the step time that was predicted from that.
    """
    plan = plan or BenchPlan()
    refused = _refused(setup, methods)
    with setup.cluster() as cluster, cluster.pool() as pool:
        probed = None
        if measure is not None:
            progress("probing links and processors", 0, 1)
            probed = probe(setup, [m for m in methods if m not in refused], pool, measure, plan.seed)
        bench = _Bench(setup, plan, [m for m in methods if m not in refused], pool, progress)
        results = _measure(bench, methods, refused)
    if probed is not None:
        _add_predictions(results, probed, plan)
    note_drops(results, cluster.dropped)
    return _report(setup, plan, cluster, results)


def _add_predictions(results: list[dict[str, Any]], probed: Probed, plan: BenchPlan) -> None:
    """Add the predicted step time and its error to every result."""
    options = {k: getattr(plan, k) for k in ("staleness", "every", "fragments", "outer", "average_every")}
    for r in results:
        if "skipped" in r:
            continue
        method = parse(r["method"])
        seconds = probed.step_seconds(
            method,
            bucket_mb=r["bucket_mb"],
            options=options if method.local_steps(2) > 1 else {},  # neither DDP nor asynchronous methods have them
            gradients="worker",
            steps=plan.warmup + plan.steps,
            seed=plan.seed,
        )
        r["predicted_ms"] = 1e3 * seconds
        r["prediction_error"] = 1e3 * seconds / r["step_ms"] - 1


def expected(setup: Setup, methods: Sequence[Method], plan: BenchPlan) -> tuple[int, float]:
    """The number of runs of a benchmark, and the least number of seconds that they take.

    Every step is counted at its limit (DDP: the bytes of a ring all-reduce; gossip: compute alone), and every run with
    its start and the time to send the model to all nodes.
    """
    refused, table, rate = _refused(setup, methods), plan.table(setup), setup.rates.default
    start = START_SECONDS + (2 * setup.model_bytes * 8 / rate if rate is not None and len(setup.per_node) > 1 else 0.0)
    count, seconds = 0, 0.0
    for method in methods:
        if method not in refused:
            moved = all_reduced(setup, method, plan.every) if method.exact and len(setup.per_node) > 1 else None
            step, _ = limit_seconds(setup, compute_seconds(method, table), moved)
            runs = plan.runs(method, setup)
            count += len(runs)
            seconds += sum(runs) * step + len(runs) * start + plan.repeats * (plan.seconds or 0.0)
    return count, seconds


def _refused(setup: Setup, methods: Sequence[Method]) -> dict[Method, str]:
    """The methods that cannot be measured, and why."""
    if not methods:
        raise InputError("there is nothing to compare; name at least one method, e.g. ddp,dadam:aer")
    names = [str(m) for m in methods]
    if len(set(names)) < len(names):
        raise InputError(f"a method is listed twice in {','.join(names)}; list each once")
    return {m: why for m in methods if (why := why_not(m, setup)) is not None}


def _measure(bench: _Bench, methods: Sequence[Method], refused: dict[Method, str]) -> list[dict[str, Any]]:
    plan = bench.plan
    buckets: dict[Method, float | None] = {}
    sweeps: dict[Method, list[dict[str, Any]]] = {}
    runs: dict[Method, list[list[dict[str, Any]]]] = {m: [] for m in bench.methods}
    first_steps: dict[Method, list[int]] = {}  # by worker: the first measured step in the timeline

    for method in bench.methods:
        with _may_refuse(method, refused):
            buckets[method], sweeps[method] = bench.best_bucket(method)
    for repeat in range(plan.repeats):
        for method in bench.methods:
            if method not in refused:
                with _may_refuse(method, refused):
                    runs[method].append(
                        bench.measure(f"repeat {repeat + 1}", bench.method_run(method, buckets[method]))
                    )
    if plan.trace is not None:
        for method in bench.methods:
            if method not in refused:
                folder = str(trace_folder(plan.trace, method))
                run = bench.method_run(method, buckets[method], steps=TRACE_STEPS, seconds=None, trace=folder)
                first_steps[method] = [answer["warmed"] for answer in bench.measure("timeline", run)]
    results: list[dict[str, Any]] = []
    for method in methods:
        if method in refused:
            results.append({"method": str(method), "skipped": refused[method]})
            continue
        compute = compute_seconds(method, bench.table[plan.warmup :])
        made = summarize(method, bench.setup, runs[method], compute, buckets[method], usable_cores(), plan.every)
        made |= {"timeline_from": first_steps[method]} if method in first_steps else {}
        results.append({**made, "sweep": sweeps[method], "runs": runs[method]})
    add_speedups(results)
    return results


@contextmanager
def _may_refuse(method: Method, refused: dict[Method, str]) -> Iterator[None]:
    """Skip a method whose settings the user has to correct (a topology that does not fit the layout, for example)."""
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
            "staleness": plan.staleness,
            "every": plan.every,
            "outer": plan.outer,
            "fragments": plan.fragments,
            "average_every": plan.average_every,
        },
        "ideal": ideal(plan.table(setup)[plan.warmup :]),
    }


def trace_folder(trace: Path, method: Method | str) -> Path:
    return trace / str(method).replace(":", "-")


def timeline(folder: Path, label: str, first: Sequence[int], steps: int = TRACE_STEPS) -> Trace:
    """The measured timeline of a method, starting at time 0, with `steps` steps of every worker from its `first` on."""
    whole = merge(folder)
    inside = [s for s in whole.spans if 0 <= s.attrs.get("step", -1) - first[s.worker] < steps]
    if not inside:
        raise InputError(f"the trace in {folder} has no steps after its warm-up; record it again")
    begin, end = min(s.start for s in inside), max(s.end for s in inside)
    kept = [s for s in whole.spans if s.end > begin and s.start < end and (s in inside or "step" not in s.attrs)]
    moved = (Span(s.category, s.worker, max(s.start, begin) - begin, min(s.end, end) - begin, s.attrs) for s in kept)
    return Trace(tuple(moved), whole.node, label)
