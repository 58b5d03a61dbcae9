"""Exchanges over gloo (CPU): one two-rank group per edge, and communication threads that sleep in `wait()`.

Facts behind the design, measured with torch 2.13: A failed group stays dead, so every edge has its own group and a dead
peer costs only its edges. A pair that posts its send before its receive is half-duplex. `wait()` releases the GIL. A
pending point-to-point operation cannot be polled, only waited for, hence the threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from gossamer.comm.accelerator import Accelerator
from gossamer.comm.deadline import Deadline
from gossamer.comm.exchange import Batch
from gossamer.comm.process_groups import ProcessGroupGloo, Store, WorkerGroup, gloo_device
from gossamer.comm.store_transport import FAILED, StoreTransport
from gossamer.comm.threaded import ThreadedChannel
from gossamer.comm.transport import Channel, ChannelId, Job

NEVER, SENTINEL = 2**31 - 1, 2**31 - 2  # tags that no exchange has
FOREVER = timedelta(days=3650)
POLL = 0.005  # seconds between checks for a peer that connects for the first time
CONNECT = 10.0  # seconds that connecting may take once both sides have announced it
GRACE = 2.0  # seconds that watching threads have to end when their connections were cut


class PollingStore(Store):
    """Keys below a prefix of `client`, whose `get` polls.

    A blocking get holds the lock of its client, so threads that connect at the same time would need a client each, or
    could wait for each other in a circle across workers. Polling lets all edges of a worker share one client.
    """

    def __init__(self, prefix: str, client: Store, timeout: float):
        super().__init__()
        self._prefix, self._client, self._seconds = prefix, client, timeout

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def set(self, key: str, value: Any) -> None:
        self._client.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._client.get(self._key(key))

    def check(self, keys: list[str]) -> bool:
        return self._client.check([self._key(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = Deadline(self._seconds if timeout is None else timeout.total_seconds())
        while not self.check(keys):
            if not deadline.sleep(POLL):
                raise ConnectionError("it did not connect")

    def has_extended_api(self) -> bool:
        return False


class Edge:
    """The connection of this worker with one peer, made when first used; tags keep channels and buckets apart.

    Note [Why every edge has a sentinel]: if a peer dies in the middle of a message, gloo often does not end the
    pending operation before its timeout, and a worker without a pending operation notices nothing. A receive that is
    never answered, waited for by a thread of its own, fails as soon as the connection does. `lost` is called then.
    """

    def __init__(
        self,
        store: Store,
        me: int,
        peer: int,
        timeout: float,
        left: threading.Event,
        lost: Callable[[int], object],
    ):
        low, high = sorted((me, peer))
        self.me, self.peer, self.other = me, peer, 0 if me == high else 1
        self._store = PollingStore(f"edge/{low}-{high}", store, timeout)
        self._job = store
        self._timeout = timeout
        self._left, self._lost = left, lost  # `left` is set when this worker no longer takes part
        self._lock = threading.Lock()
        self._group: Any = None
        self.watcher = threading.Thread(target=self._watch, name=f"gossamer-watch-{peer}", daemon=True)

    @property
    def group(self) -> Any:
        with self._lock:  # several threads of a channel may connect
            if self._group is None:
                self._await_peer()  # connecting cannot be interrupted, this can
                options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._devices = [gloo_device()]
                options._threads = 1
                options._timeout = timedelta(seconds=min(self._timeout, CONNECT))  # operations have their own
                self._group = ProcessGroupGloo(self._store, 1 - self.other, 2, options)
                if self._left.is_set():  # too late for cut() to see this connection
                    self._group = None
                    raise ConnectionError("this worker has left")
                self.watcher.start()
            return self._group

    def _await_peer(self) -> None:
        """Return when both sides have announced that they will connect. Once a side has announced itself it must
        complete the handshake, even if it is leaving, for as long as the other may need to see it."""
        deadline = Deadline(self._timeout)
        for word in ("here", "seen"):  # a peer that left while it waited announces only the first
            self._store.set(f"{word}/{self.me}", "")
            while not self._store.check([f"{word}/{self.peer}"]):
                failed = self._job.check([FAILED])  # a worker has: the job is over, and the peer may never come
                if self._left.wait(POLL) or failed:
                    deadline.shorten(0.0 if word == "here" else CONNECT / 10)
                    time.sleep(POLL)
                if deadline.expired:
                    why = f"; worker {int(self._job.get(FAILED))} has failed" if failed else ""
                    raise ConnectionError(f"it did not connect{why}")

    def _watch(self) -> None:
        """Wait for the connection to fail. See Note [Why every edge has a sentinel]."""
        group, never = self._group, torch.empty(1)
        with suppress(RuntimeError):
            group.recv([never], self.other, SENTINEL).wait(FOREVER)
        if not self._left.is_set():
            self._lost(self.peer)
            self.cut()  # ends operations that gloo left pending

    def recv(self, message: Tensor, tag: int) -> Any:
        return self.group.recv([message], self.other, tag)

    def send(self, message: Tensor, tag: int) -> Any:
        return self.group.send([message], self.other, tag)

    def cut(self) -> None:
        """End every operation under way, on both sides: a receive that times out closes the pair."""
        if self._group is not None:
            with suppress(RuntimeError):
                self._group.recv([torch.empty(1)], self.other, NEVER).wait(timedelta(milliseconds=1))


class GlooTransport(StoreTransport):
    """A worker's edges, made when first used: a worker connects only to the peers of its rounds. `store` holds their
    addresses."""

    def __init__(self, store: Store, workers: WorkerGroup, timeout: float, accelerator: Accelerator | None = None):
        super().__init__(store, workers, timeout, accelerator)
        self._edges: dict[int, Edge] = {}
        self._lock = threading.Lock()
        self._left = threading.Event()

    def edge(self, peer: int) -> Edge:
        with self._lock:
            if peer not in self._edges:
                self._edges[peer] = Edge(self._edge_store, self.rank, peer, self._timeout, self._left, self.first_lost)
            return self._edges[peer]

    def channel(self, channel: ChannelId, in_flight: int, timeout: float) -> Channel:
        return GlooChannel(self, channel, in_flight, timeout)

    def cut(self) -> None:
        """End all exchanges under way, and begin no connection."""
        self._left.set()
        with self._lock:
            edges = list(self._edges.values())
        for edge in edges:
            edge.cut()

    def close(self) -> None:
        deadline = Deadline(GRACE)
        self.cut()
        for edge in self._edges.values():
            while edge.watcher.is_alive() and not deadline.expired:  # gloo may miss the cut while it is busy, so retry
                edge.cut()
                edge.watcher.join(POLL)
        self._edges.clear()
        super().close()


class GlooChannel(ThreadedChannel):
    """Carries out exchanges as point-to-point operations on the edges."""

    def __init__(self, transport: GlooTransport, channel: ChannelId, threads: int, timeout: float):
        self._transport, self._timeout = transport, timeout
        super().__init__(channel, threads, transport.pace, transport.staged(channel))

    def _cut(self) -> None:
        self._transport.cut()

    def _carry(self, batch: Batch, job: Job) -> None:
        # Messages of different rounds never match: after a mistake the wait times out and names the round.
        tag = ((job.round % 4) << 28) + (self._channel.number << 16) + job.bucket
        peer = -1
        edges: dict[int, Edge] = {}
        works: list[tuple[int, Any]] = []
        try:
            edges.update((p, self._transport.edge(p)) for p, _ in [*batch.recvs, *batch.sends])
            for peer, message in batch.recvs:  # receives first: see the module docstring
                with job.waiting_for(peer):
                    works.append((peer, edges[peer].recv(message, tag)))
            for peer, message in batch.sends:
                with job.waiting_for(peer):
                    works.append((peer, edges[peer].send(message, tag)))
                job.count(peer, message)
            for peer, work in works:
                with job.waiting_for(peer):
                    work.wait(timedelta(seconds=self._timeout))
        except Exception as error:
            raise self._transport.loss(peer, job, str(error)) from error
        finally:  # the traceback of an error would otherwise keep connections open
            works.clear()
            edges.clear()
