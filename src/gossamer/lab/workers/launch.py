"""Start real worker processes quickly, run functions on them, and never hang.

    def hello(rank, text):
        torch.distributed.init_process_group("gloo")      # RANK, WORLD_SIZE, MASTER_ADDR, ... are set
        return f"{text} from {rank}"

    run_workers(4, hello, "hi")                            # ['hi from 0', ..., 'hi from 3'], by rank

The first call in a process starts a server that imports torch once (some seconds); from then on a gang of workers
is forked in milliseconds. Functions are sent by reference, so they live at module level; their first argument is
the rank.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from gossamer.errors import GossamerError, InputError
from gossamer.lab.cpu import CpuMeter, RunStats
from gossamer.lab.workers.forkserver import MAX_WORKERS, WorkerSpec
from gossamer.lab.workers.server import START_SECONDS, start_gang

TAIL = 4000  # characters of a worker's output shown with a failure


class WorkerFailed(GossamerError):
    """A worker raised or died, and the run with it. The message carries its traceback and last output."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class WorkerTimeout(WorkerFailed):
    """Workers did not return in time; the message shows where each of them was."""


@dataclass(frozen=True)
class _Failure:
    at: float  # time.monotonic(), one clock for all processes
    rank: int
    summary: str
    details: str = ""
    cause: Exception | None = None


@dataclass(frozen=True)
class Node:
    """Where the workers of one node run: the address they have, and the namespace they enter (None: the host's)."""

    address: str = "127.0.0.1"
    interface: str = "lo"
    netns: str | None = None


class WorkerPool:
    """Persistent workers: started once, they run one function after the other.

        with WorkerPool(4) as pool:
            results = pool.run(fn, 1, key=2)      # fn(rank, 1, key=2) on every worker; results by rank

    An exception in a worker raises WorkerFailed here and leaves the pool usable, if all other workers return
    within `grace` seconds. Otherwise (a worker died, or hangs) all workers are killed, and the next `run` starts
    new ones; `setup(rank)` runs first on them. Every `run` has a MASTER_PORT of its own, so each function may
    make and destroy its own process group. `pool.stats` describes the last successful run.
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
                f"{len(self.nodes)} nodes cannot hold workers per node {self.per_node}; pass one count a node"
            )
        check_timeout(timeout)
        self.n = sum(self.per_node)
        self.env = dict(env or {})
        self.setup, self.timeout, self.grace, self.verbose = setup, timeout, grace, verbose
        self.stats: RunStats | None = None
        self.pids: list[int] = []
        self._gang: Connection | None = None
        self._channels: list[Connection] = []
        self._outputs: list[IO[bytes]] = []
        self._shown: list[int] = []
        self._exits: dict[int, int] = {}  # rank -> exit code, in the order in which the server saw them go

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """`fn(rank, *args, **kwargs)` on every worker; the results by rank, or WorkerFailed / WorkerTimeout."""
        limit = self.timeout if timeout is None else check_timeout(timeout)
        call = pickle_call(fn, args, kwargs)
        try:
            if self._gang is None:
                self._set_up(fn, limit)
            return self._call(call, fn, limit)
        except WorkerFailed:
            raise
        except BaseException:  # Ctrl-C above all
            self.kill()
            raise

    def close(self) -> None:
        """Let idle workers leave by themselves, then make sure that none is left."""
        for channel in self._channels:
            channel.close()
        if self.pids:
            self._await_exits(1.0)
        self.kill()

    def kill(self) -> None:
        """End all workers now. The next `run` starts new ones."""
        if self._gang is not None:
            with contextlib.suppress(OSError):
                self._gang.send(signal.SIGKILL)
                if self.pids:  # else the server is still importing; it will see the closed connection
                    self._await_exits(10.0)
            self._gang.close()
        for channel in self._channels:
            channel.close()
        for output in self._outputs:
            output.close()
        self._gang, self._channels, self._outputs, self.pids = None, [], [], []

    def _set_up(self, fn: Callable[..., Any], limit: float) -> None:
        try:
            self._start(fn)
            self._call(pickle_call(_ready, (), {}), _ready, START_SECONDS)
            if self.setup is not None:
                self._call(pickle_call(self.setup, (), {}), self.setup, limit)
        except WorkerFailed:
            self.kill()  # workers that are not set up must not run anything
            raise

    def _start(self, fn: Callable[..., Any]) -> None:
        try:
            gang = start_gang(
                worker_specs(self.per_node, self.nodes, self.env),
                [getattr(each, "__module__", None) for each in (fn, self.setup)],
            )
        except EOFError:
            raise WorkerFailed(
                f"the lab's fork server died or did not answer within {START_SECONDS:g} s; see its output above"
            ) from None
        self._gang, self._channels, self._outputs, self.pids = gang.server, gang.channels, gang.outputs, gang.pids
        self._shown, self._exits = [0] * self.n, {}

    def _call(self, call: bytes, fn: Callable[..., Any], limit: float) -> list[Any]:
        name = getattr(fn, "__name__", str(fn))
        begin = time.monotonic()
        with reserved_port(self.nodes[0]) as port, CpuMeter() as meter:
            payload = pickle.dumps(({"MASTER_PORT": str(port)}, call))
            for channel in self._channels:
                with contextlib.suppress(OSError):  # died while idle: its end-of-file is read below
                    channel.send_bytes(payload)
            answers, failures = self._collect(begin + limit)
        self._show_output()
        missing = [r for r in range(self.n) if r not in answers]
        if failures:
            first, *others = sorted(failures, key=lambda failure: failure.at)
            also = "".join(f"\n  then worker {f.rank}: {f.summary}" for f in others[:4])
            what = f"worker {first.rank} of {self.n} failed in {name}: {first.summary}"
            message = f"{what}{first.details}{self._tail(first.rank)}{also}"
            if missing:
                self.kill()
            raise WorkerFailed(message, first.rank) from first.cause
        if missing:
            stacks = self._stacks(missing)
            self.kill()
            who = f"worker{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.n}"
            raise WorkerTimeout(
                f"{who} did not return from {name} within {limit:g} s (timeout={limit:g}); all were ended{stacks}",
                missing[0],
            )
        cpu = tuple(answers[r][1] for r in range(self.n))
        self.stats = RunStats(time.monotonic() - begin, meter.use, cpu)
        return [answers[r][0] for r in range(self.n)]

    def _collect(self, deadline: float) -> tuple[dict[int, tuple[Any, float]], list[_Failure]]:
        """Wait for every worker's answer, until the deadline, or `grace` seconds after the first failure.

        A worker that raised has answered and lives on: it is in both results. One that died is a failure only.
        """
        answers: dict[int, tuple[Any, float]] = {}
        failures: list[_Failure] = []
        ranks = {channel: rank for rank, channel in enumerate(self._channels)}
        dead: set[int] = set()
        while len(answers) < self.n and not dead and time.monotonic() < deadline:
            pending = [c for c in self._channels if ranks[c] not in answers]
            patience = max(0.0, deadline - time.monotonic())
            for ready in wait(pending, min(patience, 0.2) if self.verbose else patience):
                rank = ranks[ready]  # type: ignore[index]
                try:
                    kind, *rest = self._channels[rank].recv()
                except (EOFError, OSError):
                    dead.add(rank)
                    continue
                if kind == "ok":
                    answers[rank] = (rest[0], rest[1])
                else:
                    at, text, cause = rest
                    summary = text.strip().rsplit("\n", 1)[-1]
                    failures.append(_Failure(at, rank, summary, f"\n{_indent(text)}", cause))
                    answers[rank] = (None, 0.0)
                    deadline = min(deadline, time.monotonic() + self.grace)
            self._show_output()
        if dead:
            failures += self._obituaries(dead)
        return answers, failures

    def _obituaries(self, dead: set[int]) -> list[_Failure]:
        """How the dead ended, in the order in which the server saw them go."""
        now = time.monotonic()
        self._await_exits(2.0, dead)
        found = []
        for rank, code in self._exits.items():
            if rank in dead:
                # Who is killed tells nobody; the others' connection errors may be here before we notice.
                found.append(_Failure(now - 1.0 if code < 0 else now, rank, describe_exit(code)))
        return found or [_Failure(now, rank, "it is gone, and the fork server with it") for rank in sorted(dead)]

    def _await_exits(self, seconds: float, ranks: set[int] | None = None) -> None:
        """Note exit codes as the server reports them, until those of `ranks` (default: all) are known."""
        assert self._gang is not None
        wanted = set(range(self.n)) if ranks is None else ranks
        deadline = time.monotonic() + seconds
        with contextlib.suppress(EOFError, OSError):
            while wanted - self._exits.keys() and self._gang.poll(max(0.0, deadline - time.monotonic())):
                _, rank, code = self._gang.recv()
                self._exits[rank] = code

    def _stacks(self, ranks: list[int]) -> str:
        """Ask the workers for their Python stacks (they print them), and return the ends of their output."""
        assert self._gang is not None
        with contextlib.suppress(OSError):
            self._gang.send(signal.SIGUSR1)
            time.sleep(0.5)
        return "".join(self._tail(rank) for rank in ranks[:4])

    def _tail(self, rank: int) -> str:
        output = self._outputs[rank]
        size = os.fstat(output.fileno()).st_size
        text = os.pread(output.fileno(), TAIL, max(0, size - TAIL)).decode(errors="replace").strip()
        return f"\n  last output of worker {rank}:\n{_indent(text)}" if text else ""

    def _show_output(self) -> None:
        """With `verbose`: pass on whole new lines, with the rank in front."""
        if not self.verbose:
            return
        for rank, output in enumerate(self._outputs):
            size = os.fstat(output.fileno()).st_size - self._shown[rank]
            text = os.pread(output.fileno(), size, self._shown[rank]) if size > 0 else b""
            lines, newline, _ = text.rpartition(b"\n")
            if newline:
                self._shown[rank] += len(lines) + 1
                for line in lines.decode(errors="replace").split("\n"):
                    print(f"[worker {rank}] {line}", file=sys.stderr, flush=True)


def run_workers(
    n: int | None,
    fn: Callable[..., Any],
    *args: Any,
    per_node: Sequence[int] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    verbose: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Run `fn(rank, *args, **kwargs)` on n fresh processes on loopback and return the results by rank.

    `per_node=[2, 2]` makes believe nodes (LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK); n may then be None. The first
    failure ends all workers and raises WorkerFailed with its rank and traceback; `timeout` (seconds, after the
    processes have started) raises WorkerTimeout with the stack of every worker that did not return.
    """
    with WorkerPool(n, per_node=per_node, env=env, timeout=timeout, grace=0.2, verbose=verbose) as pool:
        return pool.run(fn, *args, **kwargs)


def worker_specs(per_node: Sequence[int], nodes: Sequence[Node], env: Mapping[str, str]) -> list[WorkerSpec]:
    """What each worker is told, by rank: torchrun's variables, its node's interface and namespace, and `env`."""
    specs: list[WorkerSpec] = []
    for index, (count, node) in enumerate(zip(per_node, nodes, strict=True)):
        for local in range(count):
            own = {
                "RANK": len(specs),
                "WORLD_SIZE": sum(per_node),
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": count,
                "GROUP_RANK": index,
                "GROUP_WORLD_SIZE": len(per_node),
                "MASTER_ADDR": nodes[0].address,
                "GLOO_SOCKET_IFNAME": node.interface,
                "TP_SOCKET_IFNAME": node.interface,
            }
            text = {k: str(v) for k, v in own.items()}
            specs.append(WorkerSpec(len(specs), {**text, **env}, node.netns))
    return specs


def _ready(rank: int) -> None:
    """A worker that can return from this is up: time limits count from here."""


def check_per_node(n: int | None, per_node: Sequence[int] | None) -> tuple[int, ...]:
    """The workers on each node, from either way of saying it."""
    counts = tuple(per_node) if per_node is not None else (n,)
    if not counts or any(isinstance(c, bool) or not isinstance(c, int) or c < 1 for c in counts):
        raise InputError(f"workers per node must be positive integers, got {list(counts)}; write e.g. [2, 2]")
    whole = tuple(c for c in counts if c is not None)
    if n is not None and sum(whole) != n:
        raise InputError(f"workers per node {list(whole)} add up to {sum(whole)}, not to n={n}; pass one of the two")
    if sum(whole) > MAX_WORKERS:
        raise InputError(f"the lab starts at most {MAX_WORKERS} workers, got {sum(whole)}; use fewer per node")
    return whole


def check_timeout(seconds: float) -> float:
    if not seconds > 0:
        raise InputError(f"a timeout must be positive, got {seconds}; pass seconds, e.g. timeout=60")
    return seconds


def pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((fn, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"cannot send {getattr(fn, '__qualname__', fn)} to the workers ({error}); "
            "use a function at module level and arguments that can be pickled"
        ) from None


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().split("\n"))


def describe_exit(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with code {code} before it returned"


_ports = itertools.cycle(range(29500, 32768))  # below those that the kernel hands out


@contextlib.contextmanager
def reserved_port(master: Node) -> Any:
    """A port for the rendezvous that nobody else is given meanwhile.

    On the host a socket stays bound to it without listening: with SO_REUSEADDR a store may still listen there,
    while the kernel hands it to no one else. Inside a namespace of our own, counting is enough.
    """
    if master.netns is not None:
        yield next(_ports)
        return
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((master.address, 0))
        yield holder.getsockname()[1]
