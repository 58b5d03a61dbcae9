"""One property suite over every registered topology and random layouts; a new topology is tested by registering it."""

import math
import pickle
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.topology import Layout, analyze, build, entries, from_dict, to_dict

NAMES = [e.name for e in entries()]
LAYOUTS = st.lists(st.integers(1, 5), min_size=1, max_size=6).map(Layout.of)
some = settings(max_examples=12, deadline=None, derandomize=True)


@pytest.mark.parametrize("name", NAMES)
@some
@given(layout=LAYOUTS)
def test_rounds_are_doubly_stochastic_partitions(name: str, layout: Layout) -> None:
    topology, again = build(name, layout), build(name, layout)
    values = np.random.default_rng(0).standard_normal(layout.n)
    for k, made in enumerate(topology.rounds):
        assert sorted(w for g in made.groups for w in g) == list(range(layout.n))
        matrix = topology.matrix(k)
        assert matrix.min() >= 0
        np.testing.assert_allclose(matrix.sum(axis=0), 1, rtol=0, atol=1e-12)
        np.testing.assert_allclose(matrix.sum(axis=1), 1, rtol=0, atol=1e-12)
        outside = np.ones_like(matrix, dtype=bool)
        for g in made.groups:
            outside[np.ix_(g, g)] = False
        assert not matrix[outside].any()
        assert made == again.round(k) == topology.round(k + topology.period)
        assert (matrix @ values).mean() == pytest.approx(values.mean(), abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
@some
@given(layout=LAYOUTS)
def test_union_is_connected_and_is_the_union_of_the_rounds(name: str, layout: Layout) -> None:
    topology = build(name, layout)
    edges = {tuple(e) for e in topology.union_edges().tolist()}
    graph: nx.Graph = nx.Graph()
    graph.add_nodes_from(range(layout.n))
    graph.add_edges_from(edges)
    assert nx.is_connected(graph)
    assert edges == {tuple(e) for e in replace(topology, edges=None).union_edges().tolist()}


@pytest.mark.parametrize("name", NAMES)
@some
@given(layout=LAYOUTS)
def test_contraction_and_exactness_agree_with_simulation(name: str, layout: Layout) -> None:
    topology, n = build(name, layout), layout.n
    mixing = analyze(topology).mixing
    assert not mixing.contraction_estimated
    assert not mixing.rounds_estimated
    x = np.eye(n) - 1 / n
    start, distance = np.linalg.norm(x) or 1.0, []
    for k in range(max(topology.period, mixing.rounds_to_1e3 or 0, mixing.exact_after or 0)):
        if k == topology.period:
            after_period = np.linalg.norm(x, 2)
        x = topology.matrix(k) @ x
        distance.append(float(np.linalg.norm(x) / start))
    if len(distance) == topology.period:
        after_period = np.linalg.norm(x, 2)
    if mixing.contraction_period > 1e-12:
        assert after_period == pytest.approx(mixing.contraction_period, rel=1e-3)
        assert mixing.contraction == pytest.approx(mixing.contraction_period ** (1 / topology.period), rel=1e-9)
    if mixing.exact_after:
        assert distance[mixing.exact_after - 1] < 1e-13
        assert mixing.exact_after == 1 or distance[mixing.exact_after - 2] > 1e-9
    reached = mixing.rounds_to_1e3
    assert reached is not None
    if n > 1:
        assert distance[reached - 1] <= 1e-3 * (1 + 1e-9)
        assert reached == 1 or distance[reached - 2] > 1e-3


@pytest.mark.parametrize("name", ["ring", "one-peer-exponential", "random-matching", "aer"])
@pytest.mark.parametrize("n", [3, 5, 7, 9, 13])
def test_odd_n_workers_sit_out_equally_often(name: str, n: int) -> None:
    topology = build(name, Layout.of([1] * n))
    idle = [sum(len(r.group_of(w)) == 1 for r in topology.rounds) for w in range(n)]
    assert len(set(idle)) == 1
    assert idle[0] > 0


@pytest.mark.parametrize("name", NAMES)
def test_json_and_pickle_bring_back_the_same_rounds(name: str) -> None:
    topology = build(name, Layout.of([2, 3, 1]))
    for copy in (
        from_dict(to_dict(topology)),
        from_dict(to_dict(topology, matrices=True)),
        pickle.loads(pickle.dumps(topology)),
    ):
        assert copy.layout == topology.layout
        assert copy.period == topology.period
        for k in range(topology.period):
            np.testing.assert_allclose(copy.matrix(k), topology.matrix(k), rtol=0, atol=1e-15)


@pytest.mark.parametrize("n", [4095, 4096])
@pytest.mark.parametrize("name", ["ring", "one-peer-exponential"])
def test_thousands_of_workers_are_made_lazily(name: str, n: int) -> None:
    topology = build(name, Layout.flat(n))
    for k in (0, topology.period // 2, topology.period - 1):
        assert sum(len(g) == 2 for g in topology.round(k).groups) >= n // 3
    assert topology.period <= n * math.ceil(math.log2(n))
