"""The virtual-time study of asynchronous gossip: against the equations, and its command."""

import json
import math

import numpy as np
import pytest
import scipy.linalg
from typer.testing import CliRunner

from gossamer.cli.simulate import app
from gossamer.predict.asynchronous import ALGORITHMS, ConsensusCurve, ConsensusRuns, consensus_scaling, consensus_study
from gossamer.topology import Layout, build
from gossamer.topology.a2cid2 import rates_of


def graph(name, n):
    return build(name, Layout.flat(n))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_exchanges_side_by_side_equal_one_after_the_other(algorithm, monkeypatch):
    """The batches of commuting exchanges against a plain loop in the order of time."""
    topology, n, runs = graph("ring", 7), 7, 3
    x = np.random.default_rng(0).standard_normal(runs * n)
    fast = ConsensusRuns(topology, algorithm, x.copy(), 1.5, 4)
    batches = []
    average = ConsensusRuns._average

    def noted(self, i, j, times):
        batches.extend(zip(times.tolist(), i.tolist(), j.tolist(), strict=True))
        average(self, i, j, times)

    monkeypatch.setattr(ConsensusRuns, "_average", noted)
    for now in (1.0, 2.0, 3.0):
        fast.exchange_until(now)
        fast.step(np.full(runs * n, 0.25))
    a, b, mixed = x.copy(), x.copy(), np.zeros(runs * n)
    eta = fast.eta if algorithm == "a2cid2" else 0.0
    alpha = fast.alpha_tilde if algorithm == "a2cid2" else 0.5

    def mix(i, now):
        share = (1 - math.exp(-2 * eta * (now - mixed[i]))) / 2
        d = share * (b[i] - a[i])
        a[i], b[i], mixed[i] = a[i] + d, b[i] - d, now

    steps = [(now, -1, -1) for now in (1.0, 2.0, 3.0)]
    for at, i, j in sorted(batches + steps):
        if i < 0:
            for w in range(runs * n):
                mix(w, at)
            a, b = a + 0.25, b + 0.25
            continue
        mix(i, at)
        mix(j, at)
        m = a[i] - a[j]
        a[i], a[j], b[i], b[j] = a[i] - m / 2, a[j] + m / 2, b[i] - alpha * m, b[j] + alpha * m
    np.testing.assert_allclose(fast.x, a, rtol=0, atol=1e-13)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", ["ring", "star", "complete"])
def test_the_mean_square_follows_its_linear_equation(name, algorithm):
    """M = E z z' of z = (x, x~) obeys dM/dt = D M + M D' + sum of lambda_e (B_e M B_e' - M)."""
    n, runs, until = 6, 20000, 1.5
    topology = graph(name, n)
    state = ConsensusRuns(topology, algorithm, np.random.default_rng(1).standard_normal(runs * n), 1.0, 0)
    eta, alpha = (state.eta, state.alpha_tilde) if algorithm == "a2cid2" else (0.0, 0.5)
    one = np.eye(2 * n)
    drift = np.kron(eta * np.array([[-1.0, 1.0], [1.0, -1.0]]), np.eye(n))
    generator = np.kron(drift, one) + np.kron(one, drift)
    for (i, j), intensity in zip(state.events.edges, state.events.intensity, strict=True):
        difference = np.outer(np.eye(n)[i] - np.eye(n)[j], np.eye(n)[i] - np.eye(n)[j])
        event = one - np.kron(np.array([[0.5, 0.0], [alpha, 0.0]]), difference)
        generator += intensity * (np.kron(event, event) - np.eye(4 * n * n))
    start = np.kron(np.ones((2, 2)), np.eye(n))
    square = (scipy.linalg.expm(generator * until) @ start.ravel()).reshape(2 * n, 2 * n)[:n, :n]
    centered = np.eye(n) - 1 / n
    expected = np.trace(centered @ square @ centered) / n
    state.exchange_until(until)
    state.step(np.zeros(1))  # Mix up to now
    assert state.distance() ** 2 == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("forcing", ["none", "noise", "constant", "quadratic"])
def test_workers_take_part_in_rate_exchanges_a_unit(forcing, algorithm):
    curve = consensus_study(graph("ring", 8), algorithm, forcing=forcing, units=100, rate=1.5, runs=16)
    assert curve.communications[-1] == pytest.approx(1.5 * 100 * 8 / 2, rel=0.05)
    assert curve.time[-1] == pytest.approx(100)
    assert (curve.loss is not None) == (forcing == "quadratic")


def test_the_momentum_pays_where_workers_differ_and_not_against_noise():
    ring = graph("ring", 16)
    ratio = {}
    for forcing in ("noise", "constant"):
        found = [consensus_study(ring, a, forcing=forcing, units=120, runs=16).stationary() for a in ALGORITHMS]
        ratio[forcing] = found[1] / found[0]
    assert ratio["constant"] < 0.55
    assert 0.85 < ratio["noise"] < 1.1


def test_exponents_of_the_ring_are_those_of_the_theory():
    rings = [graph("ring", n) for n in (8, 16, 32)]
    exponent = {a: consensus_scaling(rings, a, epsilon=0.1, runs=16, seed=0).exponent for a in ALGORITHMS}
    assert exponent["ad-psgd"] == pytest.approx(3, abs=0.25)
    assert exponent["a2cid2"] == pytest.approx(2, abs=0.25)


def test_communications_to_a_level_are_interpolated():
    curve = ConsensusCurve("ad-psgd", np.arange(3.0), np.array([0.0, 10.0, 20.0]), np.array([1.0, 0.1, 0.01]), None)
    assert curve.communications_to(0.1) == 10
    assert curve.communications_to(10**-1.5) == pytest.approx(15)
    assert curve.communications_to(1.0) == 0
    assert math.isnan(curve.communications_to(0.001))


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_the_command_prints_curves_of_both_methods():
    result = run("--method", "a2cid2:ring", "--n", "8", "--consensus", "--scaling", "4,8", "--steps", "50", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.output)
    assert said["workers"] == 8
    assert said["eta"] == rates_of(graph("ring", 8)).eta
    for forcing in ("none", "noise", "constant", "quadratic"):
        for method in ALGORITHMS:
            curve = said["curves"][forcing][method]
            assert (
                len(curve["time"]) == len(curve["communications"]) == len(curve["distance"]) == 51 or forcing == "none"
            )
    assert [s["method"] for s in said["scaling"]] == list(ALGORITHMS)
    assert all(len(s["communications"]) == 2 for s in said["scaling"])


def test_the_command_draws(tmp_path):
    path = tmp_path / "picture.svg"
    result = run("--method", "ad-psgd:star", "--n", "6", "--consensus", "--steps", "20", "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert "constant forcing" in result.output
    assert path.read_text().count("<svg") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--method", "dadam:ring", "--n", "8"], "compares ad-psgd with a2cid2 on one topology"),
        (["--methods", "a2cid2:ring,a2cid2:star", "--n", "8"], "compares ad-psgd with a2cid2 on one topology"),
        (["--method", "a2cid2:ring"], "the number of workers is missing"),
        (["--method", "a2cid2:ring", "--n", "1"], "has no exchanges to study"),
        (["--method", "a2cid2:ring", "--n", "8", "--scaling", "8"], "--scaling must list at least two numbers"),
        (["--method", "a2cid2:ring", "--n", "8", "--scaling", "8,x"], "--scaling must list at least two numbers"),
        (["--method", "a2cid2:ring", "--n", "8", "--epsilon", "2"], "--epsilon must be between 0 and 1"),
        (["--method", "a2cid2:ring", "--n", "8", "--runs", "0"], "--runs must be from 1 to 4096"),
        (["--method", "a2cid2:ring", "--n", "8", "--rate", "0"], "--rate must be a positive number"),
        (["--method", "a2cid2:ring", "--n", "8", "--steps", "1"], "--steps must be from 2"),
        (["--method", "a2cid2:ring", "--n", "8", "--steps", "5", "--plot", "x.gif"], "cannot draw to 'x.gif'"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence):
    result = run(*arguments, "--consensus")
    assert sentence in str(result.exception)
