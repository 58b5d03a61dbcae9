"""Topologies from networkx graphs and weight matrices."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import networkx as nx
import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from gossamer.errors import InputError
from gossamer.topology.core import Layout, Round, Topology
from gossamer.topology.families import metropolis


def from_graph(
    graph: nx.Graph[Any], layout: Layout | None = None, *, style: str = "one-peer", name: str = "custom"
) -> Topology:
    """Make a topology from an undirected graph; workers are its nodes, sorted if possible.

    `style="one-peer"`: the edges are colored so that edges of one color share no worker, and each color is a round of
    pairs with weights 1/2, 1/2. `style="static"`: one round, with the `weight` attributes of the edges if all edges
    have one, otherwise with Metropolis-Hastings weights.
    """
    if style not in ("one-peer", "static"):
        raise InputError(f"the style of a graph topology must be 'one-peer' or 'static', got {style!r}")
    if graph.is_directed():
        raise InputError("a topology's graph must be undirected, got a directed one; pass graph.to_undirected()")
    try:
        order = sorted(graph)
    except TypeError:
        order = list(graph)
    n = len(order)
    layout = fit(name, n, layout)
    rank = {node: i for i, node in enumerate(order)}
    plain: nx.Graph[int] = nx.Graph()
    plain.add_nodes_from(range(n))
    plain.add_edges_from((rank[a], rank[b], data) for a, b, data in graph.edges(data=True) if a != b)
    if style == "one-peer":
        colors = nx.greedy_color(nx.line_graph(plain), strategy="connected_sequential_bfs")
        matchings: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for edge, color in sorted(colors.items()):
            matchings[color].append(edge)
        rounds = [Round.uniform(n, matchings[color]) for color in sorted(matchings)]
    elif plain.number_of_edges() and all("weight" in data for _, _, data in plain.edges(data=True)):
        weighted = [
            (i, j, number(data["weight"], f"weight of edge ({i}, {j})")) for i, j, data in plain.edges(data=True)
        ]
        rounds = [both_ways(n, weighted)]
    else:
        rounds = [metropolis(plain)]
    return check_connected(Topology.of_rounds(name, layout, rounds or [Round.uniform(n, [])]))


def from_matrix(matrices: Any, layout: Layout | None = None, *, name: str = "custom") -> Topology:
    """Make a topology from one doubly stochastic matrix, or from a sequence of them, one per round."""
    array = as_array(matrices)
    if array.ndim not in (2, 3) or not len(array):
        raise InputError(f"a topology needs a square weight matrix or a list of them, got shape {array.shape}")
    rounds = [Round.from_matrix(m) for m in (array[None] if array.ndim == 2 else array)]
    return check_connected(Topology.of_rounds(name, fit(name, array.shape[-1], layout), rounds))


def as_array(value: Any) -> np.ndarray:
    """Convert a matrix or a stack of matrices to an array of real numbers; refuse ragged or other values."""
    try:
        array = np.asarray(value)
    except ValueError:
        raise InputError("weight matrices must be square and of one size, got rows of unequal lengths") from None
    if array.dtype.kind not in "iuf":
        raise InputError(f"a weight matrix must hold real numbers only, got values of type {array.dtype}")
    return array


def number(value: Any, what: str) -> float:
    """Convert a number to a finite float; the error calls it `what`."""
    try:
        made = float(value) if isinstance(value, int | float | np.number) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an integer beyond the range of a float
        made = math.inf
    if not math.isfinite(made):
        raise InputError(f"the {what} must be a finite number, got {value!r:.60}")
    return made


def fit(name: str, n: int, layout: Layout | None) -> Layout:
    """Return the layout after checking that it has n workers; without a layout, all workers are on one node."""
    if n < 1:
        raise InputError(f"topology {name!r} needs at least one worker, got none")
    if layout is None:
        return Layout.flat(n)
    if layout.n != n:
        raise InputError(
            f"topology {name!r} is for {n} workers but the layout has {layout.n} ({layout}); "
            f"start {n} workers or pass a topology of {layout.n}"
        )
    return layout


def check_connected(topology: Topology) -> Topology:
    """Return the topology; raise an `InputError` if its rounds never join all workers."""
    n = topology.n
    i, j = topology.union_edges().T
    parts, label = connected_components(coo_array((np.ones(len(i)), (i, j)), shape=(n, n)), directed=False)
    if parts > 1:
        apart = int(np.argmax(label != label[0]))
        raise InputError(
            f"topology {topology.name!r} is disconnected: workers 0 and {apart} never reach each other in any round; "
            "add an edge between their parts"
        )
    return topology


def both_ways(n: int, edges: Sequence[tuple[int, int, float]]) -> Round:
    """Make a round from undirected edges, each listed once."""
    return Round.weighted(n, [*edges, *((j, i, w) for i, j, w in edges)])
