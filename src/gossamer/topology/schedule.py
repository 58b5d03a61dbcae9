"""Schedules: which round each bucket performs at which time, and by which plan. Shared by engine and simulator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from gossamer.errors import InputError
from gossamer.topology.core import Layout, Round, Topology
from gossamer.topology.plan import Program, Traffic, program, program_inside, renamed, traffic


@dataclass(frozen=True)
class Schedule:
    """A topology and how its rounds are spread over buckets and time.

    With `stagger`, bucket b performs round k + b of the topology, so that rounds that load the network and rounds that
    do not are spread over the buckets of a step. With `average_every = p`, every p-th round is an exact global average
    instead (0: never).
    """

    topology: Topology
    stagger: bool = True
    hierarchical: bool = True
    average_every: int = 0
    inside: Layout | None = None  # gradients are exact inside a node: the topology is over the nodes of this layout
    ranks: tuple[int, ...] | None = None  # the topology's worker i is rank ranks[i]

    def __post_init__(self) -> None:
        if self.average_every < 0:
            raise InputError(f"average_every must be 0 (never) or positive, got {self.average_every}")

    @cached_property
    def everyone(self) -> Round:
        """The round that averages all workers exactly."""
        return Round.uniform(self.topology.n, [range(self.topology.n)])

    def averages(self, k: int) -> bool:
        """Return whether round k is an exact global average."""
        return self.average_every > 0 and (k + 1) % self.average_every == 0

    def round(self, k: int, bucket: int = 0) -> Round:
        """Return the round that `bucket` performs as number k of its sequence."""
        if self.averages(k):
            return self.everyone
        return self.topology.round(k + bucket if self.stagger else k)

    def program(self, k: int, bucket: int, worker: int, size: int, *, average: bool = False) -> Program:
        """Return the program of rank `worker` for that exchange; `average=True`: for an exact global average."""
        made = self.everyone if average else self.round(k, bucket)
        if self.inside is not None:
            return _program_inside(made, self.inside, worker, size)
        if self.ranks is not None:
            found = _program(made, self.topology.layout, self.ranks.index(worker), size, self.hierarchical)
            return renamed(found, self.ranks)
        return _program(made, self.topology.layout, worker, size, self.hierarchical)

    def traffic(self, k: int, bucket: int = 0) -> Traffic:
        """Return what every worker sends for that exchange."""
        return traffic(self.round(k, bucket), self.topology.layout, hierarchical=self.hierarchical)


def bucket_count(nbytes: float, period: int) -> int:
    """Return the default number of buckets for parameters of `nbytes`.

    It is a multiple of the schedule's period, so that staggering spreads the load evenly, and at least four; buckets
    have 64 KiB to 25 MiB.
    """
    base = period * -(-4 // period) if period <= 8 else 4
    count = base * max(1, math.ceil(nbytes / (base * 25 * 2**20)))
    return int(min(count, max(1, nbytes // 2**16)))


@lru_cache(maxsize=16384)
def _program(round: Round, layout: Layout, worker: int, size: int, hierarchical: bool) -> Program:
    return program(round, layout, worker, size, hierarchical=hierarchical)


@lru_cache(maxsize=16384)
def _program_inside(round: Round, layout: Layout, worker: int, size: int) -> Program:
    return program_inside(round, layout, worker, size)
