"""Local steps with outer steps or exact averages: predictions, configuration, virtual training, bad input."""

import json

import numpy as np
import pytest

import gossamer
from gossamer.cli import main
from gossamer.lab.bench.run import BenchPlan
from gossamer.lab.bench.setup import Setup
from gossamer.lab.bench.stats import all_reduced
from gossamer.predict.costs import AbstractCosts
from gossamer.predict.local_steps import simulate_local
from gossamer.predict.methods import parse
from gossamer.predict.predict import Abstract, predict
from gossamer.predict.simulator import ExchangePolicy
from gossamer.recipes.config import make_config
from gossamer.recipes.methods import gossip_settings
from gossamer.topology import Layout

TINY = ["--virtual", "4", "--batch", "4", "--width", "2", "--evaluate-on", "16", "--steps", "8", "--jobs", "1"]
LAYOUT = Layout.of([2, 2])


@pytest.mark.parametrize("method", ["diloco", "localsgd"])
def test_a_period_is_the_slowest_worker_and_an_all_reduce(method):
    setting = Abstract(LAYOUT, gamma=3.0)
    for every, steps in ((8, 8), (1, 8), (16, 16)):  # 1 is the default: eight
        result = predict(method, setting, steps=100, policy=ExchangePolicy(1, every=every), trace_steps=2 * steps)
        assert result.step_time == pytest.approx(1 + 3.0 / steps)
        assert result.exchange_rate == pytest.approx(1 / steps)
        waits = [s for s in result.spans if s.category == "wait"]
        assert {s.attrs["step"] for s in waits} == {steps - 1, 2 * steps - 1}
        assert all(s.end - s.start == pytest.approx(3.0) for s in waits)
    jitter = np.random.default_rng(0).uniform(0.5, 1.5, (40, 4))
    result = simulate_local(AbstractCosts(LAYOUT, 3.0, 1.0), jitter, every=4)
    assert result.step_time == pytest.approx((jitter.reshape(10, 4, 4).sum(axis=1).max(axis=1).sum() + 30) / 40)


def test_an_outer_step_hides_the_exchange_behind_all_local_steps():
    """An exchange of three compute times: behind one step it delays every period by two, behind eight not at all."""
    setting, method = Abstract(Layout.of([1, 1]), gamma=3.0), parse("dadam:ring")
    times = {}
    for name, policy in {
        "plain": ExchangePolicy(1, every=8),
        "outer": ExchangePolicy(1, every=8, outer=True),
        "short": ExchangePolicy(1, every=2, outer=True),
        "atc": ExchangePolicy(1, every=8, outer=True, combine="atc"),
    }.items():
        times[name] = predict(method, setting, steps=100, policy=policy).step_time
    assert times["plain"] == pytest.approx(1 + 2 / 8)
    assert times["outer"] == pytest.approx(1.0)
    assert times["short"] == pytest.approx(1.5)
    assert times["atc"] == pytest.approx(1 + 3 / 8)


def test_the_exact_average_form_of_the_recipes():
    config = make_config({"task": "lm", "every": 16})
    found = gossip_settings(parse("diloco"), config)
    assert found["topology"] == "complete"
    assert found["algorithm"] == gossamer.ATC(every=16, outer=gossamer.Nesterov(lr=0.7, momentum=0.9))
    config = make_config({"task": "lm", "outer": "heavy-ball", "outer_lr": 0.5, "outer_momentum": 0.8, "every": 4})
    assert gossip_settings(parse("diloco"), config)["algorithm"].outer == gossamer.Nesterov(lr=0.5, momentum=0.8)
    assert gossip_settings(parse("localsgd"), config)["algorithm"] == gossamer.ATC(every=4)
    ours = gossip_settings(parse("dadam:ring"), config)
    assert ours["algorithm"] == gossamer.AWC(every=4, outer=gossamer.HeavyBall(lr=0.5, momentum=0.8))


def test_compare_trains_them_side_by_side(tmp_path, capsys):
    """--every and --outer mean nothing to ddp; diloco sends an all-reduce per period."""
    words = ["--methods", "ddp,diloco,localsgd,dadam:ring", "--every", "4", "--outer", "nesterov", "--json"]
    words += ["--no-exact-inside"]  # which would send gradients in every step
    assert main(["compare", "vision", *TINY, *words, "--out", str(tmp_path / "cmp")]) == 0
    content = json.loads(capsys.readouterr().out)
    rows = {row["method"]: row for row in content["methods"]}
    assert content["failed"] == {}
    assert all(np.isfinite(row["loss_mean"]) for row in rows.values())
    size = rows["ddp"]["bytes_per_step"]
    assert rows["diloco"]["bytes_per_step"] == rows["localsgd"]["bytes_per_step"] == pytest.approx(size / 4)
    assert 0 < rows["dadam:ring"]["bytes_per_step"] < size / 4
    saved = json.loads((tmp_path / "cmp" / "dadam-ring" / "seed-0" / "config.json").read_text())
    assert saved["config"]["outer"] == "nesterov"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--method", "dadam:ring", "--outer", "nesterov"], "every=1 exchanges after each step"),
        (["--method", "dadam:ring", "--outer", "slowmo", "--every", "2"], "average_every=0 makes none"),
        (["--method", "dadam:ring", "--every", "2", "--outer-momentum", "1"], "outer_momentum"),
        (["--method", "dadam:ring", "--every", "2", "--outer-lr", "0"], "outer_lr"),
        (["--method", "dadam:ring", "--every", "2", "--outer-lr", "0.5"], "need an outer step, and dadam has none"),
        (["--method", "dadam:ring", "--every", "2", "--outer", "newton"], "outer"),
        (["--method", "ad-psgd:ring", "--every", "2", "--outer", "nesterov"], "does not apply"),
        (["--method", "ad-psgd:ring", "--every", "2"], "use a rate below 1"),
        (["--method", "diloco:ring"], "has neither topology nor wire"),
        (["--method", "diloco", "--on-failure", "continue"], "virtual"),
        (
            ["--method", "dadam:exp", "--every", "2", "--outer", "heavy-ball", "--outer-lr", "5"],
            "is unstable on the topology 'one-peer-exponential' of 2",
        ),
    ],
    ids=str,
)
def test_bad_input_is_one_sentence(words, text, capsys, tmp_path):
    assert main(["train", "vision", *TINY[:-2], "--out", str(tmp_path / "run"), *words]) == 2
    assert not (tmp_path / "run").exists()
    said = capsys.readouterr().err
    assert text in said
    assert "Traceback" not in said


def test_a_benchmark_measures_whole_periods():
    plan = BenchPlan(steps=10, warmup=5, repeats=1, sweep_steps=0)
    setup = Setup()
    assert plan.runs(parse("dadam:aer"), setup) == [5 + 12]  # AER on four nodes repeats after four rounds
    assert plan.runs(parse("ad-psgd:ring"), setup) == [15]
    assert plan.runs(parse("diloco"), setup) == [8 + 16]
    local = BenchPlan(steps=10, warmup=5, repeats=1, sweep_steps=0, every=4)
    assert local.runs(parse("diloco"), setup) == [8 + 12]
    assert local.runs(parse("dadam:aer"), setup) == [8 + 16]
    assert local.runs(parse("ddp"), setup) == [15]
    exact = BenchPlan(steps=20, warmup=5, repeats=1, sweep_steps=0, average_every=64)
    assert exact.runs(parse("dadam:aer:int8"), setup) == [5 + 64]
    fragments = BenchPlan(steps=20, warmup=5, repeats=1, fragments=8, average_every=64)
    *sweep, run = fragments.runs(parse("dadam:aer"), setup)
    assert run == 8 + 64
    assert set(sweep) == {8 + 32}
    sizes = fragments.sizes(parse("dadam:aer"), setup)
    assert [round(setup.model_bytes / (size * 2**20)) for size in sizes if size] == [
        63,
        32,
        16,
    ]  # a little larger than 1/64
    whole = all_reduced(setup, parse("ddp")).busiest
    assert all_reduced(setup, parse("diloco")).busiest == pytest.approx(whole / 8)
    assert all_reduced(setup, parse("localsgd"), 4).busiest == pytest.approx(whole / 4)
