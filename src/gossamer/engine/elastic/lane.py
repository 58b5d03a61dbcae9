"""Gossip that outlives its workers (on_failure="continue").

A lane here never waits longer than the soft deadline: an exchange that a peer does not answer is dropped, which gives
the peer's weight back to this worker for that round (x stays x, rows still sum to one). Since parameters change only
when a whole exchange has arrived, nothing half-done is ever mixed in. When the members change, every lane follows
the plan for the new ones from the announced round on. Conservation of the mean is not promised across a fault: one side
of a pair may have applied what the other lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gossamer.comm import Exchange, Job, Membership, PeerError, Record, Scratch, Stamp, TcpChannel, clock, layout_of
from gossamer.engine.synchronous import SyncLane
from gossamer.topology import Layout, build
from gossamer.topology.plan import Program
from gossamer.topology.replan import replanned
from gossamer.topology.schedule import Schedule

LOOK = 0.05  # seconds between looks at a job
SLACK = 8  # rounds a neighbor may be ahead without this worker having missed something


@dataclass
class Plans:
    """The schedule for the members of each epoch."""

    spec: Any  # the topology as the user gave it
    founding: Schedule
    description: bytes
    made: dict[tuple[tuple[int, ...], tuple[str, ...]], Schedule] = field(default_factory=dict)

    def schedule(self, record: Record) -> Schedule:
        ranks = record.ranks
        nodes = tuple(record.members[r].node for r in ranks)
        if (ranks, nodes) not in self.made:
            layout = layout_of(nodes)
            topology = replanned(self.spec, self.founding.topology, ranks, layout)
            self.made[ranks, nodes] = replace(self.founding, topology=topology, ranks=ranks)
        return self.made[ranks, nodes]


@dataclass(frozen=True)
class Meeting:
    """A collective call of those who are there."""

    number: int
    epoch: int  # of the members who were waited for
    came: tuple[tuple[int, str], ...]  # rank and process: a replacement of the same rank is somebody else
    layout: Layout
    rounds: list[int]  # the furthest of each lane
    steps: int  # the most that a worker had taken
    alone: bool = False  # nobody else could be asked: the others may have held one of their own

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, _ in self.came)

    def gone(self, record: Record) -> set[int]:
        """Ranks of those who came and are no longer members."""
        if record.epoch < self.epoch:
            return set()  # this record does not know all of them yet
        members = {(rank, member.incarnation) for rank, member in record.members.items()}
        return {rank for rank, process in self.came if (rank, process) not in members}


class ElasticLane(SyncLane):
    """`survive` makes it one; then `epoch` is the members' epoch whose plan it follows."""

    channel: TcpChannel

    def survive(
        self, members: Membership, plans: Plans, between: Callable[[], None], dissolved: Callable[[], bool]
    ) -> None:
        """`between` is called after a step, `dissolved` tells whether the meeting under way was given up."""
        assert self.settings.elastic is not None
        self.soft = self.settings.elastic.soft
        self.members, self.plans, self._between, self._dissolved = members, plans, between, dissolved
        self.epoch = 0
        self.lost = 0
        self.given_up = 0  # of those, because the soft deadline had passed
        self.longest_stall = 0.0
        self.meeting: Meeting | None = None
        self.planned = self.schedule
        self._plan = bytes(8)
        self._until = 0.0
        self._launched = clock()
        self._switch()

    # -- rounds --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def launch(self, *, combine: bool = True) -> None:
        ahead = self.members.ahead(self.index)
        if ahead > self.k + SLACK:  # this worker stood still, or is new: go where the others are
            self._jump(ahead)
        self._switch()
        self._launched = clock()
        super().launch(combine=combine)
        self.members.rounds[self.index] = self.k

    def stepped(self) -> None:
        super().stepped()
        if self.index == 0:
            self._between()

    def _jump(self, k: int) -> None:
        """Skip rounds: nobody shall wait for this worker in them."""
        self.k = self.members.rounds[self.index] = k
        self.members.moved(self.index)

    def _switch(self) -> None:
        """Follow the latest members' plan once its round has come."""
        record = self.members.record
        if record.epoch == self.epoch or self.members.excluded:
            return
        if self.epoch and self.k < record.starts[self.index]:
            return
        self.epoch = record.epoch
        self.planned = self.schedule = self.plans.schedule(record)
        self._plan = record.plan(self.plans.description)
        at = self.schedule.ranks
        assert at is not None
        mine = at.index(self.rank)
        edges = self.schedule.topology.union_edges()
        near = {int(b if a == mine else a) for a, b in edges if mine in (a, b)}
        self.members.neighbors(at[i] for i in near)

    def _launch_job(self, k: int, bucket: int, program: Program, make: Callable[[Scratch], Exchange]) -> Job:
        peers = frozenset(p.peer for step in program for p in (*step.sends, *step.recvs))
        if self.meeting is not None:
            job = Job(self.meeting.number, bucket, make, stamp=meeting_stamp(peers))
        else:
            job = Job(k, bucket, make, stamp=Stamp(self.epoch, self._plan, peers))
        self.channel.launch(job)
        return job

    def finish(self, *, assisting: bool = False) -> None:
        since = clock()
        self._until = since + self.soft
        super().finish()
        self.longest_stall = max(self.longest_stall, clock() - since)

    def wait(self, job: Job, *, assisting: bool = False) -> None:
        """Until it has arrived, or until the soft deadline, and then go on without it. An exchange of a meeting is
        waited for as long as all who came are there."""
        together = job.stamp is not None and job.stamp.meeting
        if not job.done:
            since = clock()
            until = since + self.settings.timeout if together else self._until
            while not self.channel.wait(job, max(0.0, min(LOOK, until - clock()))):  # it may be another channel's
                if clock() >= until or (together and self._dissolved()):
                    self.given_up += not (together or job.given_up)
                    self.channel.give_up(job)  # it ends as soon as its thread looks
                    until = clock() + LOOK
            self.meter.waited_for(job, since, clock())
        if job.error is None:
            return
        if together or not isinstance(job.error, PeerError):
            raise job.error
        self.lost += 1
        job.error = None  # dropped: its result is nothing to mix in

    # -- collective calls ----------------------------------------------------------------------------------------

    def abandon(self, jobs: Sequence[Job]) -> None:
        """End exchanges of a meeting that failed, or they would hold up those of the next one."""
        for job in jobs:
            self.channel.give_up(job)
        for job in jobs:
            while not self.channel.wait(job, LOOK):
                pass

    def relay(self) -> None:
        """While parked: a round without a step if somebody has begun it and nothing has to be waited for."""
        waiting = self.jobs is not None and not all(self.channel.wait(j, 0) for j in self.jobs)
        if waiting and clock() - self._launched < self.soft:
            return
        if self.members.ahead(self.index) > self.k:
            self.finish()
            self.apply()
            self.launch(combine=False)
            self.meter.mix_only += 1

    def convene(self, meeting: Meeting) -> None:
        """From now on exact averages are over those who are there."""
        self.meeting = meeting
        if meeting.rounds[self.index] > self.k:
            self._jump(meeting.rounds[self.index])
        self.finish()
        self.schedule = replace(self.planned, topology=build("complete", meeting.layout), ranks=meeting.ranks)

    def resume(self) -> None:
        self.meeting = None
        self.schedule = self.planned

    @torch.no_grad()
    def take_over(self, rounds: int, steps: int) -> None:
        """Go on from another worker's state, which is in the parameters already."""
        self.drop()
        self.k, self.meter.steps = rounds, steps
        self.members.rounds[self.index] = rounds


def meeting_stamp(peers: frozenset[int]) -> Stamp:
    """Of exchanges in a collective call: their numbers are their own, whatever the epoch."""
    return Stamp(0, bytes(8), peers, meeting=True)
