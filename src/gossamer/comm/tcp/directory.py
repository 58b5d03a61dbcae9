"""The directory: where the members of a job are agreed on. A torch TCPStore outside the workers.

It holds addresses and a record of the members, nothing that training needs from step to step: when it is gone, the
workers go on with the links they have, and only joins and agreements wait. A client of it can hang in a network that is
cut, so it is asked from a thread of its own, and that thread and its connection are replaced when it does.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from gossamer.errors import GossamerError, InputError

ANSWER = 3.0  # seconds the directory may take
T = TypeVar("T")


class Unreachable(GossamerError):
    """The directory does not answer."""


class HostedDirectory:
    """A directory in this process, for launchers. Keep it as long as workers may join."""

    def __init__(self, port: int, address: str):
        listener = socket.create_server((address, port), backlog=1024)  # torch's own would listen everywhere
        name, self.port = listener.getsockname()[:2]
        reach = "127.0.0.1" if name == "0.0.0.0" else name
        self._store = TCPStore(
            reach, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def host(port: int = 0, address: str = "0.0.0.0") -> HostedDirectory:
    """Host a directory on `port` (0: a free one, see `.port`) of the interface with `address` (default: all)."""
    return HostedDirectory(port, address)


def found_at() -> tuple[str, int]:
    """Where this job's directory is: GOSSAMER_DIRECTORY, else the launcher's own store."""
    text = os.environ.get("GOSSAMER_DIRECTORY")
    if text is None and "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        text = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if text is None:
        raise InputError(
            'on_failure="continue" needs a directory outside the workers and found none; start one with `gossamer '
            "directory --port 29400` and set GOSSAMER_DIRECTORY=host:29400, or start the job with torchrun"
        )
    name, _, port = text.rpartition(":")
    if not name or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"GOSSAMER_DIRECTORY must be host:port, got {text!r}")
    return name, int(port)


class Directory:
    """A client. `ask(f)` runs `f(store)` on the directory's thread and returns its result, or raises Unreachable."""

    def __init__(self, connect: Callable[[], Store], hosted: Store | None = None):
        self._connect, self._hosted = connect, hosted  # a directory that this worker hosts lives as long as this
        self._lock = threading.Lock()
        self._stopped = False
        self._requests = self._begin()

    @classmethod
    def of_job(cls, rank: int, timeout: float) -> Directory:
        """The directory of the job this process belongs to."""
        if "GOSSAMER_DIRECTORY" not in os.environ and dist.is_available() and dist.is_initialized():
            return cls(dist.distributed_c10d._get_default_store().clone)  # type: ignore[attr-defined]
        name, port = found_at()
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or "GOSSAMER_DIRECTORY" in os.environ
        hosted = TCPStore(name, port, is_master=True, wait_for_workers=False) if rank == 0 and not agent else None
        patience = [timedelta(seconds=timeout)]  # the first time it may be late; later it is there or it is gone

        def connect() -> Store:
            wait, patience[0] = patience[0], timedelta(seconds=ANSWER)
            if wait.total_seconds() <= ANSWER:  # a look first: torch fills the log when nobody is there
                socket.create_connection((name, port), timeout=1.0).close()
            return TCPStore(name, port, is_master=False, wait_for_workers=False, timeout=wait)

        return cls(connect, hosted)

    def ask(self, request: Callable[[Store], T], timeout: float = ANSWER) -> T:
        answer: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        if self._stopped:
            raise Unreachable("this worker has left")
        requests = self._requests
        requests.put((request, answer))
        try:
            fine, value = answer.get(timeout=timeout)
        except queue.Empty:
            with self._lock:
                if self._requests is requests and not self._stopped:  # leave that thread to its fate
                    requests.put(None)
                    self._requests = self._begin()
            raise Unreachable(f"the directory did not answer within {timeout:g} s") from None
        if fine:
            result: T = value
            return result
        raise Unreachable(f"the directory is gone: {' '.join(str(value).split())[:200]}") from value

    def close(self) -> None:
        with self._lock:
            self._stopped = True
            self._requests.put(None)

    def _begin(self) -> queue.SimpleQueue[Any]:
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._answer, args=(requests,), name="gossamer-directory", daemon=True).start()
        return requests

    def _answer(self, requests: queue.SimpleQueue[Any]) -> None:
        store: Store | None = None
        while (asked := requests.get()) is not None:
            request, answer = asked
            try:
                if store is None:
                    store = PrefixStore("gossamer", self._connect())
                answer.put((True, request(store)))
            except Exception as error:
                store = None  # a connection that failed stays so: make another one next time
                answer.put((False, error))


def look(store: Store, key: str) -> str:
    """The value of a key, empty when there is none; never waits."""
    return store.get(key).decode() if store.check([key]) else ""
