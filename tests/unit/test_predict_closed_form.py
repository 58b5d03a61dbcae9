"""Formulas against exact values, Monte Carlo and the simulator."""

import numpy as np
import pytest

from gossamer.errors import InputError
from gossamer.predict.closed_form import allreduce_step, contour, expected_max, gossip_step
from gossamer.predict.compute import Gamma, Gaussian, LogNormal
from gossamer.topology import Layout, build

FOUR_BY_FOUR = Layout.of([4] * 4)


@pytest.mark.parametrize(("sigma", "expected"), [(0.1, 1.177), (0.2, 1.353), (0.3, 1.530)])
def test_expected_max_of_16_gaussians(sigma, expected):
    assert expected_max(16, sigma) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(("kind", "jitter"), [("gaussian", Gaussian), ("lognormal", LogNormal), ("gamma", Gamma)])
def test_expected_max_agrees_with_sampling(kind, jitter):
    sampled = jitter(0.3).sample(8, 40_000, 1).max(axis=1)
    assert expected_max(8, 0.3, kind) == pytest.approx(sampled.mean(), abs=4 * sampled.std() / 200)


def test_expected_max_edges():
    assert expected_max(1, 0.5) == 1.0
    assert expected_max(1000, 0.0) == 1.0
    with pytest.raises(InputError, match="no distribution 'cauchy'"):
        expected_max(4, 0.1, "cauchy")
    with pytest.raises(InputError, match="n >= 1"):
        expected_max(0, 0.1)


def test_allreduce_step_by_buckets():
    assert allreduce_step(3.0, 1.353) == pytest.approx(4.353)
    assert allreduce_step(0.4, 1.0, buckets=4) == pytest.approx(1.1)  # hidden but for the last bucket
    assert allreduce_step(3.0, 1.0, buckets=4) == pytest.approx(1 + 3 - 2 / 3 * 3 / 4)


@pytest.mark.parametrize("cost", [0.3, 1.0, 1.5, 3.0, 7.25])
def test_gossip_step_without_jitter(cost):
    assert gossip_step(build("complete", FOUR_BY_FOUR), cost) == pytest.approx(max(1, cost), abs=1e-12)
    assert gossip_step(build("aer", FOUR_BY_FOUR), cost) == pytest.approx((1 + max(1, cost)) / 2, abs=1e-12)


def test_contour_grows_with_gamma_and_falls_with_omega():
    made = contour(build("aer", FOUR_BY_FOUR), np.array([0.5, 2.0, 4.0]), np.array([0.25, 1.0]), sigma=0.1, steps=100)
    saving = np.array(made.saving)
    assert saving.shape == (2, 3)
    assert (np.diff(saving[0]) > 0).all()
    assert (saving[0] >= saving[1]).all()
    exact = contour(build("complete", FOUR_BY_FOUR), np.array([3.0]), np.array([0.5]))
    assert exact.saving[0][0] == pytest.approx(1 - 1.5 / 4)
