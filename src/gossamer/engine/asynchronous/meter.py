"""What an asynchronous lane counts."""

from __future__ import annotations

from typing import Any

from gossamer.engine.asynchronous.clock import VirtualClock, WallClock
from gossamer.engine.metrics import Metrics
from gossamer.topology import Layout
from gossamer.trace import TraceWriter


class EventMetrics(Metrics):
    """And the unit of time, once it is agreed; by lane, since other optimizers may have other step times."""

    def __init__(
        self, worker: int, layout: Layout, writer: TraceWriter | None, lane: int, time: WallClock | VirtualClock
    ):
        super().__init__(worker, layout, writer)
        self._lane, self._clock = lane, time

    def summary(self) -> dict[str, Any]:
        unit = self._clock.unit if isinstance(self._clock, WallClock) else None
        return {**super().summary(), "unit_seconds_by_lane": {} if unit is None else {self._lane: unit}}
