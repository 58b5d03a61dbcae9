"""The process that imports torch once and forks workers from then on; started and driven by `launch`.

It stays single-threaded (no tensor is ever computed here), so a fork is safe and takes milliseconds. Every gang
of workers has its own connection: when that closes, for whatever reason, the gang is killed. So nothing outlives
the launcher, not even after kill -9.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import Any

# Imported by every training worker anyway; `torch._dynamo` comes in with the first optimizer step (2 s of CPU each).
PRELOAD = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "numpy", "gossamer.lab.chaos.worker")
MAX_WORKERS = 120  # a Unix socket carries at most 253 file descriptors in a message: two a worker
PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class WorkerSpec:
    """What one worker needs to know before it runs anything."""

    rank: int
    env: dict[str, str]
    netns: str | None = None  # the name of a network namespace, or the host's own


@dataclass(frozen=True)
class GangSpec:
    """Workers that are started and killed together."""

    workers: tuple[WorkerSpec, ...]
    sys_path: tuple[str, ...]
    cwd: str
    environ: dict[str, str]
    main: dict[str, Any] | None = None  # how to import the launcher's __main__, if a function lives there


@dataclass
class Gang:
    connection: Connection
    alive: dict[int, int] = field(default_factory=dict)  # pid -> rank

    def kill(self, number: int) -> None:
        for pid in self.alive:  # not yet reaped, so the pid is still theirs
            _signal_group(pid, number)

    def tell(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone: its end-of-file is next in the queue
            self.connection.send(message)


def _signal_group(pid: int, number: int) -> None:
    """Signal a worker and whatever it started (data loaders), which share its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def main(descriptor: int) -> None:
    """Serve until the launcher closes its end."""
    control = socket.socket(fileno=descriptor)
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the children share these pages; a collection must not touch (and copy) them
    bell, ringer = socket.socketpair()
    bell.setblocking(False)
    ringer.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ringer.fileno(), warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(bell, selectors.EVENT_READ)
    gangs: list[Gang] = []
    try:
        while True:
            for key, _ in selector.select():
                if key.fileobj is control:
                    request = _receive(control)
                    if request is None:
                        return
                    spec, fds = request
                    private = [control.fileno(), bell.fileno(), ringer.fileno(), selector.fileno()]
                    private += [g.connection.fileno() for g in gangs]
                    gang = _fork_gang(spec, fds, private)
                    gangs.append(gang)
                    selector.register(gang.connection, selectors.EVENT_READ, gang)
                elif key.fileobj is bell:
                    with contextlib.suppress(BlockingIOError):
                        bell.recv(4096)
                    _reap(gangs)
                elif key.data in gangs and not _obey(key.data):
                    key.data.kill(signal.SIGKILL)
                    selector.unregister(key.data.connection)
                    key.data.connection.close()
                    gangs = [g for g in gangs if g is not key.data or g.alive]
    finally:
        for gang in gangs:
            gang.kill(signal.SIGKILL)
        signal.set_wakeup_fd(-1)


def _receive(control: socket.socket) -> tuple[GangSpec, list[int]] | None:
    """One request: a length with the file descriptors attached, then the pickled GangSpec."""
    header, ancillary, _, _ = control.recvmsg(8, socket.CMSG_SPACE(4 * 256))
    if len(header) < 8:
        return None
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    body = bytearray()
    while len(body) < int.from_bytes(header, "big"):
        piece = control.recv(1 << 16)
        if not piece:
            return None
        body += piece
    return pickle.loads(body), list(fds)


def _fork_gang(spec: GangSpec, fds: list[int], private: list[int]) -> Gang:
    gang_fd, *rest = fds
    channels, outputs = rest[: len(spec.workers)], rest[len(spec.workers) :]
    gang = Gang(Connection(gang_fd))
    server = os.getpid()
    pids = []
    for index, worker in enumerate(spec.workers):
        pid = os.fork()
        if pid == 0:
            keep = {channels[index], outputs[index]}
            for fd in {*private, *fds} - keep:
                os.close(fd)
            _worker(spec, worker, Connection(channels[index]), outputs[index], server)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # here and in the child: whoever comes first
        gang.alive[pid] = worker.rank
        pids.append(pid)
    for fd in rest:
        os.close(fd)
    gang.tell(("started", pids))
    return gang


def _reap(gangs: list[Gang]) -> None:
    while True:
        try:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if dead is None:
            return
        _signal_group(dead.si_pid, signal.SIGKILL)  # what it left behind, while its pid cannot be reused
        _, status = os.waitpid(dead.si_pid, 0)
        for gang in gangs:
            if dead.si_pid in gang.alive:
                gang.tell(("exit", gang.alive.pop(dead.si_pid), os.waitstatus_to_exitcode(status)))


def _obey(gang: Gang) -> bool:
    """Perform what the launcher asks of a gang; False when the launcher has hung up."""
    try:
        gang.kill(signal.Signals(gang.connection.recv()))
    except (EOFError, OSError):
        return False
    return True


def _worker(spec: GangSpec, worker: WorkerSpec, channel: Connection, output: int, server: int) -> None:
    """The life of a worker, in the forked child: set the scene, then run calls until the launcher hangs up."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        _die_with(server)
        faulthandler.enable(file=sys.stderr)
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
        if worker.netns is not None:
            enter_namespace(worker.netns)
        os.chdir(spec.cwd)
        os.environ.clear()
        os.environ.update(spec.environ)
        os.environ.update(worker.env)
        sys.path[:] = spec.sys_path
        importlib.import_module("torch").set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        if spec.main is not None:
            spawn.prepare(spec.main)
        _serve_calls(worker.rank, channel)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # the server's own exit handlers are not ours to run


def _serve_calls(rank: int, channel: Connection) -> None:
    """Run what the launcher sends; an ordinary exception is an answer, not the end of the worker."""
    while True:
        try:
            payload = channel.recv_bytes()
        except (EOFError, OSError):
            return
        cpu = time.process_time()
        try:
            env, call = pickle.loads(payload)
            os.environ.update(env)
            function, args, kwargs = pickle.loads(call)
            value = function(rank, *args, **kwargs)
            answer = pickle.dumps(("ok", value, time.process_time() - cpu))
        except Exception as error:
            when, text = time.monotonic(), traceback.format_exc()
            answer = pickle.dumps(("error", when, text, _portable(error)))
        sys.stdout.flush()
        sys.stderr.flush()
        channel.send_bytes(answer)


def _portable(error: Exception) -> Exception | None:
    """The exception itself if it survives pickling (many do not), for `raise ... from`."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the fork server dies (Linux; elsewhere end-of-file must do)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def enter_namespace(name: str) -> None:
    """Move this process into the named network namespace (`os.setns` exists from Python 3.12 only)."""
    descriptor = os.open(f"/var/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter network namespace {name}: {os.strerror(number)}")
    finally:
        os.close(descriptor)
