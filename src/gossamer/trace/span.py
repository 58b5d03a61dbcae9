"""`Span`, the element of predicted and measured timelines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# What a span's time was spent on. `compute` is forward and backward together, where they are not recorded separately.
CATEGORIES = ("compute", "forward", "backward", "step", "wait", "exchange")

# The three kinds of time, and the color of each in every picture.
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
LATEST = 1e12  # seconds; a larger number is not a time


def real(value: Any) -> float:
    """Check that a value from a file is a finite number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LATEST:
        raise ValueError(f"time {value!r:.40}")
    return float(value)


def whole(value: Any, what: str, most: int) -> int:
    """Check that a value from a file is a whole number from 0 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{what} {value!r:.40}, not from 0 to {most}")
    return value


@dataclass(frozen=True, slots=True)
class Span:
    """One interval on one worker's timeline, in seconds since the run's common origin.

    `attrs` has the details of the category: `step`, `round`, `bucket`, `peer`, `bytes`, `wire`. A wait for the network
    instead of a worker has `link`, the two nodes of the link ("0-1").
    """

    category: str
    worker: int
    start: float
    end: float
    attrs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def checked(cls, category: Any, worker: Any, start: Any, end: Any, attrs: Any, workers: int) -> Span:
        """Make a span from values of a file; a ValueError says which value is wrong."""
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
