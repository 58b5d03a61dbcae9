"""A cluster on one machine: worker processes, network namespaces, shaped links, emulated accelerators."""

from gossamer.lab.cluster import LabCluster
from gossamer.lab.cpu import CpuMeter, RunStats
from gossamer.lab.namespaces import LabUnavailable, clean_up, why_unavailable
from gossamer.lab.shaping import format_rate, parse_rate
from gossamer.lab.workers import Worker, WorkerFailed, WorkerPool, WorkerTimeout, run_workers, warm_up

__all__ = [
    "CpuMeter",
    "LabCluster",
    "LabUnavailable",
    "RunStats",
    "Worker",
    "WorkerFailed",
    "WorkerPool",
    "WorkerTimeout",
    "clean_up",
    "format_rate",
    "parse_rate",
    "run_workers",
    "warm_up",
    "why_unavailable",
]
