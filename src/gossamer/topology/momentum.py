"""Stability of an outer step with momentum over the rounds of a schedule.

Let φ be the workers' outer points, v their velocities and W(k) the matrix of round k. Without any drift by local steps
one outer step is

    v ← β v − p Λ φ,    φ ← φ − r Λ φ + v,    Λ = I − W(k)

so a round multiplies the stacked vector (φ, v) by a companion matrix. On the mean of the workers Λ is 0 and nothing
moves. On the complement of the mean the product over one period decides: with spectral radius ρ after P rounds the
workers' distance grows by ρ^(1/P) per round, which is the *growth*. Above 1 the workers drift apart although nobody
trains. The matrices of different rounds do not commute, so the growth can exceed 1 where every round by itself would
converge: heavy-ball momentum of 0.9 with lr 0.7 is stable in every single round of pairs, and diverges over the rounds
of the one-peer exponential graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gossamer.topology.core import Round

DENSE = 128  # workers up to which the matrix of a whole period is formed
DENSE_WORK = 1 << 27  # rounds x n^2 up to which it is formed
COLUMNS = 4  # of the walk of larger schedules
WALK = 1 << 27  # workers x rounds x columns of that walk
LONGEST_WALK = 2000  # rounds
TOLERANCE = 1e-6  # growth above 1 that is rounding
WALK_TOLERANCE = 2e-3  # growth above 1 that is the error of a walk


@dataclass(frozen=True)
class Momentum:
    """The coefficients of an outer step at zero drift: `decay` is β, `velocity` is p, `direct` is r."""

    decay: float
    velocity: float
    direct: float


@dataclass(frozen=True)
class Growth:
    """How the distance between the workers changes per round; `estimated`: by a random walk instead of eigenvalues."""

    per_round: float
    estimated: bool

    @property
    def stable(self) -> bool:
        return self.per_round <= 1 + (WALK_TOLERANCE if self.estimated else TOLERANCE)


@lru_cache(maxsize=1024)
def growth(rounds: tuple[Round, ...], n: int, momentum: Momentum) -> Growth:
    """Return the growth of the consensus distance per round, over the period `rounds`, without drift."""
    if n == 1:
        return Growth(0.0, False)
    if n <= DENSE and len(rounds) * n**2 <= DENSE_WORK:
        return Growth(_dense(rounds, n, momentum), False)
    return Growth(_walked(rounds, n, momentum), True)


def stable_momentum(choices: Sequence[tuple[float, Momentum]], rounds: tuple[Round, ...], n: int) -> float | None:
    """Return the largest stable momentum of `choices`, which ascend, by bisection; None if the first is unstable."""
    low, high = -1, len(choices)  # choices[low] is stable, choices[high] is not
    while high - low > 1:
        middle = (low + high) // 2
        if growth(rounds, n, choices[middle][1]).stable:
            low = middle
        else:
            high = middle
    return choices[low][0] if low >= 0 else None


def _dense(rounds: tuple[Round, ...], n: int, momentum: Momentum) -> float:
    """The growth from the eigenvalues of the product over one period, on an orthogonal basis of the complement."""
    basis = np.linalg.qr(np.column_stack([np.ones(n), np.eye(n)[:, 1:]]))[0][:, 1:]
    m = n - 1
    product, log = np.eye(2 * m), 0.0
    for each in rounds:
        phi, velocity = product[:m], product[m:]
        pulled = phi - basis.T @ (each.sparse(n) @ (basis @ phi))
        velocity = momentum.decay * velocity - momentum.velocity * pulled
        product = np.concatenate([phi - momentum.direct * pulled + velocity, velocity])
        scale = float(np.abs(product).max())
        if scale == 0.0:
            return 0.0
        product /= scale
        log += math.log(scale)
    radius = float(np.abs(np.linalg.eigvals(product)).max())
    # the eigenvalues of a nilpotent product are rounding errors
    return 0.0 if radius < 1e-12 else math.exp((math.log(radius) + log) / len(rounds))


def _walked(rounds: tuple[Round, ...], n: int, momentum: Momentum) -> float:
    """The growth of random columns over the second half of a long walk."""
    length = max(16, min(LONGEST_WALK, WALK // (n * COLUMNS)))
    phi = np.random.default_rng(0).standard_normal((n, COLUMNS))
    phi -= phi.mean(axis=0)
    velocity = np.zeros_like(phi)
    log = 0.0
    for k in range(length):
        pulled = phi - rounds[k % len(rounds)].sparse(n) @ phi
        velocity = momentum.decay * velocity - momentum.velocity * pulled
        phi = phi - momentum.direct * pulled + velocity
        phi -= phi.mean(axis=0)  # rounding errors on the mean do not decay
        velocity -= velocity.mean(axis=0)
        scale = math.hypot(float(np.linalg.norm(phi)), float(np.linalg.norm(velocity)))
        if scale == 0.0:
            return 0.0
        phi, velocity = phi / scale, velocity / scale
        log += math.log(scale) if k >= length // 2 else 0.0
    return math.exp(log / (length - length // 2))
