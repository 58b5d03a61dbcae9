"""Time limits of waits."""

from __future__ import annotations

import time


class Deadline:
    """A moment `seconds` from now by which a wait has to end.

    deadline = Deadline(timeout)
    while not done():
        if not deadline.sleep(0.02):
            raise PeerError(...)
    """

    def __init__(self, seconds: float):
        self._at = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds that are left; 0 after the deadline."""
        return max(0.0, self._at - time.monotonic())

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self._at

    def shorten(self, seconds: float) -> None:
        """End at most `seconds` from now."""
        self._at = min(self._at, time.monotonic() + seconds)

    def sleep(self, seconds: float) -> bool:
        """Sleep for `seconds`, but not beyond the deadline. Return False, without sleeping, once it has expired."""
        remaining = self.remaining
        if remaining > 0:
            time.sleep(min(seconds, remaining))
        return remaining > 0
