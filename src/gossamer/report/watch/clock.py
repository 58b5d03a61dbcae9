"""The time of a watched run: seconds since it began, without the pauses between an interruption and a resume."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable

LONGEST_PAUSE = 300.0  # seconds without a row of any worker; longer pauses count as SHORT
SHORT = 1.0


class RunClock:
    """Maps wall-clock times to the run's own. Times that come in later may be earlier, but not before a pause."""

    def __init__(self) -> None:
        self._start: float | None = None
        self.latest = 0.0
        self._pauses: list[tuple[float, float]] = []  # where a pause ended, and all that was cut until then

    def add(self, times: Iterable[float]) -> None:
        """Take note of times at which something was written."""
        for time in sorted(times):
            if self._start is None:
                self._start = self.latest = time
            if time - self.latest > LONGEST_PAUSE:
                cut = self._pauses[-1][1] if self._pauses else 0.0
                insort(self._pauses, (time, cut + time - self.latest - SHORT))
            self.latest = max(self.latest, time)

    def of(self, time: float) -> float:
        """Return the seconds since the run began."""
        if self._start is None:
            return 0.0
        at = bisect_right(self._pauses, (time, float("inf"))) - 1
        return time - self._start - (self._pauses[at][1] if at >= 0 else 0.0)

    def wall(self, seconds: float) -> float:
        """Return the wall-clock time of a time of the run."""
        cut = 0.0
        for end, so_far in self._pauses:
            if end - (self._start or 0.0) - so_far <= seconds:
                cut = so_far
        return (self._start or 0.0) + seconds + cut

    @property
    def end(self) -> float | None:
        """The latest time, None before there is any."""
        return None if self._start is None else self.of(self.latest)
