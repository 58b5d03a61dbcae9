"""Deadlines that set themselves, per edge, from what was seen: median + k * 1.4826 * MAD of the last arrivals.

The median and the median absolute deviation (MAD) of an edge do not follow a single pause, and do follow a change that
lasts. 1.4826 MAD is the standard deviation of normally distributed arrivals.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

WINDOW = 32  # arrivals that are remembered per edge
ENOUGH = 5  # arrivals without which an edge has no deadline of its own
SPREADS = 6.0  # k
SHORTEST, LONGEST = 0.25, 600.0  # seconds; the clamps of a soft deadline
OF_A_STEP = 0.5  # a soft deadline is at least this part of this worker's own step time
FIRST = 5.0  # seconds, or two steps if that is longer: while nothing is known about any edge
STRANGE = 2.0  # times the longest deadline of the known edges: while an edge has no deadline of its own
CONNECTING = 1.0  # seconds; the least for such an edge, whose connection may have to be made first
BEATS = 20.0  # usual gaps between heartbeats after which a peer counts as dead
SILENT, SILENT_LONGEST = 5.0, 60.0  # seconds; the clamps of a hard deadline


def usual_bound(seen: Sequence[float]) -> float:
    """median + k * 1.4826 * MAD of `seen`, which must not be empty."""
    middle = statistics.median(seen)
    return middle + SPREADS * 1.4826 * statistics.median(abs(value - middle) for value in seen)


def silence_bound(gaps: Sequence[float]) -> float:
    """The silence after which a peer with these gaps between heartbeats counts as dead."""
    if len(gaps) < ENOUGH:
        return SILENT
    return min(max(SILENT, BEATS * usual_bound(gaps)), SILENT_LONGEST)


class EdgeDeadlines:
    """How long to wait for each peer in an exchange, counted from the moment at which this worker began it.

    Args:
        fixed: The user's deadline in seconds, or None to learn one per edge.
    """

    def __init__(self, fixed: float | None):
        self.fixed = fixed
        self.step = 0.0  # seconds of this worker's own steps
        self._inherited: float | None = None  # what another worker had learned
        self._lags: dict[int, deque[float]] = {}

    def arrived(self, peer: int, lag: float) -> None:
        """Note that a message of `peer` came `lag` seconds after this worker had begun the exchange (0: before), even
        if this worker had given it up by then."""
        self._lags.setdefault(peer, deque(maxlen=WINDOW)).append(lag)

    def inherit(self, learned: float | None, step: float) -> None:
        """Begin with what the worker has learned whose state this worker took, and with its step time."""
        self._inherited = learned
        self.step = self.step or step

    def learned(self) -> float | None:
        """The longest deadline of the edges that are known; else the inherited one; else None."""
        known = [bound for peer in list(self._lags) if (bound := self._known(peer)) is not None]
        return max(known, default=self._inherited)

    @property
    def shortest(self) -> float:
        """The least that a worker waits for a peer once it needs its message."""
        return max(SHORTEST, OF_A_STEP * self.step) if self.fixed is None else self.fixed

    def of(self, peer: int) -> float:
        """Seconds to wait for `peer`."""
        if self.fixed is not None:
            return self.fixed
        known = self._known(peer)
        if known is not None:
            return min(max(self.shortest, known), LONGEST)
        first, learned = max(FIRST, 2 * self.step), self.learned()
        return first if learned is None else min(first, max(CONNECTING, self.shortest, STRANGE * learned))

    def _known(self, peer: int) -> float | None:
        """The deadline that the arrivals of `peer` ask for; None while they are few."""
        lags = list(self._lags.get(peer, ()))
        return usual_bound(lags) if len(lags) >= ENOUGH else None
