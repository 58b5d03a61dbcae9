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

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def family(self) -> str:
        return FAMILIES[self.category]
