"""A virtual-time study of asynchronous gossip: consensus distance against time and communications.

n workers hold numbers x_i. Edges of the topology's union graph fire by Poisson clocks of intensity
lambda_ij = rate (1/deg_i + 1/deg_j) / 2 and average their two workers (AD-PSGD), or do so with the continuous
momentum of A2CiD2 (Nabli, Belilovsky, Oyallon, NeurIPS 2023):
    between events  x and x~ approach each other at rate eta
    exchange        m = x_i - x_j;  x_i -= m / 2, x_j += m / 2;  x~_i -= alpha~ m, x~_j += alpha~ m
At whole times every worker takes a gradient step, which adds the same to x and x~:
    "none"       nothing: pure averaging
    "noise"      i.i.d. standard normal numbers (stochastic gradients of one distribution)
    "constant"   a number of its own, always the same (workers with different data)
    "quadratic"  lr (c_i + noise - y_i): descent on f_i(y) = |y - c_i|^2 / 2 with different minima
Many independent runs go on side by side; exchanges that touch different workers commute, so they are done at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import InputError
from gossamer.topology.a2cid2 import laplacian, rates_of, slow_modes
from gossamer.topology.core import Topology
from gossamer.topology.events import Events

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Algorithm = Literal["ad-psgd", "a2cid2"]
Forcing = Literal["none", "noise", "constant", "quadratic"]
ALGORITHMS: tuple[Algorithm, ...] = ("ad-psgd", "a2cid2")
LR = 0.05  # of the quadratic forcing
PATIENCE = 200.0  # relaxation times after which a run that should have converged is given up


@dataclass(frozen=True)
class Curve:
    """One method's course: at `time` (mean gradient times) and after `communications` (exchanges of all workers, a
    run) the consensus distance, RMS over workers and runs; `loss` is the mean of |x_i - mean c|^2 / 2, if any."""

    algorithm: Algorithm
    time: Floats
    communications: Floats
    distance: Floats
    loss: Floats | None

    def communications_to(self, level: float) -> float:
        """Communications until the distance first falls to `level`, between two records log-linearly."""
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
        """RMS of the distance over the second half."""
        half = self.distance[len(self.distance) // 2 :]
        return float(np.sqrt(np.mean(half**2)))


class Runs:
    """`runs` independent copies of the graph, advanced by one time unit at a time."""

    def __init__(self, topology: Topology, algorithm: Algorithm, x: Floats, rate: float, seed: int):
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
        self.mixed = np.zeros(len(x))  # until when Mix has been applied to each worker
        self.communications = 0.0  # a run
        self._cumulative = np.cumsum(self.events.intensity)

    def exchange_until(self, now: float) -> None:
        """All exchanges of the next unit of time, each worker's in their order."""
        counts = self.random.poisson(self._cumulative[-1] * (now - self.now), self.runs)
        run = np.repeat(np.arange(self.runs), counts)
        at = np.sort(run + self.random.random(len(run))) - run
        edge = np.searchsorted(self._cumulative, self.random.random(len(run)) * self._cumulative[-1], side="right")
        ends = self.events.edges[edge] + (run * self.n)[:, None]
        i, j, times = ends[:, 0], ends[:, 1], self.now + at * (now - self.now)
        while len(i):
            number = np.arange(len(i))
            earliest = np.full(len(self.x), len(i))  # each worker's first event that is left
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


def study(
    topology: Topology,
    algorithm: Algorithm,
    *,
    forcing: Forcing = "none",
    units: float | None = None,
    until: float | None = None,
    start: Literal["white", "slow"] = "white",
    rate: float = 1.0,
    runs: int = 16,
    seed: int = 0,
) -> Curve:
    """One method's course over `units` of time, or until the distance is `until` of the first one.

    `start`: i.i.d. normal numbers ("white"), or the graph's slowest mode ("slow"), which the theory's rates are about;
    forced runs start at consensus.
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
    state = Runs(topology, algorithm, x, rate, seed)
    relaxation = (rates_of(topology).chi1 or 1.0) / rate
    horizon = units if units is not None else PATIENCE * max(1.0, relaxation)
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
    return Curve(algorithm, time, communications, distance, loss if forcing == "quadratic" else None)


@dataclass(frozen=True)
class Scaling:
    """Communications of all workers until the slowest mode has shrunk to `epsilon`, over n, and the power law's
    exponent by least squares in logarithms."""

    algorithm: Algorithm
    epsilon: float
    workers: tuple[int, ...]
    communications: tuple[float, ...]
    exponent: float


def scaling(topologies: Sequence[Topology], algorithm: Algorithm, *, epsilon: float, runs: int, seed: int) -> Scaling:
    """The exponent of communications-to-epsilon over the number of workers."""
    if len(topologies) < 2 or len({t.n for t in topologies}) < 2:
        raise InputError("an exponent needs at least two numbers of workers; pass for example --scaling 8,16,32,64")
    needed = []
    for topology in topologies:
        curve = study(topology, algorithm, until=epsilon, start="slow", runs=runs, seed=seed)
        needed.append(curve.communications_to(epsilon * curve.distance[0]))
    workers = tuple(t.n for t in topologies)
    slope = float(np.polyfit(np.log(workers), np.log(needed), 1)[0])
    return Scaling(algorithm, epsilon, workers, tuple(needed), slope)
