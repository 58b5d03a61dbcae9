"""How long a wait for others may take."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from gossamer.comm import PeerError, clock
from gossamer.engine.lane import WARN_AFTER
from gossamer.errors import GossamerWarning


class Patience:
    """One wait: the user is told once that it is long, and it ends with an error after `timeout` seconds."""

    def __init__(self, rank: int, timeout: float):
        self._rank, self._timeout = rank, timeout
        self._warned = False
        self.since = clock()

    def renew(self) -> None:
        self.since = clock()

    def try_on(self, whom: Callable[[], str], advice: str) -> None:
        """Still waiting. `whom` says for whom, when that has to be told."""
        waited = clock() - self.since
        if waited > self._timeout:
            raise PeerError(
                f"worker {self._rank} waited {waited:.0f} s for {whom()} and gives up; {advice} Raise timeout= if it "
                "really takes that long"
            )
        if waited > WARN_AFTER and not self._warned:
            self._warned = True
            warnings.warn(
                f"worker {self._rank} has waited {waited:.0f} s for {whom()}; it gives up after "
                f"timeout={self._timeout:g} s",
                GossamerWarning,
                stacklevel=2,
            )
