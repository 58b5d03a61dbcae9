"""A lane of an elastic job: it never waits for a late peer longer than the soft deadline.

An exchange that a peer does not answer is dropped, which gives the peer's weight back to this worker for that round
(x stays x, rows still sum to one). Parameters change only when a whole exchange has arrived, so nothing incomplete is
mixed in. When the members change, every lane follows the plan for the new members from the announced round on. The
mean is not conserved exactly across a fault: one side of a pair may have applied what the other lost.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from gossamer.comm import Deadline, ExchangeSteps, Job, PeerError, Scratch, Stamp, clock
from gossamer.comm.tcp import TcpChannel
from gossamer.engine.elastic.coordinator import ElasticCoordinator
from gossamer.engine.elastic.meeting import Meeting, meeting_stamp
from gossamer.engine.lane import LaneParts
from gossamer.engine.outer import problem
from gossamer.engine.protocol import ScalesWithReplicas
from gossamer.engine.synchronous import SyncLane
from gossamer.errors import GossamerWarning
from gossamer.topology import build
from gossamer.topology.plan import Program

LOOK = 0.05  # seconds between checks of a job
SLACK = 8  # rounds that a peer may be ahead before this worker skips to its round


class ElasticLane(SyncLane):
    """A synchronous lane over the members of an elastic job, which is its coordinator."""

    channel: TcpChannel

    def __init__(self, parts: LaneParts):
        super().__init__(parts)
        job = parts.coordinator
        assert isinstance(job, ElasticCoordinator)
        self._job, self._members, self._plans, self._meetings = job, job.members, job.plans, job.meetings
        self._soft = job.soft_deadline
        self.epoch = 0  # of the members whose plan this lane follows
        self.lost = 0  # exchanges that were dropped
        self.given_up = 0  # of those, because the soft deadline had passed
        self.longest_stall = 0.0
        self.meeting: Meeting | None = None
        self.planned = self.schedule
        self._plan = bytes(8)
        self._deadline = Deadline(0.0)  # of the round in flight
        self._launched = clock()
        self._follow_members()

    # -- rounds -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def launch(self, *, combine: bool = True) -> None:
        ahead = self._members.furthest(self.index)
        if ahead > self.k + SLACK:  # this worker stood still, or is new: continue where the others are
            self._jump(ahead)
        self._follow_members()
        self._launched = clock()
        super().launch(combine=combine)
        self._members.advance(self.index, self.k)

    def stepped(self) -> None:
        super().stepped()
        if self.index == 0:
            self._job.between_steps(cast("Sequence[ElasticLane]", self.siblings))

    def _jump(self, k: int) -> None:
        """Skip the rounds before `k`: nobody should wait for this worker in them."""
        self.k = k
        self._members.advance(self.index, k, jump=True)

    def _follow_members(self) -> None:
        """Follow the plan of the latest members once its first round has come: see Note [Why a plan starts at an
        announced round] in comm/tcp/membership.py."""
        record = self._members.record
        if record.epoch == self.epoch or self._members.excluded:
            return
        if self.epoch and self.k < record.starts[self.index]:
            return
        self.epoch = record.epoch
        self.planned = self.schedule = self._plans.schedule(record)
        if isinstance(self.optimizer, ScalesWithReplicas):
            self.optimizer.set_replicas(self.schedule.topology.n)
        if self._outer_step is not None and (why := problem(self._outer_step.policy, self.schedule)) is not None:
            warnings.warn(f"the members have changed: {why}", GossamerWarning, stacklevel=2)
        self._plan = record.plan(self._plans.description)
        ranks = self.schedule.ranks
        assert ranks is not None
        mine = ranks.index(self.rank)
        edges = self.schedule.topology.union_edges()
        neighbors = {int(b if a == mine else a) for a, b in edges if mine in (a, b)}
        self._members.watch(ranks[i] for i in neighbors)

    def _launch_job(self, k: int, bucket: int, program: Program, make: Callable[[Scratch], ExchangeSteps]) -> Job:
        peers = frozenset(p.peer for step in program for p in (*step.sends, *step.recvs))
        if self.meeting is not None:
            job = Job(self.meeting.number, bucket, make, stamp=meeting_stamp(peers), turn=self.turn(bucket))
        else:
            job = Job(k, bucket, make, stamp=Stamp(self.epoch, self._plan, peers), turn=self.turn(bucket))
        self.channel.launch(job)
        return job

    def donation(self) -> dict[str, Any]:
        """What a newcomer takes from this lane, besides parameters and the state of the optimizer."""
        return {} if self._anchors is None else {"anchors": self._anchors.state_dict()}

    def average_id(self) -> int:
        """Another plan may have averaged other members in a round of the same number."""
        return (self.k + 1) << 24 | int.from_bytes(self._plan[:3])

    def finish(self, *, assisting: bool = False) -> None:
        since = clock()
        self._deadline = Deadline(self._soft)
        super().finish()
        self.longest_stall = max(self.longest_stall, clock() - since)

    def wait(self, job: Job, *, assisting: bool = False) -> None:
        """Wait until the job is done.

        A round's exchange is dropped at the soft deadline. A meeting's exchange is waited for as long as all
        participants are there; the loss of one raises PeerError.
        """
        in_meeting = job.stamp is not None and job.stamp.meeting
        if not job.done:
            since = clock()
            deadline = Deadline(self.settings.timeout) if in_meeting else self._deadline
            while not self.channel.wait(job, min(LOOK, deadline.remaining)):  # the job may be another channel's
                if deadline.expired or (in_meeting and self._meetings.failed()):
                    self.given_up += not (in_meeting or job.given_up)
                    self.channel.give_up(job)  # its thread ends it at the next check
                    deadline = Deadline(LOOK)
            self.metrics.waited_for(job, since, clock())
        if job.error is None:
            return
        if in_meeting or not isinstance(job.error, PeerError):
            raise job.error
        self.lost += 1
        job.error = None  # dropped: it has no result to mix in

    # -- collective calls -------------------------------------------------------------------------------------

    def abandon(self, jobs: Sequence[Job]) -> None:
        """End the exchanges of a meeting that failed, so that they do not delay those of the next one."""
        for job in jobs:
            self.channel.give_up(job)
        for job in jobs:
            while not self.channel.wait(job, LOOK):
                pass

    def relay(self) -> None:
        """While this worker waits in a collective call: take part, without a step, in a round that another worker has
        begun, unless this worker would have to wait."""
        waiting = self.jobs is not None and not all(self.channel.wait(j, 0) for j in self.jobs)
        if waiting and clock() - self._launched < self._soft:
            return
        if self._members.furthest(self.index) > self.k:
            self.finish()
            self.apply()
            self.launch(combine=False)
            self.metrics.mix_only += 1

    def convene(self, meeting: Meeting) -> None:
        """Go to the furthest round of the participants; from now on exact averages are over them."""
        self.meeting = meeting
        if meeting.rounds[self.index] > self.k:
            self._jump(meeting.rounds[self.index])
        self.finish()
        self.schedule = replace(self.planned, topology=build("complete", meeting.layout), ranks=meeting.ranks)

    def resume(self) -> None:
        self.meeting = None
        self.schedule = self.planned

    @torch.no_grad()
    def continue_from(self, rounds: int, steps: int, donated: dict[str, Any]) -> None:
        """Continue from another worker's state, which is in the parameters already; `donated` is the rest of it."""
        self.adopt()
        if self._anchors is not None:
            self._anchors.load_state_dict(donated["anchors"])
            self._anchors.wanted = False  # the others may have had that average meanwhile
        self.k, self.metrics.steps = rounds, steps
        self._members.advance(self.index, rounds)
