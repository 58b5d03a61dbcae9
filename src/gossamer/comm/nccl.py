"""Exchanges over NCCL (CUDA). Experimental: written to the same interface, not yet run on a GPU cluster.

The launch of a round queues all of its operations on a side stream, so the next forward and backward pass overlap
them, and `wait` makes the training stream wait for the recorded event. All pairs use point-to-point operations of one
communicator: a communicator per pair would cost hundreds of megabytes each.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gossamer.comm.exchange import Scratch
from gossamer.comm.gloo import GlooChannel, GlooTransport
from gossamer.comm.process_groups import WorkerGroup
from gossamer.comm.transport import Channel, ChannelId, Job, Purpose, clock


class NcclTransport(GlooTransport):
    """Sends buckets on the GPU by NCCL and small control values on the CPU by gloo."""

    def channel(self, channel: ChannelId, in_flight: int, timeout: float) -> Channel:
        if channel.purpose is Purpose.PARAMETERS:
            return NcclChannel(self._workers)
        return GlooChannel(self, channel, in_flight, timeout)


class NcclChannel(Channel):
    def __init__(self, workers: WorkerGroup) -> None:
        self._ranks = workers.ranks
        # Workers outside of the group do not take part in making its communicator.
        self._group: Any = dist.new_group(list(workers.ranks), backend="nccl", use_local_synchronization=True)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._scratch: dict[int, Scratch] = {}
        self._events: dict[int, torch.cuda.Event] = {}

    def launch(self, job: Job) -> None:
        job.started = clock()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            steps = job.make(self._scratch.setdefault(job.bucket, Scratch()))
            try:
                while True:
                    batch = next(steps)
                    operations = [dist.P2POp(dist.irecv, t, self._ranks[p], self._group) for p, t in batch.recvs]
                    operations += [dist.P2POp(dist.isend, t, self._ranks[p], self._group) for p, t in batch.sends]
                    for work in dist.batch_isend_irecv(operations):
                        work.wait()  # orders the side stream, does not block the host
                    for peer, message in batch.sends:
                        job.count(peer, message)
            except StopIteration as stop:
                job.result = stop.value
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
            self._events[id(job)] = event

    def wait(self, job: Job, timeout: float) -> bool:
        event = self._events.get(id(job))
        if event is not None:
            if timeout == 0 and not event.query():  # type: ignore[no-untyped-call]
                return False
            torch.cuda.current_stream().wait_event(event)
            del self._events[id(job)]
            job.finished = clock()
        return job.done

    def close(self, drain: float) -> None:
        self._stream.synchronize()
