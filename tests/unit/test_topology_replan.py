"""Topologies for the remaining workers of an elastic job."""

import itertools

import networkx as nx
import numpy as np
import pytest

from gossamer.errors import InputError
from gossamer.topology import Layout, build, resolve
from gossamer.topology.replan import replanned, restricted


@pytest.mark.parametrize("name", ["ring", "aer", "complete", "exp", "base(k=2)"])
@pytest.mark.parametrize("alive", [(0, 1, 2, 3, 5), (2, 3), (7,), (0, 2, 4, 6)])
def test_a_family_is_built_again_for_the_remaining_workers(name, alive):
    founding = build(name, Layout.of([2, 2, 2, 2]))
    nodes = dict.fromkeys(r // 2 for r in alive)
    layout = Layout(tuple(list(nodes).index(r // 2) for r in alive))
    rest = replanned(name, founding, alive, layout)
    assert rest.n == len(alive)
    for k in range(min(rest.period, 8)):
        assert np.array_equal(rest.matrix(k), build(name, layout).matrix(k))


def test_nothing_changes_while_all_workers_are_alive():
    founding = build("ring", Layout.flat(4))
    assert replanned("ring", founding, range(4), founding.layout) is founding


def test_a_family_is_built_again_if_a_replacement_is_on_another_node():
    founding = build("aer", Layout.of([2, 2]))
    moved = Layout((0, 0, 1, 0))
    assert replanned("aer", founding, range(4), moved).layout == moved
    ring = resolve(nx.cycle_graph(4), Layout.of([2, 2]))
    assert replanned(nx.cycle_graph(4), ring, range(4), moved) is ring


def test_a_graph_without_its_dead_workers_is_doubly_stochastic():
    founding = resolve(nx.petersen_graph(), Layout.flat(10))
    for dead in itertools.combinations(range(10), 2):
        alive = [w for w in range(10) if w not in dead]
        rest = restricted(founding, alive, Layout.flat(8))
        for k in range(rest.period):
            full, left = founding.matrix(k), rest.matrix(k)
            assert np.allclose(left.sum(0), 1)
            assert np.allclose(left.sum(1), 1)
            assert (left >= 0).all()
            for i, j in itertools.permutations(range(8), 2):
                assert left[i, j] in (0.0, pytest.approx(full[alive[i], alive[j]]))


def test_asymmetric_weights_stay_doubly_stochastic():
    shift = np.roll(np.eye(5), 1, axis=1)
    founding = resolve(0.5 * np.eye(5) + 0.3 * shift + 0.2 * shift.T, Layout.flat(5))
    rest = restricted(founding, [0, 1, 2, 4], Layout.flat(4))
    matrix = rest.matrix(0)
    assert np.allclose(matrix.sum(0), 1)
    assert np.allclose(matrix.sum(1), 1)
    assert matrix[0, 1] == pytest.approx(0.2)  # the smaller of both directions


def test_a_disconnected_rest_is_replaced():
    founding = resolve(nx.star_graph(4), Layout.flat(5))
    rest = replanned(nx.star_graph(4), founding, [1, 2, 3, 4], Layout.flat(4))  # the center died
    graph = nx.Graph(rest.union_edges().tolist())
    assert graph.number_of_nodes() == 4
    assert nx.is_connected(graph)


def test_a_layout_of_another_size_is_refused():
    with pytest.raises(InputError, match="the layout has 3 workers, but 2 are alive"):
        restricted(build("ring", Layout.flat(4)), [0, 1], Layout.flat(3))
