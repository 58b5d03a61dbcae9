"""How busy the cores were: an emulated result is worth nothing when the real CPU was the bottleneck."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

SATURATED = 0.85


@dataclass(frozen=True)
class CpuTimes:
    """Jiffies of all cores since boot. Stolen time counts as busy: the cores were not ours to use."""

    busy: int
    total: int

    @classmethod
    def now(cls) -> CpuTimes | None:
        """None where there is no /proc/stat (not Linux)."""
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        except OSError:
            return None
        values = list(map(int, fields))
        idle = values[3] + values[4]
        return cls(sum(values) - idle, sum(values))

    def use_until(self, later: CpuTimes) -> float:
        """Fraction of all cores that was busy between the two readings."""
        return (later.busy - self.busy) / max(1, later.total - self.total)


class CpuMeter:
    """`with CpuMeter() as cpu: ...` then `cpu.use` (0 to 1 over all cores, or None) and `cpu.saturated`."""

    use: float | None = None

    def __enter__(self) -> CpuMeter:
        self._start = CpuTimes.now()
        return self

    def __exit__(self, *_: object) -> None:
        end = CpuTimes.now()
        self.use = self._start.use_until(end) if self._start and end else None

    @property
    def saturated(self) -> bool:
        return self.use is not None and self.use > SATURATED


@dataclass(frozen=True)
class RunStats:
    """What a run of the workers cost: `cpu_use` of the whole machine, `cpu_seconds` of each worker by rank."""

    seconds: float
    cpu_use: float | None
    cpu_seconds: tuple[float, ...]
    cores: int = os.cpu_count() or 1

    @property
    def saturated(self) -> bool:
        return self.cpu_use is not None and self.cpu_use > SATURATED
