"""A job that loses workers goes on: a short chaos run on real processes, and the command around it."""

import json
from pathlib import Path

import pytest

from gossamer.cli import main
from gossamer.lab import LabCluster, why_unavailable
from gossamer.lab.chaos import ChaosConfig
from gossamer.lab.chaos.job import run_job
from gossamer.lab.chaos.plan import Fault
from gossamer.lab.chaos.verdict import leaks, rejoins
from gossamer.lab.chaos.worker import final_loss, train

NETWORK = "loopback" if why_unavailable() else "namespaces"


def test_rank_0_is_killed_and_another_leaves_and_both_places_are_filled(tmp_path):
    plan = [Fault(2.0, "kill", (0,), 3.5), Fault(7.0, "join", (3,), 8.5)]
    chaos = ChaosConfig(per_node=(2, 2), seconds=14.0, faults=0, compute=0.1, network=NETWORK, link=None, timeout=50.0)
    with chaos.cluster() as cluster, cluster.directory() as address:
        job = chaos.job(tmp_path, seed=0, seconds=chaos.seconds)
        ran = run_job(cluster, job, train, plan, env={"GOSSAMER_DIRECTORY": address})
    assert ran.began
    assert ran.hung == []
    assert ran.ended == [], "nobody ended who was not told to"
    assert [(r["worker"], r["seconds"] is not None) for r in rejoins(ran)] == [(0, True), (3, True)]
    lives = {(life.rank, life.generation): life for life in ran.lives}
    assert set(lives) == {(0, 0), (0, 1), (1, 0), (2, 0), (3, 0), (3, 1)}
    assert lives[0, 1].joined
    assert lives[0, 1].steps[0][1] > lives[0, 0].steps[-1][1], "a replacement goes on from the others' step"
    assert sorted(ran.values) == [0, 1, 2, 3]
    assert leaks(ran) == {"processes": 0, "threads": 0, "file_descriptors": 0}
    losses = [step[3] for step in lives[1, 0].steps]
    assert final_loss([v["parameters"] for v in ran.values.values()], job.width) < losses[0]


@pytest.mark.slow
def test_a_short_soak_is_flat(tmp_path, capsys):
    assert main(["chaos", "--nodes", "1", "--per-node", "4", "--faults", "0", "--seconds", "120", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["passed"]
    assert told["memory"]["flat"]
    assert len(told["memory"]["workers"]) == 4


@pytest.mark.slow
def test_the_command_tells_and_records_a_verdict(tmp_path, capsys):
    record = tmp_path / "record"
    words = "chaos --nodes 2 --per-node 2 --seconds 40 --faults 3 --seed 2 --ddp --json --out"
    assert main([*words.split(), str(record)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["hangs"], told["restarts"], told["not_rejoined"]) == (0, 0, 0)
    assert told["leaks"] == {"processes": 0, "threads": 0, "file_descriptors": 0, "namespaces": 0}
    assert len(told["faults"]) == 3
    assert told["ddp"]["failed"] == 4
    assert {p.name for p in Path(record).iterdir()} == {"record.json", "README.md", "timeline.svg"}


def test_a_cluster_must_be_up():
    with pytest.raises(Exception, match="not up"):
        LabCluster(2, 1, network="loopback").pool()
