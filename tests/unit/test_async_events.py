"""The shared event sequence and the constants of asynchronous gossip."""

import itertools
from collections import Counter

import numpy as np
import pytest

from gossamer.errors import InputError
from gossamer.topology import Layout, Round, Topology, build
from gossamer.topology.a2cid2 import rates_of
from gossamer.topology.events import Events


def graph(name, n):
    return build(name, Layout.flat(n))


@pytest.mark.parametrize(
    ("name", "n", "printed"),
    [
        ("ring", 16, ("13.137", "0.9375", "0.1425", "1.8717")),
        ("ring", 64, ("207.67", "0.9844", "0.0350", "7.2624")),
        ("exponential", 16, ("2.0", "1.0097", "0.3519", "0.7037")),
        ("exponential", 64, ("3.0", "1.0241", "0.2853", "0.8558")),
        ("star", 8, ("1.75", "0.875", None, None)),
    ],
)
def test_check_values_to_the_printed_digits(name, n, printed):
    rates = rates_of(graph(name, n))
    for value, text in zip((rates.chi1, rates.chi2, rates.eta, rates.alpha_tilde), printed, strict=True):
        if text is not None:
            assert f"{value:.{len(text.partition('.')[2])}f}" == text


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("name", ["ring", "star", "complete", "torus"])
def test_constants_equal_their_definition(name, n):
    topology = graph(name, n)
    edges = topology.union_edges()
    degree = np.bincount(edges.ravel(), minlength=n)
    matrix = np.zeros((n, n))
    for i, j in edges:
        e = np.eye(n)[i] - np.eye(n)[j]
        matrix += 0.5 * (1 / degree[i] + 1 / degree[j]) * np.outer(e, e)
    inverse = np.linalg.pinv(matrix)
    chi1 = 1 / np.sort(np.linalg.eigvalsh(matrix))[1]
    chi2 = max(0.5 * (inverse[i, i] + inverse[j, j] - 2 * inverse[i, j]) for i, j in edges)
    rates = rates_of(topology)
    assert rates.chi1 == pytest.approx(chi1, rel=1e-10)
    assert rates.chi2 == pytest.approx(chi2, rel=1e-10)
    assert rates.eta == pytest.approx(1 / (2 * np.sqrt(chi1 * chi2)), rel=1e-10)
    assert rates.alpha_tilde == pytest.approx(np.sqrt(chi1 / chi2) / 2, rel=1e-10)


@pytest.mark.parametrize("gaps", ["poisson", "fixed"])
@pytest.mark.parametrize("pairing", ["edges", "rounds"])
@pytest.mark.parametrize("name", ["ring", "torus", "complete"])
def test_a_worker_takes_part_in_rate_exchanges_a_unit(name, pairing, gaps):
    n, rate = 8, 1.5
    events = Events(graph(name, n), rate, 3, gaps, pairing)
    taken = list(itertools.takewhile(lambda e: e.time < 2000, events.stream()))
    by_worker = Counter(w for e in taken for w in (e.i, e.j))
    for worker in range(n):
        assert by_worker[worker] / 2000 == pytest.approx(rate, rel=0.08)
    assert all(a.time <= b.time and a.number + 1 == b.number for a, b in itertools.pairwise(taken))


def test_poisson_gaps_are_exponential_and_fixed_ones_equal():
    gaps = {}
    for kind in ("poisson", "fixed"):
        times = [e.time for e in itertools.islice(Events(graph("ring", 8), 1.0, 0, kind).stream(), 20000)]
        gaps[kind] = np.diff(times)
    assert gaps["poisson"].mean() == pytest.approx(0.25, rel=0.03)
    assert gaps["poisson"].std() == pytest.approx(0.25, rel=0.03)
    np.testing.assert_allclose(gaps["fixed"], 0.25, rtol=1e-9)


def test_a_star_fires_its_edges_alike():
    picked = Counter(e.j for e in itertools.islice(Events(graph("star", 5), 1.0, 0).stream(), 20000))
    assert set(picked) == {1, 2, 3, 4}
    assert max(picked.values()) / min(picked.values()) < 1.1


def test_pairs_of_a_round_are_disjoint():
    for _, together in itertools.groupby(
        itertools.islice(Events(graph("torus", 9), 1.0, 0, pairing="rounds").stream(), 3000), lambda e: e.time
    ):
        workers = [w for e in together for w in (e.i, e.j)]
        assert len(workers) == len(set(workers))


def test_all_workers_draw_one_sequence_and_can_start_anywhere_in_it():
    events = Events(graph("torus", 9), 1.0, 5)
    whole = list(itertools.islice(events.stream(), 9000))
    assert list(itertools.islice(Events(graph("torus", 9), 1.0, 5).stream(after=4999), 4000)) == whole[5000:]
    for worker in range(9):
        mine = [e for e in whole if worker in (e.i, e.j)]
        assert list(itertools.islice(events.of(worker), len(mine))) == mine
        assert {e.peer_of(worker) for e in mine} == set(events.neighbors(worker))
    shifted = Events(graph("torus", 9), 1.0, 5, first=100, start=8.0)
    first = next(shifted.stream())
    assert (first.number, first.time, first.i, first.j) == (100, 8.0 + whole[0].time, whole[0].i, whole[0].j)


def test_one_worker_has_no_events():
    assert list(Events(graph("ring", 1)).stream()) == []


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_must_be_positive(rate):
    with pytest.raises(InputError, match="rate must be a positive number"):
        Events(graph("ring", 4), rate)


def test_a_disconnected_topology_is_refused():
    pairs = Round.uniform(4, [(0, 1), (2, 3)])
    apart = Topology.of_rounds("pairs", Layout.flat(4), [pairs], connected=False)
    with pytest.raises(InputError, match="topology 'pairs' is not connected"):
        Events(apart)
