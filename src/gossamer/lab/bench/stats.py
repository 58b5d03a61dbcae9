"""From what the workers tell to what a reader wants: step time, speed-up, multiple of the limit, waiting."""

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

Answers = Sequence[Mapping[str, Any]]  # by rank, as `bench_worker.work` returns it


def step_seconds(told: Answers, *, asynchronous: bool = False) -> float:
    """Seconds a step: from the moment the last worker had ended its warm-up until the last one was done.

    Where workers take different numbers of steps in a given time, over the mean number. Asynchronous workers have
    windows of their own: n / sum(steps_i / time_i), one over the mean of their rates.
    """
    if asynchronous:
        return len(told) / max(1e-9, sum(steps_per_second(told)))
    begin, end = max(t["begin"] for t in told), max(t["end"] for t in told)
    return float((end - begin) / max(1.0, statistics.fmean(t["steps"] for t in told)))


def steps_per_second(told: Answers) -> list[float]:
    """Each worker's own rate."""
    return [t["steps"] / max(1e-9, t["end"] - t["begin"]) for t in told]


def compute_seconds(method: Method, table: Table) -> float:
    """What compute alone allows a step: the mean; of asynchronous workers n / sum(1 / c_i), c_i each one's own mean."""
    if not method.asynchronous:
        return float(table.mean())
    own = table.mean(axis=0)
    return float(len(own) / np.sum(1 / own)) if own.all() else 0.0


def ideal(table: Table) -> dict[str, float | None]:
    """What jitter alone allows: DDP the slowest worker's compute of every step, gossip the mean, asynchronous gossip
    the harmonic mean over workers."""
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
    """Bytes a step. `busiest` is the most that any node's interface carries in one direction; `counted` says by whom:
    the kernel (headers included), Gossamer's counters (payload), or a formula (payload)."""

    busiest: float
    mean: float
    pairs: dict[tuple[int, int], float]
    counted: str


def traffic(method: Method, setup: Setup, told: Answers) -> NodeTraffic | None:
    """What crossed between nodes; None where nothing counts it (a peer on loopback).

    A step is a worker's own, or, where each has its own pace, the mean one: `step_seconds` of its window.
    """
    nodes = [node for node, count in enumerate(setup.per_node) for _ in range(count)]
    if len(setup.per_node) == 1:
        return NodeTraffic(0.0, 0.0, {}, "one node")
    steps = [max(1.0, t["steps"]) for t in told]
    if method.asynchronous:
        step = step_seconds(told, asynchronous=True)
        steps = [max(1.0, (t["end"] - t["begin"]) / step) for t in told]
    pairs: defaultdict[tuple[int, int], float] = defaultdict(float)  # (from, to)
    sent = dict.fromkeys(range(len(setup.per_node)), 0.0)
    for rank, t in enumerate(told):
        for peer, size in t["sent"].items():
            if nodes[peer] != nodes[rank]:
                pairs[nodes[rank], nodes[peer]] += size / steps[rank]
                sent[nodes[rank]] += size / steps[rank]
    firsts = [nodes.index(node) for node in range(len(setup.per_node))]
    if all(told[r]["interface"] is not None for r in firsts):
        ways = [[told[r]["interface"][way] / steps[r] for r in firsts] for way in ("sent", "received")]
        return NodeTraffic(max(max(w) for w in ways), statistics.fmean(ways[0]), dict(pairs), "kernel")
    if pairs:
        received: defaultdict[int, float] = defaultdict(float)
        for (_, node), size in pairs.items():
            received[node] += size
        return NodeTraffic(
            max(*sent.values(), *received.values()), statistics.fmean(sent.values()), dict(pairs), "engine"
        )
    return all_reduced(setup, method) if method.algorithm == "ddp" else None


def all_reduced(setup: Setup, method: Method) -> NodeTraffic:
    """A ring all-reduce of the whole model: 2 (n-1)/n S bytes leave every node."""
    size = 2 * (setup.n - 1) / setup.n * setup.model_bytes * WIRES[method.wire] / 4
    return NodeTraffic(size, size, {}, "formula")


def limit_seconds(setup: Setup, compute: float, moved: NodeTraffic | None) -> tuple[float, str]:
    """max(compute, bytes / bandwidth) over the nodes' interfaces and the pairs with a rate of their own."""
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


def waiting(told: Answers) -> dict[str, float]:
    """Milliseconds a step that a worker stands still, by cause, the mean over workers; dearest first."""
    total: defaultdict[str, float] = defaultdict(float)
    for t in told:
        for cause, seconds in t["waited"].items():
            total[cause] += 1e3 * seconds / max(1, t["steps"]) / len(told)
    return dict(sorted(((c, round(ms, 3)) for c, ms in total.items() if ms > 0.0005), key=lambda item: -item[1]))


def summarize(
    method: Method, setup: Setup, runs: Sequence[Answers], compute: float, bucket_mb: float | None, cores: float
) -> dict[str, Any]:
    """One entry of `results` from a method's repeats; `compute` is its `compute_seconds`."""
    samples = [step_seconds(told, asynchronous=method.asynchronous) for told in runs]
    step = statistics.median(samples)
    moved = [traffic(method, setup, told) for told in runs]
    counted = [m for m in moved if m is not None]
    middle = sorted(counted, key=lambda m: m.busiest)[len(counted) // 2] if counted else None
    limit, by = limit_seconds(setup, compute, middle)
    use = [told[0]["cpu_use"] for told in runs if told[0]["cpu_use"] is not None]
    busy = use != [] and max(use) > SATURATED
    own = [sum(t["own_cpu_seconds"] / max(1e-9, t["end"] - t["begin"]) for t in told) / cores for told in runs]
    waits: defaultdict[str, list[float]] = defaultdict(list)
    for told in runs:
        for cause, ms in waiting(told).items():
            waits[cause].append(ms)
    by_worker = [statistics.median(rates) for rates in zip(*(steps_per_second(told) for told in runs), strict=True)]
    return {
        "method": str(method),
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
    """How many of the steps went on without mixing (staleness)."""
    counts = [(t["skipped_mixes"], t["steps"]) for told in runs for t in told if t["skipped_mixes"] is not None]
    return sum(s for s, _ in counts) / max(1, sum(n for _, n in counts)) if counts else None


def note_drops(results: list[dict[str, Any]], dropped: int | None) -> None:
    """Packets that the lab's queues dropped make every result invalid: links were slower than they should be."""
    for r in results:
        if dropped and "skipped" not in r:
            reasons = (r["invalid_because"], f"the lab's queues dropped {dropped} packets")
            r["valid"], r["invalid_because"] = False, " and ".join(filter(None, reasons))


def add_speedups(results: list[dict[str, Any]]) -> None:
    """`speedup_vs_ddp` of every result: medians over medians, and repeat by repeat (they were run in turn)."""
    ddp = next((r for r in results if r["method"] == "ddp" and "skipped" not in r), None)
    for r in results:
        if "skipped" in r:
            continue
        samples = zip(ddp["step_ms_samples"], r["step_ms_samples"], strict=True) if ddp else ()
        r["speedup_vs_ddp"] = ddp["step_ms"] / r["step_ms"] if ddp else None
        r["speedup_samples"] = [d / own for d, own in samples]
