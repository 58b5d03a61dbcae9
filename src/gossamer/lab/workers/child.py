"""What runs inside a worker process: prepare the process, then run calls until the launcher hangs up.

Note [How workers end with their launcher]
    A worker is forked by the fork server, so its parent is the server and not the launcher. Two kernel features make
    sure that no worker is left behind, even if the launcher is ended by kill -9 and the worker is stopped or busy:
    - multiprocessing gives every child the read end of a pipe whose write end only the launcher holds. With O_ASYNC
      the kernel signals the owner of the read end when the write end closes; the owner is the worker's process group
      (so data loaders end as well) and the signal is SIGKILL.
    - PR_SET_PDEATHSIG kills the worker when the fork server dies.
    Outside Linux a worker ends at the latest when it returns from its call and finds its channel closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

from gossamer.lab.namespaces import enter_namespace
from gossamer.lab.workers.placement import WorkerSpec

PR_SET_PDEATHSIG = 1


def main(spec: WorkerSpec, environ: Mapping[str, str], channel: Connection, output: Connection) -> NoReturn:
    """Run as worker `spec.rank` with the environment `environ`; what the process prints goes to `output`."""
    code = 1
    try:
        os.setpgid(0, 0)  # the worker is signaled together with the processes that it starts
        _redirect_prints(output)
        _end_with_launcher()
        _name_process(spec.rank)
        faulthandler.enable(file=sys.stderr)
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
        if spec.netns is not None:
            enter_namespace(spec.netns)  # before any thread starts: a thread keeps the namespace it started in
        os.environ.clear()
        os.environ.update(environ)
        os.environ.update(spec.env)
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        _serve_calls(spec.rank, channel)
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
        os._exit(code)  # multiprocessing would wait here for threads that the function left running


def _redirect_prints(output: Connection) -> None:
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _name_process(rank: int) -> None:
    """Show the rank in `ps` and `top`."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"gossamer-{rank}")  # the kernel keeps 15 characters


def _end_with_launcher() -> None:
    """See Note [How workers end with their launcher]."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    pipe = launcher.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if wait([pipe], 0):
        os._exit(1)  # the launcher died before the pipe was set up


def _serve_calls(rank: int, channel: Connection) -> None:
    """Run the functions that the launcher sends; an ordinary exception is an answer and does not end the worker."""
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
            answer = pickle.dumps(("returned", value, time.process_time() - cpu))
        except Exception as error:
            at, text = time.monotonic(), traceback.format_exc()
            answer = pickle.dumps(("raised", at, text, _portable(error)))
        sys.stdout.flush()
        sys.stderr.flush()
        channel.send_bytes(answer)


def _portable(error: Exception) -> Exception | None:
    """The exception itself if it can be pickled and unpickled (many cannot), for `raise ... from`."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error
