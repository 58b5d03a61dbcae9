"""The one Span type, for predicted and measured timelines alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# What a span's time was spent on. `compute` is forward + backward where they are not told apart.
CATEGORIES = ("compute", "forward", "backward", "step", "wait", "exchange")

# The three kinds of time a reader cares about, and the color each has in every picture.
FAMILIES = {
    "compute": "compute",
    "forward": "compute",
    "backward": "compute",
    "step": "compute",
    "exchange": "communication",
    "wait": "waiting",
}
COLORS = {"compute": "#3b73b9", "communication": "#a3a7ad", "waiting": "#d1342f"}

MOST_STEPS = 1 << 40
LATEST = 1e12  # seconds; what is later is no time


def real(value: Any) -> float:
    """A finite number of seconds from a file."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LATEST:
        raise ValueError(f"time {value!r:.40}")
    return float(value)


def whole(value: Any, what: str, most: int) -> int:
    """A whole number from 0 to `most` from a file."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{what} {value!r:.40}, not from 0 to {most}")
    return value


@dataclass(frozen=True, slots=True)
class Span:
    """One interval on one worker's timeline, in seconds since the run's common origin.

    `attrs` carries what the category needs: `step`, `round`, `bucket`, `peer`, `bytes`, `wire`; a wait for the
    network rather than for a worker has `link`, the nodes it joins ("0-1").
    """

    category: str
    worker: int
    start: float
    end: float
    attrs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def checked(cls, category: Any, worker: Any, start: Any, end: Any, attrs: Any, workers: int) -> Span:
        """A span from a file that anybody may have written; a ValueError says what is wrong with it."""
        if category not in CATEGORIES:
            raise ValueError(f"category {category!r:.40}")
        begin, stop = real(start), real(end)
        if stop < begin:
            raise ValueError(f"it ends at {stop:g}, before its start at {begin:g}")
        if not isinstance(attrs, dict):
            raise ValueError(f"attributes {attrs!r:.40}")
        for name in ("step", "round", "bucket"):
            if name in attrs:
                whole(attrs[name], name, MOST_STEPS)
        if attrs.get("peer") is not None:
            whole(attrs["peer"], "peer", workers - 1)
        return cls(category, whole(worker, "worker", workers - 1), begin, stop, attrs)

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def family(self) -> str:
        return FAMILIES[self.category]
