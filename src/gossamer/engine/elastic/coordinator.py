"""One worker's part in an elastic job: how it starts, meets the other members, and joins again when it was dropped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

from gossamer.comm import Accelerator, Deadline, PeerError, layout_of
from gossamer.comm.tcp import SILENT, Arrival, Membership, Record, TcpTransport, Unreachable, digest
from gossamer.engine.coordinator import Coordinator
from gossamer.engine.elastic.meeting import Attendee
from gossamer.engine.elastic.meetings import Meetings
from gossamer.engine.elastic.rejoining import Attempts, continue_alone
from gossamer.engine.elastic.state_transfer import SILENCE, Progress, StateTransfer
from gossamer.engine.flat import longest_message
from gossamer.engine.metrics import UsualStep
from gossamer.engine.policies import Algorithm, Synchronous
from gossamer.errors import GossamerError
from gossamer.topology.replan import replanned
from gossamer.topology.schedule import Schedule, forget_programs

if TYPE_CHECKING:
    from gossamer.engine.elastic.member_lane import MemberLane
    from gossamer.engine.lane import Lane
    from gossamer.engine.prepared import Prepared

# The least time until a new plan starts, in rounds and in seconds: see Note [Why a plan starts at an announced round]
# in comm/tcp/membership.py. The seconds are for the record to reach all members.
MARGIN, MARGIN_SECONDS = 2, 0.5
POLL = 0.01  # seconds between checks of whether a neighbor has reported its round
KEPT = 8  # memberships whose schedules are kept: members may leave and come back


class Plans:
    """The schedule for the members of each epoch, made anew for members that were not there lately.

    Args:
        spec: The topology as the user gave it.
        founding: The schedule for all workers.
        description: Stands for everything that the workers agreed on at the start.
    """

    def __init__(self, spec: Any, founding: Schedule, description: bytes):
        self.description = description
        self._made = lru_cache(KEPT)(partial(_schedule, spec, founding))
        self._forget_at = KEPT  # schedules made until their programs are forgotten

    def schedule(self, record: Record) -> Schedule:
        ranks = record.ranks
        found = self._made(ranks, tuple(record.members[r].node for r in ranks))
        made = self._made.cache_info().misses
        if made >= self._forget_at:
            self._forget_at = made + KEPT
            forget_programs()
        return found

    def neighbors(self, record: Record, rank: int) -> set[int]:
        """The members that `rank` exchanges with, in some round."""
        edges, ranks = self.schedule(record).topology.union_edges(), record.ranks
        named = {(ranks[int(i)], ranks[int(j)]) for i, j in edges}
        return {i + j - rank for i, j in named if rank in (i, j)}


def _schedule(spec: Any, founding: Schedule, ranks: tuple[int, ...], nodes: tuple[str, ...]) -> Schedule:
    topology = replanned(spec, founding.topology, ranks, layout_of(nodes))
    return replace(founding, topology=topology, ranks=ranks)


def _margin(policy: Algorithm, workers: int, step: float) -> int:
    """Rounds, or events, until a plan starts that a worker proposes whose steps take `step` seconds (0: not known)."""
    if isinstance(policy, Synchronous):
        round_seconds, each = step * policy.every, 1
    else:
        round_seconds, each = step, workers  # events are counted over all workers
    return each * max(MARGIN, math.ceil(MARGIN_SECONDS / round_seconds) if round_seconds else 0)


class ElasticCoordinator(Coordinator):
    """A worker that has founded or joined an elastic job, with the parameters from which it starts.

    Args:
        arrival: How this worker found the job.
        prepared: The model, its optimizers and the settings.
        spec: The topology as the user gave it.
        broadcast: Whether founders start from the first worker's parameters and buffers.
        accelerator: Where the parameters are, if not on the CPU.
    """

    def __init__(
        self,
        arrival: Arrival,
        prepared: Prepared,
        spec: Any,
        *,
        broadcast: bool,
        accelerator: Accelerator | None = None,
    ):
        settings = prepared.settings
        assert settings.elastic is not None
        soft, hard = settings.elastic.soft, settings.elastic.hard
        self.hard_deadline = SILENT if hard is None else hard  # of waits that are for no peer in particular
        self.joined = arrival.joining
        self._leaving = False  # this worker has left for good, or is about to
        self._usual_step = UsualStep()
        self.newcomer = False  # this worker has a member's state, and has taken part in no meeting since
        self._donor_meeting = -1  # the next meeting of the member whose state this worker has
        self.plans = Plans(spec, prepared.schedule, digest(arrival.foundation.description))
        self._transfer = StateTransfer(prepared.model, prepared.optimizers, arrival.foundation.run, settings.timeout)
        longest = longest_message(prepared.model)
        margin = partial(_margin, settings.algorithm, arrival.size)
        self.members = Membership(arrival, longest, soft, hard, self._transfer.serve, self.plans.neighbors, margin)
        self._attempts = Attempts(lambda: (self.members.recoveries, self.members.record.epoch))  # to join again
        self.transport = TcpTransport(self.members, settings.timeout, accelerator)
        try:
            self._donated: Progress | None = None  # the progress of the member whose state this worker has
            if arrival.joining:
                self._donated = self._take_state(SILENCE)
            elif broadcast:
                self._donated = self._transfer.broadcast(self.members, arrival.record)
            self.meetings = Meetings(self.members, settings.timeout, self.hard_deadline)
        except BaseException:
            self.transport.close()
            raise

    def start(self, lanes: Sequence[MemberLane]) -> None:
        """Let the lanes of a worker that took a member's state continue where that member was."""
        if self._donated is not None:
            self._continue_from(self._donated, lanes)

    # -- collective calls -------------------------------------------------------------------------------------

    def meet(self, lanes: Sequence[Lane], call: str) -> None:
        """Bring all members that can come to one meeting; from then on exact averages are over them."""
        elastic = cast("Sequence[MemberLane]", lanes)

        def here() -> Attendee:
            me = self.members.me  # another one after this worker has joined again
            rounds = [lane.k for lane in elastic]
            return Attendee(self.members.rank, me.incarnation, me.node, rounds, elastic[0].metrics.steps, call)

        def while_parked() -> None:
            for lane in elastic:
                lane.relay()
            self.between_steps(elastic)

        meeting = self.meetings.gather(call, here, while_parked)
        self.newcomer = False
        for lane in elastic:
            lane.convene(meeting)

    def skip_meeting(self) -> None:
        """Skip the meeting that this worker's donor was about to attend; the others do not wait for this worker."""
        self.meetings.skip_to(self._donor_meeting + 1, absent_from=self._donor_meeting)

    def acknowledge_join(self) -> bool:
        """Return `newcomer`, and set it to False."""
        newcomer, self.newcomer = self.newcomer, False
        return newcomer

    def close(self) -> None:
        self._transfer.close()
        self.meetings.close()

    def leave(self, within: float | None = None) -> None:
        """Tell the others that this worker leaves for good, so that nobody waits for it: at once, unless a slower
        founder still needs the initial state (`within`: seconds that this may take)."""
        self._leaving = True
        self._transfer.await_children(self.members, self.meetings.seen, within)
        self.members.leave()
        self.meetings.left = True

    # -- between steps ----------------------------------------------------------------------------------------

    def between_steps(self, lanes: Sequence[MemberLane]) -> None:
        """Serve the state to workers that asked for it, and join again if the others continued without this worker."""

        def progress() -> Progress:
            rounds, steps = [lane.k for lane in lanes], [lane.metrics.steps for lane in lanes]
            given, learned = [lane.donation() for lane in lanes], self.members.deadlines
            return Progress(
                rounds, steps, self.meetings.next, self.meetings.parked, given, learned.learned(), learned.step
            )

        step = self._usual_step.look([lane.metrics for lane in lanes])
        if step is not None:
            self.members.deadlines.step = step
        self._transfer.between_steps(progress)
        if self.members.excluded and not self._leaving:
            self._join_again(lanes)

    def _join_again(self, lanes: Sequence[MemberLane]) -> None:
        """After this worker was stopped or cut off for too long: take the state of a member that is ahead, and join."""
        if not self._attempts.due or self._rank_is_taken():
            return
        with ExitStack() as suspended:
            for lane in lanes:
                suspended.enter_context(lane.suspended())
            try:
                progress = self._take_state()
            except (PeerError, Unreachable, OSError):
                self._attempts.failed()  # still cut off: train alone, and try again after a later step
                with suppress(Unreachable):
                    continue_alone(self.members, self.meetings)
                return
            self._attempts.succeeded()
            self._continue_from(progress, lanes)

    def _take_state(self, retry_for: float = 0.0) -> Progress:
        """Take a member's state and what it has learned, and become a member."""
        progress = self._transfer.fetch(self.members, retry_for)
        self.members.deadlines.inherit(progress.deadline, progress.step_seconds)
        self.members.admit(progress.rounds)
        return progress

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

    def _continue_from(self, progress: Progress, lanes: Sequence[MemberLane]) -> None:
        self.newcomer, self._donor_meeting = True, progress.meetings
        self.meetings.skip_to(progress.meetings)
        if progress.parked and not self.meetings.parked:
            self.skip_meeting()
        deadline = Deadline(self.members.deadlines.shortest)
        while len(self.members.record.members) > 1 and not self.members.furthest(0):
            if not deadline.sleep(POLL):  # until a neighbor reports which round the others are in by now
                break
        for lane, rounds, steps, given in zip(lanes, progress.rounds, progress.steps, progress.lanes, strict=True):
            lane.continue_from(max(rounds, self.members.furthest(lane.index)), steps, given)
