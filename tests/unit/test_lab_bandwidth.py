"""Which links are measured at the start, which of them at the same time, and which rates are refused."""

from itertools import combinations
from types import SimpleNamespace

import pytest

from gossamer.lab import LabCluster, LabUnavailable
from gossamer.lab import cluster as cluster_module
from gossamer.lab.bandwidth import batches


@pytest.fixture
def network(monkeypatch):
    """Namespaces that are not there; `reached[way]` is what a way carries, else what was asked."""
    reached, looks = {}, []

    def measure(names, a, b, rate, seconds):
        looks.append((a, b, seconds))
        return reached.get((a, b), rate)

    made = SimpleNamespace(remove=lambda: None, traffic=lambda: [{"dropped": 0}])
    monkeypatch.setattr(cluster_module, "why_unavailable", lambda: None)
    monkeypatch.setattr(cluster_module, "clean_up", lambda: None)
    monkeypatch.setattr(cluster_module, "Namespaces", lambda n, _: SimpleNamespace(names=[""] * n, **vars(made)))
    monkeypatch.setattr(cluster_module, "measure", measure)
    return SimpleNamespace(reached=reached, looks=looks)


def test_both_directions_of_a_ring_and_of_every_pair_with_its_own_rate_are_measured(network):
    own = {pair: "10mbit" for pair in combinations(range(4), 2) if pair != (0, 1)}
    with LabCluster(4, link="50mbit", links={**own, (1, 3): None}) as cluster:
        assert cluster.measured.pop((0, 1)) == cluster.measured.pop((1, 0)) == 50e6
        assert set(cluster.measured) == {w for a, b in own if (a, b) != (1, 3) for w in ((a, b), (b, a))}
        assert set(cluster.measured.values()) == {10e6}


def test_a_ring_of_equal_links_measures_every_node_in_both_directions(network):
    with LabCluster(5, link="50mbit") as cluster:
        assert set(cluster.measured) == {w for a in range(5) for w in ((a, (a + 1) % 5), ((a + 1) % 5, a))}


def test_a_slow_direction_is_measured_longer_and_refused(network):
    network.reached[2, 1] = 20e6
    with pytest.raises(LabUnavailable, match="from node 2 to node 1 carries 20mbit instead of 50mbit"):
        LabCluster(4, link="50mbit").__enter__()
    assert [look for look in network.looks if look[:2] == (2, 1)] == [(2, 1, s) for s in (0.25, 0.5, 1.0)]


def test_free_links_and_single_nodes_are_not_measured(network):
    for cluster in (LabCluster(3), LabCluster(1, link="50mbit")):
        with cluster:
            assert not network.looks


def test_ways_measured_at_the_same_time_share_no_node_and_fit_the_cores():
    ring = [w for a in range(4) for w in ((a, (a + 1) % 4), ((a + 1) % 4, a))]
    made = batches(dict.fromkeys(ring, 50e6))
    assert [len(b) for b in made] == [2, 2, 2, 2]
    assert sorted(w for b in made for w in b) == sorted(ring)
    assert all(len({node for way in b for node in way}) == 4 for b in made)
    assert [len(b) for b in batches(dict.fromkeys(ring, 1.5e9))] == [1] * 8
