"""What two workers give each other in an event: their step counts, then x."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from gossamer.comm import Batch, Channel, Exchange, Job, Scratch, Wire, exchange
from gossamer.engine.asynchronous.state import State
from gossamer.engine.metrics import Metrics
from gossamer.topology import Layout
from gossamer.topology.events import Event
from gossamer.topology.plan import Piece, Program, Step


class Trade:
    """One side of an event: `greet`, then `send`, then, when all has arrived, `receive`. With the lane's lock."""

    def __init__(
        self,
        rank: int,
        layout: Layout,
        state: State,
        outs: Sequence[Tensor],
        wire: Wire,
        channel: Channel,
        meter: Metrics,
    ):
        self._rank, self._layout, self._state, self._outs = rank, layout, state, outs
        self._wire, self._channel, self._meter = wire, channel, meter

    def greet(self, event: Event, *, parked: bool) -> Job:
        """Swap step counts. `parked`: this worker takes no steps for now."""
        if parked:
            self._state.excuse()
        ours = self._state.counts.clone()
        swap = partial(_swap_counts, event.peer_of(self._rank), ours, self._state.heard)
        return self._launch(Job(event.number, len(self._outs), swap))

    @torch.no_grad()
    def send(self, event: Event, now: float) -> list[Job]:
        """Swap x as it is now, a job a bucket."""
        peer = event.peer_of(self._rank)
        wired = self._layout.nodes == 1 or self._layout.node[peer] != self._layout.node[self._rank]
        self._state.depart(now)
        jobs = []
        for b, (sent, out) in enumerate(zip(self._state.sent, self._outs, strict=True)):
            whole = Piece(peer, 0, sent.numel(), 1.0)
            program: Program = (Step("swap", "x", wired, (whole,), (whole,)),)
            jobs.append(self._launch(Job(event.number, b, partial(exchange, program, sent, out, self._wire))))
        return jobs

    @torch.no_grad()
    def receive(self, now: float, jobs: Sequence[Job]) -> None:
        """All has arrived: move x and x~."""
        for job in jobs:
            self._meter.exchanged(job)
        self._state.arrive(now, jobs)
        self._meter.rounds += 1

    def _launch(self, job: Job) -> Job:
        self._channel.launch(job)
        return job


def _swap_counts(peer: int, ours: Tensor, theirs: Tensor, scratch: Scratch) -> Exchange:
    """The step counts travel with the parameters."""
    yield Batch([(peer, ours)], [(peer, theirs)])
    return None
