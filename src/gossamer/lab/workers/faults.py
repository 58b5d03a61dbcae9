"""Workers that live and die on their own, and the means to hurt them.

    with Cluster(nodes=4, per_node=2) as cluster, cluster.workforce() as force:
        for rank in range(cluster.n):
            force.start(rank, fn, *args)       # fn(rank, *args); forked in milliseconds
        force.kill(3)                          # kill -9; the others are not touched
        force.start(3, fn, *args)              # a replacement: same rank, same place
        force.stop(5), force.resume(5)         # SIGSTOP, SIGCONT
        cluster.cut(1), cluster.mend(1)        # the link of node 1 is down, and up again
        for worker in force.poll(0.1): ...     # those that ended since, and how

A `WorkerPool` is the opposite: there the first failure ends all.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from gossamer.errors import InputError
from gossamer.lab.workers.forkserver import WorkerSpec
from gossamer.lab.workers.launch import TAIL, Node, WorkerFailed, describe_exit, pickle_call, worker_specs
from gossamer.lab.workers.server import START_SECONDS, Gang, start_gang

Ending = Literal["returned", "raised", "died"]


@dataclass
class Worker:
    """One process in a rank's place; `generation` counts the processes that place has had."""

    rank: int
    generation: int
    pid: int
    started: float  # time.monotonic(), one clock for all processes
    gang: Gang = field(repr=False)
    ended: float | None = None
    ending: Ending | None = None
    value: Any = None  # what it returned
    why: str = ""  # how it died, or its traceback
    error: Exception | None = None  # what it raised, if that can be sent
    killed: bool = False  # by us
    stays: bool = False  # the process lives on after its call
    gone: bool = False  # reaped by the server, which has also ended what the worker left behind

    @property
    def running(self) -> bool:
        return self.ended is None

    def output(self) -> str:
        """The end of what it printed."""
        descriptor = self.gang.outputs[0].fileno()
        size = os.fstat(descriptor).st_size
        return os.pread(descriptor, TAIL, max(0, size - TAIL)).decode(errors="replace").strip()


class Workforce:
    """Places for n workers, filled one by one. Whoever ends, or is ended, leaves the others alone.

    They share a GOSSAMER_TOKEN made for them, unless `env` or this process's environment has one.
    """

    def __init__(
        self,
        n: int | None = None,
        *,
        per_node: Sequence[int] | None = None,
        nodes: Sequence[Node] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        counts = tuple(per_node) if per_node is not None else (n or 0,)
        token = {} if "GOSSAMER_TOKEN" in os.environ else {"GOSSAMER_TOKEN": secrets.token_hex(16)}
        self.specs = worker_specs(counts, nodes or (Node(),) * len(counts), {**token, **(env or {})})
        self.workers: list[Worker] = []  # all there ever were

    def __enter__(self) -> Workforce:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def current(self, rank: int) -> Worker | None:
        """The last process in a rank's place."""
        return next((w for w in reversed(self.workers) if w.rank == rank), None)

    @property
    def running(self) -> list[Worker]:
        return [w for w in self.workers if w.running]

    def start(self, rank: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Worker:
        """A worker in a free place: `fn(rank, *args, **kwargs)` begins at once."""
        if not 0 <= rank < len(self.specs):
            raise InputError(f"ranks are 0 to {len(self.specs) - 1}, got {rank}; a replacement takes its rank")
        before = self.current(rank)
        if before is not None and before.running:
            raise InputError(f"the place of rank {rank} is taken by process {before.pid}; kill it first")
        worker = launch(self.specs[rank], 0 if before is None else before.generation + 1, fn, *args, **kwargs)
        self.workers.append(worker)
        return worker

    def kill(self, rank: int) -> None:
        """kill -9, and of all that the worker started."""
        self._signal(rank, signal.SIGKILL).killed = True

    def stop(self, rank: int) -> None:
        """SIGSTOP: the process stays, and does nothing."""
        self._signal(rank, signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        """SIGCONT."""
        self._signal(rank, signal.SIGCONT)

    def stack(self, rank: int) -> str:
        """Where a worker is: its output after it was asked for its Python stacks."""
        worker = self._signal(rank, signal.SIGUSR1)
        time.sleep(0.5)
        return worker.output()

    def _signal(self, rank: int, number: signal.Signals) -> Worker:
        worker = self.current(rank)
        if worker is None:
            raise InputError(f"rank {rank} was never started; start it first")
        with contextlib.suppress(OSError):  # the server sends it: only it knows that the pid is still the worker's
            worker.gang.server.send(number)
        return worker

    def poll(self, seconds: float = 0.0) -> list[Worker]:
        """Wait up to `seconds` for workers to end; those that did since the last call."""
        deadline = time.monotonic() + seconds
        ended: list[Worker] = []
        while not ended:
            ends: dict[Connection, Worker] = {w.gang.server: w for w in self.workers if not w.gone}
            ends |= {w.gang.channels[0]: w for w in self.running if not w.gang.channels[0].closed}
            left = max(0.0, deadline - time.monotonic())
            if not ends:
                time.sleep(left)
                break
            for ready in wait(list(ends), left):
                worker = ends[ready]  # type: ignore[index]
                was = worker.running
                if ready is worker.gang.server:
                    _note_exit(worker)
                else:
                    _note_answer(worker)
                if was and not worker.running:
                    ended.append(worker)
            if time.monotonic() >= deadline:
                break
        return ended

    def wait_gone(self, seconds: float) -> list[Worker]:
        """Wait until the processes of all that ended are reaped; those that are not."""
        deadline = time.monotonic() + seconds
        while (left := [w for w in self.workers if not w.gone]) and time.monotonic() < deadline:
            self.poll(0.05)
        return left

    def close(self) -> None:
        """End everybody who is left."""
        for worker in self.workers:
            if not worker.gone:
                with contextlib.suppress(OSError):
                    worker.gang.server.send(signal.SIGKILL)
        self.wait_gone(10.0)
        for worker in self.workers:
            worker.gang.close()
        self.workers = []


def launch(spec: WorkerSpec, generation: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Worker:
    """Fork one worker and give it its call."""
    call = pickle_call(fn, args, kwargs)
    begin = time.monotonic()
    try:
        gang = start_gang([spec], [getattr(fn, "__module__", None)])
    except EOFError:
        raise WorkerFailed(
            f"the lab's fork server died or did not answer within {START_SECONDS:g} s; see its output above", spec.rank
        ) from None
    with contextlib.suppress(OSError):  # died at once: poll tells
        gang.channels[0].send_bytes(pickle.dumps(({}, call)))
    return Worker(spec.rank, generation, gang.pids[0], begin, gang)


def _note_exit(worker: Worker) -> None:
    try:
        _, _, code = worker.gang.server.recv()
        why = describe_exit(code)
    except (EOFError, OSError):
        why = "it is gone, and the fork server with it"
    worker.gone = True
    channel = worker.gang.channels[0]
    if worker.running and not channel.closed and channel.poll():
        _note_answer(worker)  # it had answered before it went
    if worker.running:
        worker.ended, worker.ending, worker.why = time.monotonic(), "died", why


def _note_answer(worker: Worker) -> None:
    try:
        kind, *rest = worker.gang.channels[0].recv()
    except (EOFError, OSError):
        worker.gang.channels[0].close()
        return  # the server is about to say how it died
    if kind == "ok":
        worker.ended, worker.ending, worker.value = time.monotonic(), "returned", rest[0]
    else:
        worker.ended, worker.ending, worker.why, worker.error = rest[0], "raised", rest[1], rest[2]
    if not worker.stays:
        worker.gang.channels[0].close()  # no more calls: the process leaves by itself


class Directory:
    """Where the workers of a fault-tolerant job find each other, hosted by a process that is no worker.

    `address` is what GOSSAMER_DIRECTORY holds. Use it as a context, or `close()` it: without it nobody can join.
    """

    def __init__(self, node: Node) -> None:
        self._process = launch(WorkerSpec(-1, {}, node.netns), 0, host_directory, node.address)
        self._process.stays = True
        self._force = Workforce(1)
        self._force.workers.append(self._process)
        deadline = time.monotonic() + START_SECONDS
        while self._process.running and time.monotonic() < deadline:
            self._force.poll(0.2)
        if self._process.ending != "returned":
            why = self._process.why or "it did not answer"
            self.close()
            raise WorkerFailed(f"the directory could not be hosted: {why}")
        self.address = f"{node.address}:{self._process.value}"

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._force.close()


def host_directory(rank: int, address: str) -> int:
    """Host a directory at `address` in this process for as long as it lives; its port."""
    from gossamer.comm.tcp import directory

    _kept.append(directory.host(address=address))
    return int(_kept[-1].port)


_kept: list[Any] = []
