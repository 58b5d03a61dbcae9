"""One worker process as the launcher sees it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Literal

from gossamer.errors import GossamerError, InputError
from gossamer.lab.workers.child import main
from gossamer.lab.workers.placement import WORKER_ENV, WorkerSpec

TAIL = 4000  # bytes of a worker's output that are shown with a failure
NO_SERVER = 255  # the exit code that multiprocessing reports if the fork server is dead

Ending = Literal["returned", "raised", "died"]


class WorkerFailed(GossamerError):
    """A worker raised an exception or died. The message has its traceback and the end of its output."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class Worker:
    """A process that runs functions for the launcher, one call at a time.

    `ending` says how the last call ended: it returned `value`, it raised (`error` if the exception can be sent, `why`
    is its traceback), or the process died (`why` says how). `generation` counts the processes that had this rank
    before. Times are `time.monotonic()`, which is the same clock in all processes.
    """

    def __init__(self, spec: WorkerSpec, generation: int = 0, *, single_call: bool = False) -> None:
        self.rank, self.generation = spec.rank, generation
        self.started = time.monotonic()
        self.ended: float | None = None  # when the last call ended
        self.hung_up: float | None = None  # when its end of the channel was found closed: it is about to exit
        self.ending: Ending | None = None
        self.value: Any = None
        self.cpu_seconds = 0.0
        self.why = ""
        self.error: Exception | None = None
        self.exit_code: int | None = None
        self.killed = False  # by `WorkerPool.kill`
        self.single_call = single_call
        # An unlinked file needs no cleanup, and unlike a pipe it never blocks the worker.
        self._output = tempfile.TemporaryFile(mode="a+b", buffering=0)  # noqa: SIM115
        self._tail = ""
        context = multiprocessing.get_context("forkserver")
        self._channel, theirs = context.Pipe()
        output = Connection(os.dup(self._output.fileno()), readable=False)  # multiprocessing can send a Connection
        environ = {**os.environ, **WORKER_ENV}
        # Not a daemon: daemons may not have children, and data loaders are children.
        self._process = context.Process(target=main, args=(spec, environ, theirs, output), daemon=False)
        try:
            self._process.start()
        except BaseException as error:
            self._channel.close()
            self._output.close()
            if isinstance(error, EOFError | OSError):
                raise WorkerFailed("the fork server of the lab died; see its output above", spec.rank) from error
            raise
        finally:
            theirs.close()
            output.close()
        self.pid: int = self._process.pid or 0

    @property
    def running(self) -> bool:
        """Whether the last call has not ended."""
        return self.ended is None

    @property
    def gone(self) -> bool:
        """Whether the process has ended and was reaped."""
        return self.exit_code is not None

    @property
    def usable(self) -> bool:
        """Whether an idle worker can run another call."""
        hung_up = self._channel.closed or self._channel.poll()  # an idle worker sends nothing but the end of the stream
        return not (self.gone or self.single_call or hung_up)

    def call(self, call: bytes, env: dict[str, str]) -> None:
        """Run a call (see `pickle_call`) after setting the environment variables `env`."""
        self.ended, self.ending, self.value, self.why, self.error = None, None, None, "", None
        with contextlib.suppress(OSError):  # a dead worker: `update` says so
            self._channel.send_bytes(pickle.dumps((env, call)))
        if self.gone:
            self.update()

    def sources(self) -> list[Connection | int]:
        """What to wait on: something of this is ready when `update` has something to read."""
        channel = [self._channel] if self.running and not self._channel.closed else []
        return [*channel, *([] if self.gone else [self._process.sentinel])]

    def update(self) -> bool:
        """Read what has arrived from the worker and its process; whether the call ended by that."""
        was_running = self.running
        exited = not self.gone and self._process.exitcode is not None
        if was_running and not self._channel.closed and self._channel.poll():
            self._read_answer()  # also of a worker that exited after it had answered
        if exited:
            self.exit_code = self._process.exitcode
            self._kill_descendants()
        if self.running and self.exit_code is not None:
            self.ended, self.ending, self.why = self.hung_up or time.monotonic(), "died", describe_exit(self.exit_code)
        return was_running and not self.running

    def _read_answer(self) -> None:
        try:
            kind, *rest = self._channel.recv()
        except (EOFError, OSError):
            self._channel.close()
            self.hung_up = time.monotonic()
            return  # the exit code follows, from the fork server, which may be late
        self.ending = kind
        if kind == "returned":
            self.ended, (self.value, self.cpu_seconds) = time.monotonic(), rest
        else:
            self.ended, self.why, self.error = rest
        if self.single_call:
            self._channel.close()  # the process leaves when it finds its channel closed

    def _kill_descendants(self) -> None:
        """Kill the processes that a dead worker has left; they are in its process group."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, 0)
            return  # the kernel reuses a pid only after its process group is empty
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """Signal the worker and the processes that it started."""
        if self.gone or self._process.exitcode is not None:
            return
        try:
            os.killpg(self.pid, number)
        except OSError:  # the process is too young to have a group, or was reaped just now
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)

    def output(self) -> str:
        """The end of what the worker has printed."""
        if self._output.closed:
            return self._tail
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), TAIL, max(0, size - TAIL)).decode(errors="replace").strip()

    def new_lines(self, offset: int) -> tuple[list[str], int]:
        """The complete lines that were printed after `offset`, and the offset where the next ones begin."""
        size = os.fstat(self._output.fileno()).st_size - offset
        text = os.pread(self._output.fileno(), size, offset) if size > 0 else b""
        lines, newline, _ = text.rpartition(b"\n")
        if not newline:
            return [], offset
        return lines.decode(errors="replace").split("\n"), offset + len(lines) + 1

    def hang_up(self) -> None:
        """Send no more calls: an idle worker ends."""
        self._channel.close()

    def close(self) -> None:
        """Release the file descriptors of a worker that is gone. The answer and the end of the output stay."""
        self._tail = self.output()
        self._channel.close()
        self._output.close()
        if self.gone:
            self._process.close()


def pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """A call as bytes that a worker can run; InputError if it cannot be pickled."""
    try:
        return pickle.dumps((fn, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"cannot send {getattr(fn, '__qualname__', fn)} to the workers ({error}); "
            "use a function at module level and arguments that can be pickled"
        ) from None


def describe_exit(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    if code == NO_SERVER:
        return f"exited with code {code} before it returned, or the fork server of the lab died"
    return f"exited with code {code} before it returned"
