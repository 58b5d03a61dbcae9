"""Elastic jobs in one process, for tests: a thread is a worker, the sockets and the directory are real."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn

import gossamer
from gossamer.comm.tcp import HostedDirectory
from gossamer.engine.elastic.gossip import ElasticGossip
from policies import policies

LIMIT = 300.0  # seconds until a test's worker counts as hung


def until(condition: Callable[[], bool], complaint: str = "") -> None:
    """Wait for `condition`; fail with `complaint` after LIMIT seconds."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.005)


class Worker(threading.Thread):
    """Trains `steps` steps of a small regression at its own pace, then calls `end(gossip)`."""

    def __init__(self, job: Job, rank: int, steps: int, end: Callable[[ElasticGossip], Any], pause: float):
        super().__init__(name=f"worker-{rank}", daemon=True)
        self.job, self.rank, self.steps, self.end, self.pause = job, rank, steps, end, pause
        self.gossip: ElasticGossip | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.stopped = threading.Event()  # killed
        self.frozen = threading.Event()
        self.values: list[torch.Tensor] = []
        self.started_at = 0

    def run(self) -> None:
        try:
            self.job.local.rank = self.rank
            with self.job.lock:  # torch's generator is one for all threads
                model, optimizer = self.job.make(self.rank)
            self.model = model
            gossip = gossamer.decentralize(
                model, optimizer, **policies(on_failure="continue", **{"timeout": 20.0, **self.job.options})
            )
            assert isinstance(gossip, ElasticGossip)
            self.gossip, self.started_at = gossip, gossip.stats()["steps"]
            while (step := gossip.stats()["steps"]) < self.steps:
                if self.stopped.is_set():
                    return
                while self.frozen.is_set():
                    time.sleep(0.01)
                self.job.train(self.rank, step, model, optimizer)
                self.values.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
                time.sleep(self.pause)
            self.result = self.end(gossip)
            gossip.close()
        except BaseException as error:
            if not self.stopped.is_set():
                self.error = error

    def kill(self) -> None:
        """Die as by kill -9: the others see closed connections and a closed port, and get no message."""
        self.stopped.set()
        assert self.gossip is not None
        self.gossip.members.close()
        self.join(LIMIT)

    def until(self, step: int) -> None:
        """Wait until this worker has taken `step` steps."""

        def reached() -> bool:
            assert self.error is None, self.error
            return self.gossip is not None and self.gossip.lanes[0].metrics.steps >= step

        until(reached, f"worker {self.rank} does not reach step {step}")


class Job:
    """`n` workers and the directory they meet in."""

    def __init__(self, n: int, per_node: int, options: dict[str, Any], hosted: HostedDirectory):
        self.n, self.options, self.directory = n, options, hosted
        self.nodes = [rank // per_node for rank in range(n)]  # by rank
        self.local = threading.local()
        self.lock = threading.Lock()

    def make(self, rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(100 + rank)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        return model, torch.optim.Adam(model.parameters(), lr=1e-2)

    def train(self, rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        x = torch.randn(16, 8, generator=generator)
        loss = (model(x) - x[:, :3].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def restart_directory(self) -> None:
        """End the directory and host an empty one on its port."""
        port = self.directory.port
        self.directory.close()
        gc.collect()
        self.directory = HostedDirectory(port)

    def start(self, rank: int, steps: int, end: Callable[..., Any] = lambda g: None, pause: float = 0.0) -> Worker:
        worker = Worker(self, rank, steps, end, pause)
        worker.start()
        return worker

    def all(self, steps: int, end: Callable[..., Any] = lambda g: None, pause: float = 0.0) -> list[Worker]:
        return [self.start(rank, steps, end, pause) for rank in range(self.n)]


@contextmanager
def job(monkeypatch: Any, n: int, per_node: int = 1, **options: Any) -> Any:
    made = Job(n, per_node, options, HostedDirectory())
    monkeypatch.setenv("GOSSAMER_DIRECTORY", f"127.0.0.1:{made.directory.port}")
    engine = import_module("gossamer.engine.decentralize")
    monkeypatch.setattr(engine, "rank_and_size", lambda without_group=False: (made.local.rank, n))
    for module in (engine, import_module("gossamer.comm.tcp.rendezvous")):
        monkeypatch.setattr(module, "node_name", lambda: f"node={made.nodes[made.local.rank]}")
    try:
        yield made
    finally:
        made.directory.close()


def finish(workers: list[Worker]) -> list[Any]:
    """Wait for `workers` and return their results; raise the first error of any."""
    for worker in workers:
        worker.join(LIMIT)
        if worker.error is not None:
            raise worker.error
        assert not worker.is_alive(), f"worker {worker.rank} does not end"
    return [worker.result for worker in workers]
