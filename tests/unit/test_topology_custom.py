"""Topologies from graphs, matrices and JSON; `resolve`; and the errors for bad input."""

import json
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest

from gossamer.errors import InputError
from gossamer.topology import Layout, Topology, build, from_dict, from_graph, from_json, from_matrix, resolve, to_json


def test_graph_becomes_matchings_that_cover_its_edges() -> None:
    graph = nx.petersen_graph()
    topology = from_graph(graph)
    pairs = [g for r in topology.rounds for g in r.groups if len(g) == 2]
    assert sorted(pairs) == sorted(tuple(sorted(e)) for e in graph.edges())
    assert all(len(g) <= 2 for r in topology.rounds for g in r.groups)
    assert from_graph(nx.cycle_graph(8)).period == 2


def test_static_graph_takes_its_own_weights_or_metropolis() -> None:
    path = nx.path_graph(3)
    third = from_graph(path, style="static").matrix(0)
    np.testing.assert_allclose(third, [[2 / 3, 1 / 3, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 3, 2 / 3]])
    nx.set_edge_attributes(path, 0.25, "weight")
    np.testing.assert_allclose(from_graph(path, style="static").matrix(0)[1], [0.25, 0.5, 0.25])


def test_workers_are_the_sorted_nodes() -> None:
    graph = nx.Graph([("c", "b"), ("b", "a")])
    assert from_graph(graph, style="static").matrix(0)[0, 2] == 0  # a and c are not neighbors
    assert from_graph(nx.grid_2d_graph(2, 2)).n == 4


def test_asymmetric_matrix_round_trips_through_json(tmp_path: Path) -> None:
    cycle = (np.eye(5) + np.roll(np.eye(5), 1, axis=1)) / 2
    to_json(from_matrix(cycle), tmp_path / "cycle.json")
    np.testing.assert_allclose(from_json(tmp_path / "cycle.json").matrix(0), cycle)


@pytest.mark.parametrize(
    ("data", "period", "n"),
    [
        ({"edges": [[0, 1], [1, 2], [2, 3], [3, 0]]}, 2, 4),
        ({"edges": [[0, 1], [1, 2]], "style": "static"}, 1, 3),
        ({"edges": [[0, 1, 0.25], [1, 2, 0.5]], "name": "mine"}, 1, 3),
        ({"matrix": [[0.5, 0.5], [0.5, 0.5]], "per_node": [1, 1]}, 1, 2),
        ({"rounds": [{"groups": [[0, 1]]}, {"edges": [[1, 2, 0.5]]}], "n": 3}, 2, 3),
        ({"rounds": [{"matrix": [[1]]}]}, 1, 1),
    ],
)
def test_json_forms(data: dict[str, Any], period: int, n: int, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(data))
    topology = resolve(str(tmp_path / "t.json"), Layout.flat(n))
    assert (topology.period, topology.n) == (period, n)
    assert topology.name == data.get("name", "t")
    assert from_dict(data).layout.nodes == len(data.get("per_node", [0]))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ("[1, 2]", '"edges", "matrix" or "rounds"'),
        ("{}", '"edges", "matrix" or "rounds"'),
        ('{"edges": 3}', '"edges" must be a list'),
        ('{"edges": [[0]]}', "an edge must be"),
        ('{"edges": [[0, "a"]]}', "workers must be integers"),
        ('{"edges": [[0, -1]]}', "workers must be integers"),
        ('{"edges": [[0, 1000000000000]]}', "workers must be integers"),
        ('{"edges": [[0, 0]]}', "join two workers"),
        ('{"edges": [[0, 1, NaN]]}', "finite number"),
        ('{"edges": [[0, 1, 0.7], [1, 2, 0.7]]}', "must not be negative"),
        ('{"edges": [[0, 1], [2, 3]]}', "disconnected"),
        ('{"edges": [[0, 1]], "n": 3}', "disconnected"),
        ('{"edges": [[0, 5]], "n": 2}', "0..1"),
        ('{"edges": [], "n": 0}', '"n" must be'),
        ('{"edges": []}', "at least one worker"),
        ('{"edges": [[0, 1]], "style": "both"}', "'one-peer' or 'static'"),
        ('{"edges": [[0, 1]], "per_node": [1, 0]}', "positive integers"),
        ('{"edges": [[0, 1]], "per_node": [3]}', "is for 2 workers but the layout has 3"),
        ('{"matrix": [[1, 0], [1]]}', "unequal lengths"),
        ('{"matrix": [[0.5, "x"], [0.5, 0.5]]}', "real numbers"),
        ('{"matrix": [[NaN, 1], [1, 0]]}', "finite"),
        ('{"matrix": [[0.5, 0.5], [0.4, 0.6]]}', "sums to"),
        ('{"matrix": [[1.5, -0.5], [-0.5, 1.5]]}', "must not be negative"),
        ('{"matrix": [[1, 0], [0, 1]]}', "disconnected"),
        ('{"matrix": [[0.5, 0.5], [0.5, 0.5]], "n": 3}', "is for 2 workers"),
        ('{"matrix": []}', "square weight matrix"),
        ('{"matrix": null}', "real numbers"),
        ('{"rounds": []}', "at least one"),
        ('{"rounds": {}}', '"rounds" must be a list'),
        ('{"rounds": [3]}', "round 0 must be an object"),
        ('{"rounds": [{"groups": [[0, 1], [1, 2]]}]}', "disjoint"),
        ('{"rounds": [{"groups": [0]}]}', "must be a list"),
        ('{"rounds": [{"edges": [[0, 1, 0.5], [1, 0, 0.5]]}]}', "more than once"),
        ('{"rounds": [{"matrix": [[1]]}], "n": 2}', "1 x 1"),
        ('{"rounds": [{"groups": [[0, 1]]}], "period": 7}', '"period" says 7'),
    ],
)
def test_bad_json_is_one_sentence(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        from_json(path)
    assert says in str(caught.value)
    assert "bad.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_and_not_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read topology file"):
        resolve("nowhere.json", Layout.flat(2))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not valid JSON"):
        from_json(tmp_path / "binary.json")


def test_resolve_accepts_every_form() -> None:
    layout = Layout.of([2, 2])
    assert resolve("base(k=3)", layout).name == "base(k=3)"
    assert resolve("exp", layout).name == "one-peer-exponential"
    assert resolve(nx.cycle_graph(4), layout).layout == layout
    assert resolve(np.full((4, 4), 0.25), layout).round(0).weights is None
    assert resolve([[[0.5, 0.5], [0.5, 0.5]]] * 2, Layout.flat(2)).period == 2
    assert resolve(build("ring", Layout.flat(4)), layout).layout == layout


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("rign", "did you mean 'ring'"),
        ("base(k=2", "cannot read"),
        ("base(3)", "cannot read"),
        ("ring(k=2)", "no option 'k'"),
        ("random(seed=-1)", "integer >= 0"),
        (build("ring", Layout.flat(6)), "is for 6 workers but the layout has 4"),
        (nx.cycle_graph(3), "is for 3 workers but the layout has 4"),
        (nx.Graph([(0, 1), (2, 3)]), "disconnected"),
        (nx.DiGraph([(0, 1)]), "must be undirected"),
        (nx.Graph(), "at least one worker"),
        (np.eye(4), "disconnected"),
        (np.ones((4, 3)), "square"),
        (np.ones(4), "square"),
        (7, "a name, a .json file"),
    ],
)
def test_resolve_refuses_in_one_sentence(spec: "str | Topology | nx.Graph | np.ndarray", says: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve(spec, Layout.flat(4))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("n", [0, -3, 2.5])
def test_layouts_refuse_bad_counts(n: Any) -> None:
    with pytest.raises(InputError, match="positive integer"):
        Layout.flat(n)
    with pytest.raises(InputError, match="positive integers"):
        Layout.of([2, n])
