"""The events of asynchronous gossip: which two workers average at which time. A shared seed gives every worker the same
sequence.

An edge (i, j) of the union graph fires with intensity λ_ij = rate (1/deg_i + 1/deg_j) / 2, so that a worker of a
regular graph takes part in `rate` exchanges per time unit. Every worker draws the whole sequence and performs its own
events in order. This needs no coordinator, is reproducible, and cannot deadlock: the earliest event that is not done
can always proceed. Where exchanges take long, workers lose time waiting for each other's earlier events;
`pairing="rounds"` then fires a whole random color of an edge coloring at once, so that all of its pairs exchange at the
same time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from gossamer.errors import InputError
from gossamer.topology.core import Topology
from gossamer.topology.plan import edge_colors

CHUNK = 4096  # draws at a time


class Event(NamedTuple):
    """Event `number` of the sequence: workers i < j exchange at `time`, measured in mean gradient times."""

    number: int
    time: float
    i: int
    j: int

    def peer_of(self, worker: int) -> int:
        return self.j if worker == self.i else self.i


@dataclass(frozen=True)
class Events:
    """A sequence of events with exponential (`gaps="poisson"`) or equal (`gaps="fixed"`) gaps between them."""

    topology: Topology
    rate: float = 1.0
    seed: int = 0
    gaps: Literal["poisson", "fixed"] = "poisson"
    pairing: Literal["edges", "rounds"] = "edges"
    first: int = 0  # number of the first event
    start: float = 0.0  # time at which the clock starts
    ranks: tuple[int, ...] | None = None  # the topology's worker i is rank ranks[i], ascending

    def __post_init__(self) -> None:
        if not (self.rate > 0 and math.isfinite(self.rate)):
            raise InputError(f"rate must be a positive number of exchanges per gradient, got {self.rate}")
        if self.gaps not in ("poisson", "fixed"):
            raise InputError(f"gaps must be 'poisson' or 'fixed', got {self.gaps!r}")
        if self.pairing not in ("edges", "rounds"):
            raise InputError(f"pairing must be 'edges' or 'rounds', got {self.pairing!r}")
        if not self.topology.connected:
            raise InputError(f"topology {self.topology.name!r} is not connected; pass one that joins all workers")

    @cached_property
    def edges(self) -> np.ndarray:
        """The union graph, one row (i, j) per edge; a double edge has two rows."""
        return self.topology.union_edges()

    @cached_property
    def intensity(self) -> np.ndarray:
        """Exchanges of each edge per time unit."""
        degree = np.bincount(self.edges.ravel(), minlength=self.topology.n)
        i, j = self.edges.T
        return np.asarray(self.rate * 0.5 * (1.0 / degree[i] + 1.0 / degree[j]))

    def neighbors(self, worker: int) -> list[int]:
        """Return the workers that `worker` exchanges with."""
        return [int(i + j) - worker for i, j in self._named_edges.tolist() if worker in (i, j)]

    @property
    def _named_edges(self) -> np.ndarray:
        """The union graph by rank."""
        return self.edges if self.ranks is None else np.asarray(self.ranks)[self.edges]

    def stream(self, *, after: int = -1) -> Iterator[Event]:
        """Yield all events with a number above `after`, endlessly."""
        if not len(self.edges):
            return
        random = np.random.default_rng([self.seed, 0x60551])
        time, number = self.start, self.first
        total = float(self.intensity.sum())
        if self.pairing == "edges":
            groups = [self._named_edges[e : e + 1] for e in range(len(self.edges))]
            weights = self.intensity / total
            mean_gap = 1.0 / total
        else:
            groups = [
                np.array([sorted(e) for e in color]) for color in edge_colors(map(tuple, self._named_edges.tolist()))
            ]
            weights = np.full(len(groups), 1.0 / len(groups))
            mean_gap = float(np.mean([len(g) for g in groups])) / total
        while True:
            waits = random.exponential(mean_gap, CHUNK) if self.gaps == "poisson" else np.full(CHUNK, mean_gap)
            picks = random.choice(len(groups), CHUNK, p=weights)
            for gap, pick in zip(waits.tolist(), picks.tolist(), strict=True):
                time += gap
                for i, j in groups[pick].tolist():
                    if number > after:
                        yield Event(number, time, i, j)
                    number += 1

    def of(self, worker: int, *, after: int = -1) -> Iterator[Event]:
        """Yield the events that `worker` takes part in."""
        return (e for e in self.stream(after=after) if worker in (e.i, e.j))
