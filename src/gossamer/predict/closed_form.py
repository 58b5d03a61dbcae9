"""Step times by formula, in units of the mean compute time.

γ is the time of an all-reduce, ω the time of a gossip exchange across nodes divided by γ (so that an exchange takes
C = ωγ), and σ the standard deviation of a worker's compute time. The runtime model of "From Promise to Practice" (ICLR
2025) has these three numbers; the formulas are our own derivation:

    T_AR = E[max of n X] + max(γ/B, γ - φ(1 - 1/B))         B buckets, backward share φ
    T_D  = max(1, C) (complete),  (1 + max(1, C))/2 (AER, four nodes or more), exactly, at σ = 0

T_AR is the step time with all-reduce, T_D that of decentralized training. The formulas assume that compute times are
independent and identically distributed, that an exchange inside a node takes no time, that the links of different
groups do not disturb each other, that gossip has one bucket, and that all-reduces run one after another. For σ > 0
there is no formula for gossip; use the simulator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from scipy import integrate, stats

from gossamer.errors import InputError
from gossamer.topology import Topology

BACKWARD_SHARE = 2 / 3


def expected_max(n: int, sigma: float, kind: str = "gaussian") -> float:
    """Return E[max of n independent compute times] with mean 1 and standard deviation σ.

    For "lognormal", σ is that of the logarithm, as in `gossamer.predict.compute`.
    """
    if n < 1 or sigma < 0:
        raise InputError(f"the expected maximum needs n >= 1 and sigma >= 0, got n={n}, sigma={sigma}")
    if n == 1 or sigma == 0:
        return 1.0
    made: Any
    if kind == "gaussian":
        made = stats.norm(1, sigma)
    elif kind == "lognormal":
        made = stats.lognorm(sigma, scale=math.exp(-(sigma**2) / 2))
    elif kind == "gamma":
        made = stats.gamma(sigma**-2, scale=sigma**2)
    else:
        raise InputError(f"no distribution {kind!r}; use gaussian, lognormal or gamma")
    low, high = made.ppf(1e-14), made.isf(1e-14)
    # E[max] = low + integral of P(max > x) beyond low
    value, _ = integrate.quad(
        lambda x: -math.expm1(n * made.logcdf(x)), low, high, limit=500, points=[float(made.mean())]
    )
    return float(low + value)


def allreduce_step(gamma: float, largest: float, *, buckets: int = 1, backward_share: float = BACKWARD_SHARE) -> float:
    """Return T_AR, given E[max X] as `largest`."""
    return largest + max(gamma / buckets, gamma - backward_share * (1 - 1 / buckets))


def gossip_step(topology: Topology, cost: float) -> float:
    """Return T_D at σ = 0, where an exchange costs `cost` across nodes and 0 inside a node.

    With equal compute times the max-plus recursion repeats after a few periods; this runs it until it does.
    """
    n, node = topology.n, np.array(topology.layout.node)
    one = topology.layout.nodes == 1

    def period(u: np.ndarray) -> np.ndarray:
        for r in topology.rounds:
            following = u + 1.0
            for g in r.groups:
                if len(g) > 1:
                    crosses = one or len(set(node[list(g)])) > 1
                    members = list(g)
                    following[members] = np.maximum(following[members], u[members].max() + cost * crosses)
            u = following
        return u

    u = np.zeros(n)
    for _ in range(4 * n + 4):
        before, u = u, period(u)
        if np.ptp(u - before) < 1e-12:
            break
    return float((u - before).mean() / topology.period)


@dataclass(frozen=True)
class Contour:
    """The saving (T_AR - T_D) / T_AR over a grid of γ and ω, for one σ."""

    gamma: tuple[float, ...]
    omega: tuple[float, ...]
    sigma: float
    saving: tuple[tuple[float, ...], ...]  # [omega][gamma]


def contour(
    topology: Topology, gammas: np.ndarray, omegas: np.ndarray, *, sigma: float = 0.0, steps: int = 400, seed: int = 0
) -> Contour:
    """Compute the saving over a grid: by formula for σ = 0, otherwise by simulating `steps` steps."""
    from gossamer.predict.compute import Gaussian
    from gossamer.predict.costs import AbstractCosts
    from gossamer.predict.simulator import PAPER, simulate
    from gossamer.topology.schedule import Schedule

    draws = Gaussian(sigma).sample(topology.n, steps, seed)
    largest = expected_max(topology.n, sigma)
    made: dict[float, float] = {}
    rows = np.zeros((len(omegas), len(gammas)))
    for (a, omega), (b, gamma) in product(enumerate(omegas), enumerate(gammas)):
        cost = round(float(omega * gamma), 9)
        if cost not in made:
            if sigma == 0:
                made[cost] = gossip_step(topology, cost)
            else:
                costs = AbstractCosts(topology.layout, cost, 1.0)
                made[cost] = simulate(Schedule(topology), costs, draws, PAPER, rounds=steps).step_time
        rows[a, b] = 1 - made[cost] / allreduce_step(float(gamma), largest)
    saving = tuple(tuple(map(float, row)) for row in rows)
    return Contour(tuple(map(float, gammas)), tuple(map(float, omegas)), sigma, saving)
