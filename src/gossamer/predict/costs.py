"""The cost of an exchange in seconds, from the same rounds and traffic that the engine executes.

An `ExchangeCost` is a round prepared for the simulator: which workers wait for which, fixed seconds before and after
the network, and the jobs for the nodes' network interfaces. There are two cost models: `AbstractCosts` (the paper's
setting: a fixed cost across nodes, none inside a node, no contention) and `ClusterCosts` (bytes over described links).

Jobs share a link equally (processor sharing). In *virtual time* every present job progresses at rate 1: the virtual
time V grows at rate 1/m while m jobs are present, and a job of work w that arrives at virtual time V ends when V has
grown by w (Kleinrock, "Queueing Systems" II, section 4.4).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gossamer.predict.cluster import ClusterSpec, LinkSpec
from gossamer.predict.methods import WIRES
from gossamer.predict.processing import compression_seconds, exchange_seconds
from gossamer.topology import Layout, Round
from gossamer.topology.plan import traffic

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
FEW = 40  # jobs below which plain Python is faster than about twenty calls of numpy


class Peers:
    """Which workers wait for which in a round: for the whole group if it averages uniformly, else for the neighbors.

    A worker's row lists the workers it waits for, itself included. Rows are concatenated in `members` and begin at
    `starts`; `row[i]` is the row of worker i (the workers of a group share one).
    """

    def __init__(self, round: Round, n: int) -> None:
        self.round = round
        self.partner: Ints | None = None
        if round.weights is not None:
            pattern = round.sparse(n)
            self.members = pattern.indices.astype(np.int64)
            self.starts = pattern.indptr[:-1].astype(np.int64)
            self.row = np.arange(n)
            self.active = np.diff(pattern.indptr) > 1
            return
        sizes = np.array([len(g) for g in round.groups], dtype=np.int64)
        self.members = np.fromiter((w for g in round.groups for w in g), dtype=np.int64, count=n)
        self.starts = np.cumsum(sizes) - sizes
        self.row = np.empty(n, dtype=np.int64)
        self.row[self.members] = np.repeat(np.arange(len(sizes)), sizes)
        self.active = (sizes > 1)[self.row]
        if sizes.max() <= 2:  # pairs: one gather instead of a reduction
            first = self.starts[self.row]
            self.partner = self.members[first] + self.members[first + sizes[self.row] - 1] - np.arange(n)

    def of(self, worker: int) -> tuple[int, ...]:
        """Return the worker and the workers that it waits for."""
        if self.round.weights is None:
            return self.round.group_of(worker)
        stop = self.starts[worker + 1] if worker + 1 < len(self.starts) else len(self.members)
        return tuple(int(w) for w in self.members[self.starts[worker] : stop])


class Latest:
    """The largest of each worker's own and its peers' times, for several exchanges at once, [exchanges x n]."""

    def __init__(self, peers: Sequence[Peers]) -> None:
        n = len(peers[0].row)
        shift = n * np.arange(len(peers))
        self.partner: Ints | None = None
        partners = [p.partner for p in peers if p.partner is not None]
        if len(partners) == len(peers):
            self.partner = np.concatenate([p + s for p, s in zip(partners, shift, strict=True)])
            return
        self.members = np.concatenate([p.members + s for p, s in zip(peers, shift, strict=True)])
        lengths = np.cumsum([0] + [len(p.members) for p in peers])
        rows = np.cumsum([0] + [len(p.starts) for p in peers])
        self.starts = np.concatenate([p.starts + s for p, s in zip(peers, lengths, strict=False)])
        self.row = np.concatenate([p.row + s for p, s in zip(peers, rows, strict=False)])

    def __call__(self, times: Floats) -> Floats:
        if self.partner is not None:
            return np.maximum(times, times[self.partner])
        return np.asarray(np.maximum.reduceat(times[self.members], self.starts)[self.row])


@dataclass(frozen=True)
class Jobs:
    """Transfers that share links: job j keeps link[j] busy for work[j] seconds.

    A job arrives when worker[j] is ready, and worker[j] waits for its end. A job takes at least `least` seconds, even
    on an idle link (a slow pair of nodes).
    """

    link: Ints
    worker: Ints
    work: Floats
    least: Floats


NO_JOBS = Jobs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0), np.empty(0))


@dataclass(frozen=True)
class ExchangeCost:
    """The cost of one bucket's exchange in one round, in seconds per worker.

    `local` is the transfer inside the node and the worker's own processing, half before and half after the network; the
    buckets in flight share it. `latency` is not shared. `sent` is the number of bytes, for traces. `cpu` are the CPU
    seconds of the worker.
    """

    peers: Peers
    local: Floats
    latency: Floats
    jobs: Jobs = NO_JOBS
    sent: Floats = field(default_factory=lambda: np.empty(0))
    cpu: Floats = field(default_factory=lambda: np.empty(0))


class Costs(Protocol):
    """A cost model: the costs of an exchange and of an all-reduce of a share of the model."""

    @property
    def layout(self) -> Layout: ...
    @property
    def links(self) -> int:
        """The number of links that jobs can name."""
        ...

    def exchange(self, round: Round, share: float, *, exact: bool = False) -> ExchangeCost:
        """The cost of an exchange. `exact`: an exact average, which travels in full precision."""
        ...

    def allreduce(self, share: float) -> float: ...


@dataclass(frozen=True)
class AbstractCosts:
    """The paper's setting, in mean compute times: an all-reduce costs γ, an exchange ωγ across nodes, 0 inside.

    Exchanges of different workers do not disturb each other; the buckets of one worker share its link. In a layout of
    one node every worker counts as a node of its own. A hierarchical exchange sends less across nodes than the flat
    ring that ω is measured with: g/(2(g-1)) of it for a group of g workers on two nodes.
    """

    layout: Layout
    gamma: float
    omega: float
    wire: str = "fp32"
    hierarchical: bool = False

    @property
    def links(self) -> int:
        return self.layout.n

    def exchange(self, round: Round, share: float, *, exact: bool = False) -> ExchangeCost:
        n, node = self.layout.n, self.layout.node
        full = self.omega * self.gamma * share * (1.0 if exact else WIRES[self.wire] / WIRES["fp32"])
        cost = np.zeros(n)
        for g in round.groups:
            nodes = len({node[w] for w in g})
            if len(g) > 1 and (self.layout.nodes == 1 or nodes > 1):
                flat, parts = 2 * (len(g) - 1) / len(g), nodes if nodes > 1 else len(g)
                volume = (1.0 if parts == 2 else 2 * (parts - 1) / parts) if self.hierarchical else flat
                cost[list(g)] = full * volume / flat
        nothing = np.zeros(n)
        if share == 1:
            return ExchangeCost(Peers(round, n), nothing, cost)
        busy = np.flatnonzero(cost)
        return ExchangeCost(Peers(round, n), nothing, nothing, Jobs(busy, busy, cost[busy], cost[busy]))

    def allreduce(self, share: float) -> float:
        return self.gamma * share * WIRES[self.wire] / WIRES["fp32"] if self.layout.n > 1 else 0.0


@dataclass(frozen=True)
class ClusterCosts:
    """Seconds on a described cluster, from the bytes of each exchange's plan.

    With `collective`, groups average by one flat all-reduce like DDP's instead of our plans, as Decent-DP does. With
    `inside`, the layout's workers stand for nodes of so many workers that hold one replica: each exchanges its shard,
    and the node gathers.
    """

    cluster: ClusterSpec
    wire: str = "fp32"
    hierarchical: bool = True
    collective: bool = False
    inside: int = 1

    @cached_property
    def layout(self) -> Layout:
        return self.cluster.layout

    @property
    def links(self) -> int:
        return self.layout.nodes

    def exchange(self, round: Round, share: float, *, exact: bool = False) -> ExchangeCost:
        layout, links = self.layout, self.cluster.links
        elements = self.cluster.model.bytes / 4 * share
        own = np.zeros(layout.n)
        if self.collective and round.weights is None:
            inter, intra, steps = _collective(round, layout, tree=self.cluster.ddp.allreduce == "best")
            inter, intra = inter * elements * 4, intra * elements * 4
        else:
            t = traffic(round, layout, hierarchical=self.hierarchical)
            wire = "fp32" if exact else self.wire
            wired = WIRES[wire]
            inter = (t.inter_wired * wired + t.inter_plain * 4) * elements
            intra = (t.intra_wired * wired + t.intra_plain * 4) * elements
            own = exchange_seconds(self.cluster.costs, t, elements * 4, wire, 1 / self.inside)
            steps = t.steps
        crosses = inter > 0
        # a hierarchical exchange has two steps inside the node, before and after those across nodes
        inside = np.where(crosses, np.where((intra > 0) & (steps > 2) & (not self.collective), 2, 0), steps)
        if self.inside > 1:
            gathered = (self.inside - 1) / self.inside * elements * 4
            intra, inside = intra + np.where(crosses, gathered, 0.0), inside + crosses
            steps = steps + crosses
        local = intra / links.intra.bytes_per_second + own
        latency = _overhead(links.intra, intra, inside)
        if crosses.any():
            latency = latency + _overhead(links.between, inter / self.inside, steps - inside)
        moved = inter / self.inside + intra
        rate = self.cluster.costs.transfer_cpu_gb_per_s if self.cluster.costs is not None else None
        cpu = own + (moved / rate / 1e9 if rate else 0.0)
        return ExchangeCost(Peers(round, layout.n), local, latency, self._jobs(round, inter), inter + intra, cpu)

    def _jobs(self, round: Round, inter: Floats) -> Jobs:
        """Return one job per group and node (per worker in a weighted round)."""
        node = self.layout.node
        rows: list[tuple[int, int, float, float]] = []
        for g in round.groups:
            merged = round.weights is None
            total: Counter[int] = Counter()
            flows: Counter[int] = Counter()
            first: dict[int, int] = {}
            for w in g:
                if inter[w] > 0:
                    key = node[w] if merged else w
                    total[key] += inter[w]
                    flows[key] += 1
                    first.setdefault(key, w)
            nodes = {node[w] for w in g}
            for key, size in total.items():
                w = first[key]
                slowest, fastest = self._bandwidth(node[w], nodes)
                flow = self.cluster.links.between.flow_bytes_per_second * flows[key] * self.inside
                least = max(size / max(1, len(nodes) - 1) / slowest, size / flow)
                rows.append((node[w], w, size / fastest / self.cluster.links.between.shared, least))
        if not rows:
            return NO_JOBS
        table = np.array(rows)
        at = table[:, :2].astype(np.int64)
        return Jobs(at[:, 0], at[:, 1], table[:, 2], table[:, 3])

    def _bandwidth(self, node: int, group: set[int]) -> tuple[float, float]:
        """Return bytes per second of the slowest pair of nodes used in the group, and of the interface."""
        default = self.cluster.links.between.bytes_per_second
        rates = [
            p.bytes_per_second
            for p in self.cluster.links.pairs
            if node in p.nodes and p.nodes[0] in group and p.nodes[1] in group
        ]
        covered = len(rates) >= len(group) - 1  # every other node of the group has an override
        slowest = min(rates if covered and rates else [*rates, default])
        return slowest, max([slowest] if covered and rates else [*rates, default])

    def allreduce(self, share: float) -> float:
        """Return the seconds of an all-reduce of gradients.

        Measured times count where there are any, scaled by the formula to another layout.
        """
        if self.layout.n == 1:
            return 0.0
        costs, size = self.cluster.costs, self.cluster.model.bytes * share
        sent = size / 4 * WIRES[self.wire]
        seconds = self.formula(self.layout, sent)
        if costs is not None and costs.allreduce is not None:
            probed = Layout.of(costs.allreduce.per_node)
            scale = 1.0 if probed == self.layout else seconds / self.formula(probed, sent)
            seconds = costs.allreduce.at(sent) * scale
            seconds *= costs.allreduce.bf16_slowdown if self.wire != "fp32" else 1.0
        return seconds + compression_seconds(costs, size, self.wire)

    def formula(self, layout: Layout, size: float) -> float:
        """Return the seconds by formula: a ring sends 2(n-1)/n of the data through every interface; `best` on two nodes
        sends the data once each way."""
        n, links = layout.n, self.cluster.links
        if layout.nodes == 1:
            return 2 * (n - 1) / n * size / links.intra.bytes_per_second + 2 * (n - 1) * links.intra.latency
        slowest = min([p.flow_bytes_per_second for p in links.pairs] + [links.between.flow_bytes_per_second])
        latency = links.between.latency
        if links.pairs:
            latency = max(latency, *(p.latency for p in links.pairs))
        if self.cluster.ddp.allreduce == "best" and layout.nodes == 2:
            local = max(layout.per_node)
            inside = 2 * (local - 1) / local * size / links.intra.bytes_per_second
            return inside + size / slowest + 2 * latency
        hops = layout.nodes if self.cluster.ddp.allreduce == "best" else n
        return 2 * (n - 1) / n * size / slowest + 2 * (hops - 1) * latency


def _overhead(link: LinkSpec, nbytes: Floats, messages: Ints) -> Floats:
    """Return the seconds of so many messages that carry `nbytes` together, beyond their bytes over the bandwidth."""
    if not link.by_size:
        return np.asarray(messages * link.latency)
    each = nbytes / np.maximum(1, messages)
    known = {float(size): link.overhead(float(size)) for size in np.unique(each)}
    return np.array([m * known[float(size)] for m, size in zip(messages, each, strict=True)])


def _collective(round: Round, layout: Layout, *, tree: bool) -> tuple[Floats, Floats, Ints]:
    """Return what workers send across and inside nodes, in bucket sizes, and the steps of one all-reduce per group.

    A ring sends 2(g-1)/g over each hop; with `tree`, a group on two nodes sends its data once between them.
    """
    inter, intra, steps = np.zeros(layout.n), np.zeros(layout.n), np.zeros(layout.n, dtype=np.int64)
    for g in round.groups:
        if len(g) == 1:
            continue
        volume = 2 * (len(g) - 1) / len(g)
        two = tree and len({layout.node[w] for w in g}) == 2
        for w, following in zip(g, (*g[1:], g[0]), strict=True):
            if layout.node[w] == layout.node[following]:
                intra[w] += volume
            else:
                inter[w] += 1.0 if two else volume
            steps[w] = 2 * (len(g) - 1)
    return inter, intra, steps


def share(arrival: Floats, work: Floats) -> Floats:
    """Return when each job ends under processor sharing, one link per row.

    Rows are padded with jobs of no work that never arrive (infinity).
    """
    columns = arrival.shape[1]
    if columns == 1:
        return arrival + work
    if arrival.size <= FEW:
        return np.array([_one(a, w) for a, w in zip(arrival.tolist(), work.tolist(), strict=True)])
    if columns == 2:
        return _two(arrival, work)
    end, crowded = _crowded(arrival, work)
    for row in np.flatnonzero(~crowded).tolist():
        end[row] = _one(arrival[row].tolist(), work[row].tolist())
    return end


def _one(arrival: list[float], work: list[float]) -> list[float]:
    """Simulate one link, event by event."""
    end = list(arrival)
    present: list[tuple[float, int]] = []  # (virtual time of its end, job)
    now = virtual = 0.0
    for job in sorted(range(len(arrival)), key=arrival.__getitem__):
        at = arrival[job]
        while present:
            finish, first = present[0]
            then = now + (finish - virtual) * len(present)
            if then > at:
                virtual += (at - now) / len(present)
                break
            now, virtual = then, finish
            end[first] = then
            heapq.heappop(present)
        if work[job] == 0:  # padding; it sorts last
            continue
        now = at
        heapq.heappush(present, (virtual + work[job], job))
    while present:
        finish, first = present[0]
        now, virtual = now + (finish - virtual) * len(present), finish
        end[first] = now
        heapq.heappop(present)
    return end


def _two(arrival: Floats, work: Floats) -> Floats:
    """Two jobs per link: full speed until the second arrives, half the speed while both are present."""
    swap = arrival[:, 1] < arrival[:, 0]
    first, second = arrival.min(axis=1), arrival.max(axis=1)
    own, other = np.where(swap, work[:, 1], work[:, 0]), np.where(swap, work[:, 0], work[:, 1])
    left = np.maximum(own - (second - first), 0.0)
    both = np.minimum(left, other)
    end_first = np.where(left > 0, second + left + both, first + own)
    end_second = second + other + both
    return np.stack([np.where(swap, end_second, end_first), np.where(swap, end_first, end_second)], axis=1)


def _crowded(arrival: Floats, work: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Compute all rows at once, and the rows that this is valid for: all jobs arrive before the first one ends."""
    rows, columns = arrival.shape
    never = np.isinf(arrival)
    if never.any():  # padding arrives with the last job and ends immediately, before the others
        last = np.where(never, -np.inf, arrival).max(axis=1, keepdims=True)
        arrival = np.where(never, last, arrival)
    at = np.arange(rows)[:, None]
    order = arrival.argsort(axis=1, kind="stable")
    sorted_arrival = arrival[at, order]
    virtual = np.zeros_like(arrival)
    np.cumsum(np.diff(sorted_arrival, axis=1) / np.arange(1, columns), axis=1, out=virtual[:, 1:])
    finish = virtual + work[at, order]
    by_finish = finish.argsort(axis=1, kind="stable")
    finish = finish[at, by_finish]
    crowded = finish[:, 0] >= virtual[:, -1]
    steps = np.diff(finish, axis=1, prepend=virtual[:, -1:]) * np.arange(columns, 0, -1)
    end = np.empty_like(arrival)
    end[at, order[at, by_finish]] = sorted_arrival[:, -1:] + np.cumsum(steps, axis=1)
    return end, crowded
