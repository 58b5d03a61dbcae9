"""The verdict of a chaos run: stalls of workers without a fault, rejoins, leaks, growth, and the reasons to fail."""

from __future__ import annotations

import json

import pytest

from gossamer.lab.chaos.job import FaultRecord, JobRecord
from gossamer.lab.chaos.log import LogReader, ProcessLog
from gossamer.lab.chaos.plan import Fault
from gossamer.lab.chaos.verdict import back_at, false_drops, flatness, leaks, loss_bound, problems, rejoins, stalls

BEGIN = 1000.0


def log(rank, times, *, generation=0, members=(), compute=0.1):
    made = ProcessLog(rank, generation)
    made.steps = [(BEGIN + t, k, compute, 1.0) for k, t in enumerate(times)]
    made.members = [(BEGIN + t, epoch, tuple(ranks)) for t, epoch, ranks in members]
    return made


def recorded(logs, *faults, seconds=100.0):
    made = JobRecord(BEGIN, seconds, logs=logs)
    made.faults = [FaultRecord(f, f.at, f.until) for f in faults]
    return made


def places(found):
    return [(s["worker"], round(s["from"], 6), round(s["to"], 6)) for s in found]


def test_a_stall_is_the_gap_beyond_compute():
    found = stalls(recorded([log(0, [0.0, 0.2, 2.0, 2.2])]))
    assert places(found) == [(0, 0.2, 2.0)]
    assert found[0]["seconds"] == pytest.approx(1.7)
    assert len(stalls(recorded([log(0, [0.0, 0.2, 2.0, 2.2])]), 0.0)) == 3


def test_a_slower_step_is_no_stall():
    assert stalls(recorded([log(0, [0.0, 2.0, 4.0], compute=1.9)])) == []


def test_stalls_of_a_victim_are_not_counted():
    fault = Fault(10.0, "stop", (1,), 18.0)
    victim = log(1, [9.9, 18.1, 18.3])
    other = log(0, [9.9, 11.0, 11.2, 18.3])
    found = stalls(recorded([other, victim], fault), 0.5)
    assert sorted(places(found)) == [(0, 9.9, 11.0), (0, 11.2, 18.3)]


def test_stalls_of_a_slow_worker_are_counted():
    fault = Fault(10.0, "slow", (1,), 18.0, how="compute")
    assert [s["worker"] for s in stalls(recorded([log(1, [9.9, 15.0])], fault))] == [1]


def test_stalls_of_a_victim_count_again_after_its_rejoin():
    fault = Fault(10.0, "stop", (1,), 12.0)
    found = stalls(recorded([log(1, [9.9, 12.1, 14.0])], fault))
    assert places(found) == [(1, 12.1, 14.0)]


def test_a_gap_that_ends_after_the_run_is_no_stall():
    assert stalls(recorded([log(0, [0.0, 0.2, 5.0])], seconds=3.0)) == []


def test_a_replacement_is_back_when_the_others_list_it():
    fault = Fault(10.0, "kill", (1,), 13.0)
    other = log(0, [0.0, 10.1, 20.0], members=[(0, 1, [0, 1]), (10.2, 2, [0]), (14.5, 3, [0, 1])])
    logs = [other, log(1, [0.0, 9.9]), log(1, [14.0, 14.2], generation=1)]
    found = rejoins(recorded(logs, fault))
    assert [(r["worker"], r["kind"], r["back"]) for r in found] == [(1, "kill", 14.5)]
    assert found[0]["seconds"] == pytest.approx(1.5)


def test_a_victim_that_is_never_listed_again_did_not_rejoin():
    fault = Fault(10.0, "cut", (1,), 13.0)
    other = log(0, [0.0, 10.1, 30.0], members=[(0, 1, [0, 1]), (10.2, 2, [0])])
    made = recorded([other, log(1, [0.0, 9.9, 14.0])], fault)
    assert back_at(made, made.faults[0], 1) is None


def test_a_victim_that_makes_no_step_did_not_rejoin():
    fault = Fault(10.0, "kill", (1,), 13.0)
    made = recorded([log(0, [0.0, 30.0]), log(1, [0.0, 9.9])], fault)
    assert rejoins(made)[0]["seconds"] is None


def test_a_later_drop_is_not_counted_for_this_fault():
    fault = Fault(10.0, "stop", (1,), 11.0)
    other = log(0, [0.0, 30.0], members=[(0, 1, [0, 1]), (20.0, 2, [0]), (25.0, 3, [0, 1])])
    made = recorded([other, log(1, [0.0, 11.1, 30.0])], fault)
    assert back_at(made, made.faults[0], 1) == pytest.approx(11.1)
    assert [(d["worker"], d["at"], d["epoch"]) for d in false_drops(made)] == [(1, 20.0, 2)]


def test_dropping_a_victim_is_no_false_drop():
    fault = Fault(10.0, "stop", (1,), 18.0)
    other = log(0, [0.0, 30.0], members=[(0, 1, [0, 1]), (15.0, 2, [0]), (18.5, 3, [0, 1])])
    assert false_drops(recorded([other, log(1, [0.0, 18.1])], fault)) == []


def test_leaks_are_summed_without_negative_ones():
    made = recorded([])
    made.orphans = 1
    before = {"threads": 3, "file_descriptors": 10}
    made.values = {
        0: {"before": before, "after": {"threads": 5, "file_descriptors": 10}},
        1: {"before": before, "after": {"threads": 2, "file_descriptors": 11}},
    }
    assert leaks(made) == {"processes": 1, "threads": 2, "file_descriptors": 1}


@pytest.mark.parametrize(
    ("growth", "descriptors", "flat"), [(0.0, 0, True), (3e6, 0, True), (20e6, 0, False), (0.0, 5, False)]
)
def test_memory_that_grows_is_not_flat(growth, descriptors, flat):
    made = log(0, [])
    made.census = [(BEGIN + k, int(100e6 + growth * k / 100), 20 + descriptors * k // 100, 5) for k in range(100)]
    result = flatness(recorded([made]))
    assert result["flat"] is flat
    assert result["workers"][0]["rss_growth_mb"] == pytest.approx(0.74 * growth / 1e6, abs=0.01)


def test_growth_while_warming_up_does_not_count():
    made = log(0, [])
    made.census = [(BEGIN + k, int(100e6 + 50e6 * min(k, 20) / 20), 20, 5) for k in range(100)]
    assert flatness(recorded([made]))["flat"]


def test_too_few_samples_are_not_flat():
    assert flatness(recorded([log(0, [])]))["flat"] is False


def test_the_bound_of_the_loss():
    assert loss_bound([]) is None
    assert loss_bound([1.0]) == pytest.approx(1.1)
    assert loss_bound([1.0, 1.05, 1.02]) == pytest.approx(1.1)


GOOD = {
    "hangs": 0,
    "restarts": 0,
    "not_rejoined": 0,
    "longest_stall_s": 0.6,
    "final_loss": 1.0,
    "calm_final_losses": [1.0],
    "leaks": {"processes": 0, "threads": 0, "file_descriptors": 0, "namespaces": 0},
}


def test_a_good_run_has_no_problems():
    assert problems(GOOD, soft=0.5) == []
    assert problems({**GOOD, "longest_stall_s": 1.9}, soft=None) == []
    assert "stalled for 2.10 s, longer than 2 s" in problems({**GOOD, "longest_stall_s": 2.1}, soft=None)[0]
    assert problems({**GOOD, "longest_stall_s": None, "calm_final_losses": []}, soft=0.5) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hangs": 2}, "2 workers hung"),
        ({"restarts": 1}, "1 workers ended unexpectedly"),
        ({"not_rejoined": 1}, "1 victims did not come back"),
        ({"longest_stall_s": 2.1}, "stalled for 2.10 s, longer than 4 soft deadlines of 0.5 s"),
        ({"final_loss": 1.2}, "the final loss 1.2000 is above 1.1000"),
        ({"final_loss": None}, "no final loss"),
        ({"leaks": {**GOOD["leaks"], "threads": 3}}, "left behind: 3 threads"),
    ],
)
def test_every_problem_is_reported(change, words):
    found = problems({**GOOD, **change}, soft=0.5)
    assert len(found) == 1
    assert words in found[0]


def test_the_reader_follows_a_file_and_waits_for_complete_lines(tmp_path):
    path = tmp_path / "worker-002-001.jsonl"
    lines = [
        {"t": 1.0, "event": "ready", "joined": True, "step": 7},
        {"t": 1.2, "step": 8, "compute": 0.1, "loss": 2.0, "epoch": 3, "members": [0, 2]},
        {"t": 1.3, "rss": 5, "file_descriptors": 6, "threads": 7},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    reader = LogReader(tmp_path)
    path.write_text(text[:-5])
    reader.update()
    made = reader.logs[2, 1]
    assert (made.joined, made.steps, made.census) == (True, [(1.2, 8, 0.1, 2.0)], [])
    path.write_text(text)
    reader.update()
    reader.update()
    assert made.census == [(1.3, 5, 6, 7)]
    assert made.members == [(1.2, 3, (0, 2))]
    assert made.last == 1.2
