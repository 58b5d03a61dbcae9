"""The handle of an elastic job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from gossamer.comm import Counted, Deadline, Job, PeerError
from gossamer.comm.tcp import Unreachable
from gossamer.engine.averages import Control
from gossamer.engine.elastic.job import ElasticJob
from gossamer.engine.elastic.lane import ElasticLane
from gossamer.engine.elastic.meeting import Attendee, Meeting, meeting_stamp
from gossamer.engine.elastic.state_transfer import Progress
from gossamer.engine.gossip import Collective, Gossip
from gossamer.engine.policies import Settings
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

    lanes: list[ElasticLane]  # type: ignore[assignment]

    def __init__(
        self,
        model: nn.Module,
        lanes: list[ElasticLane],
        settings: Settings,
        control: Control,
        writer: TraceWriter | None,
        job: ElasticJob,
    ):
        self.members, self._meetings, self._transfer = job.members, job.meetings, job.transfer
        self._soft = job.soft_deadline
        self.joined = job.members.joining
        self.averaging = False  # inside averaged(): the other participants are in the same meeting
        self.newcomer = False  # it has a member's state, and has taken part in no meeting since
        self._donor_meeting = -1  # the next meeting of the member whose state this worker has
        super().__init__(model, list(lanes), settings, job.transport, control, self._gather, writer, 1)
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

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        with super().averaged() as model:
            self.averaging = True
            try:
                yield model
            finally:
                self.averaging = False

    def state_dict(self) -> dict[str, Any]:
        return self._state() if self.averaging else super().state_dict()

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "topology": self.lanes[0].planned.topology.name}

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

    def _gather(self, lanes: Sequence[Counted], call: str) -> None:
        """Bring all members that can come to one meeting; from then on averages are over them."""
        meeting = self._meetings.gather(call, self._here, self._while_parked)
        self.newcomer = False
        self.control = Control(
            self.members.rank,
            meeting.layout,
            self.control.channel,
            meeting.ranks,
            partial(meeting_stamp, frozenset(meeting.ranks)),
            meeting.number * CALLS,
        )
        for lane in self.lanes:
            lane.convene(meeting)

    def _here(self) -> Attendee:
        me = self.members.me
        rounds = [lane.k for lane in self.lanes]
        return Attendee(self.members.rank, me.incarnation, me.node, rounds, self.lanes[0].meter.steps)

    def _while_parked(self) -> None:
        for lane in self.lanes:
            lane.relay()
        self._between_steps()
