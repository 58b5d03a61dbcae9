"""Virtual workers: n workers of one process on the in-process transport, deterministic, without threads.

cluster = VirtualCluster(per_node=[4, 4])
gossips = cluster.decentralize(models, optimizers, topology="aer")
for step in range(steps):
    for model, optimizer in zip(models, optimizers):
        loss(model).backward(); optimizer.step(); optimizer.zero_grad()
with cluster.averaged():
    evaluate(models[0])
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gossamer.comm import Counted, Hub
from gossamer.engine.asynchronous import AsyncLane
from gossamer.engine.build import Prepared, assemble, prepare
from gossamer.engine.consistency import agree, describe
from gossamer.engine.decentralize import starting_values
from gossamer.engine.gossip import Collective, Gossip
from gossamer.engine.policies import Asynchronous, Filter, Settings
from gossamer.engine.synchronous import SyncLane
from gossamer.errors import InputError
from gossamer.topology import Layout
from gossamer.topology.events import Event


class VirtualCluster:
    """n workers, `VirtualCluster(8)`, or `VirtualCluster(per_node=[4, 4])` with nodes."""

    def __init__(self, n: int | None = None, *, per_node: Sequence[int] | None = None):
        if (n is None) == (per_node is None):
            raise InputError("pass either n or per_node=[...] to VirtualCluster, and not both")
        self.layout = Layout.of(per_node) if per_node is not None else Layout.flat(n or 0)
        self.hub = Hub(self.layout.n)
        self.gossips: list[Gossip] = []
        self._parked: set[int] = set()
        self._streams: dict[int, _Peekable] = {}  # of each asynchronous lane: the events that are left
        self._driven: dict[int, float] = {}  # and the time up to which they are done
        self._timed = False  # workers step at the times of turns(): a collective call finds them between two

    def decentralize(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer | Sequence[Optimizer]],
        *,
        topology: Any = "aer",
        parameters: Filter | None = None,
        broadcast: bool = True,
        **settings: Any,
    ) -> list[Gossip]:
        """`gossamer.decentralize` on every virtual worker; the same arguments, one handle each."""
        if self.gossips:
            raise InputError("this VirtualCluster is in use; close() it first")
        if len(models) != self.layout.n or len(optimizers) != self.layout.n:
            raise InputError(
                f"{self.layout.n} virtual workers need as many models and optimizers, got {len(models)} and "
                f"{len(optimizers)}"
            )
        policy = Settings.of(**settings)
        if isinstance(policy.algorithm, Asynchronous):  # a single thread has no wall time of its own
            policy = replace(policy, algorithm=replace(policy.algorithm, clock="virtual"))
        workers = [
            prepare(model, optimizer, topology, policy, parameters, self.layout, rank, range(self.layout.n))
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True))
        ]
        agree([json.dumps(describe(w)) for w in workers])
        if broadcast:
            self._broadcast(workers)
        self.gossips = [assemble(w, self.hub.transport(w.rank), self._refuse, self._nudge, None) for w in workers]
        for gossip in self.gossips:
            for lane in gossip.lanes:
                if isinstance(lane, SyncLane):
                    lane.combine = partial(self._combine, lane.index)  # type: ignore[method-assign]
                if isinstance(lane, AsyncLane):
                    lane.drive = self._drive
        return self.gossips

    def turns(self, total_steps: int, durations: Callable[[int, int], float] = lambda rank, step: 1.0) -> Iterator[int]:
        """Asynchronous workers at their own pace: yields whose step comes next, `total_steps` times in all.

        `durations(rank, step)` is how long that worker's gradient takes, in mean gradient times.
        """
        self._timed = True
        due = []
        for rank, gossip in enumerate(self.gossips):
            now = 0.0
            for lane in gossip.lanes:
                if isinstance(lane, AsyncLane):
                    lane.durations, now = partial(durations, rank), lane.virtual_time
            due.append((now + durations(rank, gossip.lanes[0].meter.steps), rank))
        heapq.heapify(due)
        for _ in range(total_steps):
            time, rank = heapq.heappop(due)
            yield rank
            heapq.heappush(due, (time + durations(rank, self.gossips[rank].lanes[0].meter.steps), rank))

    def park(self, rank: int) -> None:
        """Worker `rank` has no more data: it takes part in its neighbors' rounds without steps of its own."""
        if rank not in range(self.layout.n):
            raise InputError(f"cannot park worker {rank!r}: the workers are 0..{self.layout.n - 1}")
        self._parked.add(rank)

    def catch_up(self) -> None:
        """Bring every worker to the round of the furthest by mix-only rounds, as a collective call does."""
        for index in range(len(self.gossips[0].lanes)):
            clocks = [lane for g in self.gossips if isinstance(lane := g.lanes[index], AsyncLane)]
            if clocks:  # an event is done on both sides at once: only clocks can be behind
                latest = max(lane.virtual_time for lane in clocks)
                for late in clocks:
                    if late.virtual_time < latest and not self._timed:
                        late.meter.mix_only += round(latest - late.virtual_time)
                        late.reach(latest)
                continue
            lanes = self._rounds(index)
            goal = max(lane.k for lane in lanes)
            for k in range(min(lane.k for lane in lanes), goal):
                behind = [lane for lane in lanes if lane.k == k]
                for lane in behind:
                    lane.finish()
                    lane.apply()
                for lane in behind:
                    lane.launch()
                    lane.meter.mix_only += 1
            for lane in lanes:
                lane.finish()

    def _rounds(self, index: int) -> list[SyncLane]:
        """Lane `index` of every worker, if it gossips in rounds."""
        return [lane for g in self.gossips if isinstance(lane := g.lanes[index], SyncLane)]

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """All workers hold the exact mean inside the block; yields worker 0's model."""
        self.catch_up()
        restores = self._run([g._enter_average() for g in self.gossips])
        try:
            yield self.gossips[0].model
        finally:
            for restore in restores:
                restore()

    def consensus_distance(self) -> float:
        self.catch_up()
        return float(self._run([g._measure_distance() for g in self.gossips])[0])

    def state_dicts(self) -> list[dict[str, Any]]:
        self.catch_up()
        return [g._state() for g in self.gossips]

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        if len(states) != len(self.gossips):
            raise InputError(f"{len(states)} states for {len(self.gossips)} virtual workers; pass one each")
        for gossip, state in zip(self.gossips, states, strict=True):
            gossip._check_state(state)
        self.catch_up()
        for gossip, state in zip(self.gossips, states, strict=True):
            gossip._load(state)
        self._streams.clear()
        self._driven.clear()

    def reset(self) -> None:
        self.catch_up()
        for gossip in self.gossips:
            for lane in gossip.lanes:
                lane.adopt()

    def close(self) -> None:
        for gossip in self.gossips:
            gossip._stop(drain=0.0)
        self.gossips = []
        self._parked.clear()
        self._streams.clear()
        self._driven.clear()
        self._timed = False
        self.hub = Hub(self.layout.n)  # without the messages nobody took

    def __enter__(self) -> VirtualCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drive(self, index: int, time: float) -> None:
        """Perform the events up to `time`, each on both of its workers."""
        if time < self._driven.get(index, 0.0) - 1e-9:
            raise InputError(
                f"a virtual worker stepped at time {time:g} after others had reached {self._driven[index]:g}; step the "
                "workers in turn, or in the order of VirtualCluster.turns()"
            )
        self._driven[index] = time
        lanes = [lane for g in self.gossips if isinstance(lane := g.lanes[index], AsyncLane)]
        stream = self._streams.get(index)
        if stream is None:
            begun = max(lane.agenda.started for lane in lanes)
            stream = self._streams[index] = _Peekable(lanes[0].agenda.events.stream(after=begun))
        while (event := stream.next_until(time)) is not None:
            pair = (lanes[event.i], lanes[event.j])
            jobs = [lane.begin(event) for lane in pair]
            for lane, launched in zip(pair, jobs, strict=True):
                lane.end(event, launched)

    def _run(self, collectives: list[Collective]) -> list[Any]:
        """All workers' collectives in turn: each exchange is complete once everybody has launched it."""
        results: list[Any] = [None] * len(collectives)
        running = dict(enumerate(collectives))
        while running:
            for worker, steps in list(running.items()):
                try:
                    next(steps)
                except StopIteration as stop:
                    results[worker] = stop.value
                    del running[worker]
        return results

    @torch.no_grad()
    def _broadcast(self, workers: list[Prepared]) -> None:
        first = starting_values(workers[0])
        for worker in workers[1:]:
            for mine, theirs in zip(starting_values(worker), first, strict=True):
                mine.copy_(theirs)

    def _refuse(self, lanes: Sequence[Counted], call: str) -> None:
        raise InputError(f"{call} is collective, and virtual workers share one thread; call it on the VirtualCluster")

    def _nudge(self, lane: int, k: int) -> None:
        """A worker stands still: parked workers go on to its round."""
        for rank in sorted(self._parked):
            parked = self.gossips[rank].lanes[lane]
            while parked.k < k:
                parked.mix_only()

    def _combine(self, index: int) -> None:
        """Adapt-then-combine without threads: a worker's values are mixed as soon as all it needs have stepped, which
        is before its own next forward pass."""
        lanes = self._rounds(index)
        slowest = min((lane.k for lane in lanes if lane.rank not in self._parked), default=0)
        for lane in lanes:
            if lane.jobs is not None and all(job.done for job in lane.jobs):
                lane.apply()
        self._nudge(index, slowest)


class _Peekable:
    """Events taken one by one while they are due."""

    def __init__(self, events: Iterator[Event]):
        self._events, self._next = events, next(events, None)

    def next_until(self, time: float) -> Event | None:
        due = self._next
        if due is None or due.time > time:
            return None
        self._next = next(self._events, None)
        return due
