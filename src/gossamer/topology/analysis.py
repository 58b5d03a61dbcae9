"""What a topology costs and how well it mixes, in one object: `analyze(topology)`.

The *consensus distance* is the root mean square distance of the workers' values to their mean. The *contraction* is
the factor by which a round shrinks it: the p-th root of the second largest singular value of W(p-1) ... W(0), where p
is the period.

Both are read off the deviation from the mean, X(k+1) = W(k) X(k) - mean. The mean is removed and the scale kept apart
in every round, so that a product of any length keeps its relative precision; an exact average then shows as a fall to
rounding error within one round, whatever came before.

Note [Why there are two ways to measure]: up to 512 workers X starts as the identity, which gives the exact expectation
over white initial values. That needs the singular values of a dense matrix and, to find the round at which a slow ring
reaches 1e-3, about 40 products of dense matrices: 55 s for a ring of 1024 workers on two busy cores, and the time grows
with the cube of n. So larger topologies use a few Gaussian columns and the slowest modes of the graph: 3 s for a ring
of 4096 workers on the same cores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg as sla

from gossamer.errors import InputError
from gossamer.topology.a2cid2 import Rates, laplacian, rates, slow_modes
from gossamer.topology.core import Layout, Topology
from gossamer.topology.plan import traffic

DENSE = 512  # workers up to which the identity is iterated, above a block of Gaussian columns
DENSE_WORK = 1 << 29  # rounds x n^2 up to which a whole period is multiplied out
COLUMNS = 16
EXACT = 1e-11  # a fall of the deviation by this factor in one round is an exact average
TARGET = math.log(1e-3)
KEPT = 1 << 21  # workers x rounds that are kept in memory; of a longer period only the first rounds are looked at


@dataclass(frozen=True)
class Mixing:
    """How fast a schedule brings the workers to their mean."""

    exact_after: int | None  # rounds until all workers hold the exact mean; None: the mean is only approached
    exact_after_by_offset: tuple[int | None, ...] | None  # None: the period is too long to try every offset
    contraction: float  # per round
    contraction_period: float  # per period
    contraction_estimated: bool
    rounds_to_1e3: int | None  # None: never, the workers do not reach consensus
    rounds_estimated: bool


@dataclass(frozen=True)
class Volume:
    """Bytes that an exchange sends."""

    intra: float  # per worker and round, inside its node: the mean over workers and rounds
    inter: float  # per worker and round, to other nodes: the mean over workers and rounds
    busiest: float  # the most that one node sends to other nodes in one round


@dataclass(frozen=True)
class Analysis:
    """The figures of one topology on one layout, for a model of `model_bytes`."""

    name: str
    layout: Layout
    period: int
    model_bytes: float
    mixing: Mixing
    rates: Rates
    direct: Volume  # every worker exchanges with every other one of its group
    hierarchical: Volume  # reduce inside each node first; see gossamer.topology.plan
    volume_estimated: bool  # the mean over the first rounds of a very long period
    max_degree: int  # the largest number of peers that a worker has over the period

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of `gossamer topology show --json`, without the rounds.

        `bytes_*` are those of the hierarchical exchange.
        """
        mixing, direct, hierarchical = self.mixing, self.direct, self.hierarchical
        offsets = mixing.exact_after_by_offset
        estimated = {
            "contraction": mixing.contraction_estimated,
            "rounds_to_1e-3": mixing.rounds_estimated,
            "bytes": self.volume_estimated,
        }
        return {
            "name": self.name,
            "n": self.layout.n,
            "nodes": self.layout.nodes,
            "per_node": list(self.layout.per_node),
            "period": self.period,
            "exact_after": mixing.exact_after,
            "exact_after_by_offset": None if offsets is None else list(offsets),
            "contraction": mixing.contraction,
            "contraction_period": mixing.contraction_period,
            "rounds_to_1e-3": mixing.rounds_to_1e3,
            "model_bytes": self.model_bytes,
            "bytes_intra": hierarchical.intra,
            "bytes_inter": hierarchical.inter,
            "bytes_busiest_link": hierarchical.busiest,
            "bytes_intra_direct": direct.intra,
            "bytes_inter_direct": direct.inter,
            "bytes_busiest_link_direct": direct.busiest,
            "max_degree": self.max_degree,
            "chi1": self.rates.chi1,
            "chi2": self.rates.chi2,
            "eta": self.rates.eta,
            "alpha_tilde": self.rates.alpha_tilde,
            "estimated": [what for what, is_so in estimated.items() if is_so],
        }


def analyze(topology: Topology, *, model_bytes: float = 100e6) -> Analysis:
    """Compute contraction, exactness, rounds to 1e-3 of the initial consensus distance, bytes, asynchronous rates.

    The figures are exact up to 512 workers. Above, rounds to 1e-3 come from random initial values; the contraction is
    exact for periods of up to 2^21 / n rounds and estimated otherwise. `to_dict()["estimated"]` lists the estimates.
    """
    if not model_bytes > 0:
        raise InputError(f"the model's size must be positive, got {model_bytes} bytes")
    n = topology.n
    edges = topology.union_edges()
    most_rounds = max(64, KEPT // n)
    if n == 1:
        asynchronous, modes, degree = Rates(None, None), edges, 0
    else:
        matrix = laplacian(n, edges)
        values, modes = slow_modes(matrix)
        asynchronous = rates(matrix, float(values[0]))
        degree = int(np.diff(matrix.indptr).max()) - 1
    return Analysis(
        topology.name,
        topology.layout,
        topology.period,
        model_bytes,
        _Mixer(topology, modes).measure(),
        asynchronous,
        _volume(topology, model_bytes, most_rounds, hierarchical=False),
        _volume(topology, model_bytes, most_rounds, hierarchical=True),
        topology.period > most_rounds,
        degree,
    )


def _volume(topology: Topology, model_bytes: float, most_rounds: int, *, hierarchical: bool) -> Volume:
    """Sum the traffic of one period, or of its first `most_rounds` rounds."""
    layout = topology.layout
    rounds = min(topology.period, most_rounds)
    intra = inter = busiest = 0.0
    for k in range(rounds):
        sent = traffic(topology.round(k), layout, hierarchical=hierarchical)
        across = sent.inter_plain + sent.inter_wired
        intra += float((sent.intra_plain + sent.intra_wired).sum())
        inter += float(across.sum())
        busiest = max(busiest, float(np.bincount(layout.node, weights=across).max()))
    per = model_bytes / (rounds * layout.n)
    return Volume(intra * per, inter * per, busiest * model_bytes)


class _Walk:
    """Columns of deviations from the mean, round by round; `logs` are the logs of their norms relative to the start.

    A column that falls to rounding error is exactly averaged: its log becomes -inf.
    """

    def __init__(self, start: np.ndarray) -> None:
        self.x = start - start.mean(axis=0)
        self.start = self.norms = np.linalg.norm(self.x, axis=0)
        self.logs = np.zeros(self.x.shape[1])

    def step(self, matrix: sp.csr_array) -> None:
        self.x = matrix @ self.x
        self.x -= self.x.mean(axis=0)
        norms = np.linalg.norm(self.x, axis=0)
        fallen = norms <= EXACT * self.norms
        norms[fallen] = 0.0
        self.x[:, fallen] = 0.0
        with np.errstate(divide="ignore", invalid="ignore"):
            self.logs = np.where(norms == 0.0, -np.inf, self.logs + np.log(norms / self.norms))
        if norms.min(where=norms > 0.0, initial=1.0) < 1e-100:  # before it underflows
            self.x /= np.where(norms == 0.0, 1.0, norms)
            norms = np.where(norms == 0.0, 0.0, 1.0)
        self.norms = norms

    def log(self, columns: slice = slice(None)) -> float:
        """Return the log of the consensus distance of these columns, relative to the start."""
        logs, weight = self.logs[columns], self.start[columns] ** 2
        top = float(logs.max())
        if top == -math.inf:
            return top
        return top + 0.5 * math.log(float((weight * np.exp(2 * (logs - top))).sum() / weight.sum()))

    def log_sigma(self) -> float:
        """Return the log of the largest singular value of the product so far, for a walk from the identity."""
        top = float(self.logs.max())
        scale = np.exp(self.logs - top) * self.start / np.where(self.norms == 0.0, 1.0, self.norms)
        return top + math.log(float(np.linalg.norm(self.x * scale, 2)))


class _Mixer:
    """Measures the mixing of a topology; keeps the sparse matrices of a period that is not too long.

    `modes` are the slowest modes of the union graph, one per column.
    """

    def __init__(self, topology: Topology, modes: np.ndarray) -> None:
        self.topology, self.n, self.period, self.modes = topology, topology.n, topology.period, modes
        self.short = self.period * self.n <= KEPT

    @cached_property
    def kept(self) -> list[sp.csr_array]:
        return [r.sparse(self.n) for r in self.topology.rounds]

    def matrix(self, k: int) -> sp.csr_array:
        return self.kept[k % self.period] if self.short else self.topology.round(k).sparse(self.n)

    def measure(self) -> Mixing:
        if self.n == 1:
            return Mixing(0, (0,) * self.period, 0.0, 0.0, False, 0, False)
        small = self.n <= DENSE and self.period * self.n**2 <= DENSE_WORK
        return self._dense() if small else self._large()

    def exact_from(self, offset: int, most: int) -> int | None:
        """Count the rounds from `offset` on until Gaussian columns are exactly averaged, at most `most`."""
        walk = _Walk(np.random.default_rng(0).standard_normal((self.n, 2)))
        for k in range(most):
            walk.step(self.matrix(offset + k))
            if walk.log() == -math.inf:
                return k + 1
        return None

    def exact_by_offset(self, exact_after: int | None) -> tuple[int | None, ...] | None:
        if exact_after is None or self.period > 64:  # exact from any offset would be exact from 0, a little later
            return None
        return tuple(self.exact_from(offset, exact_after + self.period) for offset in range(self.period))

    def _mixing(
        self, exact_after: int | None, log_sigma: float, estimated: bool, reached: int | None, extrapolated: bool
    ) -> Mixing:
        contraction = min(1.0, math.exp(log_sigma / self.period))
        period = min(1.0, math.exp(log_sigma))
        offsets = self.exact_by_offset(exact_after)
        return Mixing(exact_after, offsets, contraction, period, estimated, reached, extrapolated)

    def _dense(self) -> Mixing:
        walk = _Walk(np.eye(self.n))
        reached = None
        for k in range(1, self.period + 1):
            walk.step(self.matrix(k - 1))
            distance = walk.log()
            if reached is None and distance <= TARGET:
                reached = k
            if distance == -math.inf:
                return Mixing(k, self.exact_by_offset(k), 0.0, 0.0, False, reached, False)
        exact_after = self.exact_from(0, 2 * self.period) if self.period <= 64 else None
        if reached is None:
            reached = self._repeat(walk.x)  # not yet at 1e-3, so the walk has not rescaled
        return self._mixing(exact_after, walk.log_sigma(), False, reached, False)

    def _repeat(self, product: np.ndarray) -> int | None:
        """Count the rounds to 1e-3 over several periods, by powers of a period's product and then single rounds."""
        goal = 1e-3 * math.sqrt(self.n - 1)
        powers = [product]
        while np.linalg.norm(powers[-1]) > goal:
            if len(powers) > 50:
                return None
            powers.append(powers[-1] @ powers[-1])
        x, periods = np.eye(self.n) - 1.0 / self.n, 0
        for exponent in range(len(powers) - 2, -1, -1):
            trial = powers[exponent] @ x
            if np.linalg.norm(trial) > goal:
                x, periods = trial, periods + (1 << exponent)
        rounds = periods * self.period
        while np.linalg.norm(x) > goal:
            x = self.matrix(rounds) @ x
            rounds += 1
        return rounds

    def _large(self) -> Mixing:
        budget = max(64, (1 << 22 if self.short else KEPT) // self.n)
        block = np.random.default_rng(0).standard_normal((self.n, COLUMNS))
        walk = _Walk(np.hstack([block, self.modes]))
        history = np.zeros((budget + 1, walk.x.shape[1]))
        reached = exact_after = None
        for k in range(1, budget + 1):
            walk.step(self.matrix(k - 1))
            history[k] = walk.logs
            distance = walk.log(slice(COLUMNS))
            if reached is None and distance <= TARGET:
                reached = k
            if distance == -math.inf:
                exact_after = k
                break
            if reached is not None and k >= 2 * self.period + 64:
                break
        if exact_after is not None and exact_after <= self.period:
            return Mixing(exact_after, self.exact_by_offset(exact_after), 0.0, 0.0, False, reached, False)
        last = k - (exact_after is not None)
        half = last // 2
        # Slope of each log norm over the second half of the walk: the block shows fast schedules, the modes slow ones.
        with np.errstate(invalid="ignore"):
            slopes = (history[last] - history[half]) / max(1, last - half)
        slopes[history[last] == -np.inf] = -np.inf
        extrapolated = reached is None
        if reached is None:
            distance = walk.log(slice(COLUMNS))
            reached = self._extrapolate(last, distance, history[last, COLUMNS:], slopes[COLUMNS:])
        log_sigma, estimated = self._sigma(min(0.0, float(slopes.max())))
        return self._mixing(exact_after, log_sigma, estimated, reached, extrapolated)

    def _extrapolate(self, k: int, log: float, logs: np.ndarray, slopes: np.ndarray) -> int | None:
        """Continue the squared distance, a sum over modes: each slow mode by its slope, the rest by the fastest one."""
        share = 1.0 / (self.n - 1)
        rest = max(0.0, math.exp(2 * log) - share * float(np.exp(2 * logs).sum()))
        alive = logs > -np.inf
        logs, slopes = logs[alive], slopes[alive]

        def excess(log_more: float) -> float:
            more = math.exp(log_more)
            modes = share * float(np.exp(2 * (logs + slopes * more)).sum())
            return modes + rest * math.exp(2 * float(slopes.min()) * more) - 1e-6

        if not alive.any() or slopes.max() >= 0 or excess(40.0) > 0:
            return None
        from scipy.optimize import brentq  # slow to import, and every worker would

        return k + (math.ceil(math.exp(brentq(excess, -1.0, 40.0))) if excess(-1.0) > 0 else 1)

    def _sigma(self, slope: float) -> tuple[float, bool]:
        """Return the log of the period's second singular value, and whether it is only estimated from the slope."""
        if not self.short or self.period > 256:
            return slope * self.period, True
        if self.period <= 4:
            product = self.kept[0]
            for matrix in self.kept[1:]:
                product = matrix @ product
            if float((np.diff(product.indptr).astype(float) ** 2).sum()) <= 32 * self.n:
                return self._sigma_inverse(product), False
        growth = math.exp(-slope)  # keeps the operator's largest eigenvalue near 1

        def gram(v: np.ndarray) -> np.ndarray:
            v = v.ravel() - v.mean()
            for matrix in self.kept:
                v = growth * (matrix @ v)
                v -= v.mean()
            for matrix in reversed(self.kept):
                v = growth * (matrix.T @ v)
                v -= v.mean()
            return v

        operator = sla.LinearOperator((self.n, self.n), matvec=gram, dtype=float)
        start = np.random.default_rng(0).standard_normal(self.n)
        try:
            top = sla.eigsh(operator, k=1, which="LA", v0=start, tol=1e-8, maxiter=40, return_eigenvectors=False)
        except sla.ArpackNoConvergence:
            return slope * self.period, True
        return 0.5 * math.log(float(top[0])) + slope * self.period, False

    def _sigma_inverse(self, product: sp.csr_array) -> float:
        """Use shift-invert just above 1, where a slow ring's singular values crowd and plain Lanczos fails."""
        gram = sp.csc_array(product.T @ product)
        start = np.random.default_rng(0).standard_normal(self.n)
        values = sla.eigsh(gram, k=3, sigma=1.0 + 1e-7, which="LM", v0=start, return_eigenvectors=False)
        return 0.5 * math.log(float(np.sort(values)[-2]))
