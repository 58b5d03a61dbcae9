"""Exchange plans: how a round is carried out, message by message.

A round says *what* is averaged (the matrix W); a plan says *how*. The plan of one worker is a short program of steps.
A step is a batch of point-to-point messages and an operation on the received data. The engine executes exactly these
programs (over gloo, NCCL or in one process), and the simulator charges for exactly these messages.

A uniform group over several nodes uses the hierarchical exchange: reduce-scatter inside each node, then the owners of
the same piece swap it (two nodes) or reduce and spread it (more nodes), then all-gather inside each node. The matrix
is that of a direct average, but a node sends its data over the slow link only once. If nodes are unequal, pieces are
cut at the union of all nodes' shard boundaries, and the result is still uniform over all workers. A weighted round
does one swap per color of a proper edge coloring, so that a worker needs one receive buffer however many neighbors it
has.

`wired` messages cross the slow link and use the wire format; messages inside a node stay in full precision. In a
layout of one node no link is slower than another, so every worker counts as a node of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Literal, NamedTuple

import networkx as nx
import numpy as np

from gossamer.topology.core import Layout, Round


class Piece(NamedTuple):
    """Elements `start:stop` of a bucket, to or from `peer`; the receiver counts them with `weight`."""

    peer: int
    start: int
    stop: int
    weight: float = 0.0


@dataclass(frozen=True)
class Step:
    """One batch of messages of one worker, and the operation on the received data.

    - `reduce`: for every range in `own`, out = (weight * value + sum of weight * received) / sum of weights. The
      weights count workers: see Note [Why averages divide] in gossamer.comm.exchange.
    - `swap`:   out += weight * (received - value), both sides using the value as it was sent.
    - `spread`: after a wired reduce: out += received - (own value as it was sent); keeps the mean for any wire.
    - `gather`: out = received.
    `source` names the data that is sent and reduced: the parameters `x`, or `out`, the result so far.
    """

    kind: Literal["reduce", "swap", "spread", "gather"]
    source: Literal["x", "out"]
    wired: bool
    sends: tuple[Piece, ...]
    recvs: tuple[Piece, ...]
    own: tuple[Piece, ...] = ()


Program = tuple[Step, ...]


def program(round: Round, layout: Layout, worker: int, size: int, *, hierarchical: bool = True) -> Program:
    """Return the steps by which `worker` averages a bucket of `size` elements in `round`; empty if there are none."""
    group = round.group_of(worker)
    if len(group) == 1 or size == 0:
        return ()
    if round.weights is not None:
        return _weighted(round, group, layout, worker, size)
    return _uniform(parts_of(group, layout, hierarchical), worker, size, slow=layout.nodes > 1)


def program_inside(round: Round, layout: Layout, worker: int, size: int) -> Program:
    """Return the steps for a round over nodes; the workers of a node hold one replica of the bucket.

    Every worker mixes its shard of the bucket with the owners of the same pieces in the other nodes, then the node
    gathers. Unequal nodes: pieces are cut at the union of all nodes' shard boundaries.
    """
    node = layout.node[worker]
    if len(round.group_of(node)) == 1 or size == 0:
        return ()
    inside = layout.members[node]
    low, high = shard(size, len(inside), inside.index(worker))
    steps: list[Step] = []
    between = Layout.of([1] * layout.nodes)
    for start, stop in pairwise(_cuts(layout.members, size)):
        if not low <= start < high:
            continue
        owners = [_owner(members, size, start) for members in layout.members]

        def place(pieces: tuple[Piece, ...], start: int = start, owners: list[int] = owners) -> tuple[Piece, ...]:
            return tuple(Piece(owners[p.peer], p.start + start, p.stop + start, p.weight) for p in pieces)

        for s in program(round, between, node, stop - start):
            steps.append(replace(s, sends=place(s.sends), recvs=place(s.recvs), own=place(s.own)))
    others = [(w, shard(size, len(inside), at)) for at, w in enumerate(inside) if w != worker]
    if others:
        steps.append(
            Step(
                "gather",
                "out",
                False,
                sends=_pieces((w, low, high) for w, _ in others),
                recvs=_pieces((w, lo, hi) for w, (lo, hi) in others),
            )
        )
    return tuple(steps)


def renamed(steps: Program, ranks: Sequence[int]) -> Program:
    """Return the same program with worker i renamed to `ranks[i]`."""

    def name(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        return tuple(p._replace(peer=ranks[p.peer]) for p in pieces)

    return tuple(replace(s, sends=name(s.sends), recvs=name(s.recvs), own=name(s.own)) for s in steps)


def parts_of(group: Sequence[int], layout: Layout, hierarchical: bool) -> list[tuple[int, ...]]:
    """Split a group by node; by worker if not hierarchical or if all workers share one node."""
    if not hierarchical or layout.nodes == 1:
        return [(w,) for w in group]
    by_node: dict[int, list[int]] = defaultdict(list)
    for w in group:
        by_node[layout.node[w]].append(w)
    return [tuple(members) for _, members in sorted(by_node.items())]


def shard(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return range `index` of `parts`. All but the last have ceil(size / parts) elements, the last has the rest."""
    each = -(-size // parts)
    return min(index * each, size), min((index + 1) * each, size)


def _cuts(parts: Sequence[tuple[int, ...]], size: int) -> list[int]:
    """Return the union of all parts' shard boundaries."""
    return sorted({0, size, *(shard(size, len(p), at)[0] for p in parts for at in range(len(p)))})


def _owner(part: tuple[int, ...], size: int, start: int) -> int:
    """Return the worker whose shard contains element `start`."""
    return part[start // -(-size // len(part))]


def _uniform(parts: list[tuple[int, ...]], worker: int, size: int, *, slow: bool) -> Program:
    part = next(p for p in parts if worker in p)
    total = sum(map(len, parts))
    if len(parts) == 1 and len(part) == 2:  # a pair on one node: one swap instead of reduce and gather
        peer = part[1 - part.index(worker)]
        whole = (Piece(peer, 0, size, 0.5),)
        return (Step("swap", "x", not slow, whole, whole),)
    steps: list[Step] = []
    mine = shard(size, len(part), part.index(worker))
    if len(part) > 1:
        others = [(w, shard(size, len(part), place)) for place, w in enumerate(part) if w != worker]
        steps.append(
            Step(
                "reduce",
                "x",
                False,
                sends=_pieces((w, lo, hi) for w, (lo, hi) in others),
                recvs=_pieces((w, *mine, 1.0) for w, _ in others),
                own=_pieces([(worker, *mine, 1.0)]),
            )
        )
    source: Literal["x", "out"] = "out" if steps else "x"
    if len(parts) == 2:
        other = parts[0] if part is parts[1] else parts[1]
        weight = len(other) / total
        swaps = []
        for place, w in enumerate(other):
            lo, hi = shard(size, len(other), place)
            swaps.append((w, max(lo, mine[0]), min(hi, mine[1]), weight))
        pieces = _pieces(swaps)
        steps.append(Step("swap", source, True, pieces, pieces))
    elif len(parts) > 2:
        steps += _across(parts, worker, size, mine, source)
    if len(part) > 1:
        steps.append(
            Step(
                "gather",
                "out",
                False,
                sends=_pieces((w, *mine) for w, _ in others),
                recvs=_pieces((w, lo, hi) for w, (lo, hi) in others),
            )
        )
    return tuple(s for s in steps if s.sends or s.recvs)


def _across(
    parts: list[tuple[int, ...]],
    worker: int,
    size: int,
    mine: tuple[int, int],
    source: Literal["x", "out"],
) -> list[Step]:
    """Reduce and spread between the owners of each piece, one owner per node, for three nodes or more."""
    sends, recvs, own = [], [], []
    back_sends, back_recvs = [], []
    for start, stop in pairwise(_cuts(parts, size)):
        if not mine[0] <= start < mine[1]:
            continue
        owners = [_owner(p, size, start) for p in parts]
        rank = owners.index(worker)
        lo, hi = (start + e for e in shard(stop - start, len(parts), rank))
        own.append((worker, lo, hi, float(len(parts[rank]))))
        for a, w in enumerate(owners):
            if w == worker:
                continue
            their = [start + e for e in shard(stop - start, len(parts), a)]
            sends.append((w, *their))
            recvs.append((w, lo, hi, float(len(parts[a]))))
            back_sends.append((w, lo, hi))
            back_recvs.append((w, *their))
    return [
        Step("reduce", source, True, _pieces(sends), _pieces(recvs), _pieces(own)),
        Step("spread", source, False, _pieces(back_sends), _pieces(back_recvs), _pieces(own)),
    ]


def _weighted(round: Round, group: Sequence[int], layout: Layout, worker: int, size: int) -> Program:
    take = {(i, j): w for i, j, w in round.weights or ()}
    steps: list[Step] = []
    members = set(group)
    for matching in edge_colors(e for e in take if e[0] in members):
        for edge in matching:
            if worker not in edge:
                continue
            (peer,) = edge - {worker}
            wired = layout.nodes == 1 or layout.node[peer] != layout.node[worker]
            gives, gets = take.get((peer, worker), 0.0), take.get((worker, peer), 0.0)
            steps.append(
                Step(
                    "swap",
                    "x",
                    wired,
                    sends=(Piece(peer, 0, size),) if gives else (),
                    recvs=(Piece(peer, 0, size, gets),) if gets else (),
                )
            )
    return tuple(steps)


def edge_colors(pairs: Iterable[Sequence[int]]) -> list[list[frozenset[int]]]:
    """Return a proper edge coloring of a graph: every color is a matching. It is the same on every worker."""
    edges = {frozenset(p) for p in pairs}
    if not edges:
        return []
    graph: nx.Graph[int] = nx.Graph()
    graph.add_edges_from(sorted((min(e), max(e)) for e in edges))
    conflicts: nx.Graph[tuple[int, int]] = nx.Graph()
    conflicts.add_nodes_from(sorted((min(e), max(e)) for e in edges))
    conflicts.add_edges_from(((min(a), max(a)), (min(b), max(b))) for a, b in nx.line_graph(graph).edges)
    color = nx.greedy_color(conflicts, strategy=lambda g, _: sorted(g.nodes))
    matchings: list[list[frozenset[int]]] = [[] for _ in range(max(color.values()) + 1)]
    for edge in sorted(color):
        matchings[color[edge]].append(frozenset(edge))
    return matchings


def _pieces(entries: Iterable[Sequence[float]]) -> tuple[Piece, ...]:
    made = (Piece(int(e[0]), int(e[1]), int(e[2]), *e[3:]) for e in entries)
    return tuple(p for p in made if p.stop > p.start)


@dataclass(frozen=True)
class Traffic:
    """What each worker sends in one exchange, in bucket sizes, and the number of steps of its program."""

    intra_plain: np.ndarray  # inside the node, full precision
    intra_wired: np.ndarray  # inside the node, wire format (layouts of one node only)
    inter_plain: np.ndarray  # across nodes, full precision (the spread of three nodes or more)
    inter_wired: np.ndarray  # across nodes, wire format
    steps: np.ndarray


def traffic(round: Round, layout: Layout, *, hierarchical: bool = True) -> Traffic:
    """Sum the messages of `program` for each worker, by formula: no message is listed, so that any n is cheap."""
    if round.weights is not None:
        return _weighted_traffic(round, layout)
    n, node_of = layout.n, np.asarray(layout.node)
    sizes = np.array([len(g) for g in round.groups])
    worker = np.fromiter(chain.from_iterable(round.groups), dtype=np.int64, count=n)
    group = np.repeat(np.arange(len(sizes)), sizes)
    order = np.lexsort((node_of[worker], group))
    worker = worker[order]
    home = _run_lengths(group, node_of[worker])  # members of the worker's group on its node
    members = sizes[group]
    part = home if hierarchical and layout.nodes > 1 else np.ones(n, dtype=np.int64)
    parts = np.round(np.bincount(group, weights=1.0 / part))[group]
    inside = part > 1
    pair = (parts == 1) & (part == 2)
    local = np.where(pair, 1.0, 2 * (part - 1) / part)  # reduce-scatter and all-gather, or one swap
    swap = np.where(parts == 2, 1.0, (parts - 1) / parts) / part * (parts > 1)
    # Parts of one worker (no hierarchy, or one node) may have peers on this node: share out by peer.
    far = np.where(inside, 1.0, (members - home) / np.maximum(1, members - 1))
    spread = swap * (parts > 2)
    back = np.argsort(worker)
    return Traffic(
        intra_plain=(local + spread * (1 - far))[back],
        intra_wired=(swap * (1 - far))[back],
        inter_plain=(spread * far)[back],
        inter_wired=(swap * far)[back],
        steps=np.where(pair, 1, 2 * inside + (parts == 2) + 2 * (parts > 2))[back],
    )


def _run_lengths(*keys: np.ndarray) -> np.ndarray:
    """Return, for each entry of equally sorted keys, how many entries have the same keys."""
    new = np.any([np.diff(key) != 0 for key in keys], axis=0)
    lengths = np.diff(np.r_[0, np.flatnonzero(new) + 1, len(keys[0])])
    return np.repeat(lengths, lengths)


def _weighted_traffic(round: Round, layout: Layout) -> Traffic:
    n, node = layout.n, np.asarray(layout.node)
    taker, giver = np.array([(i, j) for i, j, _ in round.weights or ()], dtype=np.int64).reshape(-1, 2).T
    across = np.bincount(giver, weights=node[taker] != node[giver], minlength=n)
    inside = np.bincount(giver, minlength=n) - across
    slow, none = layout.nodes > 1, np.zeros(n)
    pairs = np.unique(np.sort(np.stack([taker, giver], axis=1), axis=1), axis=0)
    return Traffic(
        intra_plain=inside if slow else none,
        intra_wired=none if slow else inside,
        inter_plain=none,
        inter_wired=across,
        steps=np.bincount(pairs.ravel(), minlength=n),
    )
