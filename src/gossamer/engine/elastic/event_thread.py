"""The communication thread of an elastic asynchronous lane: partners may be late, cut off or dead.

An event has three parts, and each may end it without harm: the greeting, which shows that the partner is there; the
parameters; and the verdict of both sides. A partner that is late or silent in the first two is skipped at the deadline.
A worker that has said that it is done waits for its partner's verdict as long as the partner is a member.

Note [Why clocks follow the furthest neighbor]: two workers meet in an event if their clocks come to it at the same
time, as far as the deadline of a greeting allows. A worker that has joined, stood still or entered a collective call
before the others has a clock that is behind, and would miss its partners in every event from then on, because they have
given up by the time it comes. But heartbeats say which event a neighbor has begun. If that comes after this worker's
next one, this worker is late, and sets its clock to the neighbor's: to the time of that event, plus the time since it
heard of it (at most one unit, since the neighbor may be busy). Clocks are set forward only, so all follow the one that
is furthest. Where nobody is further, events are late because exchanges are slow, and the clock is set back.
"""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gossamer.comm import Deadline, Job, PeerError, clock
from gossamer.comm.tcp import Membership, Unreachable, Verdict, look, read_json
from gossamer.engine.asynchronous.clock import WallClock
from gossamer.engine.asynchronous.events import Swap, Timetable
from gossamer.engine.asynchronous.thread import EventThread, warm_up
from gossamer.topology.events import Event

if TYPE_CHECKING:
    from gossamer.comm import Store
    from gossamer.engine.elastic.async_lane import ElasticAsyncLane

LOOK = 0.05  # seconds between checks of a job, of the members and of a collective call
OWED = 4.0  # units by which events may be late
FARTHEST = 10**5  # events by which a neighbor can be ahead
ASK = 0.25  # seconds between reads of the unit of time in the directory
SHORTEST_UNIT, LONGEST_UNIT = 1e-7, 1e7  # seconds; a step takes neither less nor more


class ElasticEventThread(EventThread):
    """Performs the events of a member, in order."""

    def __init__(
        self,
        lane: ElasticAsyncLane,
        lock: threading.Condition,
        time: WallClock,
        timetable: Timetable,
        swap: Swap,
        members: Membership,
    ):
        self._lane, self._members = lane, members
        self._verdicts: dict[int, Verdict] = {}  # what this worker has told each peer
        self._busy = False  # an event is under way
        super().__init__(f"events-{lane.index}", lock, time, timetable, swap)

    _clock: WallClock

    # -- called by the training thread, which holds the lock --------------------------------------------------

    def settle(self) -> None:
        """Wait until no event is under way. The caller has set the timetable's limit."""
        self._lock.wait_for(lambda: not self._busy or self.failure is not None)

    def stop(self) -> None:
        super().stop()
        self._lock.wait_for(lambda: not self._busy, LOOK * 10)

    # -- the thread -------------------------------------------------------------------------------------------

    def _agree_on_unit(self, wall: WallClock) -> None:
        """Take the median of the members' step times as the unit, by agreement in the directory."""
        enough, lane = warm_up(self._lane.policy), self._lane.index
        alone: Deadline | None = None  # while the directory does not answer
        while not self._stopping and wall.unit is None:
            with self._lock:
                ready = self._lock.wait_for(
                    lambda: self._stopping or self.parked or wall.unit is not None or wall.laps() > enough, ASK
                )
                mine = wall.usual_lap()
            if not ready or self._stopping or wall.unit is not None:
                continue
            try:
                unit = self._members.directory.ask(lambda store: self._settle_unit(store, lane, mine))  # noqa: B023
                alone = None
            except Unreachable:
                alone = alone or Deadline(self._lane.hard_deadline)
                unit = mine if alone.expired else None
            with self._lock:
                if unit is not None and wall.unit is None:
                    wall.said = mine
                    wall.start(unit)
                elif not self._stopping:
                    self._lock.wait(ASK)

    def _settle_unit(self, store: Store, lane: int, mine: float | None) -> float | None:
        """Post this worker's step time; return the unit once it is decided. Runs on the directory's thread, and raises
        ValueError for nonsense."""
        name = f"unit/{lane}"
        decided = look(store, name)
        if not decided:
            store.set(f"{name}/{self._members.rank}", json.dumps(mine))
            posted = [look(store, f"{name}/{rank}") for rank in self._members.record.ranks]
            known = [s for text in posted if text and (s := _step_time(text)) is not None]
            if not all(posted) or not known:
                return None
            decided = store.compare_set(name, "", json.dumps(statistics.median(known))).decode()
        unit = _step_time(decided)
        if unit is None:
            raise ValueError("the unit of time is null")
        return unit

    def _take_turn(self) -> Event | None:
        timetable = self._timetable
        with self._lock:
            self._busy = False
            self._lock.notify_all()
            while not self._stopping:
                early: float | None = None
                if timetable.limit is None and not self._members.excluded:
                    self._lane.follow_members()
                    if self._lane.early:
                        self._clock.rewind(timetable.events.start)
                        self._lock.wait(LOOK)
                        continue
                    if self._clock.unit is not None:
                        now, begun = self._clock.now(), self._lane.begun_by_neighbors()
                        right = caught_up(timetable, now, [(number, age / self._clock.unit) for number, age in begun])
                        if right != now:
                            self._clock.rewind(right)
                    event = timetable.next
                    early = None if event is None else self._clock.until(event.time)
                    if event is not None and early == 0.0:
                        timetable.started, self._busy = event.number, True
                        self._lane.begin_event(event)
                        return event
                self._lock.wait(LOOK if early is None else min(early, LOOK))
            return None

    def _perform(self, event: Event) -> None:
        peer = event.peer_of(self._timetable.rank)
        applied = self._attempt(event, peer)
        with self._lock:
            if not applied:
                self._lane.lost += 1
            self._timetable.advance()
            self._in_flight = False
            self._lock.notify_all()

    def _attempt(self, event: Event, peer: int) -> bool:
        """Perform `event` with `peer`; return whether both apply it."""
        if self._past(event, peer):
            return self._skip(event, peer)
        with self._lock:
            greeting = self._swap.greet(event, parked=self.parked)
        if not self._arrived([greeting], event, peer, greeting=True):
            return self._skip(event, peer)
        with self._lock:
            if not self._lane.state.believable():
                self._lane.metrics.refuse(peer, f"the step counts of event {event.number} cannot be true")
                return self._skip(event, peer)
            if self._stopping:
                return self._skip(event, peer)
            self._in_flight = True
            jobs = self._swap.send(event)
        if not self._arrived(jobs, event, peer, greeting=False) or not self._finite(jobs, peer):
            return self._skip(event, peer)
        self._judge(peer, self._verdicts.get(peer, Verdict())._replace(done=event.number))
        if not self._both_done(event, peer):
            return False
        with self._lock, torch.no_grad():
            self._swap.receive(event, jobs)
        return True

    def _arrived(self, jobs: Sequence[Job], event: Event, peer: int, *, greeting: bool) -> bool:
        """Wait for `jobs`; return whether all of them succeeded. A greeting may take as long as the deadline, since the
        partner may be in another event; the parameters may take any time in which the partner is not silent."""
        deadline = self._lane.deadline(peer)
        since = clock()
        partner, inbox = self._members.links.peer(peer), self._members.links.inbox
        for job in jobs:
            while not self._lane.channel.wait(job, LOOK):
                late = clock() - since > deadline and (greeting or partner.silence() > deadline)
                skipped = inbox.verdict(peer, self._lane.index).on(event.number) is False
                leaving = greeting and (self._stopping or self._timetable.limit is not None)
                if late or skipped or leaving or self._members.excluded or self._past(event, peer):
                    self._lane.given_up += late
                    self._lane.abandon(jobs)
                    return False
        for job in jobs:
            if job.error is not None and not isinstance(job.error, PeerError):
                raise job.error
        return all(job.error is None for job in jobs)

    def _past(self, event: Event, peer: int) -> bool:
        """Whether `peer` has begun a later event: it will send nothing more for this one."""
        rounds = self._members.links.peer(peer).rounds
        return bool(rounds) and rounds[self._lane.index] > event.number + 1

    def _finite(self, jobs: Sequence[Job], peer: int) -> bool:
        """Whether the values that arrived are finite; others are refused and counted."""
        with self._lane.state.turns.beside():
            fine = all(job.result is not None and bool(torch.isfinite(job.result.out).all()) for job in jobs)
        if not fine:
            self._lane.metrics.refuse(peer, f"values of event {jobs[0].round} are not finite")
        return fine

    def _both_done(self, event: Event, peer: int) -> bool:
        """Wait for the partner's verdict. Its death means that nobody holds the other half; if this worker was dropped
        by the others, it will take a member's state in place of its own."""
        links = self._members.links
        partner, inbox = links.peer(peer), links.inbox
        deadline = Deadline(2 * self._members.hard_deadline(peer))  # an edge that stays broken between two members
        with inbox.changed:
            while True:
                verdict = inbox.verdict(peer, self._lane.index).on(event.number)
                if verdict is not None:
                    return verdict
                if partner.dead or links.peer(peer) is not partner or deadline.expired or self._members.closed:
                    return False
                if self._members.excluded:
                    return False
                inbox.changed.wait(LOOK)

    def _skip(self, event: Event, peer: int) -> bool:
        """Tell the partner not to wait for this worker in `event`. Returns False."""
        self._judge(peer, self._verdicts.get(peer, Verdict())._replace(skipped=event.number))
        return False

    def _judge(self, peer: int, verdict: Verdict) -> None:
        self._verdicts[peer] = verdict
        self._members.judge(peer, self._lane.index, verdict)


def caught_up(timetable: Timetable, now: float, begun: Sequence[tuple[int, float]]) -> float:
    """Return the time to which a clock is set that shows `now`: see Note [Why clocks follow the furthest neighbor].

    `begun` has the last event of each neighbor in ascending order, and how many units ago it was heard of. Events that
    the neighbors have passed, and that are too late for this worker, are left out of `timetable`.
    """
    event = timetable.next
    if event is None:
        return now
    reached = event.number
    for number, age in begun:
        if event.number < number < event.number + FARTHEST and (time := timetable.time_of(number)) is not None:
            reached, now = number, max(now, time + min(1.0, age))
    while event.time < now - OWED and event.number < reached:
        timetable.advance()
        assert timetable.next is not None
        event = timetable.next
    return event.time if event.time < now - OWED else now  # what a fault held up is not made up in a burst


def _step_time(text: str) -> float | None:
    """The seconds in `text` of the directory; None where a worker has taken no step. Raise ValueError for nonsense."""
    said = read_json(text)
    if said is not None and (type(said) not in (int, float) or not SHORTEST_UNIT <= said <= LONGEST_UNIT):
        raise ValueError(f"{str(said)[:100]} is not the time of a step in seconds")
    return None if said is None else float(said)
