"""Transfer of a worker's state: all workers start from the first one's, and a joining worker takes a member's.

The state is a `torch.save` of plain values and tensors, read with `weights_only=True`: bytes from the network never
run code. The training thread only copies the tensors to the host; a thread of its own serializes and sends them.

Note [Why a donor gives signs]: a member can give its state only between two of its steps, and a step or an evaluation
may take any time. So the member tells a worker that waits for its state every second that it lives: the worker waits
for a busy member up to the job's `timeout`, and asks the next one if a member is silent. A founder that waits for the
initial state itself gives its children signs as well.

Note [Who has a state at the start]: workers that have lost their parent in the tree must not wait for each other's
state. A worker gives signs of attendance in the directory only once it has a state, so only such workers are asked. If
there is none, the founder with the lowest rank that is still a member begins with its own parameters.
"""

from __future__ import annotations

import ctypes
import io
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from gossamer.comm import Deadline, PeerError, Store
from gossamer.comm.tcp import Ask, Member, Membership, Record, Refused, look, send_sign, send_state
from gossamer.errors import GossamerError

SIGN = 1.0  # seconds between two signs of a donor
SILENCE = 30.0  # seconds without a sign, or without accepting data, after which the other side is given up
FAREWELL = 30.0  # seconds that a worker that leaves waits for slower founders
POLL = 0.02  # seconds between checks of whether they have their state
LONGEST_POLL = 1.0  # seconds between looks for a worker that has a state, after a while
MOST_FAILURES = 2  # donors that fail in one attempt of a worker that trains meanwhile


@dataclass(frozen=True)
class Progress:
    """How far a worker is."""

    rounds: list[int]  # of each lane
    steps: list[int]  # of each lane
    meetings: int  # number of the next meeting
    parked: bool  # it waits for that meeting
    lanes: list[dict[str, Any]]  # what a joining worker needs of each lane
    deadline: float | None  # what this worker has learned about waits for its neighbors, in seconds
    step_seconds: float  # of this worker's own steps; 0 if not known


class Asker:
    """A worker that waits for this worker's state."""

    def __init__(self, connection: socket.socket, run: bytes):
        self._connection, self._run = connection, run
        self._lock = threading.Lock()  # held while bytes are written
        self._answered = threading.Event()

    def keep_company(self, closed: threading.Event) -> None:
        """Give signs until `answer`, `close` or `closed`: see Note [Why a donor gives signs]."""
        with suppress(OSError):  # it has given up
            while not self._answered.wait(SIGN):
                if closed.is_set():
                    self.close()
                    return
                with self._lock:
                    if not self._answered.is_set():
                        send_sign(self._connection, self._run)

    def answer(self, data: io.BytesIO) -> None:
        """Send the state."""
        self._answered.set()
        with self._lock, self._connection, suppress(OSError):
            send_state(self._connection, self._run, data.getbuffer())

    def close(self) -> None:
        """Let the worker ask somebody else."""
        self._answered.set()
        with self._lock:
            self._connection.close()


class StateTransfer:
    """Serves this worker's state to other workers, and fetches theirs.

    Args:
        model: The module whose state is transferred.
        optimizers: The optimizers whose state is transferred.
        run: The id of the run.
        timeout: Seconds to wait for another worker at the start of the job, or for the end of a donor's step.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], run: bytes, timeout: float):
        self._model, self._optimizers, self._run, self._timeout = model, list(optimizers), run, timeout
        self._initial: queue.SimpleQueue[io.BytesIO] = queue.SimpleQueue()  # an entry for each child in the tree
        self._children: dict[int, Member] = {}  # in the tree, by rank
        self._served: queue.SimpleQueue[None] = queue.SimpleQueue()  # an entry for each child that has its copy
        self._asked: queue.SimpleQueue[Asker] = queue.SimpleQueue()
        self._closed = threading.Event()

    def broadcast(self, members: Membership, record: Record) -> Progress | None:
        """Load worker 0's parameters and buffers, which travel down a binary tree. All founders call it.

        If this worker's parent in the tree is gone, it takes the state of another member instead, and returns that
        member's progress: see Note [Who has a state at the start].
        """
        rank, progress = members.rank, None
        members.watch_founders(record)
        if rank == 0:
            data = self._own()
        else:
            parent = record.members.get((rank - 1) // 2)
            try:
                if parent is None:
                    raise ConnectionError("it has left")
                data = members.links.fetch(parent.address, Ask.INITIAL_STATE, self._timeout, SILENCE, SILENCE)
                self._load(data, optimizers=False)
            except (OSError, Refused):
                progress, data = self._without_parent(members)
        children = (2 * rank + 1, 2 * rank + 2)
        self._children = {child: record.members[child] for child in children if child in record.members}
        for child in children:
            if child < members.size:
                self._initial.put(data)
        return progress

    def _without_parent(self, members: Membership) -> tuple[Progress | None, io.BytesIO]:
        """Take the state of a member that has one, or begin with this worker's own parameters."""
        deadline, pause = Deadline(self._timeout), POLL
        while True:
            record = members.current()
            if not record.members:
                raise PeerError(f"all others have left the job before worker {members.rank} had its initial parameters")
            ready = members.directory.ask(lambda store: _with_state(store, record))  # noqa: B023
            if not ready and min(record.members) == members.rank:
                return None, self._own()
            failures: list[str] = []
            found = self._ask((m for m in members.donors() if m.incarnation in ready), members, failures)
            if found is not None:
                return found
            pause = min(LONGEST_POLL, 1.5 * pause)
            if not deadline.sleep(pause):
                raise PeerError(
                    f"worker {members.rank} has waited {self._timeout:g} s for the initial parameters: no member has "
                    f"sent them{', '.join(['', *failures])}"
                )

    def _own(self) -> io.BytesIO:
        return _saved({"model": self._model.state_dict()})

    def await_children(
        self, members: Membership, started: Callable[[Mapping[int, str]], set[int]], within: float | None = None
    ) -> None:
        """Wait until the children in the tree have the initial state or another one, or are no longer members.

        A worker that leaves right after the start of the job calls this first: a slower founder still needs it.
        `started` returns which of some processes (incarnation by rank) are known to have a state. A child that did not
        get this worker's took another member's. `within`: seconds to wait at most, if that is less than FAREWELL.
        """
        deadline = Deadline(FAREWELL if within is None else min(FAREWELL, within))
        while self._served.qsize() < len(self._children):
            here = {r: m.incarnation for r, m in self._children.items() if members.record.members.get(r) == m}
            waiting = {r: process for r, process in here.items() if not any(members.links.peer(r).rounds)}
            if not waiting.keys() - started(waiting) or not deadline.sleep(POLL):
                return

    def fetch(self, members: Membership, retry_for: float = 0.0) -> Progress:
        """Load a member's parameters, buffers and optimizer state, and return that member's progress.

        With `retry_for` ask all donors, again and again for so many seconds; else give up after MOST_FAILURES donors.
        """
        deadline, pause = Deadline(retry_for), POLL
        while True:
            failures: list[str] = []
            found = self._ask(members.donors(), members, failures, 0 if retry_for else MOST_FAILURES)
            if found is not None:
                progress, _ = found
                del found, _
                give_back_memory()
                return progress
            pause = min(LONGEST_POLL, 1.5 * pause)
            if not (failures and deadline.sleep(pause)):
                break
        asked = ", ".join(failures) or "there is none"
        raise PeerError(f"no member of the running job sent its state: {asked}; is the job still alive?")

    def _ask(
        self, donors: Iterable[Member], members: Membership, failures: list[str], most: int = 0
    ) -> tuple[Progress, io.BytesIO] | None:
        """Load the state of the first of `donors` that sends it, and return that member's progress, and the state. Add
        to `failures` why donors did not. `most`: give up after so many of them, if not 0."""
        for donor in donors:
            try:
                data = members.links.fetch(donor.address, Ask.STATE, self._timeout, SILENCE)
            except (OSError, Refused) as error:
                failures.append(f"{donor.host}:{donor.port} ({error})")
                if len(failures) == most:
                    break
                continue
            return Progress(**self._load(data, optimizers=True)), data
        return None

    def serve(self, connection: socket.socket, ask: Ask) -> None:
        """Take over the connection of a worker that asks for this worker's state. Called in a thread of its own."""
        connection.settimeout(SILENCE)
        if ask is Ask.STATE:
            asker = Asker(connection, self._run)
            self._asked.put(asker)
            asker.keep_company(self._closed)
            return
        deadline = Deadline(self._timeout)
        with connection, suppress(OSError):  # the other worker has given up
            while True:
                try:
                    data = self._initial.get(timeout=SIGN)
                    break
                except queue.Empty:  # see Note [Why a donor gives signs]
                    if self._closed.is_set() or deadline.expired:
                        return
                    send_sign(connection, self._run)
            send_state(connection, self._run, data.getbuffer())
            self._served.put(None)

    def between_steps(self, progress: Callable[[], Progress]) -> None:
        """Send a copy of the state to the workers that asked for it. The training thread calls this after a step."""
        asked = _drained(self._asked)
        if not asked:
            return
        reached = vars(progress())  # first: it brings the parameters up to date
        state = {
            "model": self._model.state_dict(),
            "optimizers": [o.state_dict() for o in self._optimizers],
            "progress": reached,
        }
        copy = tree_map_only(torch.Tensor, lambda t: t.detach().to("cpu", copy=True), state)
        threading.Thread(target=self._send, args=(asked, copy), name="gossamer-state", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        for asker in _drained(self._asked):
            asker.close()

    def _send(self, asked: list[Asker], state: dict[str, Any]) -> None:
        data = _saved(state)
        state.clear()
        for asker in asked:
            asker.answer(data)
        del data
        give_back_memory()

    def _load(self, data: io.BytesIO, *, optimizers: bool) -> dict[str, Any]:
        try:
            data.seek(0)
            state = torch.load(data, map_location="cpu", weights_only=True)
            self._model.load_state_dict(state["model"])
            if optimizers:
                for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
                    optimizer.load_state_dict(saved)
            progress: dict[str, Any] = state.get("progress", {})
        except (RuntimeError, KeyError, ValueError, TypeError) as error:
            raise GossamerError(f"the state that a member sent does not fit this model: {error}") from error
        return progress


def give_back_memory() -> None:
    """Return freed memory to the system. glibc would keep the room of a state for each thread that has handled one."""
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _with_state(store: Store, record: Record) -> set[str]:
    """The members of `record` that have given a sign of attendance, as all do that have a state to train from."""
    return {m.incarnation for rank, m in record.members.items() if m.incarnation in look(store, f"present/{rank}")}


def _saved(state: dict[str, Any]) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer


def _drained(waiting: queue.SimpleQueue[Asker]) -> list[Asker]:
    found = []
    with suppress(queue.Empty):
        while True:
            found.append(waiting.get_nowait())
    return found
