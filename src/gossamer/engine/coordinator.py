"""What differs between kinds of jobs: how the workers meet, and what a worker does when it has to wait for others.

A lane and a handle are given one coordinator. A static job has `StaticCoordinator` (below): its workers are fixed and
meet at a round barrier. An elastic job has `ElasticCoordinator` (`engine/elastic/coordinator.py`), and virtual workers,
which share one thread, have another (`engine/virtual.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gossamer.comm import RoundBarrier

if TYPE_CHECKING:
    from gossamer.engine.lane import Lane
    from gossamer.engine.synchronous import SyncLane


class Coordinator(ABC):
    """How the workers of a job come together."""

    @abstractmethod
    def meet(self, lanes: Sequence[Lane], call: str) -> None:
        """Return when every worker is in the collective call `call`, with each lane at one round on all workers."""

    def stalled(self, lane: Lane, k: int, *, assist: bool) -> None:  # noqa: B027 - some have nobody to ask
        """`lane` has waited for a while and needs others to reach round `k`.

        `assist`: also let the worker's other lanes take part in rounds that other workers wait for.
        """

    def combine(self, lane: SyncLane) -> None:
        """Adapt, then combine: finish the round that `lane` has just launched and apply it."""
        lane.finish(assisting=True)
        lane.apply()

    def drive(self, lane: int, time: float) -> bool:
        """Perform the events of lane `lane` up to `time` on all workers. False: each lane's own thread does that."""
        return False

    def duration(self, rank: int, step: int) -> float:
        """How long a gradient takes on the virtual clock."""
        return 1.0


class StaticCoordinator(Coordinator):
    """A job whose workers are fixed: they meet at a round barrier in the job's store."""

    def __init__(self, barrier: RoundBarrier, *, events: bool):
        """`events`: workers run at their own pace and meet at an event instead of a round."""
        self._barrier, self._events = barrier, events

    def meet(self, lanes: Sequence[Lane], call: str) -> None:
        if self._events:
            self._barrier.meet_events(lanes, call)  # type: ignore[arg-type]  # asynchronous lanes can be frozen
        else:
            self._barrier.meet(lanes, call)

    def stalled(self, lane: Lane, k: int, *, assist: bool) -> None:
        self._barrier.nudge(lane.index, k)
        if assist and len(lane.siblings) > 1:
            self._barrier.assist(lane.siblings, lane.index)
