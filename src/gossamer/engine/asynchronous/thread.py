"""The communication thread: performs this worker's events, one after another, each when its time has come."""

from __future__ import annotations

import itertools
import json
import statistics
import threading
from contextlib import suppress
from typing import Any

from gossamer.comm import Channel, Job, PeerError, PeerWait, clock
from gossamer.engine.asynchronous.clock import VirtualClock, WallClock
from gossamer.engine.asynchronous.events import StoreNotes, Swap, Timetable
from gossamer.engine.policies import Asynchronous
from gossamer.errors import GossamerError
from gossamer.topology.events import Event

WARM_UP = 5  # steps whose median time makes the unit
LONG = 0.4  # of the time between a worker's exchanges: above it, waiting for each other's order would cost time
POLL = 0.05  # seconds between looks at what the others said
FAREWELL = 5.0  # seconds that a message under way may take to arrive when this worker leaves


class EventThread:
    """Shares the lane's lock, state, clock and timetable with the training thread. What ends it is in `failure`."""

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
        self._lock, self._clock, self._timetable, self._swap = lock, time, timetable, swap
        self._channel, self._notes, self._policy, self._timeout = channel, notes, policy, timeout
        self.parked = False  # this worker is in a collective call and takes no steps
        self._stopping = self._in_flight = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"gossamer-{name}", daemon=True)
        self._thread.start()

    # -- told by the training thread, which holds the lock -----------------------------------------------------

    def park(self, parked: bool) -> None:
        self.parked = parked
        self._lock.notify_all()

    def stop(self) -> None:
        """Begin nothing more, but let a message under way arrive: gloo never tells whoever waits for the rest of a
        message that was cut off in the middle."""
        self._stopping = True
        self._lock.notify_all()
        self._lock.wait_for(lambda: not self._in_flight, FAREWELL)
        self._in_flight = False  # or never: its sender is gone

    def join(self) -> None:
        self._thread.join(timeout=5.0)

    def miss_who_left(self, what: str) -> None:
        """Raise if somebody has left: waiting for it cannot help."""
        left = self._notes.first_left()
        if left is not None:
            raise PeerError(
                f"worker {self._timetable.rank} lost worker {left}, which left the job without close(), and cannot "
                f"go on with {what}. Did worker {left} print an error? Restart the job from its last checkpoint."
            )

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if isinstance(self._clock, WallClock):
                with self._lock:
                    self._agree_on_unit(self._clock)
            while (event := self._take_turn()) is not None:
                self._perform(event)
        except BaseException as error:  # handed to the training thread, which raises it
            with self._lock:
                if not self._stopping:
                    self.failure = error
        finally:
            with self._lock:
                self._in_flight = False
                self._lock.notify_all()

    def _take_turn(self) -> Event | None:
        """The next event, claimed, once its time has come and it may begin; None when the lane stops."""
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
                else:  # others wait for it: no matter the time
                    early = 0.0 if event.number <= timetable.limit else None
                if early == 0.0:
                    timetable.started = event.number  # under the same lock: a collective call must not overlook it
                    return event
                self._lock.wait(early)
            return None

    def _perform(self, event: Event) -> None:
        """The counts first: when they have arrived the partner is there, and x is sent as it is then."""
        with self._lock:
            greeting = self._swap.greet(event, parked=self.parked)
        self._await(greeting)
        with self._lock:
            if self._stopping:
                return
            self._in_flight = True
            jobs = self._swap.send(event, self._clock.at(event.time))
        since = clock()
        for job in jobs:
            self._await(job)
        with self._lock:
            self._swap.receive(self._clock.at(event.time), jobs)
            if self._timetable.trial is not None:
                self._timetable.transfers.append(max(job.finished or 0.0 for job in jobs) - since)
            self._timetable.advance()
            self._in_flight = False
            self._lock.notify_all()

    def _await(self, job: Job) -> None:
        wait = PeerWait(self._timetable.rank, self._timeout)
        while not self._channel.wait(job, 1.0):
            if self._stopping and not self._in_flight:
                raise GossamerError("closed while an exchange was under way")
            if not self._in_flight:  # a message under way arrives, or gloo tells that it does not
                with suppress(RuntimeError):  # the store is gone: the exchange itself tells more
                    self.miss_who_left(f"event {job.round}")
            wait.check(lambda: f"worker {job.blocked_on} (event {job.round})", "is that worker alive?")
        if job.error is not None:
            raise job.error

    # -- agreements, with the lock -----------------------------------------------------------------------------

    def _agree_on_unit(self, wall: WallClock) -> None:
        """Wait for the first steps, then take the median of everybody's usual step time as the unit."""
        bound = self._policy.max_staleness
        enough = WARM_UP if bound is None else min(WARM_UP, bound)
        for attempt in itertools.count():
            self._lock.wait_for(lambda: self._stopping or self.parked or wall.laps() > enough)
            if self._stopping:
                return
            wall.said = wall.usual_lap()
            said = self._hear_all(f"unit/{attempt}", wall.said)
            known = [s for s in said or () if s is not None]
            if known:
                wall.start(statistics.median(known))
            if known or self._stopping:
                return
            # All were in a collective call before the first step: try again after it.
            self._lock.wait_for(lambda: self._stopping or not self.parked)

    def _agree_on_pairing(self) -> None:
        """The trial is over: where exchanges proved long, all go on in rounds of side-by-side pairs."""
        timetable, unit = self._timetable, self._clock.unit if isinstance(self._clock, WallClock) else None
        assert unit is not None
        assert timetable.next is not None
        assert timetable.trial is not None
        seconds = statistics.mean(timetable.transfers) if timetable.transfers else 0.0
        busy = self._policy.rate * seconds / unit
        generation = timetable.generation
        said = self._hear_all(f"pairing/{generation}", [busy, timetable.next.number])
        if said is None or generation != timetable.generation:
            return
        if statistics.median(s[0] for s in said) > LONG:
            # No event after the trial has begun anywhere: the rounds may take over their numbers.
            timetable.change_to_rounds(max(s[1] for s in said), timetable.trial)
            timetable.rewind()
        timetable.trial = None

    def _hear_all(self, what: str, mine: Any) -> list[Any] | None:
        """What everybody has to say, waiting without the lock; None if the lane stops or another state is loaded."""
        wait, generation = PeerWait(self._timetable.rank, self._timeout), self._timetable.generation
        subject = f"the {what.partition('/')[0]} of their exchanges"

        def late() -> str:
            return f"worker(s) {', '.join(map(str, self._notes.silent(what)))} to agree on {subject}"

        try:
            self._notes.say(what, json.dumps(mine))
            while (said := self._notes.heard(what)) is None:
                self.miss_who_left(f"the agreement on {subject}")
                self._lock.wait(POLL)
                loaded = generation != self._timetable.generation
                if self._stopping or (loaded and not what.startswith("unit")):
                    return None
                if self.parked:  # everybody will be there, or the collective call says who is not
                    wait.renew()
                wait.check(late, "are they alive, and do they take steps?")
        except RuntimeError as error:
            raise PeerError(
                f"worker {self._timetable.rank} lost the job's store while the workers agreed on {subject}; it lives "
                "in the launcher or in worker 0: is that alive? Restart the job from its last checkpoint."
            ) from error
        return [json.loads(text) for text in said]
