"""Asynchronous gossip (AD-PSGD, A2CiD2) as an event simulation of step rates.

Every worker computes gradients at its own pace and never waits for another. Beside that, at `rate` times a mean
compute time (a Poisson clock), a worker asks for a neighbor that is idle on the network and averages with it; who
finds none tries again when its clock next ticks. So jitter and slow workers cost nothing but their own steps, and a
slow network lowers the exchanges a step (and with them the consensus), not the step rate.

A transfer's speed is fixed when it starts, by how many transfers its two nodes' interfaces then carry.
"""

from __future__ import annotations

import heapq

import numpy as np

from gossamer.errors import InputError
from gossamer.predict.costs import Costs, Floats
from gossamer.predict.recorder import TINY
from gossamer.predict.simulator import Result
from gossamer.topology import Round, Topology
from gossamer.trace import Span

MOST_RATE = 100  # exchanges a gradient; beyond it nothing is left to gain


def simulate_async(
    topology: Topology, costs: Costs, compute: Floats, *, rate: float = 1.0, seed: int = 0, trace_steps: int = 0
) -> Result:
    """Run until the slowest worker has used up its column of `compute`, [steps, workers].

    A step is n gradients in all, since training stops on the total number of gradients: the step time is n over the
    workers' summed rates.
    """
    if not 0 <= rate <= MOST_RATE:
        raise InputError(f"the exchange rate must not be negative or above {MOST_RATE}, got {rate}; pass e.g. rate=1")
    n = topology.n
    steps = len(compute)
    ends = np.cumsum(compute, axis=0)
    horizon = float(ends[-1].min())  # all workers are at work until then
    counts = (ends <= horizon + TINY).sum(axis=0)
    neighbors, seconds = _edges(topology, costs)
    rng = np.random.default_rng(seed)
    spans: list[Span] = []
    for i in range(n):
        for k in range(min(trace_steps, steps)):
            spans.append(Span("compute", i, float(ends[k, i] - compute[k, i]), float(ends[k, i]), {"step": k}))
    until = max((s.end for s in spans), default=0.0)
    done, crossed = _exchanges(topology, neighbors, seconds, float(compute.mean()), rate, horizon, rng, spans, until)
    node = topology.layout.node
    away = sum(sum(node[j] != node[i] for j in peers) / len(peers) for i, peers in enumerate(neighbors) if peers)
    wanted = away / n * rate / 2 * float(counts.sum())
    spans.sort(key=lambda s: (s.start, s.worker))
    rates = counts / horizon
    return Result(
        step_time=float(n / rates.sum()),
        compute_time=float(n / rates.sum()),
        durations=compute.ravel(),
        spans=tuple(spans),
        rates=rates,
        exchange_rate=2 * done / float(counts.sum()),
        crossing=crossed / wanted if wanted else 1.0,
    )


def _exchanges(
    topology: Topology,
    neighbors: list[list[int]],
    seconds: dict[tuple[int, int], tuple[float, float]],
    unit: float,
    rate: float,
    horizon: float,
    rng: np.random.Generator,
    spans: list[Span],
    until: float,
) -> tuple[int, int]:
    """How many pairwise exchanges end before the horizon, and how many of them across nodes; those before `until` are
    added to the spans."""
    if rate == 0 or topology.n == 1:
        return 0, 0
    node = topology.layout.node
    idle = [True] * topology.n
    load = [0] * topology.layout.nodes
    # both ends of an exchange count, so each worker starts half of `rate`
    events = [(float(t), 0, i, -1) for i, t in enumerate(rng.exponential(2 * unit / rate, topology.n))]
    heapq.heapify(events)
    done = crossed = 0
    while events and events[0][0] < horizon:
        now, kind, i, j = heapq.heappop(events)
        if kind == 1:
            idle[i] = idle[j] = True
            if node[i] != node[j]:
                load[node[i]] -= 1
                load[node[j]] -= 1
                crossed += 1
            done += 1
            continue
        heapq.heappush(events, (now + float(rng.exponential(2 * unit / rate)), 0, i, -1))
        free = [w for w in neighbors[i] if idle[w]]
        if not idle[i] or not free:
            continue
        j = free[int(rng.integers(len(free)))]
        idle[i] = idle[j] = False
        shared, fixed = seconds[min(i, j), max(i, j)]
        crowd = 1
        if node[i] != node[j]:
            load[node[i]] += 1
            load[node[j]] += 1
            crowd = max(load[node[i]], load[node[j]])
        end = now + shared * crowd + fixed
        heapq.heappush(events, (end, 1, i, j))
        if now < until:
            for a, b in ((i, j), (j, i)):
                spans.append(Span("exchange", a, now, end, {"round": done, "bucket": 0, "peer": b}))
    return done, crossed


def _edges(topology: Topology, costs: Costs) -> tuple[list[list[int]], dict[tuple[int, int], tuple[float, float]]]:
    """The union graph of the topology's rounds; for each edge the seconds on shared links, and the other seconds."""
    edges = {(int(i), int(j)) for i, j in topology.union_edges()}
    neighbors: list[list[int]] = [[] for _ in range(topology.n)]
    seconds = {}
    known: dict[tuple[int, int], tuple[float, float]] = {}
    node = topology.layout.node
    for i, j in sorted(edges):
        neighbors[i].append(j)
        neighbors[j].append(i)
        ends = (node[i], node[j])
        if ends not in known:  # pairs of the same nodes cost the same
            e = costs.exchange(Round.uniform(topology.n, [(i, j)]), 1.0)
            known[ends] = float(e.jobs.least.max(initial=0.0)), float(e.local[i] + e.latency[i])
        seconds[i, j] = known[ends]
    return neighbors, seconds
