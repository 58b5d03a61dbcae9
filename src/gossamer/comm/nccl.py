"""Exchanges over NCCL (CUDA and ROCm). Experimental: tested with a simulated device, never run on a GPU.

The launch of a round queues all of its operations on a side stream, so the next forward and backward pass overlap
them. `wait` polls the recorded events, because a peer that does not come would block a stream, and with it the whole
device, without a time limit. All pairs use point-to-point operations of one communicator: a communicator per pair would
cost hundreds of megabytes each.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gossamer.comm.accelerator import Accelerator, arrives
from gossamer.comm.exchange import Batch, Scratch
from gossamer.comm.gloo import GlooChannel, GlooTransport
from gossamer.comm.process_groups import Store, WorkerGroup
from gossamer.comm.threaded import wait_for_job
from gossamer.comm.transport import Channel, ChannelId, Event, Job, PeerError, Purpose, clock

WATCHDOG = 120.0  # seconds after `timeout` at which NCCL's own watchdog may end the process


class NcclTransport(GlooTransport):
    """Sends buckets on the GPU by NCCL and small control values on the CPU by gloo."""

    def __init__(self, store: Store, workers: WorkerGroup, timeout: float, accelerator: Accelerator):
        super().__init__(store, workers, timeout)
        self._device = accelerator
        self._watched: set[int] = set()
        self.flights: dict[int, Flight] = {}  # of all channels, by the id of the job: any channel may wait for any job

    def channel(self, channel: ChannelId, in_flight: int, timeout: float) -> Channel:
        if channel.purpose is Purpose.PARAMETERS:
            return NcclChannel(self, self._workers, self._device, timeout)
        return GlooChannel(self, channel, in_flight, timeout)

    def watch(self, peer: int) -> None:
        """Notice when `peer` dies, which NCCL does not: see Note [Why every edge has a sentinel] in gloo.py."""
        if peer in self._watched:
            return
        self._watched.add(peer)

        def connect() -> None:
            with suppress(Exception):  # a peer that never connects is a matter of timeouts
                _ = self.edge(peer).group

        threading.Thread(target=connect, name=f"gossamer-meet-{peer}", daemon=True).start()


@dataclass
class Flight:
    """A job under way: the events behind its batches, first to last, each with a peer of the batch (-1: none)."""

    job: Job
    channel: NcclChannel
    marks: list[tuple[int, Event]] = field(default_factory=list)

    def landed(self) -> bool:
        """Forget the batches that are done; return whether all are."""
        while self.marks and self.marks[0][1].query():
            self.marks.pop(0)
        return not self.marks


class NcclChannel(Channel):
    def __init__(self, transport: NcclTransport, workers: WorkerGroup, accelerator: Accelerator, timeout: float):
        self._transport, self._ranks, self._accelerator = transport, workers.ranks, accelerator
        # Workers outside of the group do not take part in making its communicator.
        self._group: Any = dist.new_group(
            list(workers.ranks),
            backend="nccl",
            use_local_synchronization=True,
            timeout=timedelta(seconds=timeout + WATCHDOG),
        )
        # NCCL requires that all workers take part in the first operation of a communicator, and no round includes all.
        dist.all_reduce(torch.zeros(1, device=accelerator.device), group=self._group)
        self._stream = accelerator.stream()
        self._scratch: dict[int, Scratch] = {}

    def launch(self, job: Job) -> None:
        job.started = clock()
        device, flight = self._accelerator, Flight(job, self)
        before = device.mark()
        with device.running_on(self._stream):
            device.wait_for(before)
            steps = job.make(self._scratch.setdefault(job.bucket, Scratch(readable=False)))
            try:
                while True:
                    batch = next(steps)
                    self._queue(batch, job)
                    peers = [peer for peer, _ in [*batch.recvs, *batch.sends]]
                    flight.marks.append((peers[0] if peers else -1, device.mark()))
            except StopIteration as stop:
                job.result = stop.value
            flight.marks.append((-1, device.mark()))
        self._transport.flights[id(job)] = flight

    def _queue(self, batch: Batch, job: Job) -> None:
        operations = [dist.P2POp(dist.irecv, t, self._ranks[p], self._group) for p, t in batch.recvs]
        operations += [dist.P2POp(dist.isend, t, self._ranks[p], self._group) for p, t in batch.sends]
        for work in dist.batch_isend_irecv(operations):
            work.wait()  # orders the side stream, does not block the host
        for peer, message in batch.sends:
            job.count(peer, message)
        for peer in {p for p, _ in [*batch.recvs, *batch.sends]}:
            self._transport.watch(peer)

    def wait(self, job: Job, timeout: float) -> bool:
        flight = self._transport.flights.get(id(job))
        if flight is None:  # done already, or a job of a gloo channel, whose thread ends it
            return wait_for_job(job, timeout)
        until = clock() + timeout
        while not flight.landed():
            (peer, event), since = flight.marks[0], clock()
            landed = arrives(event, until - since)
            job.blocked_on = None if landed or peer < 0 else peer
            if peer >= 0 and timeout > 0:
                job.blocked.append((peer, since, clock()))
            if not landed:
                return False
        # All of the job's work is done, so the training stream need not wait for anything.
        self._transport.flights.pop(id(job), None)
        job.finished = clock()
        return True

    def stuck(self, job: Job) -> PeerError | None:
        lost = self._transport.lost()
        if job.done or lost is None:
            return None
        return self._transport.loss(lost, job, "its connection has closed")

    def close(self, drain: float) -> None:
        until, flights = clock() + drain, self._transport.flights
        mine = [flight for flight in list(flights.values()) if flight.channel is self]
        if not all(arrives(event, until - clock()) for flight in mine for _, event in flight.marks):
            _abort(self._group)  # ends operations whose peer does not come
        for flight in mine:
            flights.pop(id(flight.job), None)


def _abort(group: Any) -> None:
    """End all operations of a communicator under way, on this worker."""
    with suppress(Exception):  # nothing can be done about a communicator that does not end
        group.abort()
