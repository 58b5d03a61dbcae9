"""Topologies as JSON, and `resolve`, which accepts every form in which a user may pass a topology.

The JSON format is an object with one of

- `"edges": [[i, j], ...]`: a graph, turned into one-peer rounds (`"style": "static"`: one round with
  Metropolis-Hastings weights); `[[i, j, w], ...]`: one round with these weights;
- `"matrix": [[...], ...]`: one round with this doubly stochastic matrix;
- `"rounds": [...]`: each an object with `"groups": [[...], ...]` (uniform averages), `"edges": [[i, j, w], ...]` or
  `"matrix"`; if several are present, the matrix is used, then the edges;

and optionally `name`, `n`, `per_node`. An undirected edge is listed once. Other keys are ignored, so what
`gossamer topology show --json` prints can be loaded.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Union

import networkx as nx
import numpy as np

from gossamer.errors import InputError
from gossamer.topology.core import Layout, Round, Topology
from gossamer.topology.custom import as_array, both_ways, check_connected, fit, from_graph, from_matrix, number
from gossamer.topology.registry import build

MOST = 1 << 16  # workers; a larger number in a file is a mistake that would exhaust the memory
MOST_PLACES = 1 << 22  # workers times rounds: a round of n workers takes some 50 n bytes, however short its text


def from_json(path: str | Path, layout: Layout | None = None) -> Topology:
    """Read a topology from a JSON file; the docstring of this module describes the format."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read topology file {str(path)!r}: {error.strerror}; check the path") from None
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"topology file {str(path)!r} is not valid JSON ({error!s:.200}); see `gossamer topology show --json`"
        ) from None
    try:
        return from_dict(data, layout, name=Path(path).stem)
    except InputError as error:
        raise InputError(f"topology file {str(path)!r}: {error}") from None


def from_dict(data: Any, layout: Layout | None = None, *, name: str = "custom") -> Topology:
    """Make a topology from parsed JSON. A given layout overrides `per_node`."""
    if not isinstance(data, dict) or not {"edges", "matrix", "rounds"} & set(data):
        raise InputError('a topology needs a JSON object with "edges", "matrix" or "rounds"')
    name = str(data.get("name", name))[:80]
    if layout is None and data.get("per_node") is not None:
        layout = _layout(_list(data["per_node"], "per_node"))
    n = data.get("n")
    if n is not None and (not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST):
        raise InputError(f'"n" must be an integer from 1 to {MOST}, got {n!r:.60}')
    if "rounds" in data:
        entries = _list(data["rounds"], "rounds")
        if data.get("period", len(entries)) != len(entries):
            raise InputError(
                f'"period" says {data["period"]!r:.60} but "rounds" has {len(entries)}; list every round of the period'
            )
        n = n or max((_size(entry) for entry in entries), default=0)
        if n * len(entries) > MOST_PLACES:
            raise InputError(
                f"{len(entries)} rounds of {n} workers are too many to hold; a file may have {MOST_PLACES} in all"
            )
        rounds = [_round(entry, n, k) for k, entry in enumerate(entries)]
        return check_connected(Topology.of_rounds(name, fit(name, n, layout), rounds))
    if "matrix" in data:
        made = from_matrix(data["matrix"], layout, name=name)
        fit(name, made.n, None if n is None else Layout.flat(n))
        return made
    edges = [_edge(e) for e in _list(data["edges"], "edges")]
    n = n or _size(data)
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(n))
    graph.add_edges_from((i, j, {} if w is None else {"weight": w}) for i, j, w in edges)
    if len(graph) > n:
        raise InputError(f"edges must join workers 0..{n - 1}, got worker {max(graph)}")
    weighted = any(w is not None for _, _, w in edges)
    style = str(data.get("style", "static" if weighted else "one-peer"))
    return from_graph(graph, layout, style=style, name=name)


def to_dict(topology: Topology, *, matrices: bool = False) -> dict[str, Any]:
    """Return a topology in the JSON format, with every round of its period; `matrices` adds the dense matrices."""
    return {
        "name": topology.name,
        "n": topology.n,
        "per_node": list(topology.layout.per_node),
        "period": topology.period,
        "rounds": [round_to_dict(r, matrix=matrices) for r in topology.rounds],
    }


def round_to_dict(made: Round, *, matrix: bool = False) -> dict[str, Any]:
    """Return a round in the JSON format: groups, edge weights if they are not uniform, and optionally the matrix."""
    entry: dict[str, Any] = {"groups": [list(g) for g in made.groups]}
    if made.weights is not None:
        weight = {(i, j): w for i, j, w in made.weights}
        if all(math.isclose(weight.get((j, i), 0.0), w, rel_tol=1e-12) for (i, j), w in weight.items()):
            entry["edges"] = [[i, j, w] for (i, j), w in weight.items() if i < j]
        else:
            matrix = True
    if matrix:
        entry["matrix"] = made.matrix().tolist()
    return entry


def to_json(topology: Topology, path: str | Path) -> None:
    """Write a topology to a file that `from_json` reads back."""
    Path(path).write_text(json.dumps(to_dict(topology)) + "\n", encoding="utf-8")


TopologyLike = Union[str, os.PathLike[str], Topology, "nx.Graph[int]", np.ndarray, Sequence[np.ndarray]]
"""What a user may pass as a topology; see `resolve`."""


def resolve(spec: Any, layout: Layout) -> Topology:
    """Return the topology that `spec` describes, on this layout.

    `spec` is a name (`"aer"`, `"base(k=2)"`), the path of a JSON file, a `Topology`, a networkx graph (one-peer
    rounds), a matrix or a list of matrices.
    """
    if isinstance(spec, Topology):
        return replace(spec, layout=fit(spec.name, spec.n, layout))
    if isinstance(spec, os.PathLike) or (isinstance(spec, str) and spec.strip().endswith(".json")):
        return from_json(os.fspath(spec).strip(), layout)
    if isinstance(spec, str):
        return build(spec, layout)
    if isinstance(spec, nx.Graph):
        return from_graph(spec, layout)
    if isinstance(spec, np.ndarray | Sequence):
        return from_matrix(spec, layout)
    raise InputError(
        f"cannot make a topology of a {type(spec).__name__}; "
        "pass a name, a .json file, a Topology, a networkx graph or a matrix"
    )


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f'"{what}" must be a list, got {value!r:.60}')
    return value


def _worker(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MOST:
        raise InputError(f"workers must be integers from 0 to {MOST - 1}, got {value!r:.60}")
    return value


def _layout(per_node: list[Any]) -> Layout:
    if all(isinstance(c, int) and not isinstance(c, bool) for c in per_node) and sum(per_node) > MOST:
        raise InputError(f'"per_node" must have at most {MOST} workers in all, got {per_node!r:.60}')
    return Layout.of(per_node)


def _edge(value: Any) -> tuple[int, int, float | None]:
    if not isinstance(value, list) or len(value) not in (2, 3):
        raise InputError(f"an edge must be [i, j] or [i, j, weight], got {value!r:.60}")
    i, j = _worker(value[0]), _worker(value[1])
    if i == j:
        raise InputError(
            f"an edge must join two workers, got [{i}, {j}]; leave self-loops out, a worker keeps the rest to 1 anyway"
        )
    return i, j, number(value[2], f"weight of edge ({i}, {j})") if len(value) == 3 else None


def _size(entry: Any) -> int:
    """Return the number of workers that a round or a graph mentions."""
    if not isinstance(entry, dict):
        return 0
    if "matrix" in entry:
        return len(_list(entry["matrix"], "matrix"))
    named = [w for group in _list(entry.get("groups", []), "groups") for w in _list(group, "groups")]
    named += [w for e in _list(entry.get("edges", []), "edges") for w in _edge(e)[:2]]
    return 1 + max(map(_worker, named), default=-1)


def _round(entry: Any, n: int, k: int) -> Round:
    if not isinstance(entry, dict) or not {"groups", "edges", "matrix"} & set(entry):
        raise InputError(f'round {k} must be an object with "groups", "edges" or "matrix", got {entry!r:.60}')
    if "matrix" in entry:
        made = Round.from_matrix(as_array(entry["matrix"]))
        if (size := sum(map(len, made.groups))) != n:
            raise InputError(f"the matrix of round {k} is {size} x {size} but the topology has {n} workers")
        return made
    if "edges" in entry:
        edges = [(i, j, 0.5 if w is None else w) for i, j, w in map(_edge, _list(entry["edges"], "edges"))]
        twice = [pair for pair, count in Counter((min(i, j), max(i, j)) for i, j, _ in edges).items() if count > 1]
        if twice:
            raise InputError(f"round {k} lists edge {twice[0]} more than once; list an undirected edge once")
        return both_ways(n, edges)
    return Round.uniform(n, [[_worker(w) for w in _list(g, "groups")] for g in _list(entry["groups"], "groups")])
