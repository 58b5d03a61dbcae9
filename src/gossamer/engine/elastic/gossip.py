"""The handle of an elastic job."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gossamer.comm import Job, PeerError
from gossamer.comm.tcp import GONE, settle
from gossamer.engine.averages import Control
from gossamer.engine.elastic.coordinator import ElasticCoordinator
from gossamer.engine.elastic.departure import PART, Departure
from gossamer.engine.elastic.meeting import Meeting, meeting_stamp
from gossamer.engine.elastic.member_lane import MemberLane
from gossamer.engine.gossip import Collective, Gossip
from gossamer.engine.policies import Seconds, seconds
from gossamer.engine.prepared import Prepared
from gossamer.engine.protocol import Participation
from gossamer.trace import TraceWriter

CALLS = 1024  # small averages in one meeting, at most


class ElasticGossip(Gossip):
    """The handle that `decentralize(..., on_failure="continue")` returns. It differs from `Gossip` in three ways:

    - `averaged()` and `consensus_distance()` cover the members that are alive, including those that have run out of
      data and wait in the call (meanwhile they take part in rounds without a step);
    - `close()` is not collective: this worker leaves with its own parameters, and the others continue;
    - `state_dict()` inside `averaged()` belongs to the same meeting: either all participants save, or none does.
    """

    lanes: Sequence[MemberLane]
    elastic = True

    def __init__(
        self,
        prepared: Prepared,
        lanes: Sequence[MemberLane],
        coordinator: ElasticCoordinator,
        writer: TraceWriter | None = None,
    ):
        self._job, self.members, self._meetings = coordinator, coordinator.members, coordinator.meetings
        self.joined = coordinator.joined
        self._departure: Departure | None = None
        self._shared_at = 0  # the next meeting at the last share()
        super().__init__(prepared, lanes, coordinator.transport, coordinator, writer)
        self.on_stop(coordinator.close)
        coordinator.start(lanes)

    @property
    def newcomer(self) -> bool:
        """Whether this worker joined, or joined again, after its last collective call."""
        return self._job.newcomer

    @property
    def met(self) -> Meeting | None:
        """The last meeting that this worker took part in."""
        return self._meetings.last

    def stats(self) -> dict[str, Any]:
        """Like `Gossip.stats`, with the members, exchanges lost, the longest stall, and what was refused, by sender."""
        links, stats = self.members.links, super().stats()
        refused = Counter(stats["refused_by_peer"]) + Counter(links.refusals)
        directory = self.members.directory
        whys = [*(lane.metrics.last_refusal for lane in self.lanes), links.last_refusal, directory.last_refusal]
        return {
            **stats,
            "epoch": self.members.record.epoch,
            "members": list(self.members.record.ranks),
            "joined": self.joined,
            "lost_exchanges": sum(lane.lost for lane in self.lanes),
            "given_up_exchanges": sum(lane.given_up for lane in self.lanes),
            "deadline_seconds_by_peer": {rank: self.members.deadlines.of(rank) for rank in self.lanes[0].neighbors},
            "longest_stall_s": max(lane.longest_stall for lane in self.lanes),
            "refused_by_peer": dict(sorted(refused.items())),
            "refused_from_directory": directory.refusals,
            "last_refusal": next(filter(None, whys), ""),
        }

    def scalars(self, prefix: str = "gossip/") -> dict[str, float]:
        """Like `Gossip.scalars`, with the number of members, exchanges lost, and the longest stall in seconds."""
        stats = self.stats()
        return super().scalars(prefix) | {
            f"{prefix}members": float(len(stats["members"])),
            f"{prefix}lost_exchanges": float(stats["lost_exchanges"]),
            f"{prefix}longest_stall": float(stats["longest_stall_s"]),
        }

    def state_dict(self) -> dict[str, Any]:
        return self._state() if self.in_meeting else super().state_dict()

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "topology": self.lanes[0].planned.topology.name}

    # -- the protocol of recipes, checkpoints and integrations ------------------------------------------------

    def accepts(self, state: dict[str, Any]) -> bool:
        """False: the members of a resumed job are new, so it starts from the parameters and the step count only."""
        return False

    def participation(self) -> Participation:
        """The workers that took part in the latest meeting."""
        found, met = super().participation(), self.met
        if met is None:
            return found
        name = f"{self.members.run.hex()}/{met.number}"
        return replace(found, steps=met.steps, meeting=name, alone=met.alone, departed=partial(self._departed, met))

    def _departed(self, met: Meeting) -> dict[int, str]:
        left = met.gone(self.members.record)
        return {place: f"worker {rank} has left" for place, rank in enumerate(met.ranks) if rank in left}

    def share(self, text: str) -> list[str]:
        """The texts of all ranks. Collective. The text of a rank whose worker is gone, or that joins meanwhile, is
        empty."""
        founding = self.members.record.members

        def gone() -> set[int]:
            now = self.members.record.members
            return {r for r in range(self.members.size) if r not in now or now[r] != founding.get(r, now[r])}

        meeting = self._meetings.next
        self._shared = (self._shared if self._shared_at == meeting else 0) + 1
        self._shared_at = meeting
        name, timeout = f"share/{meeting}/{self._shared}", self.settings.timeout
        directory, rank, size = self.members.directory, self.members.rank, self.members.size
        texts = directory.share(name, rank, size, text, timeout, write=settle, gone=gone)
        assert texts is not None
        return ["" if found == GONE else found for found in texts]

    def skip_meeting(self) -> None:
        """Skip the meeting that this worker's donor was about to attend; the others do not wait for this worker there.

        For a worker that joined, or joined again, at a step after which all workers meet: it has missed that meeting.
        """
        self._job.skip_meeting()

    def acknowledge_join(self) -> bool:
        """Return `newcomer`, and set it to False."""
        return self._job.acknowledge_join()

    def leave_on(self, *signals: int, grace: Seconds = 30.0) -> None:
        """Leave the job in good order when this process gets one of `signals` (default: SIGTERM). Main thread only.

        `leaving` becomes true; end the training loop then and call `close()`. If that takes more than half of `grace`,
        the time between the signal and the end of the process, the others are told that this worker leaves even so.
        """
        self._departure = Departure(self._leave, signals or (signal.SIGTERM,), seconds("grace", grace))
        self.on_stop(self._departure.close)

    def _leave(self) -> None:
        """Tell the others that this worker leaves, within what is left of the grace period if a signal has arrived."""
        left = None if self._departure is None else self._departure.remaining
        self._job.leave(None if left is None else PART * left)

    @property
    def leaving(self) -> bool:
        """Whether a signal of `leave_on` has arrived."""
        return self._departure is not None and self._departure.asked

    def catch_up(self) -> None:
        """Set the step count to the largest in the last meeting: this worker had missed an earlier one."""
        if self.met is not None:
            for lane in self.lanes:
                lane.count_steps(max(lane.metrics.steps, self.met.steps))

    def close(self, *, average: bool = False) -> None:
        """Leave the job; the others continue without this worker. Every parameter gets memory of its own again.

        `average=True` is collective: the members that are alive meet first, and each of them leaves with the mean.
        """
        if self._open:
            self._refuse_in_average("close()")
            try:
                if average:
                    self._collectively("close(average=True)", self._enter_average)
                    for lane in self.lanes:
                        lane.averaged -= 1
                for lane in self.lanes:
                    lane.drop()
                self._leave()
            finally:
                self._stop(drain=1.0)

    # -- collective calls -------------------------------------------------------------------------------------

    def _collectively(self, call: str, steps: Callable[[], Collective]) -> Any:
        """Meet again until a meeting succeeds for all participants."""
        try:
            while True:
                with self._together(call):
                    result, why, succeeded = None, "", False
                    try:
                        result = self._run(steps())
                    except PeerError as error:
                        why = str(error) or repr(error)
                    try:
                        succeeded = self._meetings.conclude(not why, why)
                    finally:
                        if not succeeded and callable(result):
                            result()  # undo what this worker has done
                    if succeeded:
                        return result
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
        self.control = Control(
            self.members.rank,
            meeting.layout,
            self.control.channel,
            meeting.ranks,
            partial(meeting_stamp, frozenset(meeting.ranks)),
            meeting.number * CALLS,
        )
