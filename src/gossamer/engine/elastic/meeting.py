"""A meeting: a collective call of the members of an elastic job, and who came to it. meetings.py agrees on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from gossamer.comm import Stamp, layout_of
from gossamer.comm.tcp import Record, whole_numbers
from gossamer.topology import Layout


class Attendee(NamedTuple):
    """A worker that came to a meeting. In the directory it is a JSON list."""

    rank: int
    incarnation: str
    node: str
    rounds: list[int]  # of each lane
    steps: int
    call: str  # the collective call that it made

    @classmethod
    def of(cls, fields: Any, lanes: int) -> Attendee:
        """Return the attendee that `fields` of the directory describe. Raise ValueError if they describe none."""
        if not isinstance(fields, list) or len(fields) != 6:
            raise ValueError(f"{str(fields)[:100]} is not an attendee")
        rank, incarnation, node, rounds, steps, call = fields
        if not all(isinstance(text, str) for text in (incarnation, node, call)) or len(whole_numbers(rounds)) != lanes:
            raise ValueError(f"{str(fields)[:100]} is not an attendee")
        rank, steps = whole_numbers([rank, steps])
        return cls(rank, incarnation, node, rounds, steps, call)


@dataclass(frozen=True)
class Meeting:
    """A collective call of the workers that are alive."""

    number: int
    epoch: int  # of the members that were expected
    came: tuple[tuple[int, str], ...]  # rank and incarnation: a replacement of the same rank is another process
    layout: Layout
    rounds: list[int]  # the furthest of each lane
    steps: int  # the most that a worker has taken
    alone: bool = False  # the directory did not answer: the other workers may meet without this one

    @classmethod
    def of(cls, number: int, epoch: int, came: list[Attendee], *, alone: bool = False) -> Meeting:
        layout = layout_of([a.node for a in came])
        rounds = [max(of_lane) for of_lane in zip(*(a.rounds for a in came), strict=True)]
        steps = max(a.steps for a in came)
        return cls(number, epoch, tuple((a.rank, a.incarnation) for a in came), layout, rounds, steps, alone)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, _ in self.came)

    def gone(self, record: Record) -> set[int]:
        """Ranks that came and are not members any more."""
        if record.epoch < self.epoch:
            return set()  # this record does not know all of them yet
        members = {(rank, member.incarnation) for rank, member in record.members.items()}
        return {rank for rank, incarnation in self.came if (rank, incarnation) not in members}


def meeting_stamp(peers: frozenset[int]) -> Stamp:
    """The stamp of a meeting's exchanges. They are numbered by the meeting, so they belong to no epoch and no plan."""
    return Stamp(0, bytes(8), peers, meeting=True)
