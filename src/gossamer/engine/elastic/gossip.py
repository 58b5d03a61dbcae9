"""The handle of an elastic job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gossamer.comm import Deadline, Job, PeerError
from gossamer.comm.tcp import Unreachable
from gossamer.engine.averages import Control
from gossamer.engine.elastic.job import ElasticJob
from gossamer.engine.elastic.lane import ElasticLane
from gossamer.engine.elastic.meeting import Meeting, meeting_stamp
from gossamer.engine.elastic.state_transfer import Progress
from gossamer.engine.gossip import Collective, Gossip
from gossamer.engine.prepared import Prepared
from gossamer.engine.protocol import Participation
from gossamer.errors import GossamerError
from gossamer.trace import TraceWriter

POLL = 0.01  # seconds between checks of whether a neighbor has told its round
CALLS = 1024  # small averages in one meeting, at most


class ElasticGossip(Gossip):
    """The handle that `decentralize(..., on_failure="continue")` returns. It differs from `Gossip` in three ways:

    - `averaged()` and `consensus_distance()` cover the members that are alive, including those that have run out of
      data and wait in the call (meanwhile they take part in rounds without a step);
    - `close()` is not collective: this worker leaves, and the others continue;
    - `state_dict()` inside `averaged()` belongs to the same meeting: either all participants save, or none does.
    """

    lanes: Sequence[ElasticLane]
    elastic = True

    def __init__(
        self, prepared: Prepared, lanes: Sequence[ElasticLane], job: ElasticJob, writer: TraceWriter | None = None
    ):
        self.members, self._meetings, self._transfer = job.members, job.meetings, job.transfer
        self._soft = job.soft_deadline
        self.joined = job.members.joining
        self.newcomer = False  # it has a member's state, and has taken part in no meeting since
        self._donor_meeting = -1  # the next meeting of the member whose state this worker has
        super().__init__(prepared, lanes, job.transport, job, writer)
        self.on_stop(job.close)
        if job.donated is not None:
            self._continue_from(job.donated)
        lanes[0].on_step(self._between_steps)

    @property
    def met(self) -> Meeting | None:
        """The last meeting that this worker took part in."""
        return self._meetings.last

    def stats(self) -> dict[str, Any]:
        """Like `Gossip.stats`, with the members, exchanges lost, the longest stall, and refused messages by sender."""
        links, stats = self.members.links, super().stats()
        refused = Counter(stats["refused_by_peer"]) + Counter(links.refusals)
        why = next((lane.meter.last_refusal for lane in self.lanes if lane.meter.last_refusal), links.last_refusal)
        return {
            **stats,
            "epoch": self.members.record.epoch,
            "members": list(self.members.record.ranks),
            "joined": self.joined,
            "lost_exchanges": sum(lane.lost for lane in self.lanes),
            "given_up_exchanges": sum(lane.given_up for lane in self.lanes),
            "longest_stall_s": max(lane.longest_stall for lane in self.lanes),
            "refused_by_peer": dict(sorted(refused.items())),
            "last_refusal": why,
        }

    def state_dict(self) -> dict[str, Any]:
        return self._state() if self.in_meeting else super().state_dict()

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "topology": self.lanes[0].planned.topology.name}

    # -- the protocol of recipes, checkpoints and integrations ---------------------------------------------------

    def accepts(self, state: dict[str, Any]) -> bool:
        """False: the members of a resumed job are new, so it starts from the parameters and the step count only."""
        return False

    def participation(self) -> Participation:
        """The workers that took part in the latest meeting."""
        found, met = super().participation(), self.met
        if met is None:
            return found
        name = f"{self.members.run.hex()}/{met.number}"
        return replace(found, steps=met.steps, meeting=name, alone=met.alone)

    def departed(self) -> dict[int, str]:
        """Participants of the latest meeting that have left the job, as {number: reason}."""
        if self.met is None:
            return {}
        left = self.met.gone(self.members.record)
        return {place: f"worker {rank} has left" for place, rank in enumerate(self.met.ranks) if rank in left}

    def skip_meeting(self) -> None:
        """Skip the meeting that this worker's donor was about to attend; the others do not wait for this worker there.

        For a worker that joined, or came back, at a step after which all workers meet: it has missed that meeting.
        """
        self._meetings.skip_to(self._donor_meeting + 1, absent_from=self._donor_meeting)

    def catch_up(self) -> None:
        """Set the step count to the largest in the last meeting: this worker had missed an earlier one."""
        if self.met is not None:
            for lane in self.lanes:
                lane.meter.steps = max(lane.meter.steps, self.met.steps)

    def close(self) -> None:
        """Leave the job; the others continue without this worker. Every parameter gets its own storage again."""
        if self._open:
            try:
                for lane in self.lanes:
                    lane.drop()
                self.members.leave()
            finally:
                self._stop(drain=1.0)

    # -- between steps -----------------------------------------------------------------------------------------

    def _between_steps(self) -> None:
        """Serve the state to workers that asked for it, and join again if the others continued without this worker."""
        self._transfer.between_steps(self._progress)
        if self.members.excluded:
            self._join_again()

    def _progress(self) -> Progress:
        rounds, steps = [lane.k for lane in self.lanes], [lane.meter.steps for lane in self.lanes]
        return Progress(rounds, steps, self._meetings.next, self._meetings.parked)

    def _join_again(self) -> None:
        """After this worker was stopped or cut off for too long: take a member's state, which is further, and join."""
        if self._rank_is_taken():
            return
        try:
            progress = self._transfer.fetch(self.members)
            self.members.admit(progress.rounds)
        except (PeerError, Unreachable, OSError):
            return  # still cut off: train alone, and try again after the next step
        self._continue_from(progress)

    def _rank_is_taken(self) -> bool:
        """Whether another process has joined with this worker's rank. Raise if that process is alive: two processes
        of one rank would evict each other forever. If it is dead, the other members will drop it."""
        members = self.members
        other = members.record.members.get(members.rank)
        if other is None or other.address == members.me.address:
            return False
        if members.links.is_alive(other.address, other.incarnation):
            raise GossamerError(
                f"another process ({other.host}:{other.port}) has joined the job as worker {members.rank}, so this one "
                "ends; run one process per rank, and start a replacement only after the old process is gone"
            )
        return True

    def _continue_from(self, progress: Progress) -> None:
        self.newcomer, self._donor_meeting = True, progress.meetings
        self._meetings.skip_to(progress.meetings)
        if progress.parked and not self._meetings.parked:
            self.skip_meeting()
        deadline = Deadline(self._soft)
        while len(self.members.record.members) > 1 and not self.members.furthest(0):
            if not deadline.sleep(POLL):  # until a neighbor says which round the others are in by now
                break
        for lane, rounds, steps in zip(self.lanes, progress.rounds, progress.steps, strict=True):
            lane.continue_from(max(rounds, self.members.furthest(lane.index)), steps)
            lane.launch(combine=False)

    # -- collective calls --------------------------------------------------------------------------------------

    def _collectively(self, call: str, steps: Callable[[], Collective]) -> Any:
        """Meet again until a meeting succeeds for all participants."""
        try:
            while True:
                with self._together(call):
                    result, fine = None, True
                    try:
                        result = self._run(steps())
                    except PeerError:
                        fine = False
                    if self._meetings.conclude(fine):
                        return result
                    if callable(result):
                        result()  # undo what this worker has done
        finally:
            self._meetings.end_call()

    def _run(self, steps: Collective) -> Any:
        jobs: list[Job] = []
        try:
            while True:
                jobs = next(steps)
                for job in jobs:
                    self.lanes[0].wait(job)
        except StopIteration as stop:
            return stop.value
        except PeerError:
            self.lanes[0].abandon(jobs)
            raise

    def _meet(self, call: str) -> None:
        super()._meet(call)
        meeting = self.met
        assert meeting is not None
        self.newcomer = False
        self.control = Control(
            self.members.rank,
            meeting.layout,
            self.control.channel,
            meeting.ranks,
            partial(meeting_stamp, frozenset(meeting.ranks)),
            meeting.number * CALLS,
        )
