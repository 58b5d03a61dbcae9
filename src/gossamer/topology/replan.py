"""Topologies for the remaining workers of an elastic job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import networkx as nx

from gossamer.errors import InputError
from gossamer.topology.core import Layout, Round, Topology
from gossamer.topology.registry import build


def replanned(spec: Any, founding: Topology, alive: Sequence[int], layout: Layout) -> Topology:
    """Return the topology for the workers `alive` of `founding`, on their `layout`.

    A named family is built again for the workers and their nodes. A custom topology is restricted to the workers that
    are alive: see `restricted`. If the restricted topology is not connected, so that its parts would never agree, an
    alternating exponential ring replaces it.
    """
    named = isinstance(spec, str) and not spec.strip().endswith(".json")
    if len(alive) == founding.n and (layout == founding.layout or not named):
        return founding
    if named:
        return build(spec, layout)
    rest = restricted(founding, alive, layout)
    return rest if _joined(rest) else build("aer", layout)


def restricted(topology: Topology, alive: Sequence[int], layout: Layout) -> Topology:
    """Return the rounds of `topology` among the workers `alive`, which are numbered 0, 1, ... in that order.

    Groups average their remaining members; the weight that a worker gave to a missing one goes back to itself.
    """
    if layout.n != len(alive):
        raise InputError(f"the layout has {layout.n} workers, but {len(alive)} are alive; pass the layout of those")
    place = {worker: at for at, worker in enumerate(alive)}
    rounds = [_restricted(topology.round(k), place) for k in range(topology.period)]
    return Topology.of_rounds(f"{topology.name}, {len(alive)} of {topology.n} alive", layout, rounds)


def _restricted(made: Round, place: dict[int, int]) -> Round:
    if made.weights is None:
        return Round.uniform(len(place), [[place[w] for w in g if w in place] for g in made.groups])
    weight = {(i, j): w for i, j, w in made.weights}
    # Taking the smaller of both directions keeps row and column sums at 1, also if the round was not symmetric.
    kept = [
        (place[i], place[j], min(w, weight.get((j, i), 0.0)))
        for (i, j), w in weight.items()
        if i in place and j in place
    ]
    return Round.weighted(len(place), kept)


def _joined(topology: Topology) -> bool:
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(topology.n))
    graph.add_edges_from(topology.union_edges().tolist())
    return bool(nx.is_connected(graph))
