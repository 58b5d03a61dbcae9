"""A lane of an elastic job that gossips in events: AD-PSGD and A2CiD2 whose partners may die, leave and join.

Exchanges with a dead or unreachable neighbor are skipped by its neighbors alone, at once. When the members change, all
workers follow the event sequence of the new members' graph, with its rates, from the announced event on. Only the
numbers of events are shared: each worker starts the sequence on its own clock when it comes to that event, and a
newcomer when it hears that another worker has come to it. Clocks that are behind are set right: see Note [Why clocks
follow the furthest neighbor] in event_thread.py.

Both sides apply an exchange, or neither does (Note [Why an exchange has a verdict] in comm/tcp/frame.py), so the sum of
all workers is conserved as long as nobody dies. A death takes the dead worker's own share with it, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from gossamer.comm import Deadline, Stamp, clock
from gossamer.engine.asynchronous.clock import WallClock
from gossamer.engine.asynchronous.lane import AsyncLane
from gossamer.engine.asynchronous.thread import EventThread
from gossamer.engine.elastic.event_thread import ElasticEventThread
from gossamer.engine.elastic.meeting import Meeting
from gossamer.engine.elastic.member_lane import MemberLane
from gossamer.engine.lane import LaneParts
from gossamer.engine.policies import A2CiD2
from gossamer.topology.a2cid2 import rates_of
from gossamer.topology.events import Event, Events


class ElasticAsyncLane(MemberLane, AsyncLane):
    """An asynchronous lane over the members of an elastic job."""

    # Of the class, because the constructor of the base class opens the thread, which sets them for a newcomer.
    _begins = 0  # the event with which the members begin this worker's first plan
    _begin_by = Deadline(0.0)  # when this worker begins without hearing of them

    def _open_thread(self, parts: LaneParts) -> EventThread:
        self.follow_members()
        wall = self.clock
        assert isinstance(wall, WallClock)
        return ElasticEventThread(self, self._lock, wall, self.timetable, self._swap, self._members)

    # -- members; the caller holds the lock -------------------------------------------------------------------

    def follow_members(self) -> None:
        """Follow the latest members from their first event on. Called by the communication thread."""
        joins = self.epoch == 0
        record = self._follow_members()
        if record is None:
            return
        if joins:
            self._begins, self._begin_by = record.starts[self.index], Deadline(self.hard_deadline)
        topology, ranks, policy = self.schedule.topology, record.ranks, self.policy
        self.state.replan(ranks, rates_of(topology) if isinstance(policy, A2CiD2) else None, policy.rate)
        self.timetable.follow(
            Events(
                topology,
                policy.rate,
                policy.seed + 7919 * self.index + 104729 * record.epoch,
                policy.gaps,
                "edges" if policy.pairing == "edges" else "rounds",  # "auto" needs an agreement of fixed workers
                record.starts[self.index],
                max(self.clock.now(), self.state.time),
                ranks,
            )
        )
        for peer in self.neighbors:
            self.metrics.sent.setdefault(peer, 0)

    def _reached(self) -> int:
        following = self.timetable.next
        if following is None:  # it was alone: nobody has events with it
            return self._members.record.starts[self.index]
        return following.number

    @property
    def early(self) -> bool:
        """Whether this worker has joined and the others do not follow the plan with it yet. Then it waits."""
        return self._members.furthest(self.index) < self._begins and not self._begin_by.expired

    def begun_by_neighbors(self) -> list[tuple[int, float]]:
        """The last event that each neighbor was heard to have begun, and how many seconds ago that was heard."""
        peers = [self._members.links.peer(rank) for rank in self.neighbors]
        now = clock()
        return sorted((p.rounds[self.index] - 1, now - p.reported) for p in peers if p.rounds and not p.dead)

    def _stamp(self, peer: int) -> Stamp:
        return Stamp(self.epoch, self._plan, frozenset((peer,)))

    def begin_event(self, event: Event) -> None:
        """Report that this worker has begun `event`."""
        self.k = event.number + 1
        self._members.advance(self.index, self.k)

    def stepped(self) -> None:
        super().stepped()
        if self.index == 0:
            self._job.between_steps(cast("Sequence[MemberLane]", self.siblings))

    def _straggler(self, bound: int) -> int | None:
        """The slowest member that can be reached, if it is more than `bound` steps behind this worker. Nobody while
        the others continue without this worker: it hears of no steps then, and joins again after its own step."""
        if self._members.excluded or self.state.ahead() <= bound:
            return None
        mine, theirs = int(self.state.counts[0, self.rank]), self.state.counts[1]
        behind = [rank for rank in self.state.members.tolist() if mine - int(theirs[rank]) > bound]
        slowest_first = sorted(behind, key=lambda rank: int(theirs[rank]))
        return next((rank for rank in slowest_first if self._reachable(rank)), None)

    def _reachable(self, rank: int) -> bool:
        """Whether member `rank` may be alive. Without the directory a dead member stays a member."""
        self._members.connect_to(rank)  # of a member that is no neighbor, only a closed port is noticed
        peer = self._members.links.peer(rank)
        return not peer.dead and (rank not in self.neighbors or peer.silence() <= self._members.hard_deadline(rank))

    # -- state of a joining worker ----------------------------------------------------------------------------

    @torch.no_grad()
    def donation(self) -> dict[str, Any]:
        with self._lock:
            self._adopt_loaded()
            self.state.release()
            unit = self.clock.unit if isinstance(self.clock, WallClock) else None
            x_tilde = self.state.x_tilde
            if x_tilde is not None:
                with self.state.turns.training():  # a copy: an event may change x~ before the caller reads it
                    x_tilde = [x.clone() for x in x_tilde]
            return {"x_tilde": x_tilde, "unit": unit}

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Begin no event, and end the one in flight: it would add its (received - sent) / 2 to other values than those
        that it sent."""
        with self._lock:
            before, self.timetable.limit = self.timetable.limit, self.timetable.started
            if isinstance(self._thread, ElasticEventThread):
                self._thread.settle()
        try:
            yield
        finally:
            with self._lock:
                self.timetable.limit = before
                self._lock.notify_all()

    @torch.no_grad()
    def continue_from(self, rounds: int, steps: int, donated: dict[str, Any]) -> None:
        with self._lock:
            self.overwritten = False
            self.metrics.steps, self.k = steps, rounds
            self.epoch = 0  # follow the members' plan at once: the events before its start have passed
            self.state.adopt()
            if donated["x_tilde"] is not None and self.state.x_tilde is not None:
                with self.state.turns.training():
                    for mine, theirs in zip(self.state.x_tilde, donated["x_tilde"], strict=True):
                        mine.copy_(theirs)
            self.state.counts[:, self.rank] = steps
            if donated["unit"] is not None and isinstance(self.clock, WallClock) and self.clock.unit is None:
                self.clock.start(donated["unit"])
            self._lock.notify_all()
        self._members.advance(self.index, rounds)

    def count_steps(self, steps: int) -> None:
        with self._lock:
            self.metrics.steps = steps
            self.state.counts[:, self.rank] = steps

    # -- collective calls -------------------------------------------------------------------------------------

    def relay(self) -> None:
        """Nothing: the communication thread serves the others."""

    def halt(self, meeting: Meeting) -> None:
        """Begin no further event, and end the one in flight: if its partner is not in it yet, both skip it."""
        with self._lock:
            self.timetable.limit = self.timetable.started
            if isinstance(self.clock, WallClock):
                self.clock.halt()
            if isinstance(self._thread, ElasticEventThread):
                self._thread.settle()

    def drop(self) -> None:
        """End the event in flight and begin no further one: this worker leaves."""
        self._release_lock()
        if self._thread is not None:
            with self._lock:
                self._thread.stop()
