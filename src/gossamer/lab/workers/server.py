"""The launcher's end of the fork server: one a process, started when first needed."""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import IO, Any

from gossamer.lab.workers.forkserver import GangSpec, WorkerSpec

START_SECONDS = 120.0  # importing torch on a loaded machine takes its time

# Many workers share few cores. And a store looks up the name of everybody who connects: a name server that does not
# answer must not hold up a run.
WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RES_OPTIONS": "timeout:1 attempts:1",
}


class Server:
    """The launcher's end of the fork server."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.lock = threading.Lock()
        self.control, child = socket.socketpair()
        path = [p or os.getcwd() for p in sys.path]
        with child:
            program = f"import sys; sys.path[:] = {path!r}; from gossamer.lab.workers import forkserver as f; "
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"{program}f.main({child.fileno()})"],
                pass_fds=[child.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **WORKER_ENV},
                start_new_session=True,  # Ctrl-C is ours to handle
            )

    def request(self, spec: GangSpec, fds: list[int]) -> None:
        body = pickle.dumps(spec)
        with self.lock:
            socket.send_fds(self.control, [len(body).to_bytes(8, "big")], fds)
            self.control.sendall(body)

    def alive(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def stop(self) -> None:
        if self.owner == os.getpid():
            self.control.close()
            try:
                self.process.wait(2)
            except subprocess.TimeoutExpired:  # still importing torch; workers, if any, die with it
                self.process.kill()
                self.process.wait()


_current: Server | None = None
_current_lock = threading.Lock()


def fork_server() -> Server:
    """The fork server of this process, started when first needed and again if it died."""
    global _current
    with _current_lock:
        if _current is None or not _current.alive():
            _current = Server()
            atexit.register(_current.stop)
        return _current


def warm_up() -> None:
    """Start importing torch in the background; the first gang of workers then starts sooner."""
    fork_server()


@dataclass
class Gang:
    """The launcher's ends of workers that were forked together; when `server` closes, they are killed."""

    server: Connection
    channels: list[Connection]  # one a worker: calls and their answers
    outputs: list[IO[bytes]]
    pids: list[int] = field(default_factory=list)

    def close(self) -> None:
        for connection in (self.server, *self.channels):
            connection.close()
        for output in self.outputs:
            output.close()


def start_gang(workers: Sequence[WorkerSpec], modules: Sequence[str | None]) -> Gang:
    """Fork workers that wait for calls of functions of `modules`; EOFError when the server does not answer."""
    main: dict[str, Any] | None = None
    if "__main__" in modules:
        data = spawn.get_preparation_data("gossamer-worker")
        main = {k: v for k, v in data.items() if k.startswith("init_main")}
    spec = GangSpec(
        workers=tuple(workers),
        sys_path=tuple(p or os.getcwd() for p in sys.path),
        cwd=os.getcwd(),
        environ={**os.environ, **WORKER_ENV},
        main=main,
    )
    mine, theirs = socket.socketpair()
    pairs = [socket.socketpair() for _ in workers]
    # Unlinked files: nothing to clean up, and a worker never blocks on a full pipe.
    outputs = [tempfile.TemporaryFile(mode="a+b", buffering=0) for _ in workers]  # noqa: SIM115
    gang = Gang(Connection(mine.detach()), [Connection(ours.detach()) for ours, _ in pairs], list(outputs))
    fds = [theirs.fileno(), *(child.fileno() for _, child in pairs), *(f.fileno() for f in outputs)]
    try:
        fork_server().request(spec, fds)
    finally:
        theirs.close()
        for _, child in pairs:
            child.close()
    try:
        if not gang.server.poll(START_SECONDS):
            raise EOFError
        _, gang.pids = gang.server.recv()
    except OSError as error:
        gang.close()
        raise EOFError from error
    except BaseException:  # Ctrl-C as well
        gang.close()
        raise
    return gang
