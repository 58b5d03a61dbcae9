"""What one exchange costs: the same rounds and traffic that the engine executes, turned into seconds.

An `Exchange` is a round prepared for the simulator: who waits for whom, fixed seconds before and after the network,
and the jobs it puts on the nodes' network interfaces. Two cost models make them: `AbstractCosts` (the paper's setting:
a fixed cost across nodes, none inside one, no contention) and `ClusterCosts` (bytes over described links).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gossamer.predict.cluster import Cluster
from gossamer.predict.methods import WIRES
from gossamer.topology import Layout, Round
from gossamer.topology.plan import traffic

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Peers:
    """Who waits for whom in a round: the whole group if it averages uniformly, else the neighbors.

    A worker's row lists those whose times count for it, itself included. Rows are concatenated in `members` and begin
    at `starts`; `row[i]` is worker i's (groups share one).
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
        """The worker and those it waits for."""
        if self.round.weights is None:
            return self.round.group_of(worker)
        stop = self.starts[worker + 1] if worker + 1 < len(self.starts) else len(self.members)
        return tuple(int(w) for w in self.members[self.starts[worker] : stop])


class Latest:
    """For every worker of several exchanges side by side, [exchanges x n], the largest of its own and peers' times."""

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

    `worker` is where its arrival time is read and its end is written; a job alone takes at least `least` seconds
    (a slow pair of nodes), however idle the link.
    """

    link: Ints
    worker: Ints
    work: Floats
    least: Floats


NO_JOBS = Jobs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0), np.empty(0))


@dataclass(frozen=True)
class Exchange:
    """One bucket's exchange in one round, in seconds a worker.

    `local` is transfer inside the node, half before and half after the network, shared with the other buckets in
    flight; `latency` is not shared. `sent` is bytes, for the record.
    """

    peers: Peers
    local: Floats
    latency: Floats
    jobs: Jobs = NO_JOBS
    sent: Floats = field(default_factory=lambda: np.empty(0))


class Costs(Protocol):
    """A cost model: prices an exchange of a share of the model, and its all-reduce over everyone."""

    @property
    def layout(self) -> Layout: ...
    @property
    def links(self) -> int:
        """How many links jobs can name."""
        ...

    def exchange(self, round: Round, share: float) -> Exchange: ...
    def allreduce(self, share: float) -> float: ...


@dataclass(frozen=True)
class AbstractCosts:
    """The paper's setting, in units of the mean compute: all-reduce γ, across nodes ωγ, inside a node 0.

    Exchanges of different workers do not disturb each other; the buckets of one worker share its link. In a layout of
    one node every worker counts as a node of its own. `hierarchical` sends less across nodes than the flat ring that
    ω is measured with: g/(2(g-1)) of it for a group of g on two nodes.
    """

    layout: Layout
    gamma: float
    omega: float
    wire: str = "fp32"
    hierarchical: bool = False

    @property
    def links(self) -> int:
        return self.layout.n

    def exchange(self, round: Round, share: float) -> Exchange:
        n, node = self.layout.n, self.layout.node
        full = self.omega * self.gamma * share * WIRES[self.wire] / WIRES["fp32"]
        cost = np.zeros(n)
        for g in round.groups:
            nodes = len({node[w] for w in g})
            if len(g) > 1 and (self.layout.nodes == 1 or nodes > 1):
                flat, parts = 2 * (len(g) - 1) / len(g), nodes if nodes > 1 else len(g)
                volume = (1.0 if parts == 2 else 2 * (parts - 1) / parts) if self.hierarchical else flat
                cost[list(g)] = full * volume / flat
        nothing = np.zeros(n)
        if share == 1:
            return Exchange(Peers(round, n), nothing, cost)
        busy = np.flatnonzero(cost)
        return Exchange(Peers(round, n), nothing, nothing, Jobs(busy, busy, cost[busy], cost[busy]))

    def allreduce(self, share: float) -> float:
        return self.gamma * share * WIRES[self.wire] / WIRES["fp32"] if self.layout.n > 1 else 0.0


@dataclass(frozen=True)
class ClusterCosts:
    """Seconds on a described cluster, from the bytes of each exchange's plan.

    `collective`: groups average by one flat all-reduce, as DDP's, instead of our plans (Decent-DP's way).
    """

    cluster: Cluster
    wire: str = "fp32"
    hierarchical: bool = True
    collective: bool = False

    @cached_property
    def layout(self) -> Layout:
        return self.cluster.layout

    @property
    def links(self) -> int:
        return self.layout.nodes

    def exchange(self, round: Round, share: float) -> Exchange:
        layout, links = self.layout, self.cluster.links
        elements = self.cluster.model.bytes / 4 * share
        if self.collective and round.weights is None:
            inter, intra, steps = _collective(round, layout, tree=self.cluster.ddp.allreduce == "best")
            inter, intra = inter * elements * 4, intra * elements * 4
        else:
            t = traffic(round, layout, hierarchical=self.hierarchical)
            wired = WIRES[self.wire]
            inter = (t.inter_wired * wired + t.inter_plain * 4) * elements
            intra = (t.intra_wired * wired + t.intra_plain * 4) * elements
            steps = t.steps
        crosses = inter > 0
        # a hierarchical exchange has two steps inside the node around those across nodes
        inside = np.where(crosses, np.where((intra > 0) & (steps > 2) & (not self.collective), 2, 0), steps)
        local = intra / links.intra.bytes_per_second
        latency = inside * links.intra.latency + (steps - inside) * links.inter.latency
        jobs = self._jobs(round, inter)
        return Exchange(Peers(round, layout.n), local, latency, jobs, inter + intra)

    def _jobs(self, round: Round, inter: Floats) -> Jobs:
        """One job for each group and node (for each worker in a weighted round)."""
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
                flow = self.cluster.links.inter.flow_bytes_per_second * flows[key]
                least = max(size / max(1, len(nodes) - 1) / slowest, size / flow)
                rows.append((node[w], w, size / fastest, least))
        if not rows:
            return NO_JOBS
        table = np.array(rows)
        at = table[:, :2].astype(np.int64)
        return Jobs(at[:, 0], at[:, 1], table[:, 2], table[:, 3])

    def _bandwidth(self, node: int, group: set[int]) -> tuple[float, float]:
        """Bytes a second of the slowest pair this node uses in the group, and of its interface."""
        default = self.cluster.links.inter.bytes_per_second
        rates = [
            p.bytes_per_second
            for p in self.cluster.links.pairs
            if node in p.nodes and p.nodes[0] in group and p.nodes[1] in group
        ]
        covered = len(rates) >= len(group) - 1  # every other node of the group has an override
        slowest = min(rates if covered and rates else [*rates, default])
        return slowest, max([slowest] if covered and rates else [*rates, default])

    def allreduce(self, share: float) -> float:
        """Ring: 2(n-1)/n of the data through every interface. Two nodes under `best`: the data once each way."""
        n, links = self.layout.n, self.cluster.links
        if n == 1:
            return 0.0
        size = self.cluster.model.bytes / 4 * WIRES[self.wire] * share
        if self.layout.nodes == 1:
            return 2 * (n - 1) / n * size / links.intra.bytes_per_second + 2 * (n - 1) * links.intra.latency
        slowest = min([p.flow_bytes_per_second for p in links.pairs] + [links.inter.flow_bytes_per_second])
        latency = links.inter.latency
        if links.pairs:
            latency = max(latency, *(p.latency for p in links.pairs))
        if self.cluster.ddp.allreduce == "best" and self.layout.nodes == 2:
            local = max(self.layout.per_node)
            inside = 2 * (local - 1) / local * size / links.intra.bytes_per_second
            return inside + size / slowest + 2 * latency
        hops = self.layout.nodes if self.cluster.ddp.allreduce == "best" else n
        return 2 * (n - 1) / n * size / slowest + 2 * (hops - 1) * latency


def _collective(round: Round, layout: Layout, *, tree: bool) -> tuple[Floats, Floats, Ints]:
    """Bucket sizes each worker sends across and inside nodes, and steps, when groups use one all-reduce.

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
