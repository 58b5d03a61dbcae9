"""Simulated step times of synchronous training: a max-plus recursion over the rounds that the engine executes.

With gossip while computing (derived from the update of the AWC method, "From Promise to Practice", ICLR 2025), worker i
ends step k at

    u_i(k) = max{ u_i(k-1) + X_i(k),  max over its exchanges of  max_{j in G_i(k)} u_j(k-1) + C_i(k) }

because the exchange of the values after step k-1 runs during the compute time X_i(k) of step k and is needed at its
end; G_i(k) is the worker's group and C_i(k) the cost of its exchange. The optimizer's update is added after that. The
step time is the growth of u per step. Buckets are launched together, at most `in_flight` at once, each with its own
round if staggered. Exchanges share the network interfaces of their nodes equally.

Approximations: a transfer is served by both ends' interfaces independently and ends when both are done; between
steps an interface keeps a backlog of work, not of single transfers; a step mixes all buckets or none (staleness).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from gossamer.errors import InputError
from gossamer.predict.cluster import MOST_BUCKETS
from gossamer.predict.costs import Costs, ExchangeCost, Floats, Ints, Latest, share
from gossamer.topology import Layout, Round
from gossamer.topology.schedule import Schedule
from gossamer.trace import Span


@dataclass(frozen=True)
class ExchangePolicy:
    """How exchanges are spread over time; the defaults are the engine's.

    `combine="atc"` (adapt then combine) averages after the step, without overlap. Workers mix every `every` steps. A
    worker may take `staleness` steps without its exchange before it waits. With `fragments`, each exchange is of one of
    so many parts of the model, in turn. With `outer` steps an exchange has all of the next `every` steps.
    """

    buckets: int = 4
    stagger: bool = True
    hierarchical: bool = True
    in_flight: int = 4
    staleness: int = 0
    every: int = 1
    combine: Literal["awc", "atc"] = "awc"
    average_every: int = 0
    fragments: int = 1
    outer: bool = False

    def __post_init__(self) -> None:
        leasts = {"buckets": 1, "in_flight": 1, "every": 1, "staleness": 0, "average_every": 0, "fragments": 1}
        for name, least in leasts.items():
            value = getattr(self, name)
            if value < least:
                raise InputError(f"{name} must be at least {least}, got {value}")
        if self.buckets > MOST_BUCKETS:
            raise InputError(f"buckets must be at most {MOST_BUCKETS}, got {self.buckets}; use fewer")
        if self.combine == "atc" and self.staleness:
            raise InputError(f"atc waits for every exchange, so staleness must be 0, got {self.staleness}")
        if self.outer and self.staleness:
            raise InputError(f"an outer step waits for its exchange, so staleness must be 0, got {self.staleness}")


TINY = 1e-12  # shorter waits are rounding errors
MOST_KEPT = 1 << 24  # numbers in prepared exchanges; bounds their memory
PAPER = ExchangePolicy(buckets=1, stagger=False, hierarchical=False)  # the paper's setting: one exchange per step


@dataclass(frozen=True)
class Result:
    """A simulated run. `durations` are the steps of all workers after the warm-up, `spans` those of the first steps."""

    step_time: float
    compute_time: float
    durations: Floats
    spans: tuple[Span, ...] = ()
    rates: Floats = field(default_factory=lambda: np.empty(0))  # steps per second of each worker
    exchange_rate: float = 1.0  # exchanges of a worker per step
    crossing: float = 1.0  # asynchronous: exchanges across nodes over their number on infinitely fast links

    @property
    def waiting(self) -> float:
        """The share of the time that is not compute."""
        return max(0.0, 1 - self.compute_time / self.step_time)

    def percentiles(self) -> dict[str, float]:
        """Return percentiles of the step durations."""
        values = np.percentile(self.durations, (5, 50, 95, 99))
        return dict(zip(("p5", "p50", "p95", "p99"), map(float, values), strict=True))


class Network:
    """The network interfaces of the nodes, and the exchanges of a step through them."""

    def __init__(self, schedule: Schedule, costs: Costs, policy: ExchangePolicy) -> None:
        self.schedule, self.costs, self.policy = schedule, costs, policy
        self.backlog = np.zeros(costs.links)
        self._prepared: dict[int, tuple[Round, ExchangeCost]] = {}
        self._waves: dict[int, list[Wave]] = {}
        self._most = max(64, MOST_KEPT // (costs.layout.n * policy.buckets))

    def run(self, k: int, launch: Floats, recorder: Recorder | None = None) -> Floats:
        """Return when every worker has all buckets of exchange k, launched at `launch`."""
        n, bucket = len(launch), 0
        done = launch
        # [in flight x workers], side by side
        lanes = np.tile(launch, min(self.policy.in_flight, self.policy.buckets))
        for wave in self._step(k):
            width = len(wave.exchanges)
            starts = lanes[: width * n]
            ends = wave.run(starts, self.backlog)
            each = ends.reshape(width, n)
            if recorder is not None:
                for at, exchange in enumerate(wave.exchanges):
                    number = -k % self.schedule.fragments + (bucket + at) * self.schedule.fragments
                    recorder.exchange(k, number, exchange, starts[at * n : (at + 1) * n].copy(), each[at])
            done = np.maximum(done, each.max(axis=0))
            lanes[: width * n] = ends
            bucket += width
        return done

    def _step(self, k: int) -> list[Wave]:
        """Return the buckets of exchange k, in waves of as many as may be in flight."""
        parts = self.schedule.fragments
        key = -1 - k % parts if self.schedule.averages(k) else k % (parts * self.schedule.topology.period)
        found = self._waves.get(key)
        if found is None:
            if len(self._waves) >= self._most:  # a long period of many workers is not kept whole
                self._waves.clear()
                self._prepared.clear()
            made = [self._exchange(k, b) for b in range(self.policy.buckets) if self.schedule.exchanges(k, b)]
            width = self.policy.in_flight
            found = self._waves[key] = [Wave(made[b : b + width]) for b in range(0, len(made), width)]
        return found

    def _exchange(self, k: int, bucket: int) -> ExchangeCost:
        round = self.schedule.round(k, bucket)
        found = self._prepared.get(id(round))
        if found is None:  # the round is kept too, so that its id is not used again
            exact = round is self.schedule.everyone
            found = self._prepared[id(round)] = round, self.costs.exchange(round, 1 / self.policy.buckets, exact=exact)
        return found[1]


class Wave:
    """Exchanges of several buckets that are in flight together: arrays of [exchanges x workers].

    `slot` is the place of each job in `table`, which has one row per used interface, [interfaces x jobs].
    """

    def __init__(self, exchanges: list[ExchangeCost]) -> None:
        self.exchanges = exchanges
        n = len(exchanges[0].local)
        self.latest = Latest([e.peers for e in exchanges])
        self.active = np.concatenate([e.peers.active for e in exchanges])
        # a worker's path inside its node is shared by the buckets that use it
        crowd = np.sum([e.local > 0 for e in exchanges], axis=0)
        self.local = np.concatenate([e.local * crowd / 2 for e in exchanges])
        self.after = np.concatenate([e.latency for e in exchanges]) + self.local
        self.worker = np.concatenate([e.jobs.worker + n * at for at, e in enumerate(exchanges)])
        self.least = np.concatenate([e.jobs.least for e in exchanges])
        self.rows, row = np.unique(np.concatenate([e.jobs.link for e in exchanges]), return_inverse=True)
        order = np.argsort(row, kind="stable")
        counts = np.bincount(row, minlength=len(self.rows))
        width = int(counts.max(initial=0))
        self.slot = np.empty(len(row), dtype=np.int64)  # a job's place in the table
        self.slot[order] = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.slot += row * width
        self.table = np.full((len(self.rows), width), np.inf)
        self.work = np.zeros((len(self.rows), width))
        self.work.ravel()[self.slot] = np.concatenate([e.jobs.work for e in exchanges])
        self.total = self.work.sum(axis=1)

    def run(self, starts: Floats, backlog: Floats) -> Floats:
        """Return when each exchange ends on every worker; updates `backlog`, the time until which each link is busy."""
        ready = self.latest(starts) + self.local
        if len(self.slot):
            arrival = ready[self.worker]
            self.table.ravel()[self.slot] = arrival
            busy = backlog[self.rows]
            ends = share(np.maximum(self.table, busy[:, None]), self.work).ravel()[self.slot]
            backlog[self.rows] = np.maximum(busy, self.table.min(axis=1)) + self.total
            ready[self.worker] = np.maximum(ends, arrival + self.least)
            ready = self.latest(ready)
        return np.where(self.active, ready + self.after, starts)


def simulate(
    schedule: Schedule,
    costs: Costs,
    compute: Floats,
    policy: ExchangePolicy,
    *,
    rounds: int,
    update: float = 0.0,
    mixing: float = 0.0,
    trace_steps: int = 0,
) -> Result:
    """Simulate `rounds` exchanges of gossip.

    `compute` has the compute times, [steps, workers], of at least all steps taken; `update` is the optimizer's time at
    the end of each step, `mixing` the time to write a round's result into the parameters.
    """
    schedule = replace(
        schedule,
        stagger=policy.stagger,
        hierarchical=policy.hierarchical,
        average_every=policy.average_every,
        fragments=policy.fragments,
    )
    n = costs.layout.n
    network = Network(schedule, costs, policy)
    everyone = np.arange(n)
    taken = np.zeros(n, dtype=np.int64)  # steps begun by each worker
    u = np.zeros(n)
    history = np.zeros((rounds + 1, n))
    steps = np.zeros((rounds + 1, n), dtype=np.int64)
    recorder = Recorder(costs.layout, trace_steps) if trace_steps else None

    def work() -> Floats:
        times = compute[taken[0]] if not policy.staleness else compute[taken, everyone]
        if recorder is not None:
            recorder.compute(taken, u, times)
        taken.__iadd__(1)
        return times

    def updated(only: np.ndarray | None = None, mixed: bool = False) -> Floats:
        seconds = update + mixing * mixed
        if recorder is not None:
            recorder.update(taken - 1, u, seconds, only)
        return u + seconds if only is None else np.where(only, u + seconds, u)

    for k in range(rounds):
        if recorder is not None and taken.min() >= trace_steps:
            recorder.close()
            spans, recorder = recorder.spans, None
        if policy.combine == "atc":
            for _ in range(policy.every):
                u = u + work()
                u = updated()
            end = network.run(k, u, recorder)
            if recorder is not None:
                recorder.wait(k, taken - 1, u, end)
            u = end + mixing
        else:
            end = network.run(k, u, recorder)
            for _ in range(policy.every - 1 if policy.outer else 0):
                u = u + work()
                u = updated()
            u = u + work()
            for _ in range(policy.staleness):
                late = end > u
                if not late.any():
                    break
                u = updated(late)
                times = compute[taken, everyone]
                if recorder is not None:
                    recorder.compute(taken, u, times, only=late)
                taken += late
                u = np.where(late, u + times, u)
            if recorder is not None:
                recorder.wait(k, taken - 1, u, end)
            u = np.maximum(u, end)
            u = updated(mixed=True)
            for _ in range(0 if policy.outer else policy.every - 1):
                u = u + work()
                u = updated()
        history[k + 1], steps[k + 1] = u, taken
    if recorder is not None:
        recorder.close()
        spans = recorder.spans
    elif not trace_steps:
        spans = []
    return _result(history, steps, compute + update + mixing / policy.every, tuple(spans))


def _result(history: Floats, steps: np.ndarray, compute: Floats, spans: tuple[Span, ...]) -> Result:
    warm = min(len(history) // 5, len(history) - 2)  # the workers need some steps to spread in time
    passed, taken = history[-1] - history[warm], steps[-1] - steps[warm]
    rates = taken / np.where(passed > 0, passed, np.inf)
    total = float(taken.sum())
    counts = np.diff(steps[warm:], axis=0)
    # with staleness workers have paces of their own, and a run ends when the slowest has taken its steps
    own_paces = bool((taken != taken[0]).any())
    return Result(
        step_time=float((passed / taken).max() if own_paces else passed.sum() / total),
        compute_time=float(compute[: steps[-1].max()].mean()),
        durations=(np.diff(history[warm:], axis=0) / counts).ravel(),
        spans=spans,
        rates=rates,
        exchange_rate=(len(history) - 1 - warm) * len(rates) / total,
    )


def simulate_ddp(
    costs: Costs,
    compute: Floats,
    shares: Floats,
    *,
    backward_share: float = 2 / 3,
    update: float = 0.0,
    trace_steps: int = 0,
) -> Result:
    """Simulate torch's DDP: bucket b, `shares[b]` of the model, is all-reduced once all workers have its gradients.

    Gradients appear evenly over the last `backward_share` of a step; all-reduces run one after another. A step
    ends on all workers together, after the slowest worker, the last all-reduce and the optimizer's `update`.
    """
    cost = np.array([costs.allreduce(s) for s in shares])
    ready_at = 1 - backward_share + backward_share * np.cumsum(shares)
    slowest = compute.max(axis=1)
    tail = np.cumsum(cost[::-1])[::-1]  # this bucket's all-reduce and all later ones
    durations = np.maximum(slowest, (slowest[:, None] * ready_at + tail).max(axis=1)) + update
    spans: list[Span] = []
    if trace_steps:
        recorder = Recorder(costs.layout, trace_steps)
        begin = np.concatenate([[0.0], np.cumsum(durations)])
        for k in range(min(trace_steps, len(durations))):
            recorder.ddp_step(k, begin[k], begin[k + 1] - update, compute[k], ready_at, cost, update)
        spans = recorder.spans
    mean = float(durations.mean())
    return Result(mean, float(compute.mean()) + update, durations, tuple(spans), np.full(compute.shape[1], 1 / mean))


@dataclass(frozen=True)
class _Flight:
    bucket: int
    exchange: ExchangeCost
    started: Floats
    end: Floats


class Recorder:
    """Collects the spans of the first `steps` steps of every worker, in the form that the engine records."""

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
        """Record the optimizer's part of a step."""
        for i in (range(self.layout.n) if only is None else np.flatnonzero(only)) if seconds else ():
            if step[i] < self.steps:
                begin = float(start[i])
                self.spans.append(Span("step", int(i), begin, begin + seconds, {"step": int(step[i])}))

    def exchange(self, k: int, bucket: int, exchange: ExchangeCost, started: Floats, end: Floats) -> None:
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
        """Record how workers wait for their last exchange: first for a late peer, then for the link."""
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
        """Record one step of DDP: all workers wait for the slowest one, then for the all-reduce, and update."""
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

    def all_reduced(self, step: int, k: int, ready: Floats, last: float, end: float, slowest: int) -> None:
        """Record an all-reduce of the parameters: all workers wait for the slowest one, then for the links."""
        for i, since in enumerate(ready.tolist()):
            if end > since + TINY:
                attrs = {"round": k, "bucket": 0, "peer": slowest}
                self.spans.append(Span("exchange", i, since, end, attrs))
            if last > since + TINY:
                self.spans.append(Span("wait", i, since, last, {"step": step, "peer": slowest}))
            if end > last + TINY:
                self.spans.append(Span("wait", i, last, end, {"step": step, "link": "all"}))

    def close(self) -> None:
        """Drop spans after the recorded steps, and sort the spans by time."""
        horizon = max((s.end for s in self.spans if s.category != "exchange"), default=0.0)
        self.spans = [s for s in self.spans if s.start < horizon]
        self.spans.sort(key=lambda s: (s.start, s.worker))

    def _last(self, flight: _Flight, worker: int) -> int:
        """Return the member of the worker's group that launched last."""
        group = flight.exchange.peers.of(worker)
        return max(group, key=lambda w: (float(flight.started[w]), w != worker))

    def _far(self, flight: _Flight, worker: int) -> int:
        """Return a member of the group on another node if there is one."""
        node = self.layout.node
        group = flight.exchange.peers.of(worker)
        return next((w for w in group if node[w] != node[worker]), group[0])
