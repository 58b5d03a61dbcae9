"""Asynchronous gossip (AD-PSGD, A2CiD2): simulations of step rates and of the consensus distance.

`simulate_async` predicts step rates. Every worker computes gradients at its own pace and never waits for another one.
Independently, `rate` times per mean compute time (a Poisson clock), a worker looks for a neighbor that is idle on the
network and averages with it; if there is none, it tries again at the next tick of its clock. So jitter and slow workers
cost only their own steps, and a slow network reduces the exchanges per step (and with them the consensus), not the step
rate. The speed of a transfer is fixed when it starts, by the number of transfers on the interfaces of its two nodes.

`consensus_study` follows the consensus distance in virtual time. n workers hold numbers x_i. Edges of the topology's
union graph fire by Poisson clocks of intensity λ_ij = rate (1/deg_i + 1/deg_j) / 2 and average their two workers
(AD-PSGD), or do so with the continuous momentum of A2CiD2 (Nabli, Belilovsky, Oyallon, NeurIPS 2023; η and α̃:
gossamer.topology.a2cid2):
    between events  x and x̃ approach each other at rate η
    exchange        m = x_i - x_j;  x_i -= m / 2, x_j += m / 2;  x̃_i -= α̃ m, x̃_j += α̃ m
At whole times every worker takes a gradient step, which adds the same number to x and x̃. The *forcing* says which:
    "none"       nothing: pure averaging
    "noise"      independent standard normal numbers (stochastic gradients of one distribution)
    "constant"   a constant number of each worker (workers with different data)
    "quadratic"  lr (c_i + noise - y_i): descent on f_i(y) = |y - c_i|^2 / 2 with different minima
Many independent runs are simulated at the same time; exchanges of different workers commute, so they are done at once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gossamer.errors import InputError
from gossamer.predict.costs import Costs, Floats, Ints
from gossamer.predict.simulator import TINY, Result
from gossamer.topology import Round, Topology
from gossamer.topology.a2cid2 import laplacian, rates_of, slow_modes
from gossamer.topology.events import Events
from gossamer.trace import Span

AsyncAlgorithm = Literal["ad-psgd", "a2cid2"]
Forcing = Literal["none", "noise", "constant", "quadratic"]
ALGORITHMS: tuple[AsyncAlgorithm, ...] = ("ad-psgd", "a2cid2")
LR = 0.05  # of the quadratic forcing
MOST_RELAXATIONS = 200.0  # relaxation times after which a run that did not converge ends
MOST_RATE = 100  # exchanges per gradient; more gain nothing


def simulate_async(
    topology: Topology, costs: Costs, compute: Floats, *, rate: float = 1.0, seed: int = 0, trace_steps: int = 0
) -> Result:
    """Simulate until the first worker has used up its column of `compute`, [steps, workers].

    A step is n gradients in all, because training ends after a total number of gradients: the step time is n over the
    sum of the workers' rates.
    """
    if not 0 <= rate <= MOST_RATE:
        raise InputError(f"the exchange rate must not be negative or above {MOST_RATE}, got {rate}; pass e.g. rate=1")
    n = topology.n
    steps = len(compute)
    ends = np.cumsum(compute, axis=0)
    horizon = float(ends[-1].min())  # all workers are computing until then
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
    """Count the pairwise exchanges that end before the horizon, and those of them across nodes.

    Exchanges that start before `until` are added to the spans.
    """
    if rate == 0 or topology.n == 1:
        return 0, 0
    node = topology.layout.node
    idle = [True] * topology.n
    load = [0] * topology.layout.nodes
    # an exchange counts for both of its workers, so each worker starts half of `rate`
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
    """Return the neighbors in the union graph, and for each edge its seconds on shared links and its other seconds."""
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


@dataclass(frozen=True)
class ConsensusCurve:
    """The consensus distance of one algorithm over time, as the root mean square over workers and runs.

    `time` is in mean gradient times, `communications` counts the exchanges of all workers in one run; `loss` is the
    mean of |x_i - mean c|^2 / 2 for the quadratic forcing.
    """

    algorithm: AsyncAlgorithm
    time: Floats
    communications: Floats
    distance: Floats
    loss: Floats | None

    def communications_to(self, level: float) -> float:
        """Return the communications until the distance first falls to `level`, interpolated log-linearly."""
        below = np.flatnonzero(self.distance <= level)
        if not len(below):
            return math.nan
        k = int(below[0])
        if k == 0:
            return float(self.communications[0])
        a, b = np.log(self.distance[k - 1 : k + 1])
        share = (a - math.log(level)) / (a - b)
        return float(self.communications[k - 1] + share * (self.communications[k] - self.communications[k - 1]))

    def stationary(self) -> float:
        """Return the root mean square of the distance over the second half."""
        half = self.distance[len(self.distance) // 2 :]
        return float(np.sqrt(np.mean(half**2)))


class ConsensusRuns:
    """The state of independent runs, advanced by one time unit at a time."""

    def __init__(self, topology: Topology, algorithm: AsyncAlgorithm, x: Floats, rate: float, seed: int):
        self.n, self.runs = topology.n, len(x) // topology.n
        self.x, self.x_tilde = x, (x.copy() if algorithm == "a2cid2" else x)
        self.accelerated = algorithm == "a2cid2"
        self.events = Events(topology, rate)
        constants = rates_of(topology)
        if constants.eta is None or constants.alpha_tilde is None:
            raise InputError(
                f"topology {topology.name!r} of {topology.n} workers has no exchanges to study; use n >= 2"
            )
        self.eta, self.alpha_tilde = rate * constants.eta, constants.alpha_tilde
        self.random = np.random.default_rng([seed, 0xC0115])
        self.now = 0.0
        self.mixed = np.zeros(len(x))  # time until which x and x̃ of each worker have been mixed
        self.communications = 0.0  # per run
        self._cumulative = np.cumsum(self.events.intensity)

    def exchange_until(self, now: float) -> None:
        """Do all exchanges until `now`, those of each worker in order."""
        counts = self.random.poisson(self._cumulative[-1] * (now - self.now), self.runs)
        run = np.repeat(np.arange(self.runs), counts)
        at = np.sort(run + self.random.random(len(run))) - run
        edge = np.searchsorted(self._cumulative, self.random.random(len(run)) * self._cumulative[-1], side="right")
        ends = self.events.edges[edge] + (run * self.n)[:, None]
        i, j, times = ends[:, 0], ends[:, 1], self.now + at * (now - self.now)
        while len(i):
            number = np.arange(len(i))
            earliest = np.full(len(self.x), len(i))  # the first event of each worker that is not done
            np.minimum.at(earliest, i, number)
            np.minimum.at(earliest, j, number)
            ready = (earliest[i] == number) & (earliest[j] == number)
            self._average(i[ready], j[ready], times[ready])
            i, j, times = i[~ready], j[~ready], times[~ready]
        self.communications += len(run) / self.runs
        self.now = now

    def _average(self, i: Ints, j: Ints, times: Floats) -> None:
        if self.accelerated:
            self._mix(i, times)
            self._mix(j, times)
        m = self.x[i] - self.x[j]
        self.x[i] -= 0.5 * m
        self.x[j] += 0.5 * m
        if self.accelerated:
            self.x_tilde[i] -= self.alpha_tilde * m
            self.x_tilde[j] += self.alpha_tilde * m

    def _mix(self, workers: Ints, now: Floats | float) -> None:
        share = -np.expm1(-2 * self.eta * (now - self.mixed[workers])) / 2
        d = share * (self.x_tilde[workers] - self.x[workers])
        self.x[workers] += d
        self.x_tilde[workers] -= d
        self.mixed[workers] = now

    def step(self, displacement: Floats) -> None:
        if self.accelerated:
            self._mix(np.arange(len(self.x)), self.now)
            self.x_tilde += displacement
        self.x += displacement

    def distance(self) -> float:
        x = self.x.reshape(self.runs, self.n)
        return float(np.sqrt(np.mean((x - x.mean(axis=1, keepdims=True)) ** 2)))


def consensus_study(
    topology: Topology,
    algorithm: AsyncAlgorithm,
    *,
    forcing: Forcing = "none",
    units: float | None = None,
    until: float | None = None,
    start: Literal["white", "slow"] = "white",
    rate: float = 1.0,
    runs: int = 16,
    seed: int = 0,
) -> ConsensusCurve:
    """Simulate one algorithm over `units` of time, or until the distance is `until` times the first one.

    Without forcing, runs start from independent normal numbers (`start="white"`) or from the slowest mode of the graph
    (`start="slow"`), which the rates of the theory describe; forced runs start at consensus.
    """
    n = topology.n
    random = np.random.default_rng([seed, 0x57A7])
    center = random.standard_normal((runs, n))
    center -= center.mean(axis=1, keepdims=True)
    if forcing != "none":
        x = np.zeros(runs * n)
    elif start == "slow":
        _, modes = slow_modes(laplacian(n, topology.union_edges()))
        x = np.tile(modes[:, 0] * math.sqrt(n), runs)
    else:
        x = random.standard_normal(runs * n)
    state = ConsensusRuns(topology, algorithm, x, rate, seed)
    relaxation = (rates_of(topology).chi1 or 1.0) / rate
    horizon = units if units is not None else MOST_RELAXATIONS * max(1.0, relaxation)
    if forcing != "none":
        horizon = math.ceil(horizon - 1e-9)  # gradient steps are at whole times
    # short units of time where everything happens within one
    tick = 1.0 if forcing != "none" else min(1.0, 0.25 * relaxation)
    rows = [(0.0, 0.0, state.distance(), 0.5 * float(np.mean((state.x.reshape(runs, n)) ** 2)))]
    goal = 0.0 if until is None else until * rows[0][2]
    y = state.x.copy()
    while state.now < horizon - 1e-9 and (rows[-1][2] > goal or len(rows) == 1):
        state.exchange_until(min(state.now + tick, horizon))
        if forcing == "noise":
            state.step(random.standard_normal(runs * n))
        elif forcing == "constant":
            state.step(center.ravel())
        elif forcing == "quadratic":
            state.step(LR * (center.ravel() + random.standard_normal(runs * n) - y))
            y = state.x.copy()
        else:
            state.step(np.zeros(1))
        rows.append((state.now, state.communications, state.distance(), 0.5 * float(np.mean(state.x**2))))
    time, communications, distance, loss = np.array(rows).T
    return ConsensusCurve(algorithm, time, communications, distance, loss if forcing == "quadratic" else None)


@dataclass(frozen=True)
class ConsensusScaling:
    """Communications of all workers until the slowest mode has shrunk to `epsilon`, for several numbers of workers.

    `exponent` is that of a power law, by least squares in logarithms.
    """

    algorithm: AsyncAlgorithm
    epsilon: float
    workers: tuple[int, ...]
    communications: tuple[float, ...]
    exponent: float


def consensus_scaling(
    topologies: Sequence[Topology], algorithm: AsyncAlgorithm, *, epsilon: float, runs: int, seed: int
) -> ConsensusScaling:
    """Fit how the communications until `epsilon` grow with the number of workers."""
    if len(topologies) < 2 or len({t.n for t in topologies}) < 2:
        raise InputError("an exponent needs at least two numbers of workers; pass for example --scaling 8,16,32,64")
    needed = []
    for topology in topologies:
        curve = consensus_study(topology, algorithm, until=epsilon, start="slow", runs=runs, seed=seed)
        needed.append(curve.communications_to(epsilon * curve.distance[0]))
    workers = tuple(t.n for t in topologies)
    slope = float(np.polyfit(np.log(workers), np.log(needed), 1)[0])
    return ConsensusScaling(algorithm, epsilon, workers, tuple(needed), slope)
