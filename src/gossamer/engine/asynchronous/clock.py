"""Time in units of a mean gradient: wall time, or virtual time, where every gradient takes one unit."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from gossamer.comm import clock

BEHIND = 16.0  # units that exchanges may be late before a warning
BEHIND_SECONDS = 10.0  # and seconds: a pause of the machine is no backlog
LATER = 50  # steps after which the unit is compared with the step time
FAR = 4.0  # a unit this many times as long as a step deserves a warning


class SlowStart(NamedTuple):
    """The unit of time, and the time of a step at the start and now, in seconds."""

    unit: float
    then: float
    now: float


class WallClock:
    """Wall time in a unit that all workers agree on after their first steps; until then it stands still."""

    def __init__(self) -> None:
        self.start_at = 0.0  # the time at which the clock starts to run
        self.unit: float | None = None  # seconds
        self._origin = 0.0
        self.said: float | None = None  # the step time that this worker contributed to the agreement
        self._laps: list[float] = []  # seconds that the first steps took
        self._later: list[float] = []  # seconds of the steps after that
        self._judged = False
        self._late_at: float | None = None  # how late exchanges were when that was last looked at
        self._told_late = False
        self._halted: float | None = None
        self._last = clock()

    def now(self) -> float:
        return self.start_at if self.unit is None else (clock() - self._origin) / self.unit

    def until(self, time: float) -> float | None:
        return None if self.unit is None else max(0.0, time - self.now()) * self.unit

    def start(self, unit: float) -> None:
        self.unit, self._origin = unit, clock() - self.start_at * unit

    def rewind(self, time: float) -> None:
        """Continue at `time`: a state was loaded."""
        self.start_at = time
        if self._halted is not None:
            self._halted = time
        if self.unit is not None:
            self.start(self.unit)

    def halt(self) -> None:
        """Stand still from now until `go_on`: all workers are in a collective call."""
        self._halted = self.now()

    def go_on(self) -> None:
        """Leave the time since `halt` out: exchanges that nobody could make are not owed afterwards."""
        if self._halted is not None:
            self.rewind(self._halted)
        self._halted = None

    def lap(self) -> None:
        """Record how long the step that has just ended took."""
        laps = self._laps if self.said is None else self._later
        if len(self._later) < LATER:
            laps.append(clock() - self._last)
        self._last = clock()

    def pause(self) -> None:
        """Do not count the time since the last step as part of the next one."""
        self._last = clock()

    def laps(self) -> int:
        return len(self._laps)

    def usual_lap(self) -> float | None:
        """Median seconds per step, without the first step, which also sets things up."""
        return statistics.median_low(self._laps[1:]) if len(self._laps) > 1 else None

    def behind(self, due: float) -> float | None:
        """Once: how late the exchange is that was due at `due`, if exchanges are late by more than `BEHIND` units, and
        by at least half as much again as when that was first so."""
        late = self.now() - due
        if self._told_late or self.unit is None or late < max(BEHIND, BEHIND_SECONDS / self.unit):
            return None
        self._late_at = self._late_at or late
        self._told_late = late > 1.5 * self._late_at
        return late if self._told_late else None

    def slow_start(self) -> SlowStart | None:
        """Once, after `LATER` steps: the times, if the unit is too long because this worker's first steps were slow."""
        if self._judged or self.unit is None or self.said is None or len(self._later) < LATER:
            return None
        self._judged = True
        now = statistics.median_low(self._later)
        return SlowStart(self.unit, self.said, now) if min(self.unit, self.said) > FAR * now else None


class VirtualClock:
    """Moves when the worker steps, and events wait for it, so that runs are reproducible bit by bit."""

    def __init__(self) -> None:
        self.time = 0.0
        self.goal = 0.0  # how far events may go

    def now(self) -> float:
        return self.time

    def until(self, time: float) -> float | None:
        return 0.0 if time <= self.goal else None

    def load(self, time: float) -> None:
        self.time = self.goal = time
