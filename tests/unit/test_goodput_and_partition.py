"""The tools behind the records of goodput and of a partition: what counts as useful, who is killed, what is resumed."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def tool(name):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made  # dataclasses look their module up
    spec.loader.exec_module(made)
    return made


goodput, partition = tool("goodput"), tool("partition")


def write_log(folder, rank, pid, started, steps):
    lines = [json.dumps({"t": t, "step": step, "lost": lost}) + "\n" for t, step, lost in steps]
    (folder / f"{rank}-{pid}-{started}.jsonl").write_text("".join(lines))


def test_a_repeated_step_counts_once_and_when_it_was_made_first(tmp_path):
    write_log(tmp_path, 0, 71, 1, [(1.0, 1, 0), (2.0, 2, 0)])
    write_log(tmp_path, 0, 70, 5, [(6.0, 2, 0), (7.0, 3, 0)])
    write_log(tmp_path, 1, 72, 1, [(1.5, 1, 0)])
    assert goodput.Steps(tmp_path).useful(0.0, 10.0) == [1.0, 1.5, 2.0, 7.0]
    assert goodput.Steps(tmp_path).useful(1.2, 6.5) == [1.5, 2.0], "a step before the window is not useful in it"


def test_lost_steps_do_not_count_and_neither_does_half_a_line(tmp_path):
    write_log(tmp_path, 0, 70, 1, [(1.0, 1, 0), (2.0, 2, 0), (3.0, 9, 2), (4.0, 10, 0)])
    with (tmp_path / "0-70-1.jsonl").open("a") as file:
        file.write('{"t": 5.0, "step": 11')
    assert goodput.Steps(tmp_path).useful(0.0, 10.0) == [1.0, 4.0]


def test_the_newest_process_of_a_rank_is_killed_before_its_first_step_too(tmp_path):
    write_log(tmp_path, 0, 99, 1, [(1.0, 1, 0)])
    write_log(tmp_path, 0, 12, 2, [])
    steps = goodput.Steps(tmp_path)
    assert steps.processes() == {0: 12}
    assert steps.stepped() == {0}


def test_neither_a_zombie_nor_a_stranger_is_killed():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert goodput.alive(child.pid, os.getpid())
    assert not goodput.alive(child.pid, 1), "the child of another process"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
    assert not goodput.alive(child.pid, os.getpid())
    child.communicate()
    assert not goodput.alive(child.pid, os.getpid())


def a_row(system="gossamer", every=10.0, value=0.96, saturated=False):
    counts = {"kills": 11, "kills_that_met_nobody": 1}
    values = {"goodput": value, "goodput_of_compute": value - 0.01}
    return {"system": system, "failure_every_s": every, "saturated": saturated, **values, **counts}


def test_finished_results_are_kept_and_saturated_ones_are_measured_again(tmp_path):
    rows = goodput.Rows(tmp_path, {"seconds": 9.0})
    rows.add(a_row("torchrun", None))
    rows.add(a_row(saturated=True))
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"system": "torchft"')  # the program was killed here
    again = goodput.Rows(tmp_path, {"seconds": 9.0})
    assert again.finished("torchrun", None)
    assert not again.finished("gossamer", 10.0)
    assert not again.finished("torchft", 10.0)
    again.add(a_row(value=0.97))
    assert goodput.Rows(tmp_path, {"seconds": 9.0}).finished("gossamer", 10.0)
    assert [(r["system"], r["goodput"]) for r in again.ordered()] == [("torchrun", 0.96), ("gossamer", 0.97)]
    with pytest.raises(SystemExit, match="results of other settings"):
        goodput.Rows(tmp_path, {"seconds": 10.0})


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "It was not measured."),
        ([a_row(value=0.951)], "It was reached: 95.1%, and 94.1% if only the compute time of a step counts."),
        ([a_row(value=0.949)], "It was NOT reached: 94.9%, and 93.9% if"),
        ([a_row(saturated=True)], "not valid, because the cores were saturated"),
    ],
)
def test_the_target_is_stated(rows, words):
    assert words in goodput.target_sentence(rows)
    assert "at least 95% at one failure every 10 s" in goodput.target_sentence(rows)


def test_the_record_shows_kills_misses_and_invalid_results(tmp_path):
    rows = [a_row("gossamer", None), a_row(), a_row("torchrun", 10.0, 0.3, saturated=True)]
    machine = {"cpu": "a core", "cores": 2, "versions": {"torch": "2"}}
    goodput.write(tmp_path, {"step_alone_s": 0.405}, rows, machine)
    text = (tmp_path / "README.md").read_text()
    assert "| gossamer | 96.0% (95.0%) | 96.0% (95.0%), 11 kills, 1 misses |" in text
    assert "| torchrun | - | INVALID 30.0% (29.0%), 11 kills, 1 misses |" in text
    assert "INVALID where the cores were saturated: torchrun every 10 s." in text


def test_a_useful_step_counts_as_long_as_one_worker_alone_takes_for_it():
    args = argparse.Namespace(seconds=100.0, compute=0.4)
    found = goodput.goodputs({"useful_steps": 1600}, 0.41, args)
    assert found == {"goodput": pytest.approx(0.82), "goodput_of_compute": pytest.approx(0.8)}


def test_one_step_per_kill_of_an_elastic_job_is_subtracted():
    assert goodput.lost_by_kills("gossamer", 12, 2000) == 12
    assert goodput.lost_by_kills("gossamer", 12, 3) == 3
    assert goodput.lost_by_kills("torchrun", 12, 2000) == goodput.lost_by_kills("torchft", 12, 2000) == 0


@pytest.mark.parametrize(
    ("calm", "cut", "words"),
    [
        ([1.0, 1.1], [1.05, 1.2], "difference of +0.0750 is within the noise"),
        ([1.0, 1.1], [1.2, 1.3], "difference of +0.2000 is ABOVE the noise"),
        ([1.0, 1.1], [0.5, 0.5], "within the noise"),
        ([1.0], [1.0], "one seed shows no noise"),
        ([1.0, None], [1.0, 1.0], "no verdict"),
    ],
)
def test_the_loss_of_a_partition_is_compared_with_the_noise(calm, cut, words):
    assert words in partition.noise_sentence(calm, cut)


def test_a_partition_without_survivors_is_summarized(tmp_path):
    run = {"seed": 1, "loss": None, "workers_at_the_end": 0, "longest_stall_s": None, "whole_again_after_s": None}
    run |= {"steps_in_the_partition": [0] * 8, "cpu_use": 0.99, "saturated": True}
    times = partition.Times(120.0, 40.0, 70.0)
    text = "\n".join(partition.summary([run, run], {"no partition": [1.0]}, times, 10))
    assert "| 1 | - | - | 0 of 8 | - | never | 0, 0 | 99% (INVALID), 99% (INVALID) |" in text
    assert partition.spread([]) is None


def test_runs_of_a_partition_are_kept_and_saturated_ones_are_made_again(tmp_path):
    made = []

    def run(name, **result):
        made.append(name)
        return {"loss": 1.0, **result}

    def rows():
        return partition.Rows(tmp_path, {"seconds": 9.0})

    first = rows()
    assert first.measured("a", lambda: run("a", steps={0: 5})) == {"loss": 1.0, "steps": {"0": 5}}
    first.measured("b", lambda: run("b", saturated=True))
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"run": "c", "loss"')  # the program was killed here
    for _ in range(2):
        again = rows()
        assert again.measured("a", lambda: run("a again")) == {"loss": 1.0, "steps": {"0": 5}}
        again.measured("b", lambda: run("b again", saturated=False))
        again.measured("c", lambda: run("c"))
    assert made == ["a", "b", "b again", "c"]
    with pytest.raises(SystemExit, match="results of other settings"):
        partition.Rows(tmp_path, {"seconds": 10.0})
