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
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gossamer.comm import Hub
from gossamer.engine.asynchronous import AsyncLane
from gossamer.engine.build import open_gossip, prepare
from gossamer.engine.consistency import agree, describe
from gossamer.engine.coordinator import Coordinator
from gossamer.engine.decentralize import starting_values, warn_if_anchor_stays
from gossamer.engine.gossip import Collective, Gossip
from gossamer.engine.lane import Lane
from gossamer.engine.policies import Asynchronous, Filter, Settings
from gossamer.engine.prepared import Prepared
from gossamer.engine.protocol import MixedParameters, Participation
from gossamer.engine.synchronous import SyncLane
from gossamer.errors import InputError
from gossamer.topology import Layout, TopologyLike
from gossamer.topology.events import Event

Durations = Callable[[int, int], float]


class VirtualCluster:
    """n workers in one process: `VirtualCluster(8)`, or `VirtualCluster(per_node=[4, 4])` with nodes."""

    elastic = joined = in_meeting = False

    def __init__(self, n: int | None = None, *, per_node: Sequence[int] | None = None):
        if (n is None) == (per_node is None):
            raise InputError("pass either n or per_node=[...] to VirtualCluster, and not both")
        self.layout = Layout.of(per_node) if per_node is not None else Layout.flat(n or 0)
        self.gossips: list[Gossip] = []
        self._hub = Hub(self.layout.n)
        self._coordinator = _OneThread(self.gossips)
        self._distance: float | None = None  # the consensus distance when it was last measured
        self._timed = False  # workers step at the times of turns(): a collective call finds them between two

    def decentralize(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer | Sequence[Optimizer]],
        *,
        topology: TopologyLike = "aer",
        parameters: Filter | None = None,
        broadcast: bool = True,
        **settings: Any,
    ) -> list[Gossip]:
        """`gossamer.decentralize` on every virtual worker: the same arguments, one handle per worker."""
        if self.gossips:
            raise InputError("this VirtualCluster is in use; close() it first")
        if len(models) != self.layout.n or len(optimizers) != self.layout.n:
            raise InputError(
                f"{self.layout.n} virtual workers need as many models and optimizers, got {len(models)} and "
                f"{len(optimizers)}"
            )
        policy = Settings.of(**settings)
        if policy.elastic is not None:
            raise InputError("virtual workers share one process and cannot die one by one; leave on_failure out")
        if policy.exchange.transport != "auto":
            raise InputError(
                f"virtual workers share one process and need no transport, got {policy.exchange.transport!r}; "
                "leave it out"
            )
        if policy.gradients == "node" and self.layout.nodes < self.layout.n:
            raise InputError(
                "gradients='node' needs real workers: virtual workers run their backward passes one after the other; "
                f"use VirtualCluster({self.layout.nodes}), one model per node, and accumulate the gradients of the "
                "node's batches in it"
            )
        if policy.gradients == "auto":
            policy = replace(policy, gradients="worker")
        if isinstance(policy.algorithm, Asynchronous):  # a single thread has no wall time of its own
            policy = replace(policy, algorithm=replace(policy.algorithm, clock="virtual"))
        workers = [
            prepare(model, optimizer, topology, policy, parameters, self.layout, rank, range(self.layout.n))
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True))
        ]
        agree([json.dumps(describe(w)) for w in workers])
        warn_if_anchor_stays(workers[0], stacklevel=3)
        for worker in workers:
            worker.common = broadcast
        if broadcast:
            _broadcast(workers)
        self.gossips += [open_gossip(w, self._hub.transport(w.rank), self._coordinator) for w in workers]
        return self.gossips

    def turns(self, total_steps: int, durations: Durations = lambda rank, step: 1.0) -> Iterator[int]:
        """Asynchronous workers at their own pace: yields the worker whose step comes next, `total_steps` times in all.

        `durations(rank, step)` is how long that worker's gradient takes, in mean gradient times.
        """
        self._timed = True
        self._coordinator.durations = durations
        due = []
        for rank, gossip in enumerate(self.gossips):
            now = max((lane.virtual_time for lane in gossip.lanes if isinstance(lane, AsyncLane)), default=0.0)
            due.append((now + durations(rank, gossip.lanes[0].metrics.steps), rank))
        heapq.heapify(due)
        for _ in range(total_steps):
            time, rank = heapq.heappop(due)
            yield rank
            heapq.heappush(due, (time + durations(rank, self.gossips[rank].lanes[0].metrics.steps), rank))

    def park(self, rank: int) -> None:
        """Worker `rank` has no more data: it takes part in its neighbors' rounds without steps of its own."""
        if rank not in range(self.layout.n):
            raise InputError(f"cannot park worker {rank!r}: the workers are 0..{self.layout.n - 1}")
        self._coordinator.parked.add(rank)

    def catch_up(self) -> None:
        """Bring every worker to the round of the furthest one by mix-only rounds, as a collective call does."""
        if not self.gossips:
            raise InputError("this VirtualCluster has no workers yet; call its decentralize() first")
        for index in range(len(self.gossips[0].lanes)):
            clocks = self._coordinator.events_of(index)
            if clocks:  # both sides of an event perform it at once: only clocks can be behind
                latest = max(lane.virtual_time for lane in clocks)
                for late in clocks:
                    if late.virtual_time < latest and not self._timed:
                        late.metrics.mix_only += round(latest - late.virtual_time)
                        late.reach(latest)
                continue
            lanes = self._coordinator.rounds_of(index)
            goal = max(lane.k for lane in lanes)
            for k in range(min(lane.k for lane in lanes), goal):
                behind = [lane for lane in lanes if lane.k == k]
                for lane in behind:
                    lane.finish()
                    lane.apply()
                for lane in behind:
                    lane.launch()
                    lane.metrics.mix_only += 1
            for lane in lanes:
                lane.finish()

    # -- collective calls -------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """All workers hold the exact mean inside the block; yields worker 0's model."""
        self.catch_up()
        restores = _run([g._enter_average() for g in self.gossips])
        try:
            yield self.gossips[0].model
        finally:
            for restore in restores:
                restore()

    def consensus_distance(self) -> float:
        """RMS distance of the workers' parameters to their mean."""
        self.catch_up()
        self._distance = float(_run([g._measure_distance() for g in self.gossips])[0])
        return self._distance

    def state_dicts(self) -> list[dict[str, Any]]:
        """What a resumed run needs besides models and optimizers, one entry per worker."""
        self.catch_up()
        return [g._state() for g in self.gossips]

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue where `states` were taken; load the models' and optimizers' states first."""
        if len(states) != len(self.gossips):
            raise InputError(f"{len(states)} states for {len(self.gossips)} virtual workers; pass one each")
        for gossip, state in zip(self.gossips, states, strict=True):
            gossip._check_state(state)
        self.catch_up()
        for gossip, state in zip(self.gossips, states, strict=True):
            gossip._load(state)
        self._coordinator.forget_events()

    def reset(self) -> None:
        """Continue from the parameters as they are now; call it after writing to them."""
        self.catch_up()
        for lane in self._lanes():
            lane.restart()

    # -- the protocol of recipes, checkpoints and integrations ------------------------------------------------

    @property
    def steps(self) -> list[int]:
        """Optimizer steps that each worker has taken."""
        return [g.lanes[0].metrics.steps for g in self.gossips]

    def scalars(self, prefix: str = "gossip/") -> dict[str, float]:
        """`Gossip.scalars` of the workers, averaged over them."""
        each = [g.scalars(prefix) for g in self.gossips]
        known = [name for name in each[0] if all(name in numbers for numbers in each)] if each else []
        found = {name: sum(numbers[name] for numbers in each) / len(each) for name in known}
        if self._distance is not None:
            found[f"{prefix}consensus_distance"] = self._distance
        return found

    def participation(self) -> Participation:
        """All workers, each with a replica of its own."""
        everyone = tuple(range(self.layout.n))
        return Participation(self.layout.n, everyone, tuple((w,) for w in everyone))

    def share(self, text: str) -> list[str]:
        """The same text for every worker: all are in this process."""
        return [text] * self.layout.n

    def accepts(self, state: dict[str, Any]) -> bool:
        """Whether `load_state_dicts` can continue from `state`: same algorithm, workers, topology and optimizers."""
        return self.gossips[0].accepts(state)

    def restart(self, steps: int) -> None:
        """Continue from the parameters as they are now, with `steps` steps counted by every worker."""
        self.catch_up()
        for lane in self._lanes():
            lane.restart()
            lane.count_steps(steps)
        self._coordinator.forget_events()

    def mixed_parameters(self) -> list[MixedParameters]:
        """Which parameters are mixed, for each worker."""
        return [m for g in self.gossips for m in g.mixed_parameters()]

    def close(self, *, average: bool = True) -> None:
        """Stop gossip on every worker, which then holds the mean of all workers; the cluster can be used again.

        With `average=False` every worker keeps its own parameters and buffers.
        """
        for gossip in self.gossips:
            gossip._refuse_in_average("close()")
        if average and self.gossips:
            self.catch_up()
            _run([g._keep_average() for g in self.gossips])
        for gossip in self.gossips:
            gossip._stop(drain=0.0)
        self.gossips = []
        self._distance = None
        self._timed = False
        self._hub = Hub(self.layout.n)  # without messages that were not received
        self._coordinator = _OneThread(self.gossips)

    def __enter__(self) -> VirtualCluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(average=kind is None)  # workers in the middle of a failed step cannot meet

    def _lanes(self) -> Iterator[Lane]:
        for gossip in self.gossips:
            yield from gossip.lanes


class _OneThread(Coordinator):
    """All workers share one thread: nobody can wait, so whatever a worker needs of others is done at once."""

    def __init__(self, gossips: list[Gossip]):
        self.parked: set[int] = set()
        self.durations: Durations = lambda rank, step: 1.0
        self._gossips = gossips
        self._streams: dict[int, _Peekable] = {}  # of each asynchronous lane: the events that are left
        self._driven: dict[int, float] = {}  # and the time up to which they are done

    def meet(self, lanes: Sequence[Lane], call: str) -> None:
        raise InputError(f"{call} is collective, and virtual workers share one thread; call it on the VirtualCluster")

    def stalled(self, lane: Lane, k: int, *, assist: bool) -> None:
        """Parked workers go on to round `k`."""
        self._advance_parked(lane.index, k)

    def combine(self, lane: SyncLane) -> None:
        """Apply a worker's round once all workers that it needs have stepped, which is before its next forward pass."""
        lanes = self.rounds_of(lane.index)
        slowest = min((other.k for other in lanes if other.rank not in self.parked), default=0)
        for other in lanes:
            if other.jobs is not None and all(job.done for job in other.jobs):
                other.apply()
        self._advance_parked(lane.index, slowest)

    def duration(self, rank: int, step: int) -> float:
        return self.durations(rank, step)

    def drive(self, lane: int, time: float) -> bool:
        """Perform the events up to `time`, each on both of its workers."""
        if time < self._driven.get(lane, 0.0) - 1e-9:
            raise InputError(
                f"a virtual worker stepped at time {time:g} after others had reached {self._driven[lane]:g}; step the "
                "workers in turn, or in the order of VirtualCluster.turns()"
            )
        self._driven[lane] = time
        lanes = self.events_of(lane)
        stream = self._streams.get(lane)
        if stream is None:
            begun = max(each.timetable.started for each in lanes)
            stream = self._streams[lane] = _Peekable(lanes[0].timetable.events.stream(after=begun))
        while (event := stream.next_until(time)) is not None:
            pair = (lanes[event.i], lanes[event.j])
            jobs = [side.begin(event) for side in pair]
            for side, launched in zip(pair, jobs, strict=True):
                side.end(event, launched)
        return True

    def forget_events(self) -> None:
        """Another state was loaded: events go on from there."""
        self._streams.clear()
        self._driven.clear()

    def rounds_of(self, index: int) -> list[SyncLane]:
        """Lane `index` of every worker, if it gossips in rounds."""
        return [lane for g in self._gossips if isinstance(lane := g.lanes[index], SyncLane)]

    def events_of(self, index: int) -> list[AsyncLane]:
        """Lane `index` of every worker, if it gossips in events."""
        return [lane for g in self._gossips if isinstance(lane := g.lanes[index], AsyncLane)]

    def _advance_parked(self, index: int, k: int) -> None:
        for rank in sorted(self.parked):
            lane = self._gossips[rank].lanes[index]
            while lane.k < k:
                lane.mix_only()


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


def _run(collectives: list[Collective]) -> list[Any]:
    """Drive all workers' collectives in turn: an exchange is complete once every worker has launched it."""
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
def _broadcast(workers: list[Prepared]) -> None:
    first = starting_values(workers[0])
    for worker in workers[1:]:
        for mine, theirs in zip(starting_values(worker), first, strict=True):
            mine.copy_(theirs)
