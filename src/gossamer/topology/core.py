"""The three immutable objects that everything else builds on: `Layout`, `Round`, `Topology`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import overload

import numpy as np
import scipy.sparse as sp

from gossamer.errors import InputError

TOLERANCE = 1e-9  # how far a row or column sum may be from 1


@dataclass(frozen=True)
class Layout:
    """The placement of workers (ranks) on nodes (hosts): `node[i]` is the node of worker i."""

    node: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.node:
            raise InputError("a layout needs at least one worker, got none; pass n >= 1 or per_node=[...]")
        if sorted(set(self.node)) != list(range(max(self.node) + 1)):
            raise InputError(f"nodes must be numbered 0..M-1 without gaps, got {sorted(set(self.node))}")

    @classmethod
    def of(cls, per_node: Sequence[int]) -> Layout:
        """Place consecutive ranks on each node: `Layout.of([4, 4, 2])` has 10 workers on 3 nodes."""
        bad = [c for c in per_node if not isinstance(c, int | np.integer) or c < 1]
        if not per_node or bad:
            raise InputError(
                f"workers per node must be positive integers, got {list(per_node)}; write e.g. per_node=[4, 4, 2]"
            )
        return cls(tuple(m for m, count in enumerate(per_node) for _ in range(count)))

    @classmethod
    def flat(cls, n: int) -> Layout:
        """Place all n workers on one node."""
        if not isinstance(n, int | np.integer) or n < 1:
            raise InputError(f"the number of workers must be a positive integer, got {n}; pass n >= 1")
        return cls((0,) * int(n))

    @property
    def n(self) -> int:
        return len(self.node)

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The workers of each node, in rank order."""
        nodes: list[list[int]] = [[] for _ in range(max(self.node) + 1)]
        for worker, node in enumerate(self.node):
            nodes[node].append(worker)
        return tuple(map(tuple, nodes))

    @property
    def nodes(self) -> int:
        return len(self.members)

    @property
    def per_node(self) -> tuple[int, ...]:
        return tuple(map(len, self.members))

    def __str__(self) -> str:
        counts = self.per_node
        if self.nodes == 1:
            return f"{self.n} worker{'s' * (self.n != 1)} on one node"
        if len(set(counts)) == 1:
            return f"{self.nodes} nodes x {counts[0]} worker{'s' * (counts[0] != 1)}"
        return f"{self.nodes} nodes of {', '.join(map(str, counts))} workers"


@dataclass(frozen=True)
class Round:
    """One entry of a schedule: a partition of the workers into groups, and how each group averages.

    If `weights` is None, every group averages uniformly (a group of one worker does nothing). Otherwise `weights` lists
    the off-diagonal entries `(i, j, w)` of the matrix W: worker i takes w times worker j's value and keeps what remains
    to 1 of its own. The groups are then the connected components of those edges.
    """

    groups: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[int, int, float], ...] | None = None

    @classmethod
    def uniform(cls, n: int, groups: Iterable[Iterable[int]]) -> Round:
        """Make a round of uniform averages in `groups`; a worker that is in no group keeps its value."""
        kept = [tuple(sorted(g)) for g in groups]
        seen = [w for g in kept for w in g]
        if len(set(seen)) != len(seen) or any(not 0 <= w < n for w in seen):
            raise InputError(f"groups must be disjoint and hold workers 0..{n - 1}, got {kept}")
        alone: list[tuple[int, ...]] = [(w,) for w in sorted(set(range(n)) - set(seen))]
        return cls(tuple(sorted([g for g in kept if g] + alone)))

    @classmethod
    def weighted(cls, n: int, weights: Iterable[tuple[int, int, float]]) -> Round:
        """Make a round from off-diagonal weights `(i, j, w_ij)`; zero entries are dropped."""
        kept = tuple(sorted((int(i), int(j), float(w)) for i, j, w in weights if w != 0.0))
        matrix = _sparse(n, kept)
        check_doubly_stochastic(matrix)
        _, label = sp.csgraph.connected_components(matrix, directed=False)
        components: dict[int, list[int]] = {}
        for worker, component in enumerate(label):
            components.setdefault(int(component), []).append(worker)
        groups = tuple(sorted(map(tuple, components.values())))
        uniform = cls(groups)
        if len(kept) == sum(len(g) * (len(g) - 1) for g in groups):  # every group is complete: maybe uniform
            difference = abs(uniform.sparse(n) - matrix)
            if difference.nnz == 0 or difference.max() < TOLERANCE:
                return uniform
        return cls(groups, kept)

    @classmethod
    def from_matrix(cls, matrix: np.ndarray) -> Round:
        """Make a round from a dense doubly stochastic matrix."""
        array = np.asarray(matrix, dtype=float)
        if array.ndim != 2 or array.shape[0] != array.shape[1] or not array.size:
            raise InputError(f"a weight matrix must be square, got shape {array.shape}")
        check_doubly_stochastic(sp.csr_array(array))
        rows, columns = np.nonzero(array)
        off = rows != columns
        rows, columns = rows[off], columns[off]
        entries = zip(rows.tolist(), columns.tolist(), array[rows, columns].tolist(), strict=True)
        return cls.weighted(array.shape[0], entries)

    def sparse(self, n: int | None = None) -> sp.csr_array:
        """Return W as a sparse matrix."""
        n = sum(map(len, self.groups)) if n is None else n
        if self.weights is not None:
            return _sparse(n, self.weights)
        sizes = np.array([len(g) for g in self.groups])
        order = np.fromiter((w for g in self.groups for w in g), dtype=np.int64, count=n)
        size_of = np.repeat(sizes, sizes)
        indptr = np.zeros(n + 1, dtype=np.int64)
        counts = np.empty(n, dtype=np.int64)
        counts[order] = size_of
        np.cumsum(counts, out=indptr[1:])
        start = np.repeat(np.cumsum(sizes) - sizes, sizes)  # where a worker's group begins in `order`
        start_of = np.empty(n, dtype=np.int64)
        start_of[order] = start
        indices = order[np.repeat(start_of - indptr[:-1], counts) + np.arange(indptr[-1])]
        return sp.csr_array((np.repeat(1.0 / counts, counts), indices, indptr), shape=(n, n))

    def matrix(self) -> np.ndarray:
        """Return W as a dense matrix."""
        return np.asarray(self.sparse().toarray())

    def group_of(self, worker: int) -> tuple[int, ...]:
        return self._group_of[worker]

    @cached_property
    def _group_of(self) -> dict[int, tuple[int, ...]]:
        return {w: g for g in self.groups for w in g}


def _sparse(n: int, weights: Sequence[tuple[int, int, float]]) -> sp.csr_array:
    i = np.array([e[0] for e in weights], dtype=np.int64)
    j = np.array([e[1] for e in weights], dtype=np.int64)
    w = np.array([e[2] for e in weights], dtype=float)
    if len(weights) and (min(i.min(), j.min()) < 0 or max(i.max(), j.max()) >= n):
        raise InputError(f"edges must join workers 0..{n - 1}, got worker {int(max(i.max(), j.max()))}")
    diagonal = 1.0 - np.bincount(i, weights=w, minlength=n)
    everyone = np.arange(n)
    return sp.csr_array(
        (np.r_[w, diagonal], (np.r_[i, everyone], np.r_[j, everyone])),
        shape=(n, n),
    )


def check_doubly_stochastic(matrix: sp.csr_array) -> None:
    """Raise an `InputError` that names the worst row, column or entry if a matrix is not doubly stochastic."""
    if not np.isfinite(matrix.data).all():
        raise InputError("a weight matrix must be finite, got a NaN or an infinity; check its entries")
    if matrix.nnz and matrix.data.min() < -TOLERANCE:
        at = matrix.tocoo()
        worst = int(at.data.argmin())
        raise InputError(
            f"weights must not be negative, got {at.data[worst]:.6g} at row {at.row[worst]}, column {at.col[worst]}; "
            "use smaller edge weights (Metropolis-Hastings weights always fit)"
        )
    for axis, what in ((1, "row"), (0, "column")):
        sums = np.asarray(matrix.sum(axis=axis)).ravel()
        worst = int(np.abs(sums - 1).argmax())
        if abs(sums[worst] - 1) > TOLERANCE:
            raise InputError(
                f"every row and column of a weight matrix must sum to 1 (doubly stochastic), but {what} {worst} "
                f"sums to {sums[worst]:.6g}; symmetric weights with rows that sum to 1 always fit"
            )


@dataclass(frozen=True, eq=False)
class Topology:
    """A named periodic schedule of rounds over a layout. Immutable; a round is made when it is first used.

    `make(k)` must be a pure function of k in 0..period-1. Read rounds by `topology.round(k)` for any k >= 0 or by
    `topology.rounds[k]` for one period, and the dense W(k) by `topology.matrix(k)`.
    """

    name: str
    layout: Layout
    period: int
    make: Callable[[int], Round] = field(repr=False)
    connected: bool = True  # False: the rounds together do not join all workers, so there is no consensus
    edges: Callable[[], np.ndarray] | None = field(default=None, repr=False)  # a shortcut for union_edges()

    @classmethod
    def of_rounds(cls, name: str, layout: Layout, rounds: Sequence[Round], *, connected: bool = True) -> Topology:
        """Make a topology whose period is the list `rounds`."""
        if not rounds:
            raise InputError(f"topology {name!r} needs at least one round, got none")
        for k, r in enumerate(rounds):
            if sum(map(len, r.groups)) != layout.n:
                covered = sum(map(len, r.groups))
                raise InputError(f"round {k} of topology {name!r} covers {covered} workers, the layout has {layout.n}")
        return cls(name, layout, len(rounds), tuple(rounds).__getitem__, connected)

    def __post_init__(self) -> None:
        # A round of n workers takes some 50 n bytes, so a long period of a large n is not kept whole.
        object.__setattr__(self, "_cached", lru_cache(maxsize=max(64, (1 << 21) // self.n))(self.make))

    @property
    def n(self) -> int:
        return self.layout.n

    @property
    def rounds(self) -> Rounds:
        """The rounds of one period, as a sequence."""
        return Rounds(self)

    def round(self, k: int) -> Round:
        """Return round k of the schedule, which repeats with the period."""
        made: Round = self._cached(k % self.period)  # type: ignore[attr-defined]
        return made

    def matrix(self, k: int) -> np.ndarray:
        """Return the dense matrix W(k)."""
        return self.round(k).matrix()

    def union_edges(self) -> np.ndarray:
        """Return every pair i < j that exchanges in some round of the period, one row each (a double edge has two)."""
        if self.edges is not None:
            return self.edges()
        found = np.empty(0, dtype=np.int64)
        pending: list[np.ndarray] = []
        for k, made in enumerate(self.rounds):
            at = made.sparse(self.n).tocoo()
            i, j = np.minimum(at.row, at.col).astype(np.int64), np.maximum(at.row, at.col)
            pending.append((i * self.n + j)[i != j])
            if k % 64 == 63 or k == self.period - 1:
                found, pending = np.unique(np.concatenate([found, *pending])), []
        return np.stack(np.divmod(found, self.n), axis=1)

    def __reduce__(self) -> tuple[object, ...]:
        return partial(Topology.of_rounds, connected=self.connected), (self.name, self.layout, tuple(self.rounds))


@dataclass(frozen=True)
class Rounds(Sequence[Round]):
    """The rounds of one period, made when they are used: AER on an odd number of nodes has a long period."""

    topology: Topology

    def __len__(self) -> int:
        return self.topology.period

    @overload
    def __getitem__(self, k: int) -> Round: ...
    @overload
    def __getitem__(self, k: slice) -> tuple[Round, ...]: ...
    def __getitem__(self, k: int | slice) -> Round | tuple[Round, ...]:
        if isinstance(k, slice):
            return tuple(self[i] for i in range(*k.indices(len(self))))
        if not -len(self) <= k < len(self):
            raise IndexError(f"round {k} of a period of {len(self)}")
        return self.topology.round(k)

    def __iter__(self) -> Iterator[Round]:
        return (self.topology.round(k) for k in range(len(self)))
