"""Published check values, exact definitions of the families, bytes by hand, and the large-n methods."""

import numpy as np
import pytest

from gossamer.errors import InputError
from gossamer.topology import Layout, Topology, analysis, analyze, build, from_matrix


@pytest.mark.parametrize(
    ("name", "n", "chi1", "chi2", "eta", "alpha"),
    [
        ("ring", 16, "13.137", "0.9375", "0.1425", "1.8717"),
        ("ring", 64, "207.673", "0.9844", "0.0350", "7.2624"),
        ("exponential", 16, "2.000", "1.0097", "0.3519", "0.7037"),
        ("exponential", 64, "3.000", "1.0241", "0.2853", "0.8558"),
        ("star", 8, "1.750", "0.8750", "0.4041", "0.7071"),
    ],
)
def test_asynchronous_rates_to_the_printed_digits(
    name: str, n: int, chi1: str, chi2: str, eta: str, alpha: str
) -> None:
    found = analyze(build(name, Layout.flat(n))).to_dict()
    assert f"{found['chi1']:.3f}" == chi1
    assert [f"{found[key]:.4f}" for key in ("chi2", "eta", "alpha_tilde")] == [chi2, eta, alpha]


def test_aer_on_four_nodes_is_the_published_schedule() -> None:
    topology = build("aer", Layout.of([1] * 4))
    assert [[g for g in r.groups if len(g) > 1] for r in topology.rounds] == [[(2, 3)], [(0, 1)], [(1, 3)], [(0, 2)]]


@pytest.mark.parametrize("nodes", [4, 8, 16])
@pytest.mark.parametrize("workers", [1, 3])
def test_aer_is_exact_from_every_offset(nodes: int, workers: int) -> None:
    found = analyze(build("aer", Layout.of([workers] * nodes)))
    r = nodes.bit_length() - 1
    assert found.period == 2 * r
    assert found.mixing.exact_after == 2 * r
    assert found.mixing.exact_after_by_offset == (2 * r, 2 * r + 1) * r
    assert found.mixing.contraction == 0


@pytest.mark.parametrize(
    ("per_node", "period", "contraction"),
    [([1] * 5, 30, "0.863"), ([2] * 7, 42, "0.725"), ([4, 4, 2], 12, "0.747")],
)
def test_generalized_aer(per_node: list[int], period: int, contraction: str) -> None:
    found = analyze(build("aer", Layout.of(per_node)))
    assert found.period == period
    assert found.mixing.exact_after is None
    assert f"{found.mixing.contraction:.3f}" == contraction


def test_a_long_mixing_schedule_that_ends_in_an_average_is_exact() -> None:
    slow = build("ring-static", Layout.flat(6)).matrix(0)
    topology = from_matrix([slow] * 200 + [np.full((6, 6), 1 / 6)])
    assert analyze(topology).mixing.exact_after == 201
    assert analyze(from_matrix([slow] * 200)).mixing.exact_after is None


def test_one_worker_has_nothing_to_average() -> None:
    found = analyze(build("aer", Layout.flat(1))).to_dict()
    assert (found["exact_after"], found["contraction"], found["rounds_to_1e-3"]) == (0, 0.0, 0)
    assert (found["bytes_intra"], found["chi1"], found["eta"]) == (0.0, None, None)


def test_bytes_of_a_joint_average_of_two_nodes() -> None:
    # One round over 2 nodes x 2 workers. Direct: 2 * 3/4 models each, two of a worker's three peers are across nodes.
    found = analyze(build("complete", Layout.of([2, 2])), model_bytes=8.0)
    assert (found.direct.intra, found.direct.inter, found.direct.busiest) == (4.0, 8.0, 16.0)
    # Hierarchical: reduce-scatter and all-gather of two, 2 * 1/2 each; half a model each across, S a node.
    assert (found.hierarchical.intra, found.hierarchical.inter, found.hierarchical.busiest) == (8.0, 4.0, 8.0)


def test_bytes_of_three_nodes_and_of_weighted_edges() -> None:
    three = analyze(build("complete", Layout.of([2, 2, 2])), model_bytes=6.0).hierarchical
    assert three.inter == pytest.approx(6 / 2 * 2 * 2 / 3)
    star = analyze(build("star", Layout.of([1, 3])), model_bytes=1.0)  # worker 0 alone on its node: all edges cross
    assert (star.direct.intra, star.direct.inter, star.direct.busiest) == (0.0, 6 / 4, 3.0)
    assert star.hierarchical == star.direct
    flat = analyze(build("ring", Layout.flat(4)), model_bytes=1.0).direct
    assert (flat.intra, flat.inter, flat.busiest) == (1.0, 0.0, 0.0)


def _as_large(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> analysis.Mixing:
    monkeypatch.setattr(analysis, "DENSE", 0)
    return analyze(topology).mixing


@pytest.mark.parametrize("name", ["ring", "ring-static", "torus", "star", "hypercube", "exponential", "random"])
def test_large_n_methods_agree_with_dense_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = build(name, Layout.flat(100))
    dense = analyze(topology).mixing
    large = _as_large(topology, monkeypatch)
    assert not large.contraction_estimated
    assert large.contraction == pytest.approx(dense.contraction, rel=1e-6)
    assert large.rounds_to_1e3 == pytest.approx(dense.rounds_to_1e3, rel=0.15)  # random columns, not all


@pytest.mark.parametrize("name", ["aer", "base", "one-peer-exponential"])
def test_large_n_methods_find_exactness(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = build(name, Layout.of([4] * 16))
    dense = analyze(topology).mixing
    assert dense.exact_after is not None
    assert _as_large(topology, monkeypatch).exact_after_by_offset == dense.exact_after_by_offset


@pytest.mark.parametrize("name", ["ring", "one-peer-exponential"])
def test_long_periods_are_estimated_well(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = build(name, Layout.flat(91))
    dense = analyze(topology).mixing
    monkeypatch.setattr(analysis, "KEPT", 91 * 80)
    large = _as_large(topology, monkeypatch)
    assert large.contraction_estimated
    assert np.log(large.contraction) == pytest.approx(np.log(dense.contraction), rel=0.05)
    assert large.rounds_to_1e3 == pytest.approx(dense.rounds_to_1e3, rel=0.15)


@pytest.mark.parametrize(("name", "exact"), [("ring", None), ("one-peer-exponential", 12)])
def test_4096_workers(name: str, exact: int | None) -> None:
    found = analyze(build(name, Layout.flat(4096)))
    assert found.mixing.exact_after == exact
    if name == "ring":  # one period projects twice: sigma_2 = cos(2 pi / n); resistance of a ring edge: 1 - 1/n
        assert found.mixing.contraction_period == pytest.approx(np.cos(2 * np.pi / 4096), abs=1e-10)
        assert found.rates.chi1 == pytest.approx(1 / (1 - np.cos(2 * np.pi / 4096)), rel=1e-6)
    assert found.rates.chi2 == pytest.approx(1 - 1 / 4096, rel=1e-9)


@pytest.mark.parametrize("size", [0, -1, float("nan")])
def test_bad_model_size(size: float) -> None:
    with pytest.raises(InputError, match="must be positive"):
        analyze(build("ring", Layout.flat(4)), model_bytes=size)
