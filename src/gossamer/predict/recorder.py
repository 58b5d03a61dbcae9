"""Turns a simulated run's times into spans, in the very form the engine records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gossamer.predict.costs import Exchange, Floats, Ints
from gossamer.topology import Layout
from gossamer.trace import Span

TINY = 1e-12  # shorter waits are rounding


@dataclass(frozen=True)
class _Flight:
    bucket: int
    exchange: Exchange
    started: Floats
    end: Floats


class Recorder:
    """Collects the spans of the first `steps` steps of every worker."""

    def __init__(self, layout: Layout, steps: int) -> None:
        self.layout, self.steps = layout, steps
        self.spans: list[Span] = []
        self._flights: list[_Flight] = []
        self._round = -1

    def compute(self, step: Ints, start: Floats, seconds: Floats, only: np.ndarray | None = None) -> None:
        for i in range(self.layout.n) if only is None else np.flatnonzero(only):
            if step[i] < self.steps:
                begin = float(start[i])
                self.spans.append(Span("compute", int(i), begin, begin + float(seconds[i]), {"step": int(step[i])}))

    def update(self, step: Ints, start: Floats, seconds: float, only: np.ndarray | None = None) -> None:
        """The optimizer's part of a step."""
        for i in (range(self.layout.n) if only is None else np.flatnonzero(only)) if seconds else ():
            if step[i] < self.steps:
                begin = float(start[i])
                self.spans.append(Span("step", int(i), begin, begin + seconds, {"step": int(step[i])}))

    def exchange(self, k: int, bucket: int, exchange: Exchange, started: Floats, end: Floats) -> None:
        if k != self._round:
            self._round, self._flights = k, []
        self._flights.append(_Flight(bucket, exchange, started, end))
        for i in np.flatnonzero(exchange.peers.active):
            last = self._last(self._flights[-1], int(i))
            attrs = {"round": k, "bucket": bucket, "peer": last}
            if len(exchange.sent):
                attrs["bytes"] = round(float(exchange.sent[i]))
            self.spans.append(Span("exchange", int(i), float(started[i]), float(end[i]), attrs))

    def wait(self, k: int, step: Ints, start: Floats, end: Floats) -> None:
        """Waits of all workers for their last exchange: first for a late peer, then for the link."""
        for i in np.flatnonzero(end > start + TINY):
            if step[i] >= self.steps:
                continue
            flight = max((f for f in self._flights if f.exchange.peers.active[i]), key=lambda f: float(f.end[i]))
            peer = self._last(flight, int(i))
            attrs = {"step": int(step[i]), "round": k, "bucket": flight.bucket}
            begin, stop = float(start[i]), float(end[i])
            arrived = min(max(float(flight.started[peer]), begin), stop) if peer != i else begin
            if arrived > begin + TINY:
                self.spans.append(Span("wait", int(i), begin, arrived, {**attrs, "peer": peer}))
            if stop > arrived + TINY:
                nodes = sorted((self.layout.node[i], self.layout.node[self._far(flight, int(i))]))
                link = f"{nodes[0]}-{nodes[1]}"
                self.spans.append(Span("wait", int(i), arrived, stop, {**attrs, "link": link}))

    def ddp_step(
        self, k: int, begin: float, end: float, compute: Floats, ready_at: Floats, cost: Floats, update: float
    ) -> None:
        """One step of DDP: everyone waits for the slowest worker, then for the all-reduce, then updates."""
        slowest = int(compute.argmax())
        last = begin + float(compute[slowest])
        free = begin
        flights = []
        for b, seconds in enumerate(cost):
            start = max(free, begin + float(compute[slowest] * ready_at[b]))
            free = start + float(seconds)
            flights.append((b, start, free))
        for i, seconds in enumerate(compute):
            done = begin + float(seconds)
            self.spans.append(Span("compute", i, begin, done, {"step": k}))
            for b, start, stop in flights:
                if stop > start:
                    ready = begin + float(seconds * ready_at[b])
                    attrs = {"round": k, "bucket": b, "peer": slowest}
                    self.spans.append(
                        Span("exchange", i, min(max(ready, flights[b - 1][2] if b else ready), start), stop, attrs)
                    )
            if last > done + TINY:
                self.spans.append(Span("wait", i, done, last, {"step": k, "peer": slowest}))
            if end > last + TINY:
                self.spans.append(Span("wait", i, max(done, last), end, {"step": k, "link": "all"}))
            if update:
                self.spans.append(Span("step", i, end, end + update, {"step": k}))

    def close(self) -> None:
        """Drop what belongs to steps nobody asked for, and put the spans in order of time."""
        horizon = max((s.end for s in self.spans if s.category != "exchange"), default=0.0)
        self.spans = [s for s in self.spans if s.start < horizon]
        self.spans.sort(key=lambda s: (s.start, s.worker))

    def _last(self, flight: _Flight, worker: int) -> int:
        """The member of the worker's group that launched last."""
        group = flight.exchange.peers.of(worker)
        return max(group, key=lambda w: (float(flight.started[w]), w != worker))

    def _far(self, flight: _Flight, worker: int) -> int:
        """A member of the group on another node, if there is one."""
        node = self.layout.node
        group = flight.exchange.peers.of(worker)
        return next((w for w in group if node[w] != node[worker]), group[0])
