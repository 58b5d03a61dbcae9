"""Compute results from the answers of the workers: step time, speedup, multiple of the limit, waiting time."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gossamer.lab.bench.setup import Setup
from gossamer.lab.cpu import SATURATED
from gossamer.predict.compute import Table
from gossamer.predict.methods import WIRES, Method, parse

Answers = Sequence[Mapping[str, Any]]  # by rank: what `bench.worker.work` returned


def step_seconds(answers: Answers, *, asynchronous: bool = False) -> float:
    """Seconds per step, from the time when the last worker ended its warm-up until the last worker was done.

    If the workers took different numbers of steps, the mean number counts. Each asynchronous worker has its own window,
    and the result is one over the mean of their rates: n / sum(steps_i / time_i).
    """
    if asynchronous:
        return len(answers) / max(1e-9, sum(steps_per_second(answers)))
    begin, end = max(t["begin"] for t in answers), max(t["end"] for t in answers)
    return float((end - begin) / max(1.0, statistics.fmean(t["steps"] for t in answers)))


def steps_per_second(answers: Answers) -> list[float]:
    """The rate of each worker."""
    return [t["steps"] / max(1e-9, t["end"] - t["begin"]) for t in answers]


def compute_seconds(method: Method, table: Table) -> float:
    """The step time if only compute took time: the mean, or for asynchronous methods the harmonic mean over workers."""
    if not method.asynchronous:
        return float(table.mean())
    own = table.mean(axis=0)
    return float(len(own) / np.sum(1 / own)) if own.all() else 0.0


def ideal(table: Table) -> dict[str, float | None]:
    """Step times if links were free: DDP needs the compute time of the slowest worker in every step, gossip the mean,
    asynchronous gossip the harmonic mean over workers."""
    slowest, mean = float(np.mean(table.max(axis=1))), float(table.mean())
    own_pace = compute_seconds(parse("ad-psgd"), table)
    return {
        "mean_compute_ms": 1e3 * mean,
        "ddp_ms": 1e3 * slowest,
        "speedup_vs_ddp": slowest / mean if mean else None,
        "asynchronous_ms": 1e3 * own_pace,
        "asynchronous_speedup_vs_ddp": slowest / own_pace if own_pace else None,
    }


@dataclass(frozen=True)
class NodeTraffic:
    """Bytes per step between nodes. `busiest` is the largest number in one direction of any node's interface.

    `counted` says by what: the kernel (headers included), Gossamer's engine (payload), or a formula (payload).
    """

    busiest: float
    mean: float
    pairs: dict[tuple[int, int], float]
    counted: str


def traffic(method: Method, setup: Setup, answers: Answers, every: int = 1) -> NodeTraffic | None:
    """The bytes that were sent between nodes; None if nothing counted them (another package on loopback).

    They are per step of the worker that sent them, or for asynchronous methods per mean step, `step_seconds` long.
    """
    nodes = [node for node, count in enumerate(setup.per_node) for _ in range(count)]
    if len(setup.per_node) == 1:
        return NodeTraffic(0.0, 0.0, {}, "one node")
    steps = [max(1.0, t["steps"]) for t in answers]
    if method.asynchronous:
        step = step_seconds(answers, asynchronous=True)
        steps = [max(1.0, (t["end"] - t["begin"]) / step) for t in answers]
    pairs: defaultdict[tuple[int, int], float] = defaultdict(float)  # (from, to)
    sent = dict.fromkeys(range(len(setup.per_node)), 0.0)
    for rank, t in enumerate(answers):
        for peer, size in t["sent"].items():
            if nodes[peer] != nodes[rank]:
                pairs[nodes[rank], nodes[peer]] += size / steps[rank]
                sent[nodes[rank]] += size / steps[rank]
    firsts = [nodes.index(node) for node in range(len(setup.per_node))]
    if all(answers[r]["interface"] is not None for r in firsts):
        ways = [[answers[r]["interface"][way] / steps[r] for r in firsts] for way in ("sent", "received")]
        return NodeTraffic(max(max(w) for w in ways), statistics.fmean(ways[0]), dict(pairs), "kernel")
    if pairs:
        received: defaultdict[int, float] = defaultdict(float)
        for (_, node), size in pairs.items():
            received[node] += size
        return NodeTraffic(
            max(*sent.values(), *received.values()), statistics.fmean(sent.values()), dict(pairs), "engine"
        )
    return all_reduced(setup, method, every) if method.exact else None


def all_reduced(setup: Setup, method: Method, every: int = 1) -> NodeTraffic:
    """The traffic of a ring all-reduce of the whole model, 2 (n-1)/n S bytes that leave every node, per step."""
    size = 2 * (setup.n - 1) / setup.n * setup.model_bytes * WIRES[method.wire] / 4 / method.local_steps(every)
    return NodeTraffic(size, size, {}, "formula")


def limit_seconds(setup: Setup, compute: float, moved: NodeTraffic | None) -> tuple[float, str]:
    """max(compute, bytes / bandwidth) over all nodes and pairs of nodes with their own rate, and which it is."""
    rates = setup.rates
    causes = [(compute, "compute")]
    if moved is not None and rates.default is not None:
        causes.append((moved.busiest * 8 / rates.default, "link"))
    if moved is not None:
        for (a, b), size in moved.pairs.items():
            rate = rates.pairs.get((min(a, b), max(a, b)))
            if rate is not None:
                causes.append((size * 8 / rate, f"link {a}-{b}"))
    return max(causes)


def waiting(answers: Answers) -> dict[str, float]:
    """Milliseconds per step that a worker waits, by cause, as a mean over workers; the largest first."""
    total: defaultdict[str, float] = defaultdict(float)
    for t in answers:
        for cause, seconds in t["waited"].items():
            total[cause] += 1e3 * seconds / max(1, t["steps"]) / len(answers)
    return dict(sorted(((c, round(ms, 3)) for c, ms in total.items() if ms > 0.0005), key=lambda item: -item[1]))


def summarize(
    method: Method,
    setup: Setup,
    runs: Sequence[Answers],
    compute: float,
    bucket_mb: float | None,
    cores: float,
    every: int = 1,
) -> dict[str, Any]:
    """One entry of `results` from the repeats of a method; `compute` is its `compute_seconds`."""
    samples = [step_seconds(answers, asynchronous=method.asynchronous) for answers in runs]
    step = statistics.median(samples)
    moved = [traffic(method, setup, answers, every) for answers in runs]
    counted = [m for m in moved if m is not None]
    middle = sorted(counted, key=lambda m: m.busiest)[len(counted) // 2] if counted else None
    limit, by = limit_seconds(setup, compute, middle)
    use = [answers[0]["cpu_use"] for answers in runs if answers[0]["cpu_use"] is not None]
    busy = use != [] and max(use) > SATURATED
    own = [sum(t["own_cpu_seconds"] / max(1e-9, t["end"] - t["begin"]) for t in answers) / cores for answers in runs]
    waits: defaultdict[str, list[float]] = defaultdict(list)
    for answers in runs:
        for cause, ms in waiting(answers).items():
            waits[cause].append(ms)
    by_worker = [
        statistics.median(rates) for rates in zip(*(steps_per_second(answers) for answers in runs), strict=True)
    ]
    return {
        "method": str(method),
        "local_steps": method.local_steps(every),
        "step_ms": 1e3 * step,
        "step_ms_samples": [1e3 * s for s in samples],
        "step_ms_spread": [1e3 * min(samples), 1e3 * max(samples)],
        "multiple_of_limit": step / limit if limit else None,
        "limit_ms": 1e3 * limit,
        "limit_by": by,
        "multiple_of_compute": step / compute if compute else None,
        "bytes_per_step": None if middle is None else round(middle.busiest),
        "bytes_counted_by": None if middle is None else middle.counted,
        "waiting_ms": {c: sum(v) / len(runs) for c, v in waits.items()},
        "cpu_use": max(use) if use else None,
        "own_cpu_use": statistics.median(own),
        "valid": not busy if use else None,
        "invalid_because": f"the cores were {max(use):.0%} busy" if busy else None,
        "bucket_mb": bucket_mb,
        "network": setup.network,
        "steps_per_second_by_worker": by_worker,
        "skipped_mixes_per_step": _skipped(runs),
    }


def _skipped(runs: Sequence[Answers]) -> float | None:
    """The share of steps that were taken without mixing (staleness)."""
    counts = [(t["skipped_mixes"], t["steps"]) for answers in runs for t in answers if t["skipped_mixes"] is not None]
    return sum(s for s, _ in counts) / max(1, sum(n for _, n in counts)) if counts else None


def note_drops(results: list[dict[str, Any]], dropped: int | None) -> None:
    """Mark all results invalid if the lab dropped packets: its links were slower than they should be."""
    for r in results:
        if dropped and "skipped" not in r:
            reasons = (r["invalid_because"], f"the lab's queues dropped {dropped} packets")
            r["valid"], r["invalid_because"] = False, " and ".join(filter(None, reasons))


def add_speedups(results: list[dict[str, Any]]) -> None:
    """Add `speedup_vs_ddp` to every result: the ratio of medians, and the ratio for each repeat."""
    ddp = next((r for r in results if r["method"] == "ddp" and "skipped" not in r), None)
    for r in results:
        if "skipped" in r:
            continue
        samples = zip(ddp["step_ms_samples"], r["step_ms_samples"], strict=True) if ddp else ()
        r["speedup_vs_ddp"] = ddp["step_ms"] / r["step_ms"] if ddp else None
        r["speedup_samples"] = [d / own for d, own in samples]
