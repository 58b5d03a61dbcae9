"""What the lanes of an elastic job have in common, with or without rounds: its members, its plan and its meetings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from gossamer.comm import Deadline, ExchangeSteps, Job, PeerError, Scratch, Stamp, clock
from gossamer.comm.tcp import Record, TcpChannel
from gossamer.engine.elastic.coordinator import ElasticCoordinator
from gossamer.engine.elastic.meeting import Meeting, meeting_stamp
from gossamer.engine.lane import Lane, LaneParts
from gossamer.engine.protocol import ScalesWithReplicas
from gossamer.topology import build
from gossamer.topology.plan import Program

LOOK = 0.05  # seconds between checks of a job


class MemberLane(Lane):
    """A lane over the members of an elastic job, which is its coordinator."""

    channel: TcpChannel

    def __init__(self, parts: LaneParts):
        job = parts.coordinator
        assert isinstance(job, ElasticCoordinator)
        self._job, self._members, self._plans, self._meetings = job, job.members, job.plans, job.meetings
        self.epoch = 0  # of the members whose plan this lane follows
        self.lost = 0  # exchanges that were dropped, or carried out without one of the peers
        self.given_up = 0  # of those, because a deadline had passed
        self.longest_stall = 0.0
        self.meeting: Meeting | None = None
        self.planned = parts.schedule
        self.neighbors: list[int] = []  # members that this worker exchanges with
        self._plan = bytes(8)
        super().__init__(parts)

    # -- members ----------------------------------------------------------------------------------------------

    def deadline(self, peer: int) -> float:
        """Seconds to wait for `peer` in an exchange."""
        return self._members.deadlines.of(peer)

    @property
    def hard_deadline(self) -> float:
        """Seconds of a wait that is for no peer in particular."""
        return self._job.hard_deadline

    @abstractmethod
    def _reached(self) -> int:
        """The next round, or event, of this lane."""

    def _follow_members(self) -> Record | None:
        """Follow the plan of the latest members whose first round has come: see Note [Why a plan starts at an announced
        round] in comm/tcp/membership.py. Return their record if it is a new one."""
        members = self._members
        record = members.begun(self.index, self._reached()) if self.epoch else members.record
        if record is None or record.epoch <= self.epoch or members.excluded:
            return None
        self.epoch = record.epoch
        self.planned = self.schedule = self._plans.schedule(record)
        if isinstance(self.optimizer, ScalesWithReplicas):
            self.optimizer.set_replicas(self.schedule.topology.n)
        self._plan = record.plan(self._plans.description)
        self.neighbors = sorted(self._plans.neighbors(record, self.rank))
        self._members.watch(self.neighbors)
        return record

    def suspended(self) -> AbstractContextManager[None]:
        """Inside the block nothing that began before it, and no exchange at all, changes this lane's values."""
        return nullcontext()  # without a thread of its own, a lane exchanges when the training thread asks it to

    @abstractmethod
    def donation(self) -> dict[str, Any]:
        """What a joining worker needs of this lane, besides the parameters and the optimizer's state. The training
        thread calls it between two steps; the parameters are this worker's latest values afterwards."""

    @abstractmethod
    def continue_from(self, rounds: int, steps: int, donated: dict[str, Any]) -> None:
        """Continue from another worker's state, which is in the parameters already."""

    # -- collective calls -------------------------------------------------------------------------------------

    @abstractmethod
    def relay(self) -> None:
        """While this worker waits in a collective call: take part in exchanges that other workers have begun."""

    @abstractmethod
    def halt(self, meeting: Meeting) -> None:
        """Bring this lane to the participants' round, with nothing in flight."""

    def convene(self, meeting: Meeting) -> None:
        """Meet the participants; from now on exact averages are over them."""
        self.meeting = meeting
        self.halt(meeting)
        self.schedule = replace(self.planned, topology=build("complete", meeting.layout), ranks=meeting.ranks)

    def resume(self) -> None:
        self.meeting = None
        self.schedule = self.planned
        super().resume()

    def _launch_job(self, k: int, bucket: int, program: Program, make: Callable[[Scratch], ExchangeSteps]) -> Job:
        peers = frozenset(p.peer for step in program for p in (*step.sends, *step.recvs))
        if self.meeting is not None:
            job = Job(self.meeting.number, bucket, make, stamp=meeting_stamp(peers), turn=self.turn(bucket))
        else:
            job = Job(k, bucket, make, stamp=Stamp(self.epoch, self._plan, peers), turn=self.turn(bucket))
        self.channel.launch(job)
        return job

    def wait(self, job: Job, *, assisting: bool = False) -> None:
        """Wait for a meeting's exchange as long as all participants are there; the loss of one raises PeerError."""
        if not job.done:
            since, deadline = clock(), Deadline(self.settings.timeout)
            while not self.channel.wait(job, min(LOOK, deadline.remaining)):  # the job may be another channel's
                blocked_on = job.blocked_on
                apart = blocked_on is not None and self._meetings.lacks_link(blocked_on)
                if apart and not job.given_up:
                    self._meetings.post_complaint()
                if deadline.expired or apart or self._meetings.failed():
                    self.channel.give_up(job)  # its thread ends it at the next check
                    deadline = Deadline(LOOK)
            self.metrics.waited_for(job, since, clock())
        if job.error is not None:
            if isinstance(job.error, PeerError) and job.blocked:
                self._meetings.lacks_link(job.blocked[-1][0])  # the peer for which it failed
            raise job.error

    def abandon(self, jobs: Sequence[Job]) -> None:
        """End exchanges that failed, so that they do not delay others or write to their buffers."""
        for job in jobs:
            self.channel.give_up(job)
        for job in jobs:
            while not self.channel.wait(job, LOOK):
                pass
