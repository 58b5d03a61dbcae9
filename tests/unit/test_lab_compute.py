"""Compute-time distributions: seeds reproduce them, means are 1, bad input is refused in one sentence."""

import numpy as np
import pytest

from gossamer import InputError
from gossamer.predict.compute import ComputeTime, parse_jitter

RANDOM = ["gaussian:0.2", "lognormal:0.3", "gamma:0.3", "gaussian:0", "lognormal:0", "gamma:0"]
ALL = [*RANDOM, "none", "slow-worker:4", "now-and-then:4:0.05", "per-worker:1,2,3", "lognormal:0.3+slow-worker:4"]


@pytest.mark.parametrize("text", ALL)
def test_equal_seeds_give_equal_tables(text):
    jitter = parse_jitter(text)
    table = jitter.sample(5, 40, seed=3)
    assert table.shape == (40, 5)
    assert (table >= 0).all()
    np.testing.assert_array_equal(table, parse_jitter(text).sample(5, 40, seed=3))
    assert jitter == parse_jitter(text)


@pytest.mark.parametrize("text", ["gaussian:0.2", "lognormal:0.3", "gamma:0.3"])
def test_a_workers_draw_depends_on_seed_and_worker_only(text):
    jitter = parse_jitter(text)
    table = jitter.sample(5, 40, seed=3)
    np.testing.assert_array_equal(table[:10, :2], jitter.sample(2, 10, seed=3))
    assert not np.array_equal(table, jitter.sample(5, 40, seed=4))
    assert not np.array_equal(table[:, 0], table[:, 1])


@pytest.mark.parametrize(("text", "deviation"), [("gaussian:0.2", 0.2), ("gamma:0.3", 0.3), ("lognormal:0.3", None)])
def test_mean_one_and_the_given_deviation(text, deviation):
    table = parse_jitter(text).sample(10, 10_000)
    assert table.mean() == pytest.approx(1.0, abs=0.01)
    if deviation is None:  # sigma of the logarithm
        assert np.log(table).std() == pytest.approx(0.3, abs=0.01)
    else:
        assert table.std() == pytest.approx(deviation, abs=0.01)


def test_gaussian_never_goes_below_zero():
    assert parse_jitter("gaussian:2").sample(4, 1000).min() == 0.0


def test_slow_worker_is_the_last_unless_named():
    assert parse_jitter("slow-worker:4").sample(3, 1).tolist() == [[1, 1, 4]]
    assert parse_jitter("slow-worker:4@1").sample(3, 1).tolist() == [[1, 4, 1]]
    with pytest.raises(InputError, match="workers 0 to 2"):
        parse_jitter("slow-worker:4@3").sample(3, 1)


def test_now_and_then_affects_at_most_one_worker_per_step():
    table = parse_jitter("now-and-then:4:0.25").sample(8, 4000)
    slow = (table == 4).sum(axis=1)
    assert set(slow) == {0, 1}
    assert slow.mean() == pytest.approx(0.25, abs=0.03)
    assert ((table == 4).sum(axis=0) > 60).all()


def test_per_worker_means():
    assert parse_jitter("per-worker:1,2").sample(3, 2).tolist() == [[1, 2, 1], [1, 2, 1]]


def test_compute_time_scales():
    assert ComputeTime(0.4, parse_jitter("slow-worker:2")).sample(2, 1).tolist() == [[0.4, 0.8]]
    with pytest.raises(InputError):
        ComputeTime(-1.0)


def test_parts_of_a_product_do_not_share_draws():
    table = parse_jitter("gaussian:0.2+gaussian:0.2").sample(1, 2000)
    single = parse_jitter("gaussian:0.2").sample(1, 2000)
    assert not np.allclose(table, single**2)
    assert table.std() == pytest.approx(np.sqrt(1.04**2 - 1), abs=0.02)


def test_replay_of_a_column_and_of_a_table(tmp_path):
    column = tmp_path / "times.txt"
    column.write_text("1\n2\n3\n")
    table = parse_jitter(f"replay:{column}").sample(4, 6, seed=1)
    assert sorted(table[:3, 0]) == [0.5, 1.0, 1.5]
    np.testing.assert_array_equal(table[:3], table[3:])
    rows = tmp_path / "times.json"
    rows.write_text("[[1, 3], [1, 3]]")
    assert parse_jitter(f"replay:{rows}").sample(2, 3).tolist() == [[0.5, 1.5]] * 3
    with pytest.raises(InputError, match="2 workers, 3 are asked"):
        parse_jitter(f"replay:{rows}").sample(3, 1)


@pytest.mark.parametrize("content", ["", "one\ntwo", "[1, [2, 3]]", "-1\n2", "0\n0", "[1,"])
def test_replay_refuses_a_broken_recording(tmp_path, content):
    path = tmp_path / "times.txt"
    path.write_text(content)
    with pytest.raises(InputError):
        parse_jitter(f"replay:{path}")


@pytest.mark.parametrize(
    "text",
    [
        *("", "gaussian", "gaussian:", "gaussian:-0.1", "gaussian:nan", "gaussian:inf", "lognormal:x", "none:1"),
        *("slow-worker:0.5", "slow-worker:4@x", "slow-worker:4@-1", "now-and-then:4", "now-and-then:4:1.5"),
        *("per-worker:", "per-worker:1,-1", "replay:/no/such/file", "gaussian:0.1+"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(text):
    with pytest.raises(InputError) as caught:
        parse_jitter(text)
    assert "\n" not in str(caught.value)


def test_near_miss_is_suggested():
    with pytest.raises(InputError, match="did you mean gaussian"):
        parse_jitter("gausian:0.2")
