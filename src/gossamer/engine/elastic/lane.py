"""A lane of an elastic job that gossips in rounds: it never waits for a late peer longer than the soft deadline.

An exchange that a peer does not answer is dropped, which gives the peer's weight back to this worker for that round
(x stays x, rows still sum to one). With several neighbors that have weights of their own only the late one is left out:
see Note [Leaving out a peer] in comm/tcp/transport.py. Nothing incomplete is mixed in: a neighbor's values count once
all of them have arrived. When the members change, every lane follows the plan for the new members from the announced
round on. The mean is not conserved exactly across a fault: one side of a pair may have applied what the other lost.

Note [What a newcomer does before its plan begins]: a worker that joins, or joins again, follows the plan of the members
with itself at once. The others follow it from the announced round on: until then nobody answers the newcomer, so it
sends and awaits nothing, and trains on its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch

from gossamer.comm import Deadline, Job, PeerError, clock
from gossamer.comm.tcp import Record
from gossamer.engine.elastic.meeting import Meeting
from gossamer.engine.elastic.member_lane import LOOK, MemberLane
from gossamer.engine.lane import LaneParts
from gossamer.engine.outer import problem
from gossamer.engine.synchronous import SyncLane
from gossamer.errors import GossamerWarning

SLACK = 8  # rounds that a peer may be ahead before this worker skips to its round


class ElasticLane(MemberLane, SyncLane):
    """A synchronous lane over the members of an elastic job."""

    def __init__(self, parts: LaneParts):
        self._begins = 0  # the first round with exchanges: see Note [What a newcomer does before its plan begins]
        super().__init__(parts)
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

    def _post(self) -> None:
        if self.k < self._begins:
            self.jobs = []
        else:
            super()._post()

    def stepped(self) -> None:
        super().stepped()
        if self.index == 0:
            self._job.between_steps(cast("Sequence[MemberLane]", self.siblings))

    def _reached(self) -> int:
        return self.k

    def _jump(self, k: int) -> None:
        """Skip the rounds before `k`: nobody should wait for this worker in them."""
        self.k = k
        self._members.advance(self.index, k, jump=True)

    def _follow_members(self) -> Record | None:
        record = super()._follow_members()
        if record is not None:
            self._begins = record.starts[self.index]
        outer = None if record is None else self._outer_step
        if outer is not None and (why := problem(outer.policy, self.schedule)) is not None:
            warnings.warn(f"the members have changed: {why}", GossamerWarning, stacklevel=2)
        return record

    def average_id(self) -> int:
        """Another plan may have averaged other members in a round of the same number."""
        return (self.k + 1) << 24 | int.from_bytes(self._plan[:3])

    def finish(self, *, assisting: bool = False) -> None:
        since = clock()
        self._deadline = Deadline(self._remaining())
        super().finish()
        self.longest_stall = max(self.longest_stall, clock() - since)

    def _remaining(self) -> float:
        """Seconds to wait for the round in flight: the longest deadline of its peers, counted from its launch, and at
        least the shortest one from now on."""
        shortest = self._members.deadlines.shortest
        if self._members.deadlines.fixed is not None:
            return shortest
        peers = {peer for job in self.jobs or () if job.stamp is not None and not job.done for peer in job.stamp.peers}
        longest = max((self.deadline(peer) for peer in peers), default=0.0)
        return max(shortest, longest - (clock() - self._launched))

    def wait(self, job: Job, *, assisting: bool = False) -> None:
        """Wait until the job is done. A round's exchange is dropped at the soft deadline."""
        if job.stamp is not None and job.stamp.meeting:
            super().wait(job)
            return
        if not job.done:
            since = clock()
            deadline = self._deadline
            while not self.channel.wait(job, min(LOOK, deadline.remaining)):
                if deadline.expired:
                    self.given_up += not job.given_up
                    self.channel.give_up(job)  # its thread ends it at the next check
                    deadline = Deadline(LOOK)
            self.metrics.waited_for(job, since, clock())
        if job.error is None:
            self.lost += bool(job.left_out)
            job.left_out = set()  # counted
            return
        if not isinstance(job.error, PeerError):
            raise job.error
        self.lost += 1
        job.error = None  # dropped: it has no result to mix in

    # -- collective calls -------------------------------------------------------------------------------------

    def relay(self) -> None:
        """Take part, without a step, in a round that another worker has begun, unless that means to wait."""
        waiting = self.jobs is not None and not all(self.channel.wait(j, 0) for j in self.jobs)
        if waiting and clock() - self._launched < self._members.deadlines.shortest:
            return
        if self._members.furthest(self.index) > self.k:
            self.finish()
            self.apply()
            self.launch(combine=False)
            self.metrics.mix_only += 1

    def halt(self, meeting: Meeting) -> None:
        """Go to the furthest round of the participants."""
        if meeting.rounds[self.index] > self.k:
            self._jump(meeting.rounds[self.index])
        self.finish()

    def donation(self) -> dict[str, Any]:
        return {} if self._anchors is None else {"anchors": self._anchors.state_dict()}

    @torch.no_grad()
    def continue_from(self, rounds: int, steps: int, donated: dict[str, Any]) -> None:
        self.abandon(self.jobs or ())  # of this worker's old plan: nobody answers them
        self.adopt()
        if self._anchors is not None:
            self._anchors.load_state_dict(donated["anchors"])
            self._anchors.wanted = False  # the others may have had that average meanwhile
        self.k, self.metrics.steps = rounds, steps
        self.epoch = 0  # follow the members' plan at once
        self._members.advance(self.index, rounds)
        self._follow_members()
