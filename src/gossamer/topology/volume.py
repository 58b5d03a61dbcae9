"""How many bytes the workers send in a round, by formula.

S is the model's size. A *direct* exchange ignores nodes: a pair swaps S, a uniform group of g > 2 runs a ring
all-reduce in node order, 2S(g-1)/g a worker, weighted edges cost S each. A *hierarchical* exchange splits a group by
node into m parts: a worker in a part of L sends 2S(L-1)/L inside its node (reduce-scatter, all-gather) and across
nodes S/L for two parts, 2(S/L)(m-1)/m for more. Weighted rounds have no hierarchical form and cost the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np

from gossamer.topology.core import Layout, Round, Topology


@dataclass(frozen=True)
class Volume:
    """Bytes a worker sends in a round, the mean over workers and rounds, and the most a node's link sends in one."""

    intra: float
    inter: float
    busiest: float


def volumes(topology: Topology, model_bytes: float, most_rounds: int) -> tuple[Volume, Volume]:
    """The direct and the hierarchical exchange, over one period or its first `most_rounds` rounds."""
    layout = topology.layout
    rounds = min(topology.period, most_rounds)
    intra, inter, busiest = np.zeros(2), np.zeros(2), np.zeros(2)
    for k in range(rounds):
        sent_inside, sent_across = _sent(topology.round(k), layout)
        intra += sent_inside.sum(axis=1)
        inter += sent_across.sum(axis=1)
        links = [np.bincount(layout.node, weights=across).max() for across in sent_across]
        busiest = np.maximum(busiest, links)
    per = model_bytes / (rounds * layout.n)
    direct, hierarchical = (
        Volume(float(intra[e] * per), float(inter[e] * per), float(busiest[e] * model_bytes)) for e in (0, 1)
    )
    return direct, hierarchical


def _sent(made: Round, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """What each worker sends inside its node and across, in model sizes: rows direct, hierarchical."""
    n, node_of = layout.n, np.asarray(layout.node)
    if made.weights is not None:
        i = np.array([e[0] for e in made.weights])
        j = np.array([e[1] for e in made.weights])  # worker i takes from j: j sends
        across = np.bincount(j, weights=node_of[i] != node_of[j], minlength=n)
        inside = np.bincount(j, minlength=n) - across
        return np.stack([inside, inside]), np.stack([across, across])
    sizes = np.array([len(g) for g in made.groups])
    worker = np.fromiter(chain.from_iterable(made.groups), dtype=np.int64, count=n)
    group = np.repeat(np.arange(len(sizes)), sizes)
    worker = worker[np.lexsort((worker, node_of[worker], group))]  # by group, then by node
    node = node_of[worker]
    g = sizes[group]
    first = np.cumsum(sizes) - sizes
    following = np.arange(1, n + 1)
    following[first + sizes - 1] = first
    crosses = node[following] != node
    sent = np.where(g == 2, 1.0, 2 * (g - 1) / g)
    part_starts = np.flatnonzero(np.r_[True, (np.diff(group) != 0) | (np.diff(node) != 0)])
    part_sizes = np.diff(np.r_[part_starts, n])
    size = np.repeat(part_sizes, part_sizes)
    parts = np.bincount(group[part_starts])[group]
    swap = np.where(parts == 1, 0.0, np.where(parts == 2, 1.0, 2 * (parts - 1) / parts)) / size
    inside = np.stack([np.where(crosses, 0.0, sent), 2 * (size - 1) / size])
    across = np.stack([np.where(crosses, sent, 0.0), swap])
    back = np.argsort(worker)
    return inside[:, back], across[:, back]
