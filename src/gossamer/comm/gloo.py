"""Exchanges over gloo (CPU): one two-rank group per edge, communication threads that sleep in `wait()`.

Facts behind the design (measured with torch 2.13): a failed group stays dead, so an edge of its own confines a dead
peer to that edge; a pair that posts its send before its receive is half-duplex; `wait()` releases the GIL; a pending
point-to-point operation cannot be polled, only waited for, hence threads.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from gossamer.comm.exchange import Batch
from gossamer.comm.pace import Pace
from gossamer.comm.process_groups import (
    PrefixStore,
    ProcessGroupGloo,
    Store,
    WorkerGroup,
    broadcast_from_first,
    gloo_device,
    subgroup_of,
)
from gossamer.comm.threaded import ThreadedChannel
from gossamer.comm.transport import Channel, ChannelId, Job, PeerError, Transport, clock

NEVER = 2**31 - 1  # a tag that no exchange has
POLL = 0.005  # seconds between looks for a peer that connects for the first time
CONNECT = 10.0  # seconds that connecting may take once both have said that they will


class Edge:
    """The connection of this worker with one peer, made when first used; tags keep channels and buckets apart."""

    def __init__(self, store: Store, me: int, peer: int, timeout: float, left: threading.Event):
        low, high = sorted((me, peer))
        self.me, self.peer, self.other = me, peer, 0 if me == high else 1
        self._store = PrefixStore(f"edge/{low}-{high}", store)
        self._timeout = timedelta(seconds=timeout)
        self._left = left  # this worker takes part in nothing any more
        self._lock = threading.Lock()
        self._group: Any = None

    @property
    def group(self) -> Any:
        with self._lock:  # bucket threads may meet here
            if self._group is None:
                self._await_peer()  # connecting cannot be interrupted, this can
                options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._devices = [gloo_device()]
                options._threads = 1
                options._timeout = min(self._timeout, timedelta(seconds=CONNECT))  # operations have their own
                self._group = ProcessGroupGloo(self._store, 1 - self.other, 2, options)
                if self._left.is_set():  # too late for cut() to see this connection
                    self._group = None
                    raise ConnectionError("this worker has left")
            return self._group

    def _await_peer(self) -> None:
        """Return when both have said that they will connect. Whoever has said so keeps its word, even if it leaves
        meanwhile, for as long as the other may need to hear it."""
        deadline = clock() + self._timeout.total_seconds()
        for word in ("here", "seen"):  # a peer that left while it waited for us says only the first
            self._store.set(f"{word}/{self.me}", "")
            while not self._store.check([f"{word}/{self.peer}"]):
                if self._left.wait(POLL):
                    deadline = min(deadline, clock() + (0.0 if word == "here" else CONNECT / 10))
                    time.sleep(POLL)
                if clock() > deadline:
                    raise ConnectionError("it did not connect")

    def recv(self, message: Tensor, tag: int) -> Any:
        return self.group.recv([message], self.other, tag)

    def send(self, message: Tensor, tag: int) -> Any:
        return self.group.send([message], self.other, tag)

    def cut(self) -> None:
        """End every operation under way, on both sides: a receive that times out closes the pair."""
        if self._group is not None:
            with suppress(RuntimeError):
                self._group.recv([torch.empty(1)], self.other, NEVER).wait(timedelta(milliseconds=1))


class GlooTransport(Transport):
    """A worker's edges. `store` holds their addresses; a worker talks only to whom its rounds name."""

    def __init__(self, store: Store, workers: WorkerGroup, timeout: float):
        self.rank, self.size, self._workers = workers.rank, workers.size, workers
        self._store, self._timeout = store, timeout
        self._edges: dict[int, Edge] = {}
        self._lock = threading.Lock()
        self._left = threading.Event()
        self.pace = Pace.from_environment(workers.rank)  # None: links are what they are
        # A blocking get holds its client's lock: edges connect through a client of their own.
        self._edge_store = store.clone()  # type: ignore[attr-defined]

    def edge(self, peer: int) -> Edge:
        with self._lock:
            if peer not in self._edges:
                store = self._edge_store.clone()
                store.set_timeout(timedelta(seconds=self._timeout))  # a peer may be late for the first exchange
                self._edges[peer] = Edge(store, self.rank, peer, self._timeout, self._left)
            return self._edges[peer]

    def channel(self, channel: ChannelId, in_flight: int, timeout: float) -> Channel:
        return GlooChannel(self, channel, in_flight, timeout)

    def share(self, name: str, text: str) -> list[str]:
        self._store.set(f"{name}/{self.rank}", text)
        keys = [f"{name}/{r}" for r in range(self.size)]
        for r, key in enumerate(keys):
            try:
                self._store.wait([key], timedelta(seconds=self._timeout))
            except Exception as error:
                raise PeerError(
                    f"worker {r} did not show up for {name!r} within {self._timeout:g} s; "
                    "check that every worker calls decentralize() and is alive"
                ) from error
        return [self._store.get(key).decode() for key in keys]

    def broadcast(self, tensors: list[Tensor], among: tuple[tuple[int, ...], ...] | None = None) -> None:
        if among is None:
            broadcast_from_first(tensors, self._workers.group)
        else:
            ranks = self._workers.ranks
            broadcast_from_first(tensors, subgroup_of(tuple(tuple(ranks[w] for w in group) for group in among)))

    def first_lost(self, peer: int) -> int:
        """Whom a worker of this job lost first: the one that died, where others only follow it."""
        with suppress(Exception):  # the store may have died with it
            return int(self._edge_store.compare_set("lost", "", str(peer)).decode())
        return peer

    def cut(self) -> None:
        """End all exchanges under way, and begin no connection."""
        self._left.set()
        with self._lock:
            edges = list(self._edges.values())
        for edge in edges:
            edge.cut()

    def close(self) -> None:
        self._edges.clear()
        self._edge_store = None  # its socket with it; the handle itself may wait for the garbage collector


class GlooChannel(ThreadedChannel):
    def __init__(self, transport: GlooTransport, channel: ChannelId, threads: int, timeout: float):
        self._transport, self._timeout = transport, timeout
        super().__init__(channel, threads, transport.pace)

    def _cut(self) -> None:
        self._transport.cut()

    def _carry(self, batch: Batch, job: Job) -> None:
        tag = self._channel.number * 65536 + job.bucket
        peer = -1
        edges: dict[int, Edge] = {}
        works: list[tuple[int, Any]] = []
        try:
            edges.update((p, self._transport.edge(p)) for p, _ in [*batch.recvs, *batch.sends])
            for peer, message in batch.recvs:  # receives first: see the module's note
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
            first = self._transport.first_lost(peer)
            before = "" if first == peer else f"; the first to be lost in this job was worker {first}"
            raise PeerError(
                f"worker {self._transport.rank} lost worker {peer} in round {job.round}, bucket {job.bucket}: "
                f"{' '.join(str(error).split())[:200]}{before}. Is worker {first} alive, and did it train as many "
                "steps? Restart the job from its last checkpoint, or train with on_failure='continue'."
            ) from error
        finally:  # the traceback of an error would keep connections open
            works.clear()
            edges.clear()
