"""The communication thread: performs this worker's events in order, each when it is due."""

from __future__ import annotations

import itertools
import json
import statistics
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any

from gossamer.comm import Channel, Job, PeerError, PeerWait, clock
from gossamer.engine.asynchronous.clock import VirtualClock, WallClock
from gossamer.engine.asynchronous.events import StoreNotes, Swap, Timetable
from gossamer.engine.policies import Asynchronous
from gossamer.errors import GossamerError
from gossamer.topology.events import Event

WARM_UP = 5  # steps whose median time becomes the unit of time
LONG = 0.4  # exchanges that take more of the time between two of them than this are paired in rounds
POLL = 0.05  # seconds between checks of the other workers' notes
FAREWELL = 5.0  # seconds that a message in flight may take to arrive when this worker leaves


def warm_up(policy: Asynchronous) -> int:
    """Steps that a worker takes before it names its step time."""
    return WARM_UP if policy.max_staleness is None else min(WARM_UP, policy.max_staleness)


class EventThread(ABC):
    """Shares the lane's lock, state, clock and timetable with the training thread. `failure` is what ended it."""

    def __init__(
        self,
        name: str,
        lock: threading.Condition,
        time: WallClock | VirtualClock,
        timetable: Timetable,
        swap: Swap,
    ):
        self._lock, self._clock, self._timetable, self._swap = lock, time, timetable, swap
        self.parked = False  # this worker is in a collective call and takes no steps
        self._stopping = self._in_flight = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"gossamer-{name}", daemon=True)
        self._thread.start()

    # -- called by the training thread, which holds the lock --------------------------------------------------

    def park(self, parked: bool) -> None:
        self.parked = parked
        self._lock.notify_all()

    def stop(self) -> None:
        """Begin no further event, but let a message in flight arrive: if a message is cut off in the middle, gloo does
        not report an error to the receiver."""
        self._stopping = True
        self._lock.notify_all()
        self._lock.wait_for(lambda: not self._in_flight, FAREWELL)
        self._in_flight = False  # it arrived, or its sender is gone

    def join(self) -> None:
        self._thread.join(timeout=5.0)

    def leave(self) -> None:  # noqa: B027 - only the workers of a static job must be told
        """Tell the others that this worker leaves without being expected to."""

    def raise_if_left(self, what: str) -> None:  # noqa: B027 - the members of an elastic job may leave
        """Raise if a worker has left a static job: waiting for it cannot help."""

    # -- the thread -------------------------------------------------------------------------------------------

    @abstractmethod
    def _agree_on_unit(self, wall: WallClock) -> None:
        """Wait until the workers have agreed on the unit of time, and start the clock."""

    @abstractmethod
    def _take_turn(self) -> Event | None:
        """Wait until the next event is due and may begin, claim it and return it; None when the lane stops."""

    @abstractmethod
    def _perform(self, event: Event) -> None:
        """Exchange with the event's other worker."""

    def _run(self) -> None:
        try:
            if isinstance(self._clock, WallClock):
                self._agree_on_unit(self._clock)
            while (event := self._take_turn()) is not None:
                self._perform(event)
        except BaseException as error:  # the training thread raises it
            with self._lock:
                if not self._stopping:
                    self.failure = error
        finally:
            with self._lock:
                self._in_flight = False
                self._lock.notify_all()


class StaticEventThread(EventThread):
    """The events of a job whose workers are fixed: the loss of a partner ends it."""

    def __init__(
        self,
        name: str,
        lock: threading.Condition,
        time: WallClock | VirtualClock,
        timetable: Timetable,
        swap: Swap,
        channel: Channel,
        notes: StoreNotes,
        policy: Asynchronous,
        timeout: float,
    ):
        self._channel, self._notes, self._policy, self._timeout = channel, notes, policy, timeout
        super().__init__(name, lock, time, timetable, swap)

    def join(self) -> None:
        super().join()
        self._notes.close()

    def leave(self) -> None:
        self._notes.leave()

    def raise_if_left(self, what: str) -> None:
        left = self._notes.first_left()
        if left is not None:
            raise PeerError(
                f"worker {self._timetable.rank} lost worker {left}, which left the job without close(), and cannot "
                f"go on with {what}. Did worker {left} print an error? Restart the job from its last checkpoint."
            )

    def _take_turn(self) -> Event | None:
        timetable = self._timetable
        with self._lock:
            while not self._stopping:
                assert timetable.next is not None
                event = timetable.next
                if timetable.trial is not None and event.time > timetable.trial:
                    self._agree_on_pairing()
                    continue
                if timetable.limit is None:
                    early = self._clock.until(event.time)
                else:  # a collective call waits for this event: its time does not matter
                    early = 0.0 if event.number <= timetable.limit else None
                if early == 0.0:
                    timetable.started = event.number  # under the same lock, so that a collective call sees it
                    return event
                self._lock.wait(early)
            return None

    def _perform(self, event: Event) -> None:
        """Swap the step counts first: once they have arrived the partner is ready, and x is sent as it is then."""
        with self._lock:
            greeting = self._swap.greet(event, parked=self.parked)
        self._await(greeting)
        with self._lock:
            if self._stopping:
                return
            self._in_flight = True
            jobs = self._swap.send(event)
        since = clock()
        for job in jobs:
            self._await(job)
        with self._lock:
            self._swap.receive(event, jobs)
            if self._timetable.trial is not None:
                self._timetable.transfers.append(max(job.finished or 0.0 for job in jobs) - since)
            self._timetable.advance()
            self._in_flight = False
            self._lock.notify_all()

    def _await(self, job: Job) -> None:
        wait = PeerWait(self._timetable.rank, self._timeout)
        while not self._channel.wait(job, 1.0):
            if self._stopping and not self._in_flight:
                raise GossamerError("the lane was closed during an exchange")
            if not self._in_flight:  # a message in flight arrives, or gloo reports its loss
                with suppress(RuntimeError):  # the store is gone: the error of the exchange says more
                    self.raise_if_left(f"event {job.round}")
            wait.check(lambda: f"worker {job.blocked_on} (event {job.round})", "is that worker alive?")
        if job.error is not None:
            raise job.error

    # -- agreements -------------------------------------------------------------------------------------------

    def _agree_on_unit(self, wall: WallClock) -> None:
        """Wait for the first steps, then take the median of all workers' step times as the unit of time."""
        with self._lock:
            self._agree_on_unit_locked(wall, warm_up(self._policy))

    def _agree_on_unit_locked(self, wall: WallClock, enough: int) -> None:
        for attempt in itertools.count():
            self._lock.wait_for(lambda: self._stopping or self.parked or wall.laps() > enough)
            if self._stopping:
                return
            wall.said = wall.usual_lap()
            said = self._agree_on(f"unit/{attempt}", wall.said)
            known = [s for s in said or () if s is not None]
            if known:
                wall.start(statistics.median(known))
            if known or self._stopping:
                return
            # All workers were in a collective call before their first step: try again after the call.
            self._lock.wait_for(lambda: self._stopping or not self.parked)

    def _agree_on_pairing(self) -> None:
        """At the end of the trial: if exchanges take long, all workers continue in rounds of side-by-side pairs. The
        caller holds the lock."""
        timetable, unit = self._timetable, self._clock.unit if isinstance(self._clock, WallClock) else None
        assert unit is not None
        assert timetable.next is not None
        assert timetable.trial is not None
        seconds = statistics.mean(timetable.transfers) if timetable.transfers else 0.0
        busy = self._policy.rate * seconds / unit
        generation = timetable.generation
        said = self._agree_on(f"pairing/{generation}", [busy, timetable.next.number])
        if said is None or generation != timetable.generation:
            return
        if statistics.median(s[0] for s in said) > LONG:
            # No event after the trial has begun on any worker, so the rounds may use their numbers.
            timetable.change_to_rounds(max(s[1] for s in said), timetable.trial)
            timetable.rewind()
        timetable.trial = None

    def _agree_on(self, what: str, mine: Any) -> list[Any] | None:
        """Post `mine` and return the notes of all workers; None if the lane stops or another state is loaded.

        Releases the lock while it waits.
        """
        wait, generation = PeerWait(self._timetable.rank, self._timeout), self._timetable.generation
        subject = f"the {what.partition('/')[0]} of their exchanges"

        def late() -> str:
            return f"worker(s) {', '.join(map(str, self._notes.missing(what)))} to agree on {subject}"

        try:
            self._notes.post(what, json.dumps(mine))
            while (said := self._notes.all(what)) is None:
                self.raise_if_left(f"the agreement on {subject}")
                self._lock.wait(POLL)
                loaded = generation != self._timetable.generation
                if self._stopping or (loaded and not what.startswith("unit")):
                    return None
                if self.parked:  # the collective call names the workers that do not come
                    wait.renew()
                wait.check(late, "are they alive, and do they take steps?")
        except RuntimeError as error:
            raise PeerError(
                f"worker {self._timetable.rank} lost the job's store while the workers agreed on {subject}; it lives "
                "in the launcher or in worker 0: is that alive? Restart the job from its last checkpoint."
            ) from error
        return [json.loads(text) for text in said]
