"""A cluster on one machine: worker processes, network namespaces, shaped links, emulated accelerators."""

from gossamer.lab.cpu import CpuMeter, RunStats
from gossamer.lab.launch import WorkerFailed, WorkerPool, WorkerTimeout, run_workers, warm_up

__all__ = ["CpuMeter", "RunStats", "WorkerFailed", "WorkerPool", "WorkerTimeout", "run_workers", "warm_up"]
