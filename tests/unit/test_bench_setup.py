"""The setup of a benchmark: dilated clusters, bucket sizes, methods that cannot be measured, bad input."""

import numpy as np
import pytest

from gossamer.cli import main
from gossamer.errors import InputError
from gossamer.lab.bench import run as bench
from gossamer.lab.bench import setup as bench_setup
from gossamer.lab.bench.run import BenchPlan, expected
from gossamer.lab.bench.setup import Setup, bucket_sizes, dilated, parse_links, why_not
from gossamer.predict.cluster import load
from gossamer.predict.methods import parse
from gossamer.predict.predict import derived


@pytest.mark.parametrize("name", ["a40", "a100", "t4"])
def test_a_dilated_preset_keeps_gamma_and_jitter(name):
    cluster = load(name)
    setup = dilated(cluster)
    assert setup.per_node == cluster.layout.per_node
    assert setup.gamma() == pytest.approx(derived(cluster)["gamma"])
    assert setup.jitter == cluster.compute.jitter
    assert setup.compute == pytest.approx(0.05 * cluster.layout.n)


def test_dilation_scales_link_with_compute_and_model():
    one, slow, big = (dilated(load("a40"), **k) for k in ({}, {"compute": 1.6}, {"model_mb": 8.0}))
    assert slow.rates.default == pytest.approx(one.rates.default / 2)
    assert big.rates.default == pytest.approx(one.rates.default * 2)


def test_gamma_is_a_ring_all_reduce_over_compute():
    assert Setup().gamma() == pytest.approx(2 * 7 / 8 * 4e6 * 8 / 50e6 / 0.4)
    assert Setup(link=None).gamma() is None
    assert Setup(per_node=(4,)).gamma() is None


def test_every_method_gets_the_same_compute_times():
    setup = Setup(jitter="lognormal:0.3")
    assert np.array_equal(setup.table(9, 3), setup.table(9, 3))
    assert np.array_equal(setup.table(9, 3), setup.table(12, 3)[:9])
    assert not np.array_equal(setup.table(9, 3), setup.table(9, 4))


def test_bucket_sizes_fill_whole_layers():
    sizes = bucket_sizes(parse("ddp"), Setup())
    assert sizes[0] == 25.0  # torch's own
    layer = 4e6 / 8 / 2**20
    assert [round(s / layer, 2) for s in sizes[1:]] == [0.99, 1.98, 3.96]
    assert bucket_sizes(parse("decent-dp:aer"), Setup()) == sizes
    assert bucket_sizes(parse("dadam:aer"), Setup())[0] is None
    assert len(bucket_sizes(parse("ddp"), Setup(layers=1))) == 1


@pytest.mark.parametrize(
    ("method", "setup", "says"),
    [
        ("decent-dp:aer", {}, None),
        ("dadam:aer", {"network": "paced"}, None),
        ("decent-dp:aer", {"network": "paced"}, "cannot be paced"),
        ("decent-dp:aer", {"per_node": (2, 2, 2)}, "needs 2, 4, 8, ... nodes"),
        ("decent-dp:aer", {"per_node": (1, 1)}, "at least 2 workers"),
        ("decent-dp:aer", {"per_node": (3, 1)}, "equally many workers"),
        ("decent-dp:exp", {"per_node": (3, 3)}, "2, 4, 8, ... workers"),
        ("decent-dp:ring", {"per_node": (3,)}, "even number"),
        ("decent-dp:torus", {}, "no topology torus"),
    ],
)
def test_methods_that_cannot_be_measured(monkeypatch, method, setup, says):
    monkeypatch.setattr(bench_setup.importlib.util, "find_spec", lambda name: object())
    why = why_not(parse(method), Setup(**setup))
    assert why is None if says is None else says in why


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(bench_setup.importlib.util, "find_spec", lambda name: None)
    assert "pip install decent-dp" in why_not(parse("decent-dp:aer"), Setup())


def test_links_as_text():
    assert parse_links("0-3=10mbit, 1-2=none") == {(0, 3): "10mbit", (1, 2): "none"}
    for text in ("0-3", "a-b=1mbit", "0=1mbit", "0-1-2=5mbit"):
        with pytest.raises(InputError, match="FROM-TO=RATE"):
            parse_links(text)
    for text in ("0-1=10mbit,0-1=20mbit", "0-1=10mbit,1-0=10mbit"):
        with pytest.raises(InputError, match="0-1 is listed twice"):
            parse_links(text)


def test_asynchronous_methods_have_no_buckets_to_sweep():
    assert bucket_sizes(parse("ad-psgd:ring"), Setup()) == (None,)
    methods = [parse("ddp"), parse("a2cid2:ring")]
    sweep, none, one = BenchPlan(), BenchPlan(sweep_steps=0), BenchPlan(bucket_mb=0.5)
    assert [len(sweep.runs(m, Setup())) for m in methods] == [4 + 3, 3]
    assert [none.sizes(m, Setup()) for m in methods] == [(25.0,), (None,)]
    assert [one.sizes(m, Setup()) for m in methods] == [(0.5,), (0.5,)]


def test_the_expected_time_is_runs_times_steps_at_their_limit():
    setup, plan = Setup(), BenchPlan(steps=20, repeats=3, bucket_mb=0.5)
    start = 2 + 2 * 4e6 * 8 / 50e6  # a run's own, and the model on its way to all nodes
    ring = 2 * 7 / 8 * 4e6 * 8 / 50e6
    assert expected(setup, [parse("ddp"), parse("dadam:aer")], plan) == (
        6,
        pytest.approx(3 * 25 * ring + 3 * 25 * 0.4 + 6 * start),
    )
    timed = BenchPlan(seconds=30.0, repeats=2, bucket_mb=0.5)
    assert expected(setup, [parse("dadam:aer")], timed) == (2, pytest.approx(2 * (30 + 5 * 0.4 + start)))


def test_the_timeout_of_a_worker_grows_with_the_run():
    def timeout(**plan):
        made = bench._Bench(Setup(), BenchPlan(**plan), [], None, None)
        return made.method_run(parse("dadam:aer"), None).timeout

    step = 0.4 + 2 * 4e6 * 8 / 50e6
    assert timeout(steps=20) == pytest.approx(120 + 5 * 30 * step)
    assert timeout(steps=2000) == pytest.approx(120 + 5 * 2010 * step)
    assert timeout(steps=20, seconds=600.0) == pytest.approx(timeout(steps=20) + 600)


@pytest.mark.parametrize("name", ["a40", "a100", "t4"])
def test_presets_take_about_ten_minutes_by_default(monkeypatch, capsys, name):
    seen = []

    def stop(setup, methods, plan, tell, measure=None):
        seen.append((plan, expected(setup, methods, plan)))
        raise InputError("enough")

    monkeypatch.setattr("gossamer.lab.bench.run_bench", stop)
    monkeypatch.setattr(bench_setup.importlib.util, "find_spec", lambda name: object())
    for arguments in ([], ["--steps", "33", "--repeats", "4"]):
        assert main(["bench", "--cluster", name, "--network", "paced", *arguments]) == 2
    (default, (_, seconds)), (changed, _) = seen
    assert 120 < seconds < 480  # at its limit, which DDP exceeds by a quarter or more
    assert (default.steps, default.repeats) == (10, 2)
    assert (changed.steps, changed.repeats) == (33, 4)
    assert f"runs, at least {seconds / 60:.0f} min" in capsys.readouterr().err


@pytest.mark.parametrize(
    "bad",
    [
        {"steps": 0},
        {"repeats": 0},
        {"seconds": 0.0},
        {"bucket_mb": -1.0},
        {"seed": -1},
        {"outer": "newton"},
        {"outer": "nesterov", "outer_momentum": 1.0},
    ],
)
def test_a_plan_refuses_bad_values(bad):
    with pytest.raises(InputError, match=str(next(iter(bad)))):
        BenchPlan(**bad)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--link fast", "got 'fast'"),
        ("--nodes 0 --per-node 2", "got 0"),
        ("--jitter lognormal:-1", "got -1"),
        ("--methods ddp,dadm:aer", "did you mean 'dadam'?"),
        ("--methods ddp,ddp", "listed twice"),
        ("--methods ,", "nothing to compare"),
        ("--steps 0", "steps must be at least 1"),
        ("--links 0-9=1mbit", "nodes of 0 to 3"),
        ("--links 0-1=10mbit,0-1=20mbit", "0-1 is listed twice"),
        ("--network magic", "--network must be"),
        ("--network loopback --link 5mbit", "loopback has no link rates"),
        ("--compute -1", "compute time"),
        ("--model-mb 0", "got 0"),
        ("--cluster a41", "unknown cluster 'a41'"),
        ("--plot figure.gif", "figure.gif"),
        ("--staleness -1", "staleness must be at least 0"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(capsys, arguments, says):
    assert main(["bench", *arguments.split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith("gossamer: error: ")
    assert says in err
    assert err.count("\n") == 1
