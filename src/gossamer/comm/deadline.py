"""Time limits of waits, and waits for other workers that explain themselves."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

from gossamer.comm.transport import PeerError, clock
from gossamer.errors import GossamerWarning

LET_READ = 10.0  # seconds that worker 0, in whose process the store may live, waits for others to read from it
WARN_AFTER = 30.0  # seconds after which a warning names the workers that are waited for


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


class PeerWait:
    """A wait of worker `rank` for other workers: warns once when it is long, raises after `timeout` seconds.

    wait = PeerWait(rank, timeout)
    while not done():
        wait.check(lambda: "worker 3", "is it alive?")
    """

    def __init__(self, rank: int, timeout: float):
        self._rank, self._timeout = rank, timeout
        self._warned = False
        self.since = clock()

    def renew(self) -> None:
        """Start counting again."""
        self.since = clock()

    def check(self, awaited: Callable[[], str], advice: str) -> None:
        """Warn or raise if the wait is long. `awaited` names what is waited for, `advice` asks what may be wrong."""
        waited = clock() - self.since
        if waited > self._timeout:
            raise PeerError(
                f"worker {self._rank} waited {waited:.0f} s for {awaited()} and gives up; {advice} Raise timeout= "
                "if it really takes that long"
            )
        if waited > WARN_AFTER and not self._warned:
            self._warned = True
            warnings.warn(
                f"worker {self._rank} has waited {waited:.0f} s for {awaited()}; it gives up after "
                f"timeout={self._timeout:g} s",
                GossamerWarning,
                stacklevel=3,
            )
