"""Worker processes on this machine: started quickly, called together or one by one, and never left behind."""

from gossamer.lab.workers.placement import Node
from gossamer.lab.workers.pool import WorkerPool, WorkerTimeout, run_workers, warm_up
from gossamer.lab.workers.worker import Worker, WorkerFailed

__all__ = ["Node", "Worker", "WorkerFailed", "WorkerPool", "WorkerTimeout", "run_workers", "warm_up"]
