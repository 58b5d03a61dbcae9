"""Elastic jobs in one process, for tests: a thread is a worker, the sockets and the directory are real.

On a busy machine a thread, or all of them, may stand still for seconds at any moment. So a test ends its workers with
`end_now` once what it waits for has happened, and a member counts as dead in seconds only where that is what is tested.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer.comm.tcp import DirectoryClient, HostedDirectory
from gossamer.comm.tcp.liveness import Liveness
from gossamer.engine.elastic.gossip import ElasticGossip
from policies import policies

LIMIT = 300.0  # seconds until a test's worker counts as hung
PATIENCE = 60.0  # seconds for which a worker may stand still because the machine is busy


def until(condition: Callable[[], bool], complaint: str = "") -> None:
    """Wait for `condition`; fail with `complaint` after LIMIT seconds."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.005)


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the answers of a directory: a busy machine may stop a process for seconds, and a worker that gets no
    answer for three of them does not start, or meets alone."""
    ask = DirectoryClient.ask
    monkeypatch.setattr(DirectoryClient, "ask", lambda self, request, timeout=LIMIT: ask(self, request, timeout))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """`be_patient` in modules that import this; `job` is so by itself."""
    be_patient(monkeypatch)


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
                model, optimizer, **policies(**{"timeout": LIMIT, "hard_deadline": PATIENCE, **self.job.options})
            )
            assert isinstance(gossip, ElasticGossip)
            self.gossip, self.started_at = gossip, gossip.stats()["steps"]
            while (step := gossip.stats()["steps"]) < self.steps:
                if self.job.deaths.get(self.rank) == step:
                    del self.job.deaths[self.rank]  # a replacement lives
                    self._die()
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
        self._die()
        self.join(LIMIT)

    def _die(self) -> None:
        assert self.gossip is not None
        self.stopped.set()
        self.gossip.members.close()
        for peer in list(self.gossip.members.links.peers.values()):
            peer.dead = peer.dead or "this worker is dead itself"  # what is left of it waits for nobody

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
        self.deaths: dict[int, int] = {}  # by rank: after how many steps a worker dies, as by kill -9
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
    be_patient(monkeypatch)
    monkeypatch.setattr("gossamer.comm.deadline.WARN_AFTER", LIMIT)  # warnings are errors
    monkeypatch.setattr("gossamer.engine.asynchronous.clock.FAR", math.inf)
    monkeypatch.setattr("gossamer.engine.asynchronous.clock.BEHIND_SECONDS", LIMIT)
    monkeypatch.setenv("GOSSAMER_DIRECTORY", f"127.0.0.1:{made.directory.port}")
    engine = import_module("gossamer.engine.decentralize")
    monkeypatch.setattr(engine, "rank_and_size", lambda without_group=False: (made.local.rank, n))
    for module in (engine, import_module("gossamer.comm.tcp.rendezvous")):
        monkeypatch.setattr(module, "node_name", lambda: f"node={made.nodes[made.local.rank]}")
    try:
        yield made
    finally:
        made.directory.close()


@contextmanager
def silent(monkeypatch: Any, workers: list[Worker], rank: int) -> Any:
    """Stop worker `rank` and its heartbeats as under SIGSTOP, and let the others drop it for that. Inside the block it
    has been dropped; it goes on after the block. No other member is dropped, however long it stands still."""
    links, hard_deadline = workers[rank].gossip.members.links, Liveness.hard_deadline
    others = [w for w in workers if w.rank != rank]
    with monkeypatch.context() as only:
        only.setattr(Liveness, "hard_deadline", lambda s, p: 0.6 if p.rank == rank else hard_deadline(s, p))
        only.setattr(links, "send_all", lambda *a, **k: None)
        workers[rank].frozen.set()
        until(lambda: all(rank not in w.gossip.stats()["members"] for w in others))
    yield
    workers[rank].frozen.clear()


def end_now(workers: list[Worker]) -> list[Any]:
    """Let `workers` come to their end after the step that they are in, and return their results."""
    for worker in workers:
        worker.steps = 0
    return finish(workers)


def finish(workers: list[Worker]) -> list[Any]:
    """Wait for `workers` and return their results; raise the first error of any."""
    for worker in workers:
        worker.join(LIMIT)
        if worker.error is not None:
            raise worker.error
        assert not worker.is_alive(), f"worker {worker.rank} does not end"
    return [worker.result for worker in workers]
