"""The directory of an elastic job: a torch TCPStore outside the workers, in which the members are agreed on.

It holds addresses and a record of the members, nothing that training needs from step to step: when the directory is
gone, the workers continue over the links they have, and only joins and agreements wait. A store client can hang when
the network is cut, so a thread of its own asks it; when a request takes too long, thread and connection are replaced.

Note [Why jobs are numbered]: the record of a job that all members have left in good order stays, without members, and
so does what its founders shared. The workers of the next job must not meet among these keys. The first of them
therefore declares the record ENDED and counts one job on, and each job has keys of its own. The record decides between
that worker and a member of the old job that was away and comes back: only one of them can replace the empty record.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from gossamer.comm.deadline import Deadline
from gossamer.comm.process_groups import default_store
from gossamer.comm.tcp.frame import read_json
from gossamer.comm.tcp.keeper import Keeper
from gossamer.comm.transport import PeerError
from gossamer.errors import GossamerError, InputError

ANSWER = 3.0  # seconds the directory may take to answer
POLL = 0.02  # seconds between checks of whether all workers have shared their text
LONGEST_POLL = 0.2  # the same after a while
PREFIX = "gossamer"  # of all keys
NOTHING = "\0"  # a value that no key has
JOB = "job"  # the key of the number of the job that the directory holds, where that is not 0
ONE_JOB = "one job"  # the key that says that there is no other job after the first one
ENDED = "ended"  # the record of a job that is over: see Note [Why jobs are numbered]
GONE = "\0gone"  # the text of a worker that is waited for no more
NONSENSE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)  # of a request
T = TypeVar("T")


class Unreachable(GossamerError):
    """The directory does not answer."""


class Ended(GossamerError):
    """All members have left this worker's job, and another job has begun in the directory."""


class HostedDirectory:
    """A directory in this process, for launchers. Keep it as long as workers may join.

    Args:
        port: The port to listen on; 0 chooses a free one, see the attribute `port`.
        address: The address of the interface to listen on. Default: all interfaces.
        file: A file from which the directory starts, and which follows its contents. Default: it starts empty, and
            members of a running job put back what it must hold.
        forget_after: Seconds without a sign of any worker after which the job is over and the directory is empty again,
            so that its workers can found the next one from a checkpoint. Default: never.
        one_job: Whether workers that come after all members have left are too late, as replacements in a launcher are,
            and raise PeerError. Default: they found the next job.
    """

    def __init__(
        self,
        port: int = 0,
        address: str = "0.0.0.0",
        *,
        file: str | os.PathLike[str] | None = None,
        forget_after: float | None = None,
        one_job: bool = False,
    ):
        listener = socket.create_server((address, port), backlog=1024)  # torch would listen on every interface
        name, self.port = listener.getsockname()[:2]
        reach = "127.0.0.1" if name == "0.0.0.0" else name
        self._store: TCPStore | None = TCPStore(
            reach, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._keeper: Keeper | None = None
        if file is not None or forget_after is not None:
            try:
                self._keeper = Keeper(self._store, None if file is None else Path(file), forget_after)
            except BaseException:
                self._store = None
                raise
        if one_job:
            PrefixStore(PREFIX, self._store).set(ONE_JOB, "yes")

    @property
    def founded(self) -> bool:
        """Whether all workers have met here and founded their job."""
        if self._store is None:
            return False
        root = PrefixStore(PREFIX, self._store)
        return look(_job_store(root, int(look(root, JOB) or 0)), "record") != ""

    def close(self) -> None:
        """Stop serving. Workers continue to train, but nobody can join."""
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
        self._store = None  # the server lives as long as this object


def directory_address() -> tuple[str, int]:
    """Return where this job's directory is: GOSSAMER_DIRECTORY, or else the launcher's own store."""
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


class DirectoryClient:
    """A worker's access to the directory.

    Args:
        connect: Opens a connection to the store, waiting at most the given number of seconds.
        first_wait: Seconds that the first connection may take: the directory may start later than its workers.
        hosted: The store itself if this process hosts it; kept alive until the client is gone.
    """

    def __init__(self, connect: Callable[[float], Store], first_wait: float, hosted: Store | None = None):
        self._connect, self._hosted = connect, hosted
        self._first_wait = self._next_wait = first_wait
        self._job: int | None = None  # the number of this worker's job
        self._lock = threading.Lock()
        self._stopped = False
        self.refusals = 0  # answers of the directory that were nonsense
        self.last_refusal = ""
        self._requests = self._start_thread()

    @classmethod
    def of_job(cls, rank: int, timeout: float) -> DirectoryClient:
        """Connect to the directory of the job that this process belongs to."""
        if "GOSSAMER_DIRECTORY" not in os.environ and dist.is_available() and dist.is_initialized():
            store = default_store()
            return cls(lambda _: store.clone(), timeout)  # type: ignore[attr-defined]
        name, port = directory_address()
        external = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or "GOSSAMER_DIRECTORY" in os.environ
        hosted = TCPStore(name, port, is_master=True, wait_for_workers=False) if rank == 0 and not external else None

        def connect(wait: float) -> Store:
            if wait <= ANSWER:  # torch fills the log when it cannot connect, so try with a plain socket first
                socket.create_connection((name, port), timeout=1.0).close()
            return TCPStore(name, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=wait))

        return cls(connect, timeout, hosted)

    def ask(self, request: Callable[[Store], T], timeout: float = ANSWER) -> T:
        """Return `request(store)`, which runs on the directory's thread. Raise Unreachable if it fails."""
        answer: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        with self._lock:  # what is put after close() would never be answered
            if self._stopped:
                raise Unreachable("this worker has left")
            requests = self._requests
            requests.put((request, answer))
        try:
            fine, value = answer.get(timeout=timeout)
        except queue.Empty:
            with self._lock:
                if self._requests is requests and not self._stopped:  # abandon the thread that hangs
                    requests.put(None)
                    self._requests = self._start_thread()
            raise Unreachable(f"the directory did not answer within {timeout:g} s") from None
        if fine:
            result: T = value
            return result
        what = "answers nonsense" if isinstance(value, NONSENSE) else "is gone"
        raise Unreachable(f"the directory {what}: {' '.join(str(value).split())[:200]}") from value

    def ask_at_start(self, request: Callable[[Store], T]) -> T:
        """Like `ask`, but allow for a directory that starts later than this worker, or stands still for a while."""
        return self.ask(request, self._first_wait + ANSWER)

    def refuse(self, why: str) -> None:
        """Count an answer of the directory that is nonsense."""
        self.refusals += 1
        self.last_refusal = why

    def share(
        self,
        name: str,
        rank: int,
        size: int,
        text: str,
        timeout: float,
        stop: Callable[[], bool] = lambda: False,
        write: Callable[[Store, str, str], object] = Store.set,
        gone: Callable[[], Iterable[int]] = tuple,
        at_start: bool = False,
    ) -> list[str] | None:
        """Return the text of all `size` workers for `name`, by rank. Return None if `stop()` while waiting. With
        `at_start`, wait for the directory as `ask_at_start` does.

        The text of a worker is its latest one; with `write=settle`, its first one. With `gone`, which needs
        `write=settle`, workers are not waited for once it names them: all workers then get the text GONE for them.
        """
        ask = self.ask_at_start if at_start else self.ask
        deadline, pause, given_up = Deadline(timeout), POLL, set[int]()
        self.ask_at_start(lambda store: write(store, f"{name}/{rank}", text))
        keys = [f"{name}/{r}" for r in range(size)]
        while not ask(lambda store: store.check(keys)):  # one message, whatever the number of workers
            if stop():
                return None
            for other in set(gone()) - given_up:
                ask(lambda store, key=keys[other]: settle(store, key, GONE))  # type: ignore[misc]
                given_up.add(other)
            pause = min(LONGEST_POLL, 1.5 * pause)
            if not deadline.sleep(pause):
                missing = ask(lambda store: [r for r, key in enumerate(keys) if not store.check([key])])
                raise PeerError(
                    f"worker(s) {', '.join(map(str, missing))} did not show up within {timeout:g} s; check that "
                    "every worker was started and calls decentralize()"
                )
        return ask(lambda store: [text.decode() for text in store.multi_get(keys)])

    def close(self) -> None:
        with self._lock:
            self._stopped = True
            self._requests.put(None)

    def _start_thread(self) -> queue.SimpleQueue[Any]:
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._answer, args=(requests,), name="gossamer-directory", daemon=True).start()
        return requests

    def _answer(self, requests: queue.SimpleQueue[Any]) -> None:
        store: Store | None = None
        while (asked := requests.get()) is not None:
            request, answer = asked
            try:
                if store is None:
                    wait, self._next_wait = self._next_wait, ANSWER
                    store = self._open(wait)
                answer.put((True, request(store)))
            except Exception as error:
                if isinstance(error, NONSENSE):  # the connection is fine, but what it says is not
                    self.refuse(f"the directory's answer cannot be read: {error!r:.200}")
                else:
                    store = None  # a failed connection stays failed, so open another one next time
                answer.put((False, error))

    def _open(self, wait: float) -> Store:
        """Connect, and return the part of the store that belongs to this worker's job."""
        root = PrefixStore(PREFIX, self._connect(wait))
        if self._job is None:
            self._job = _current_job(root)
        elif self._job:
            settle(root, JOB, str(self._job))  # a directory that was restarted is empty
        return _job_store(root, self._job)


def _job_store(root: Store, job: int) -> Store:
    return PrefixStore(str(job), root) if job else root


def _current_job(root: Store) -> int:
    """The number of the job to found or to join: see Note [Why jobs are numbered]."""
    while True:
        text = look(root, JOB)
        job = int(text or 0)
        if look(root, ONE_JOB):
            return job
        store = _job_store(root, job)
        record = look(store, "record")
        declared = _is_empty(record) and store.compare_set("record", record, ENDED).decode() == ENDED
        if not (declared or record == ENDED):
            return job
        root.compare_set(JOB, text, str(job + 1))


def _is_empty(record: str) -> bool:
    """Whether this is a record without members: all have left."""
    try:
        fields = read_json(record) if record else None
    except ValueError:  # members repair it
        return False
    return isinstance(fields, dict) and fields.get("members") == {}


def look(store: Store, key: str) -> str:
    """Return the value of `key`, or an empty text if there is none. Never waits, as `store.get` would for a key that
    is deleted at this moment."""
    held: str = store.compare_set(key, NOTHING, NOTHING).decode()
    return "" if held == NOTHING else held


def settle(store: Store, key: str, value: str) -> str:
    """Set `key` to `value` unless it has a value; return the value it has then."""
    held: str = store.compare_set(key, "", value).decode()
    return held
