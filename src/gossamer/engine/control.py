"""Small averages over all workers, in double precision, for collective calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gossamer.comm import Channel, Job, Plain, Stamp, exchange, room_for
from gossamer.topology import Layout, build
from gossamer.topology.schedule import Schedule


class Control:
    """`ranks`: who takes part, when it is not everybody of `layout`; `place` is this worker's number among them."""

    def __init__(
        self,
        rank: int,
        layout: Layout,
        channel: Channel,
        ranks: tuple[int, ...] | None = None,
        stamp: Callable[[], Stamp] | None = None,
        calls: int = 0,
    ):
        self.rank, self.layout, self.channel, self.stamp = rank, layout, channel, stamp
        self.place = rank if ranks is None else ranks.index(rank)
        self.schedule = Schedule(build("complete", layout), stagger=False, ranks=ranks)
        self._calls = calls

    def average(self, vector: Tensor) -> Job:
        """Launch the average of `vector` over all workers; collective, in one order everywhere."""
        value = vector.detach().to("cpu", torch.float64).flatten()
        out = torch.empty(room_for(value.numel(), max(self.layout.per_node)), dtype=torch.float64)
        program = self.schedule.program(0, 0, self.rank, value.numel(), average=True)
        if not program:
            out[: value.numel()].copy_(value)
        self._calls += 1
        job = Job(self._calls, 0, partial(exchange, program, value, out, Plain(), lazy=False))
        if self.stamp is not None:
            job.stamp = self.stamp()
        self.channel.launch(job)
        return job

    @staticmethod
    def read(job: Job, sent: Tensor) -> Tensor:
        """What the average of `sent` came out as."""
        return sent.detach().to("cpu", torch.float64).flatten() if job.result is None else job.result.out
