"""The verdict of a chaos run: stalls of workers without a fault, rejoins, leaks, growth, and the reasons to fail."""

from __future__ import annotations

import json

import pytest

from gossamer.lab.chaos.job import FaultRecord, JobRecord
from gossamer.lab.chaos.log import LogReader, Met, ProcessLog
from gossamer.lab.chaos.plan import Fault
from gossamer.lab.chaos.verdict import (
    back_at,
    false_drops,
    flatness,
    growth_problem,
    leaks,
    loss_bound,
    lost_shares,
    meetings,
    problems,
    rejoins,
    stalls,
)

BEGIN = 1000.0


def log(rank, times, *, generation=0, members=(), compute=0.1, met=()):
    made = ProcessLog(rank, generation)
    made.meetings = [Met(BEGIN + end, seconds, number, (0, 1), False, 1.0) for end, seconds, number in met]
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


def test_the_time_in_a_meeting_is_no_stall_of_a_step():
    found = stalls(recorded([log(0, [0.0, 0.2, 4.0, 6.0], met=[(0.1, 0.05, 0), (3.0, 2.5, 1), (3.8, 0.5, 2)])]))
    assert places(found) == [(0, 0.2, 4.0), (0, 4.0, 6.0)][::-1]
    assert [s["seconds"] for s in found] == pytest.approx([1.9, 0.7])


def test_meetings_are_counted_once_and_those_of_victims_are_not_judged():
    fault = Fault(10.0, "cut", (1,), 18.0)
    logs = [log(0, [9.0, 30.0], met=[(5.0, 0.5, 0), (12.0, 0.7, 1)])]
    logs.append(log(1, [9.0, 19.0], met=[(5.0, 0.3, 0), (16.0, 6.0, 1)]))
    logs[1].meetings.append(Met(BEGIN + 24.0, 0.1, 2, (1,), False, 1.0))
    logs[1].meetings.append(Met(BEGIN + 25.0, 0.1, 3, (0, 1), True, 1.0))
    expected = {"meetings": 2, "longest_meeting_s": pytest.approx(0.7), "meetings_that_differ": 0}
    expected["longest_meeting_of_a_victim_s"] = 6.0
    assert meetings(recorded(logs, fault)) == expected
    assert meetings(recorded([log(0, [1.0])]))["longest_meeting_s"] is None


def test_participants_with_different_means_are_found():
    logs = [log(0, [], met=[(5.0, 0.5, 0), (9.0, 0.5, 1)]), log(1, [], met=[(5.0, 0.5, 0)])]
    logs[1].meetings.append(Met(BEGIN + 9.0, 0.5, 1, (0, 1), False, 1.01))
    assert meetings(recorded(logs))["meetings_that_differ"] == 1


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


def test_a_victim_that_waits_in_a_meeting_is_back_when_the_others_list_it():
    fault = Fault(10.0, "cut", (1,), 13.0)
    other = log(0, [0.0, 10.1, 20.0, 40.0], members=[(0, 1, [0, 1]), (10.2, 2, [0]), (14.5, 3, [0, 1])])
    victim = log(1, [9.8, 9.9, 30.0, 30.2], met=[(29.0, 17.0, 1)])
    made = recorded([other, victim], fault)
    assert back_at(made, made.faults[0], 1) == pytest.approx(14.5)
    assert [s for s in stalls(made, 1.0) if s["worker"] == 1] == []
    assert meetings(made)["longest_meeting_of_a_victim_s"] == 17.0
    victim.meetings = []
    assert back_at(made, made.faults[0], 1) == pytest.approx(30.0)


def test_a_victim_that_joined_again_before_its_fault_ended_is_back_at_once():
    fault = Fault(10.0, "pair", (1, 2), 20.0)
    members = [(0, 1, [0, 1, 2]), (14.0, 2, [0, 2]), (15.0, 3, [0, 1, 2]), (40.0, 4, [0, 1])]
    other = log(0, [0.0, 10.1, 20.1, 45.0], members=members)
    made = recorded([other, log(1, [9.9, 20.3, 45.0]), log(2, [9.9, 20.2, 40.0])], fault)
    assert [back_at(made, made.faults[0], rank) for rank in (1, 2)] == pytest.approx([20.3, 20.2])


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


def counted(rank=0, *, rss=0.0, descriptors=0.0, threads=0.0, begin=0, end=100, members=()):
    """A worker whose memory (bytes), descriptors and threads grow evenly by so much within 100 s."""
    made = log(rank, [], members=members)
    for k in range(begin, end):
        grown = int(100e6 + rss * k / 100), int(20 + descriptors * k / 100), int(5 + threads * k / 100)
        made.census.append((BEGIN + k, *grown))
    return made


@pytest.mark.parametrize(
    ("growth", "flat"),
    [
        ({}, True),
        ({"rss": 3e6}, True),
        ({"rss": 20e6}, False),
        ({"descriptors": 5}, False),
        ({"threads": 5}, False),
        ({"rss": -20e6, "descriptors": -5, "threads": -4}, True),
    ],
)
def test_what_grows_is_not_flat(growth, flat):
    result = flatness(recorded([counted(**growth)]))
    assert result["flat"] is flat
    assert (growth_problem(result, 0, 100.0) == []) is flat
    found = result["workers"][0]
    assert found["rss_growth_mb"] == pytest.approx(0.5 * growth.get("rss", 0.0) / 1e6, rel=0.02)


def test_growth_while_warming_up_does_not_count():
    made = log(0, [])
    made.census = [(BEGIN + k, int(100e6 + 50e6 * min(k, 20) / 20), 20 + min(k, 20), 5) for k in range(100)]
    assert flatness(recorded([made]))["flat"]


def test_too_few_samples_are_not_judged_and_a_soak_needs_a_judgement():
    result = flatness(recorded([log(0, [])]))
    assert result["flat"] is None
    assert "no worker lived long enough" in growth_problem(result, 0, 900.0)[0]
    assert growth_problem(result, 3, 900.0) == []


def test_growth_under_faults_is_judged_in_long_runs():
    fault = Fault(10.0, "kill", (1,), 12.0)
    grows = flatness(recorded([counted(descriptors=10), counted(1, begin=14)], fault))
    assert [w["flat"] for w in grows["workers"]] == [False, True]
    assert growth_problem(grows, 1, 60.0) == [], "a short run has not warmed up"
    assert "threads of 1 of 2 workers grew" in growth_problem(grows, 1, 900.0)[0]
    for growth in ({"descriptors": 6}, {"threads": 6}, {"rss": 20e6}):
        assert flatness(recorded([counted(**growth)], fault))["flat"], "faults let a healthy process grow a little"
        assert flatness(recorded([counted(**growth)]))["flat"] is False
    assert flatness(recorded([counted(rss=30e6)], fault))["flat"] is False


def test_processes_that_lived_for_less_than_half_of_the_run_are_not_judged():
    fault = Fault(60.0, "kill", (1,), 62.0)
    logs = [counted(0), counted(1, end=60), counted(2, begin=62, rss=90e6)]
    assert [w["worker"] for w in flatness(recorded(logs, fault))["workers"]] == [0, 1]


def test_samples_while_a_member_is_away_are_left_out():
    fault = Fault(20.0, "kill", (1,), 60.0)
    views = [(0, 1, [0, 1]), (20, 2, [0]), (45, 3, [0, 1])]
    made = counted(members=views)
    made.census = [(t, rss, files - 9 * (20 <= t - BEGIN < 45), threads) for t, rss, files, threads in made.census]
    found = flatness(recorded([made], fault))["workers"][0]
    assert (found["descriptors_growth"], found["flat"]) == (0, True)


def test_the_bound_of_the_loss():
    assert loss_bound([]) is None
    assert loss_bound([1.0]) == pytest.approx(1.1)
    assert loss_bound([1.0, 1.05, 1.02]) == pytest.approx(1.1)


GOOD = {
    "hangs": 0,
    "restarts": 0,
    "not_rejoined": 0,
    "longest_stall_s": 0.6,
    "saturated": False,
    "lost_shares": {0: 0.1},
    "final_loss": 1.0,
    "calm_final_losses": [1.0],
    "leaks": {"processes": 0, "threads": 0, "file_descriptors": 0, "namespaces": 0},
}


def test_a_good_run_has_no_problems():
    assert problems(GOOD, soft=0.5) == []
    assert problems({**GOOD, "longest_stall_s": 0.9}, soft=None) == []
    assert "stalled for 1.10 s, longer than 1 s" in problems({**GOOD, "longest_stall_s": 1.1}, soft=None)[0]
    assert problems({**GOOD, "longest_stall_s": None, "calm_final_losses": []}, soft=0.5) == []


def test_stalls_on_saturated_cores_are_not_judged():
    assert problems({**GOOD, "longest_stall_s": 9.0, "saturated": True}, soft=None) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hangs": 2}, "2 workers hung"),
        ({"restarts": 1}, "1 workers ended unexpectedly"),
        ({"not_rejoined": 1}, "1 victims did not come back"),
        ({"longest_stall_s": 2.1}, "stalled for 2.10 s, longer than 4 soft deadlines of 0.5 s"),
        ({"meetings_that_differ": 2}, "the participants of 2 meetings held different means"),
        ({"lost_shares": {0: 0.1, 3: 0.9}}, "workers [3] lost more than 50% of their exchanges"),
        ({"final_loss": 1.2}, "the final loss 1.2000 is above 1.1000"),
        ({"final_loss": None}, "no final loss"),
        ({"leaks": {**GOOD["leaks"], "threads": 3}}, "left behind: 3 threads"),
    ],
)
def test_every_problem_is_reported(change, words):
    found = problems({**GOOD, **change}, soft=0.5)
    assert len(found) == 1
    assert words in found[0]


def test_the_part_of_the_exchanges_that_a_worker_lost():
    events = {"unit_seconds_by_lane": {0: 0.8}, "buckets": 4}
    stats = {
        0: {**events, "rounds": 90, "lost_exchanges": 10},
        1: {**events, "rounds": 0, "lost_exchanges": 60},
        2: {"buckets": 4, "rounds": 100, "lost_exchanges": 20},
        3: {**events, "rounds": 5, "lost_exchanges": 20},  # too few
        4: None,  # killed
        5: {"buckets": 4, "rounds": 100},  # torch's DDP
    }
    assert lost_shares(stats) == {0: 0.1, 1: 1.0, 2: 0.05}


def test_the_reader_follows_a_file_and_waits_for_complete_lines(tmp_path):
    path = tmp_path / "worker-002-001.jsonl"
    lines = [
        {"t": 1.0, "event": "ready", "joined": True, "step": 7},
        {"t": 1.2, "step": 8, "compute": 0.1, "loss": 2.0, "epoch": 3, "members": [0, 2]},
        {"t": 1.25, "meeting": 4, "seconds": 0.01, "ranks": [0, 2], "alone": False, "size": 3.5},
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
    assert made.meetings == [Met(1.25, 0.01, 4, (0, 2), False, 3.5)]
    assert made.last == 1.25
