"""The rows that one process of a run has written, in memory, and what they say about a moment."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

MOST_ROWS = 20_000  # of a process in memory; of more, every other one is dropped
NUMBERS = ("step", "seconds", "bytes")  # in every row of a step


@dataclass(frozen=True)
class Observation:
    """What a worker had sent to and waited for each peer, at some step."""

    time: float
    seconds: float
    step: int
    loss: float | None
    round: int | None
    sent: Mapping[int, float]
    waited: Mapping[int, float]
    members: tuple[int, ...] | None


@dataclass
class History:
    """Steps of one process. Counters that begin again, because the worker was replaced, are continued."""

    time: list[float] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    waited: list[float | None] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)
    loss: list[float | None] = field(default_factory=list)
    observed: dict[int, list[Observation]] = field(default_factory=dict)
    damaged: int = 0
    _before: dict[str, float] = field(default_factory=dict)  # counters of the worker's earlier lives

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the row of a step; a row without the numbers of a step is counted as damaged."""
        if not all(_number(row.get(name)) for name in NUMBERS):
            self.damaged += 1
            return
        time = row["time"] if _number(row.get("time")) else row["seconds"]  # runs of earlier versions
        seconds = self._continued("seconds", row["seconds"], self.seconds)
        sent = self._continued("bytes", row["bytes"], self.bytes)
        waited: Any = row.get("waited")
        self.time.append(max(time, self.time[-1]) if self.time else float(time))
        self.step.append(int(row["step"]))
        self.waited.append(self._continued("waited", waited, self.waited) if _number(waited) else None)
        self.seconds.append(seconds)
        self.bytes.append(sent)
        self.loss.append(float(row["loss"]) if _number(row.get("loss")) else None)
        self._observe(row.get("workers"))
        if len(self.time) > MOST_ROWS:
            for column in (self.time, self.step, self.seconds, self.waited, self.bytes, self.loss):
                del column[1:-1:2]

    def _continued(self, name: str, value: float, column: list[Any]) -> float:
        before = self._before.get(name, 0.0)
        last = column[-1] if column else None
        if last is not None and value + before < last - 1e-9:
            before = self._before[name] = last
        return value + before

    def _observe(self, workers: Any) -> None:
        for key, seen in (workers if isinstance(workers, dict) else {}).items():
            try:
                found = Observation(
                    self.time[-1],
                    self.seconds[-1],
                    self.step[-1],
                    float(seen["loss"]) if _number(seen.get("loss")) else None,
                    int(seen["round"]) if "round" in seen else None,
                    _by_peer(seen.get("sent", {})),
                    _by_peer(seen.get("waited", {})),
                    tuple(map(int, seen["members"])) if "members" in seen else None,
                )
                of_worker = self.observed.setdefault(int(key), [])
            except (TypeError, ValueError, AttributeError):
                self.damaged += 1
                continue
            of_worker.append(found)
            if len(of_worker) > MOST_ROWS // 8:
                del of_worker[1:-1:2]

    def at(self, time: float) -> int:
        """Return the index of the last row at `time`, -1 before the first."""
        return bisect_right(self.time, time) - 1

    def since(self, index: int, start: float) -> int:
        """Return the index of the last row before `start`, the beginning of a window that ends at row `index`."""
        return max(0, min(self.at(start), index - 1))

    def observation(self, worker: int, time: float, window: float) -> tuple[Observation, Observation] | None:
        """Return the worker's last observation at `time`, and the one at the beginning of a window."""
        found = self.observed.get(worker, [])
        last = bisect_right(found, time, key=lambda o: o.time) - 1
        if last < 0:
            return None
        first = bisect_right(found, time - window, key=lambda o: o.time) - 1
        return found[max(0, min(first, last - 1))], found[last]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _by_peer(values: Mapping[str, Any]) -> dict[int, float]:
    return {int(peer): float(value) for peer, value in values.items()}
