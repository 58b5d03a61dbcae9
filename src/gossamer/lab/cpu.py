"""Measure how busy the cores are: an emulated result is invalid if the real CPU was the bottleneck."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

SATURATED = 0.85
STAT, OWN_GROUP, GROUPS = Path("/proc/stat"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def usable_cores() -> float:
    """The number of cores that this process may use: those of its affinity, or fewer under a CPU quota."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota = cpu_quota()
    return cores if quota is None else min(cores, quota[1])


def cpu_quota() -> tuple[Path, float] | None:
    """The smallest CPU quota (`cpu.max`) that applies to this process: its control group, and the number of cores."""
    try:
        lines = OWN_GROUP.read_text().splitlines()
    except OSError:
        return None
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None:
        return None
    found = []
    for group in (GROUPS / own, *(GROUPS / own).parents):
        if group.is_relative_to(GROUPS) and (group / "cpu.max").is_file():  # the root group has none
            quota, period = (group / "cpu.max").read_text().split()
            if quota != "max":
                found.append((group, int(quota) / int(period)))
    return min(found, key=lambda item: item[1], default=None)


@dataclass(frozen=True)
class CpuTimes:
    """Time since boot of the cores that this process may use, in jiffies.

    Stolen time counts as busy, because the cores were not available. Under a CPU quota, `used` and `granted` are the
    seconds that the control group has used and was allowed to use.
    """

    busy: int
    total: int
    used: float = 0.0
    granted: float = 0.0

    @classmethod
    def now(cls) -> CpuTimes | None:
        """The times now; None without /proc/stat (not Linux)."""
        try:
            lines = [line.split() for line in STAT.read_text().splitlines() if line.startswith("cpu")]
        except OSError:
            return None
        own = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        rows = [line for line in lines if line[0] in own]
        if len(rows) < len(own):  # a container may number its cores differently
            rows = lines[:1]
        values = [sum(int(row[at]) for row in rows) for at in range(1, 9)]
        idle = values[3] + values[4]
        return cls(sum(values) - idle, sum(values), *_quota_times())

    def use_until(self, later: CpuTimes) -> float:
        """The fraction of the cores that was busy between two readings, or that of the quota if it is larger."""
        cores = (later.busy - self.busy) / max(1, later.total - self.total)
        granted = later.granted - self.granted
        return max(cores, (later.used - self.used) / granted) if granted > 0 else cores


def _quota_times() -> tuple[float, float]:
    quota = cpu_quota()
    if quota is None:
        return 0.0, 0.0
    group, cores = quota
    used = next(line for line in (group / "cpu.stat").read_text().splitlines() if line.startswith("usage_usec"))
    return int(used.split()[1]) / 1e6, cores * time.monotonic()


class CpuMeter:
    """`with CpuMeter() as cpu: ...`, then `cpu.use` (0 to 1 of the usable cores, or None) and `cpu.saturated`."""

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
    """The cost of a run: `cpu_use` of the usable cores (0 to 1), and `cpu_seconds` of each worker by rank."""

    seconds: float
    cpu_use: float | None
    cpu_seconds: tuple[float, ...]
    cores: float = field(default_factory=usable_cores)

    @property
    def saturated(self) -> bool:
        return self.cpu_use is not None and self.cpu_use > SATURATED
