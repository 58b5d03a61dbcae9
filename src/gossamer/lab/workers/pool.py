"""Start worker processes quickly and run functions on them, with a time limit for every call.

    def hello(rank, text):
        torch.distributed.init_process_group("gloo")      # RANK, WORLD_SIZE, MASTER_ADDR, ... are set
        return f"{text} from {rank}"

    if __name__ == "__main__":
        run_workers(4, hello, "hi")                        # ['hi from 0', ..., 'hi from 3'], by rank

Workers are forked by multiprocessing's fork server, which imports torch once; that takes some seconds, and a fork takes
milliseconds. As always with multiprocessing, functions are sent by reference, so they are defined at module level, and
a script that starts workers does so below `if __name__ == "__main__":`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import Any, TypeVar

from gossamer.errors import InputError
from gossamer.lab.cpu import CpuMeter, RunStats
from gossamer.lab.workers.placement import Node, check_per_node, reserved_port, worker_specs
from gossamer.lab.workers.worker import Worker, WorkerFailed, pickle_call

T = TypeVar("T")
START_SECONDS = 120.0  # every worker imports the main script first
KILL_SECONDS = 10.0  # a process that is still there after this hangs in the kernel
PRELOAD = ["gossamer.lab.workers.preload"]
GUARD = '; its output is above, and a script must start workers below `if __name__ == "__main__":`'


class WorkerTimeout(WorkerFailed):
    """Workers did not return in time. The message shows the stack of each of them."""


class WorkerPool:
    """Up to n worker processes, one per rank, called together or one by one.

    Together: the workers stay and run one function after the other.

        with WorkerPool(4) as pool:
            results = pool.run(fn, 1, key=2)      # fn(rank, 1, key=2) on every worker; results by rank

    An exception in a worker raises WorkerFailed here, and the pool stays usable if all other workers return within
    `grace` seconds. Otherwise (a worker died, or hangs) all workers are killed, and the next `run` starts new ones, as
    it does if a worker has died since the last one; `setup(rank)` runs first on them. Every `run` has its own
    MASTER_PORT, so each function may make and destroy its own process group. `stats` describes the last successful run.

    One by one: each worker runs one function and ends, whatever happens to the others.

        with WorkerPool(4) as pool:
            for rank in range(4):
                pool.start(rank, fn, *args)        # fn(rank, *args)
            pool.kill(3)                           # kill -9
            pool.start(3, fn, *args)               # a replacement with the same rank
            pool.stop(1), pool.resume(1)           # SIGSTOP, SIGCONT
            for worker in pool.poll(0.1): ...      # workers whose call ended since the last poll, and how

    All workers of a pool share a GOSSAMER_TOKEN made for them, unless `env` or the environment of this process has one.
    A pool that is not closed is closed when this process exits.
    """

    def __init__(
        self,
        n: int | None = None,
        *,
        per_node: Sequence[int] | None = None,
        nodes: Sequence[Node] | None = None,
        env: Mapping[str, str] | None = None,
        setup: Callable[[int], Any] | None = None,
        timeout: float = 60.0,
        grace: float = 2.0,
        verbose: bool = False,
    ) -> None:
        self.per_node = check_per_node(n, per_node)
        self.nodes = tuple(nodes) if nodes is not None else (Node(),) * len(self.per_node)
        if len(self.nodes) != len(self.per_node):
            raise InputError(
                f"{len(self.nodes)} nodes cannot hold workers per node {self.per_node}; pass one count per node"
            )
        token = {} if "GOSSAMER_TOKEN" in os.environ else {"GOSSAMER_TOKEN": secrets.token_hex(16)}
        self.specs = worker_specs(self.per_node, self.nodes, {**token, **(env or {})})
        self.setup, self.timeout, self.grace, self.verbose = setup, _check_timeout(timeout), grace, verbose
        self.stats: RunStats | None = None
        self._workers: dict[int, Worker] = {}  # the latest worker of each rank
        self._unpolled: list[Worker] = []  # calls that ended and were not yet returned by `poll`
        self._shown: dict[int, int] = {}  # bytes of each rank's output that were printed

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def n(self) -> int:
        return len(self.specs)

    @property
    def pids(self) -> list[int]:
        return [worker.pid for _, worker in sorted(self._workers.items())]

    @property
    def running(self) -> list[Worker]:
        """Workers whose call has not ended."""
        return [worker for worker in self._workers.values() if worker.running]

    def current(self, rank: int) -> Worker | None:
        """The latest worker of a rank."""
        return self._workers.get(rank)

    def close(self) -> None:
        """Let idle workers end by themselves for a second, then kill all that are left."""
        if not self.running:
            for worker in self._workers.values():
                worker.hang_up()
            self.wait_gone(1.0)
        self.kill()

    def kill(self, rank: int | None = None) -> None:
        """Kill one worker, or all workers, and the processes that they started; wait until they are gone.

        A killed worker is returned by the next `poll`. After killing all, the pool is as new.
        """
        workers = list(self._workers.values()) if rank is None else [self._worker(rank)]
        for worker in workers:
            worker.killed |= worker.running
            worker.signal(signal.SIGKILL)
        self._await_exits(workers, KILL_SECONDS)
        if rank is None:
            for worker in workers:
                worker.close()
            self._workers, self._unpolled, self._shown = {}, [], {}
            atexit.unregister(self.kill)

    def run(self, fn: Callable[..., T], *args: Any, timeout: float | None = None, **kwargs: Any) -> list[T]:
        """Call `fn(rank, *args, **kwargs)` on every worker; return the results by rank.

        Raises WorkerFailed for the first worker that raised or died, and WorkerTimeout after `timeout` seconds
        (counted from when the workers have started; default: that of the pool).
        """
        limit = self.timeout if timeout is None else _check_timeout(timeout)
        call = pickle_call(fn, args, kwargs)
        if self.running:
            raise InputError("this pool has workers that were started one by one; let them end, or kill() all")
        try:
            for worker in self._workers.values():
                worker.update()  # one may have died since the last run
            if len(self._workers) < self.n or not all(worker.usable for worker in self._workers.values()):
                self.kill()
                self._start_all(limit)
            return self._call_all(fn, call, limit)
        except WorkerFailed:
            raise
        except BaseException:  # Ctrl-C, for example
            self.kill()
            raise

    def _start_all(self, limit: float) -> None:
        try:
            for rank in range(self.n):
                self._add(rank, 0, single_call=False)
            self._call_all(_start_up, pickle_call(_start_up, (), {}), START_SECONDS)
            if self.setup is not None:
                self._call_all(self.setup, pickle_call(self.setup, (), {}), limit)
        except WorkerFailed:
            self.kill()  # workers that are not set up must not run anything
            raise

    def _call_all(self, fn: Callable[..., T], call: bytes, limit: float) -> list[T]:
        name = getattr(fn, "__name__", str(fn))
        begin = time.monotonic()
        workers = [self._workers[rank] for rank in range(self.n)]
        with reserved_port(self.nodes[0]) as port, CpuMeter() as meter:
            for worker in workers:
                worker.call(call, {"MASTER_PORT": str(port)})
            self._await_answers(begin + limit)
        failed = sorted((w for w in workers if w.ending in ("raised", "died")), key=_failed_at)
        late = [worker.rank for worker in self.running]
        if failed:
            message = _failure_message(failed, self.n, name) + (GUARD if fn is _start_up else "")
            if late or any(worker.ending == "died" for worker in failed):
                self.kill()
            raise WorkerFailed(message, failed[0].rank) from failed[0].error
        if late:
            stacks = self._stacks(late)
            self.kill()
            who = f"worker{'s' * (len(late) > 1)} {', '.join(map(str, late))} of {self.n}"
            raise WorkerTimeout(
                f"{who} did not return from {name} within {limit:g} s (timeout={limit:g}); all were killed{stacks}",
                late[0],
            )
        self.stats = RunStats(time.monotonic() - begin, meter.use, tuple(w.cpu_seconds for w in workers))
        return [worker.value for worker in workers]

    def _await_answers(self, deadline: float) -> None:
        """Wait until all have answered, a worker died, `grace` seconds after the first exception, or the deadline. A
        worker that has hung up is waited for: its death may be why the others raised."""
        last = deadline
        while self.running:
            if any(worker.ending == "died" for worker in self._workers.values()):
                break
            dying = any(worker.hung_up is not None for worker in self.running)
            left = (last if dying else deadline) - time.monotonic()
            if left <= 0:
                break
            ended = self._wait(min(left, 0.2) if self.verbose else left)
            if any(worker.ending == "raised" for worker in ended):
                deadline = min(deadline, time.monotonic() + self.grace)
            self._show_output()
        self._show_output()

    def _stacks(self, ranks: Sequence[int]) -> str:
        """The end of the workers' output after they were asked to print their Python stacks."""
        for rank in ranks:
            self._workers[rank].signal(signal.SIGUSR1)
        time.sleep(0.5)
        return "".join(_tail(self._workers[rank]) for rank in ranks[:4])

    def _show_output(self) -> None:
        """With `verbose`: print the new complete lines of every worker, with the rank in front."""
        if not self.verbose:
            return
        for rank, worker in self._workers.items():
            lines, self._shown[rank] = worker.new_lines(self._shown.get(rank, 0))
            for line in lines:
                print(f"[worker {rank}] {line}", file=sys.stderr, flush=True)

    def start(self, rank: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Worker:
        """Start a worker that calls `fn(rank, *args, **kwargs)` once; a previous worker of the rank must have ended."""
        if not 0 <= rank < self.n:
            raise InputError(f"ranks are 0 to {self.n - 1}, got {rank}; a replacement takes the rank it replaces")
        call = pickle_call(fn, args, kwargs)
        before = self._workers.get(rank)
        if before is not None:
            if before.running:
                raise InputError(f"rank {rank} is taken by process {before.pid}; kill it first")
            before.hang_up()
            if self._await_exits([before], 1.0):  # it is about to exit
                self.kill(rank)
            before.close()
        worker = self._add(rank, 0 if before is None else before.generation + 1, single_call=True)
        worker.call(call, {})
        return worker

    def stop(self, rank: int) -> None:
        """Send SIGSTOP: the process stays and does nothing."""
        self._worker(rank).signal(signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        """Send SIGCONT to a worker that was stopped."""
        self._worker(rank).signal(signal.SIGCONT)

    def stack(self, rank: int) -> str:
        """The end of a worker's output after it was asked to print its Python stacks."""
        worker = self._worker(rank)
        worker.signal(signal.SIGUSR1)
        time.sleep(0.5)
        return worker.output()

    def poll(self, seconds: float = 0.0) -> list[Worker]:
        """Wait up to `seconds` until a call ends; return the workers whose call ended since the last poll."""
        deadline = time.monotonic() + seconds
        while True:
            self._unpolled += self._wait(0.0 if self._unpolled else max(0.0, deadline - time.monotonic()))
            if self._unpolled or time.monotonic() >= deadline:
                ended, self._unpolled = self._unpolled, []
                return ended

    def wait_gone(self, seconds: float) -> list[Worker]:
        """Wait up to `seconds` until all processes have ended; return the workers whose process has not."""
        return self._await_exits(list(self._workers.values()), seconds)

    def _worker(self, rank: int) -> Worker:
        worker = self._workers.get(rank)
        if worker is None:
            raise InputError(f"rank {rank} was never started; start it first")
        return worker

    def _add(self, rank: int, generation: int, *, single_call: bool) -> Worker:
        warm_up()
        atexit.unregister(self.kill)
        atexit.register(self.kill)  # before multiprocessing's own exit handler, which would wait for the workers
        self._workers[rank] = Worker(self.specs[rank], generation, single_call=single_call)
        return self._workers[rank]

    def _wait(self, seconds: float) -> list[Worker]:
        """Wait up to `seconds` for an answer or an exit; return the workers whose call ended."""
        sources = {source: worker for worker in self._workers.values() for source in worker.sources()}
        if not sources:
            time.sleep(seconds)
            return []
        ready = {id(sources[source]): sources[source] for source in wait(list(sources), seconds)}  # type: ignore[index]
        return [worker for worker in ready.values() if worker.update()]

    def _await_exits(self, workers: Sequence[Worker], seconds: float) -> list[Worker]:
        """Wait up to `seconds` until these workers are gone; return those that are not."""
        deadline = time.monotonic() + seconds
        while (left := [w for w in workers if not w.gone]) and time.monotonic() < deadline:
            self._unpolled += self._wait(max(0.0, deadline - time.monotonic()))
        return left


def run_workers(
    n: int | None,
    fn: Callable[..., T],
    *args: Any,
    per_node: Sequence[int] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    verbose: bool = False,
    **kwargs: Any,
) -> list[T]:
    """Call `fn(rank, *args, **kwargs)` on n new processes on loopback; return the results by rank.

    `per_node=[2, 2]` lets the workers believe they are on two nodes (LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK); n may
    then be None. The first failure kills all workers and raises WorkerFailed with the rank and the traceback.
    `timeout` (seconds, after the processes have started) raises WorkerTimeout with the stack of every worker that did
    not return.
    """
    with WorkerPool(n, per_node=per_node, env=env, timeout=timeout, grace=0.2, verbose=verbose) as pool:
        return pool.run(fn, *args, **kwargs)


def warm_up(*modules: str) -> None:
    """Start the fork server, which imports torch and `modules` in the background, so that workers start sooner.

    Multiprocessing has one fork server per process. If the program has started it before, it stays as it is, and every
    worker has to import torch itself.
    """
    multiprocessing.set_forkserver_preload([*PRELOAD, *modules])
    forkserver.ensure_running()


def _start_up(rank: int) -> None:
    """A worker that returns from this has started: time limits count from here."""


def _check_timeout(seconds: float) -> float:
    if not seconds > 0:
        raise InputError(f"a timeout must be positive, got {seconds}; pass seconds, e.g. timeout=60")
    return seconds


def _failed_at(worker: Worker) -> float:
    """When a worker failed, to find the first. A death by a signal is noticed after the errors that it causes."""
    by_signal = worker.exit_code is not None and worker.exit_code < 0
    return (worker.ended or 0.0) - (1.0 if worker.ending == "died" and by_signal else 0.0)


def _failure_message(failed: Sequence[Worker], n: int, name: str) -> str:
    def summary(worker: Worker) -> str:
        return worker.why.strip().rsplit("\n", 1)[-1]

    first, *others = failed
    traceback = f"\n{_indent(first.why)}" if first.ending == "raised" else ""
    also = "".join(f"\n  then worker {w.rank}: {summary(w)}" for w in others[:4])
    return f"worker {first.rank} of {n} failed in {name}: {summary(first)}{traceback}{_tail(first)}{also}"


def _tail(worker: Worker) -> str:
    text = worker.output()
    return f"\n  last output of worker {worker.rank}:\n{_indent(text)}" if text else ""


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().split("\n"))
