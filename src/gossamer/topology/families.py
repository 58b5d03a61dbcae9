"""The named topologies, for any number of workers and any workers per node.

Static graphs take Metropolis-Hastings weights w_ij = 1 / (1 + max(deg_i, deg_j)); one-peer rounds are matchings
with weights 1/2, 1/2. If the classic definition needs a power of two or an even n, the docstring says how it is
generalized.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import networkx as nx
import numpy as np

from gossamer.errors import InputError
from gossamer.topology.core import Layout, Round, Topology
from gossamer.topology.registry import register


def metropolis(graph: nx.Graph[int]) -> Round:
    """Make a round on a graph with nodes 0..n-1: w_ij = 1 / (1 + max(deg_i, deg_j)), the diagonal is the rest to 1."""
    degree = dict(graph.degree())
    edges = [(i, j, 1.0 / (1 + max(degree[i], degree[j]))) for i, j in graph.edges()]
    return Round.weighted(graph.number_of_nodes(), [*edges, *((j, i, w) for i, j, w in edges)])


def _static(name: str, layout: Layout, edges: Iterable[Sequence[int]]) -> Topology:
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(layout.n))
    graph.add_edges_from((i, j) for i, j in edges)
    return Topology.of_rounds(name, layout, [metropolis(graph)])


def _doublings(n: int) -> list[int]:
    """Return the ceil(log2 n) distances 1, 2, 4, ... below n."""
    return [1 << b for b in range((n - 1).bit_length())]


def _ring_edges(n: int, distances: Sequence[int]) -> np.ndarray:
    """Return all edges {j, j + d mod n}, one row each."""
    j = np.arange(n)
    pairs = [np.stack([j, (j + d) % n], axis=1) for d in distances]
    return np.unique(np.sort(np.concatenate(pairs), axis=1), axis=0)


@register("complete", "full")
def complete(layout: Layout) -> Topology:
    """Every round is the exact average over all workers."""
    return Topology.of_rounds("complete", layout, [Round.uniform(layout.n, [range(layout.n)])])


@register("ring")
def ring(layout: Layout) -> Topology:
    """One peer per round: the left and the right neighbor on a ring, alternating.

    Odd n: round k leaves worker k out and matches its neighbors onward, (k+1, k+2), (k+3, k+4), ...; consecutive
    rounds share no edge, and over the period of n rounds every worker sits out once. Two workers: one round.
    """
    n = layout.n
    if n <= 2:
        return Topology.of_rounds("ring", layout, [Round.uniform(n, [range(n)])])

    def make(k: int) -> Round:
        first = k if n % 2 == 0 else k + 1
        return Round.uniform(n, [((first + j) % n, (first + j + 1) % n) for j in range(0, n - 1, 2)])

    return Topology("ring", layout, 2 if n % 2 == 0 else n, make, edges=partial(_ring_edges, n, [1]))


@register("ring-static")
def ring_static(layout: Layout) -> Topology:
    """Both ring neighbors every round, weights 1/3, 1/3, 1/3 (two workers: 1/2, 1/2)."""
    n = layout.n
    return _static("ring-static", layout, ((j, (j + 1) % n) for j in range(n) if n > 1))


@register("star")
def star(layout: Layout) -> Topology:
    """Worker 0 exchanges with every other worker in every round, weights 1/n."""
    return _static("star", layout, nx.star_graph(layout.n - 1).edges())


@register("torus", "grid")
def torus(layout: Layout) -> Topology:
    """A two-dimensional periodic grid, rows x columns as near to a square as n allows.

    Any n: rows is the largest divisor of n up to sqrt(n); a prime n degenerates to the ring.
    """
    n = layout.n
    rows = max(d for d in range(1, math.isqrt(n) + 1) if n % d == 0)
    columns = n // rows
    grid = nx.grid_2d_graph(rows, columns, periodic=True)
    return _static("torus", layout, ((a * columns + b, c * columns + d) for (a, b), (c, d) in grid.edges()))


@register("hypercube")
def hypercube(layout: Layout) -> Topology:
    """Workers whose ranks differ in one bit exchange every round.

    Not a power of two: the incomplete hypercube, with the edges {i, i xor 2^b} that stay below n. It is connected,
    because clearing bits leads every rank down to 0.
    """
    n = layout.n
    return _static("hypercube", layout, ((i, i ^ d) for d in _doublings(n) for i in range(n) if i ^ d < n))


@register("exponential", "exp-static")
def exponential(layout: Layout) -> Topology:
    """Every worker exchanges with the workers at distance 2^b on the ring, both ways, every round.

    Any n: the distances are the powers of two below n, taken modulo n. A worker reached in both directions (the
    opposite one, n a power of two) is one neighbor in W, but listed twice in `union_edges`: an asynchronous worker
    picks a direction and a distance, so it meets that peer twice as often.
    """
    n = layout.n
    pairs = [(j, (j + d) % n) for d in _doublings(n) for j in range(n)]
    both_directions = np.sort(np.array(pairs, dtype=np.int64).reshape(-1, 2), axis=1)
    return replace(_static("exponential", layout, both_directions.tolist()), edges=lambda: both_directions)


@lru_cache(maxsize=64)
def _sweep(n: int, distance: int) -> tuple[tuple[int, int], ...]:
    """Visit j = 0, 1, ... and pair j with j + distance (mod n) where both are free. Sweep s is this, shifted by s."""
    free = [True] * n
    pairs = []
    for j in range(n):
        t = (j + distance) % n
        if free[j] and free[t]:
            free[j] = free[t] = False
            pairs.append((j, t))
    return tuple(pairs)


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


@register("one-peer-exponential", "exp")
def one_peer_exponential(layout: Layout) -> Topology:
    """One peer per round at distance 1, 2, 4, ...: exact after log2(n) rounds when n is a power of two.

    Any other n: r = ceil(log2 n) distances and n sweeps, so a period of r*n rounds. Sweep s visits the workers
    j = s, s+1, ... (mod n) and pairs j with j + 2^i where both are free; the other workers sit the
    round out, each equally often over the period.
    """
    n, name = layout.n, "one-peer-exponential"
    distances = _doublings(n)
    if n == 1:
        return Topology.of_rounds(name, layout, [Round.uniform(1, [])])

    def make(k: int) -> Round:
        s, i = divmod(k, len(distances))
        return Round.uniform(n, [((a + s) % n, (b + s) % n) for a, b in _sweep(n, distances[i])])

    if _is_power_of_two(n):
        return Topology(name, layout, len(distances), make)
    return Topology(name, layout, len(distances) * n, make, edges=partial(_ring_edges, n, distances))


@register("aer")
def aer(layout: Layout) -> Topology:
    """Alternating exponential ring: node pairs at distance 2^i, half of them across nodes, half inside, in turn.

    Wang et al., "From Promise to Practice: Realizing High-performance Decentralized Training" (ICLR 2025). M = 2^r
    nodes: round i pairs node j with node j + 2^i and takes two phases; a counter runs over all pairs and rounds, an
    even pair averages inside each node in the first phase and over both nodes' workers in the second, an odd pair
    the other way round. The period is 2r; for M >= 4 the product is the exact average after 2r phases from an even
    offset, 2r + 1 from an odd one.

    Any other M: r = ceil(log2 M) and M sweeps, so a period of 2rM. Sweep s visits the nodes j = s, s+1, ... (mod M)
    and pairs j with j + 2^i where both are free; the rest average inside their node in both phases; the counter
    runs on. Joint averages are uniform over all workers of both nodes, so nodes may have unequal sizes. One node: a
    single round that averages inside it.
    """
    nodes, members = layout.nodes, layout.members
    distances = _doublings(nodes)
    if nodes == 1:
        return Topology.of_rounds("aer", layout, [Round.uniform(layout.n, members)])
    before = [0]  # pairs counted before round i of a sweep; the last entry is the count of a whole sweep
    for d in distances:
        before.append(before[-1] + len(_sweep(nodes, d)))

    def make(k: int) -> Round:
        s, rest = divmod(k, 2 * len(distances))
        i, phase = divmod(rest, 2)
        counter = s * before[-1] + before[i]
        groups: list[tuple[int, ...]] = []
        inside = set(range(nodes))
        for c, (a, b) in enumerate(_sweep(nodes, distances[i]), counter):
            if c % 2 != phase:
                a, b = (a + s) % nodes, (b + s) % nodes
                groups.append(members[a] + members[b])
                inside -= {a, b}
        return Round.uniform(layout.n, [*groups, *(members[m] for m in inside)])

    if _is_power_of_two(nodes):
        return Topology("aer", layout, 2 * len(distances), make)
    return Topology("aer", layout, 2 * len(distances) * nodes, make, edges=partial(_aer_edges, layout))


def _aer_edges(layout: Layout) -> np.ndarray:
    """Return all pairs of workers on one node, or on two nodes at distance 2^i."""
    node = np.array(layout.node)
    near = np.eye(layout.nodes, dtype=bool)
    a, b = _ring_edges(layout.nodes, _doublings(layout.nodes)).T
    near[a, b] = near[b, a] = True
    i, j = np.nonzero(near[node][:, node])
    return np.stack([i, j], axis=1)[i < j]


@register("random-matching", "random")
def random_matching(layout: Layout, seed: int = 0) -> Topology:
    """One random peer per round, from a seeded schedule that repeats.

    The period is 4 ceil(log2 n) rounds, for odd n rounded up to a multiple of n: one worker sits out each round,
    in a random order in which every worker has one turn in n rounds. If the rounds of a period do not join all workers
    (possible for small n), the period grows until they do.
    """
    n, name = layout.n, "random-matching"
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise InputError(f"the seed of a random matching must be an integer >= 0, got {seed!r}; write random(seed=3)")
    if n <= 2:
        return Topology.of_rounds(name, layout, [Round.uniform(n, [range(n)])])

    def make(k: int) -> Round:
        order = np.random.default_rng([seed, 0, k]).permutation(n).tolist()
        if n % 2:
            turns = np.random.default_rng([seed, 1, k // n]).permutation(n)
            order.remove(int(turns[k % n]))
        return Round.uniform(n, zip(order[::2], order[1::2], strict=True))

    block = n if n % 2 else 1
    period = math.ceil(4 * math.ceil(math.log2(n)) / block) * block
    joined = nx.utils.UnionFind(range(n))
    parts, k = n, 0
    while parts > 1:
        for group in make(k).groups:
            if len(group) == 2 and joined[group[0]] != joined[group[1]]:
                joined.union(*group)
                parts -= 1
        k += 1
    period = max(period, math.ceil(k / block) * block)
    return Topology(name, layout, period, make)
