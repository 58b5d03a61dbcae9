"""Results from the answers of workers: step time, bytes, limit, waiting, speedup, validity."""

import pytest

from gossamer.lab.bench.setup import Setup
from gossamer.lab.bench.stats import (
    NodeTraffic,
    add_speedups,
    compute_seconds,
    ideal,
    limit_seconds,
    note_drops,
    step_seconds,
    steps_per_second,
    summarize,
    traffic,
    waiting,
)
from gossamer.lab.bench.time_to_loss import curve, time_to
from gossamer.predict.methods import parse
from gossamer.report.bench import draw_bars, invalid_note, markdown
from gossamer.report.plots import draw_loss

SETUP = Setup(per_node=(2, 2), link="8mbit", compute=0.1, model_mb=1.0)


def answer(begin=10.0, end=12.0, steps=10, **more):
    base = {
        "begin": begin,
        "end": end,
        "steps": steps,
        "cpu_use": 0.4,
        "own_cpu_seconds": 0.1,
        "interface": None,
        "waited": {},
        "sent": {},
        "rounds": None,
        "skipped_mixes": None,
    }
    return {**base, **more}


def test_step_time_runs_from_the_last_start_to_the_last_end():
    assert step_seconds([answer(10.0, 12.0), answer(10.5, 12.5)]) == pytest.approx(0.2)


def test_workers_may_take_different_numbers_of_steps():
    runs = [answer(steps=10), answer(steps=30)]
    assert step_seconds(runs) == pytest.approx(0.1)
    assert steps_per_second(runs) == pytest.approx([5.0, 15.0])


def test_step_time_of_asynchronous_workers_is_one_over_their_mean_rate():
    own_pace = [
        *(answer(10.0, 14.0, steps=20) for _ in range(7)),
        answer(10.5, 26.5, steps=20),
    ]  # 0.2 s a step; one 0.8
    assert step_seconds(own_pace) == pytest.approx(0.8)
    assert step_seconds(own_pace, asynchronous=True) == pytest.approx(8 / (7 / 0.2 + 1 / 0.8))


def test_the_limit_of_asynchronous_workers_is_the_harmonic_mean():
    table = Setup(compute=0.2, jitter="slow-worker:4").table(6, 0)
    assert compute_seconds(parse("dadam:aer"), table) == pytest.approx(0.275)
    assert compute_seconds(parse("ad-psgd:ring"), table) == pytest.approx(8 / (7 / 0.2 + 1 / 0.8))
    best = ideal(table)
    assert (best["ddp_ms"], best["mean_compute_ms"]) == pytest.approx((800, 275))
    assert best["asynchronous_ms"] == pytest.approx(220.7, abs=0.1)
    assert best["asynchronous_speedup_vs_ddp"] == pytest.approx(3.625)
    assert ideal(0 * table)["asynchronous_speedup_vs_ddp"] is None


def test_bytes_of_asynchronous_workers_are_those_of_a_mean_step():
    """The node of a slow worker sends as many bytes per second as the others; its steps are longer."""
    fast, slow = answer(0.0, 8.0, steps=40), answer(0.0, 8.0, steps=10, sent={0: 3200.0})
    made = traffic(parse("ad-psgd:ring"), SETUP, [fast, fast, slow, fast])
    assert made.busiest == pytest.approx(3200 / 32.5)  # steps of the mean worker


def test_the_kernel_counts_the_busiest_direction_of_any_node():
    interfaces = [{"sent": 100, "received": 900}, None, {"sent": 400, "received": 300}, None]
    made = traffic(parse("dadam:aer"), SETUP, [answer(interface=i) for i in interfaces])
    assert (made.busiest, made.mean, made.counted) == (90.0, 25.0, "kernel")


def test_the_engine_counts_only_bytes_between_nodes():
    made = traffic(
        parse("dadam:aer"), SETUP, [answer(sent={1: 500.0, 2: 100.0}), answer(sent={3: 200.0}), answer(), answer()]
    )
    assert (made.busiest, made.counted) == (30.0, "engine")
    assert made.pairs == {(0, 1): 30.0}


def test_bytes_of_ddp_by_formula():
    runs = [answer() for _ in range(4)]
    assert traffic(parse("ddp"), SETUP, runs).busiest == 1.5e6
    assert traffic(parse("ddp:bf16"), SETUP, runs).busiest == 0.75e6
    assert traffic(parse("decent-dp:aer"), SETUP, runs) is None
    assert traffic(parse("ddp"), Setup(per_node=(4,)), runs).busiest == 0


def test_the_limit_is_compute_or_the_slowest_link():
    assert limit_seconds(SETUP, 0.1, None) == (0.1, "compute")
    assert limit_seconds(SETUP, 0.1, NodeTraffic(2e5, 1e5, {}, "kernel")) == (pytest.approx(0.2), "link")
    slow = Setup(per_node=(1, 1, 1), link="8mbit", links={(0, 2): "1mbit"}, compute=0.1)
    moved = NodeTraffic(1e5, 1e5, {(2, 0): 5e4, (0, 1): 5e4}, "engine")
    assert limit_seconds(slow, 0.1, moved) == (pytest.approx(0.4), "link 2-0")


def test_waiting_is_a_mean_over_workers_largest_first():
    made = waiting([answer(waited={"node 0": 0.1, "node 0 - node 1": 0.4}), answer(waited={"node 0": 0.1})])
    assert list(made.items()) == [("node 0 - node 1", 20.0), ("node 0", 10.0)]


def results():
    ddp = summarize(parse("ddp"), SETUP, [[answer(end=12.0)] * 4, [answer(end=16.0)] * 4], 0.1, 0.5, 2)
    ours = summarize(
        parse("dadam:aer"), SETUP, [[answer(end=11.0)] * 4, [answer(end=12.0, cpu_use=0.9)] * 4], 0.1, None, 2
    )
    made = [ddp, ours, {"method": "decent-dp:aer", "skipped": "not installed"}]
    add_speedups(made)
    return made


def test_results_carry_samples_speedups_and_validity():
    ddp, ours, skipped = results()
    assert ddp["step_ms"] == pytest.approx(400)
    assert ddp["step_ms_samples"] == pytest.approx([200, 600])
    assert ours["step_ms_spread"] == pytest.approx([100, 200])
    assert ours["speedup_vs_ddp"] == pytest.approx(400 / 150)
    assert ours["speedup_samples"] == pytest.approx([2, 3])
    assert ours["multiple_of_limit"] == pytest.approx(1.5)
    assert (ddp["valid"], ours["valid"], ours["cpu_use"]) == (True, False, 0.9)
    assert ddp["limit_by"] == "link"
    assert "speedup_vs_ddp" not in skipped
    assert (ddp["invalid_because"], ours["invalid_because"]) == (None, "the cores were 90% busy")


def test_dropped_packets_make_all_results_invalid():
    made = results()
    note_drops(made, 0)
    note_drops(made, None)
    assert made[0]["valid"] is True
    note_drops(made, 7)
    assert [r.get("valid") for r in made] == [False, False, None]
    assert made[0]["invalid_because"] == "the lab's queues dropped 7 packets"
    assert made[1]["invalid_because"] == "the cores were 90% busy and the lab's queues dropped 7 packets"


def test_a_record_names_only_results_that_are_known_to_be_invalid():
    made = results()
    assert invalid_note({"results": made}) == "INVALID: the cores were 90% busy (dadam:aer)."
    unknown = summarize(parse("ddp"), SETUP, [[answer(cpu_use=None)] * 4], 0.1, None, 2)
    assert unknown["valid"] is None
    assert invalid_note({"results": [unknown, made[2]]}) == ""


def test_without_ddp_there_is_no_speedup():
    only = [summarize(parse("dadam:aer"), SETUP, [[answer()] * 4], 0.1, None, 2)]
    add_speedups(only)
    assert only[0]["speedup_vs_ddp"] is None


def test_table_and_chart_of_a_benchmark(tmp_path):
    pytest.importorskip("matplotlib")
    bench = {
        "results": results(),
        "cluster": {
            "nodes": 2,
            "per_node": [2, 2],
            "link": "8mbit",
            "links": {},
            "network": "paced",
            **SETUP.describe(),
        },
        "plan": {"repeats": 2, "steps": 10},
        "ideal": {
            "mean_compute_ms": 100.0,
            "ddp_ms": 100.0,
            "speedup_vs_ddp": 1.0,
            "asynchronous_ms": 80.0,
            "asynchronous_speedup_vs_ddp": 1.25,
        },
    }
    text = markdown(bench)
    assert "| dadam:aer | 150.0 | 100.0 to 200.0 | 2.67 | 1.50 | compute |" in text
    assert "90 % INVALID" in text
    assert "2 repeats of 10 steps" in text
    assert "asynchronous" not in text
    assert "2 repeats of 15 s" in markdown({**bench, "plan": {"repeats": 2, "steps": 10, "seconds": 15.0}})
    own_pace = {**results()[0], "method": "ad-psgd:ring"}
    assert "need 80.0 ms, so asynchronous gossip can gain 1.25 times" in markdown({**bench, "results": [own_pace]})
    assert "skipped: not installed" in text
    drawn = draw_bars([bench, bench], tmp_path / "bars.svg").read_text()
    assert drawn.count("2.67×") == 2  # on the bar of each group
    assert draw_loss({"ddp": [(0.0, 2.0), (1.0, 1.0)]}, tmp_path / "loss.svg", target=1.5).stat().st_size > 1000


def test_loss_curves_are_smoothed_and_compared_at_a_target():
    points = curve(
        [{"times": [1.0, 2.0, 3.0], "losses": [4.0, 2.0, 1.0]}, {"times": [1.5, 2.0, 3.5], "losses": [2.0, 2.0, 1.0]}],
        2,
    )
    assert points == [(2.0, 2.5), (3.5, 1.5)]
    assert time_to(points, 2.0) == 3.5
    assert time_to(points, 1.0) is None
