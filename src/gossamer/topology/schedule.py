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

    Note [Fragments]
        With `fragments = f`, bucket b is exchanged in the rounds k where f divides k + b: in every round one of the f
        parts of the model. A bucket follows the topology by its own exchanges, of which there are k // f before
        round k. With the phase k + b it would meet only every f-th round of the topology: where f divides the period,
        never most of its neighbors. Staggering counts the buckets of one part, b // f, so that the load is even in
        every round. The last f rounds before a multiple of `average_every` are exact averages: one of each bucket.
    """

    topology: Topology
    stagger: bool = True
    hierarchical: bool = True
    average_every: int = 0
    fragments: int = 1
    inside: Layout | None = None  # gradients are exact inside a node: the topology is over the nodes of this layout
    ranks: tuple[int, ...] | None = None  # the topology's worker i is rank ranks[i]

    def __post_init__(self) -> None:
        if self.average_every < 0:
            raise InputError(f"average_every must be 0 (never) or positive, got {self.average_every}")
        if self.fragments < 1:
            raise InputError(f"fragments must be at least 1, got {self.fragments}; 1 exchanges every bucket each round")
        if 0 < self.average_every < self.fragments:
            raise InputError(
                f"average_every={self.average_every} rounds are too few for fragments={self.fragments}, which exchange "
                f"each bucket once in {self.fragments} rounds; use at least {self.fragments}"
            )

    @cached_property
    def nobody(self) -> Round:
        """The round of a bucket that is not exchanged."""
        return Round.uniform(self.topology.n, [])

    @cached_property
    def everyone(self) -> Round:
        """The round that averages all workers exactly."""
        return Round.uniform(self.topology.n, [range(self.topology.n)])

    def averages(self, k: int) -> bool:
        """Return whether the exchanges of round k are exact global averages."""
        return self.average_every > 0 and k % self.average_every >= self.average_every - self.fragments

    def completes_average(self, k: int) -> bool:
        """Return whether every bucket has had its exact average after round k, and not before it."""
        return self.average_every > 0 and (k + 1) % self.average_every == 0

    def exchanges(self, k: int, bucket: int) -> bool:
        """Return whether `bucket` is exchanged in round k."""
        return (k + bucket) % self.fragments == 0

    def round(self, k: int, bucket: int = 0) -> Round:
        """Return what `bucket` performs in round k: see Note [Fragments]."""
        if not self.exchanges(k, bucket):
            return self.nobody
        if self.averages(k):
            return self.everyone
        return self.topology.round(k // self.fragments + (bucket // self.fragments if self.stagger else 0))

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


def bucket_count(nbytes: float, period: int, fragments: int = 1) -> int:
    """Return the default number of buckets for parameters of `nbytes`.

    It is a multiple of `fragments`. Each fragment has a multiple of the schedule's period, so that staggering spreads
    the load evenly, and at least four; buckets have 64 KiB to 25 MiB, in a small model less.
    """
    base = fragments * (period * -(-4 // period) if period <= 8 else 4)
    count = base * max(1, math.ceil(nbytes / (base * 25 * 2**20)))
    return int(min(count, fragments * max(1, nbytes // 2**16 // fragments)))


@lru_cache(maxsize=16384)
def _program(round: Round, layout: Layout, worker: int, size: int, hierarchical: bool) -> Program:
    return program(round, layout, worker, size, hierarchical=hierarchical)


@lru_cache(maxsize=16384)
def _program_inside(round: Round, layout: Layout, worker: int, size: int) -> Program:
    return program_inside(round, layout, worker, size)


def forget_programs() -> None:
    """Free the programs that were made so far; those still needed are made again. For jobs whose members change."""
    _program.cache_clear()
    _program_inside.cache_clear()
