"""A job that loses workers continues: a short chaos run on real processes, and the command."""

import json
from pathlib import Path

import pytest

from gossamer.cli import main
from gossamer.lab import LabCluster, why_unavailable
from gossamer.lab.chaos import ChaosConfig
from gossamer.lab.chaos.job import run_job
from gossamer.lab.chaos.plan import Fault
from gossamer.lab.chaos.verdict import leaks, meetings, rejoins
from gossamer.lab.chaos.worker import final_loss, train

NETWORK = "loopback" if why_unavailable() else "namespaces"


@pytest.mark.parametrize(("method", "leaves"), [("dadam:aer", "term"), ("a2cid2:ring", "join")])
def test_killed_rank_0_and_a_worker_that_left_are_replaced(tmp_path, method, leaves):
    plan = [Fault(2.0, "kill", (0,), 3.5), Fault(7.0, leaves, (3,), 8.5)]
    setup = {"per_node": (2, 2), "network": NETWORK, "link": None, "method": method}
    chaos = ChaosConfig(**setup, seconds=14.0, faults=0, compute=0.1, timeout=50.0)
    with chaos.cluster() as cluster, cluster.directory() as address:
        job = chaos.job(tmp_path, seed=0, seconds=chaos.seconds)
        record = run_job(cluster, job, train, plan, env={"GOSSAMER_DIRECTORY": address})
    assert record.began
    assert record.hung == []
    assert record.ended == [], "no worker ended unexpectedly"
    assert [(r["worker"], r["seconds"] is not None) for r in rejoins(record)] == [(0, True), (3, True)]
    logs = {(log.rank, log.generation): log for log in record.logs}
    assert set(logs) == {(0, 0), (0, 1), (1, 0), (2, 0), (3, 0), (3, 1)}
    assert logs[0, 1].joined
    assert logs[0, 1].steps[0][1] > logs[0, 0].steps[-1][1], "a replacement continues at the step of the others"
    assert sorted(record.values) == [0, 1, 2, 3]
    assert logs[3, 0].events["left"] > 0, "it left in good order"
    held = meetings(record)
    assert held["meetings"] > 0
    assert held["meetings_that_differ"] == 0
    assert leaks(record) == {"processes": 0, "threads": 0, "file_descriptors": 0}
    losses = [step[3] for step in logs[1, 0].steps]
    assert final_loss([v["parameters"] for v in record.values.values()], job.width) < losses[0]


@pytest.mark.requires_root
@pytest.mark.skipif(NETWORK == "loopback", reason=str(why_unavailable()))
def test_nodes_that_cannot_reach_each_other_stay_in_the_job(tmp_path):
    chaos = ChaosConfig(per_node=(1, 1, 1), link=None, seconds=20.0, faults=0, compute=0.1, timeout=50.0)
    plan = [Fault(2.0, "pair", (0, 1), 10.0, 0, "packets lost", 1)]
    with chaos.cluster() as cluster, cluster.directory() as address:
        job = chaos.job(tmp_path, seed=0, seconds=chaos.seconds)
        record = run_job(cluster, job, train, plan, env={"GOSSAMER_DIRECTORY": address})
    assert (record.hung, record.ended) == ([], [])
    assert [(r["worker"], r["seconds"] is not None) for r in rejoins(record)] == [(0, True), (1, True)]
    assert sorted(record.values) == [0, 1, 2]
    held = meetings(record)
    assert held["meetings"] > 0
    assert held["meetings_that_differ"] == 0


@pytest.mark.slow
def test_a_short_soak_is_flat(tmp_path, capsys):
    assert main(["chaos", "--nodes", "1", "--per-node", "4", "--faults", "0", "--seconds", "120", "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["passed"]
    assert verdict["memory"]["flat"]
    assert len(verdict["memory"]["workers"]) == 4


@pytest.mark.slow
def test_the_command_prints_and_records_a_verdict(tmp_path, capsys):
    folder = tmp_path / "record"
    words = "chaos --nodes 2 --per-node 2 --seconds 40 --faults 3 --seed 2 --ddp --json --out"
    assert main([*words.split(), str(folder)]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["hangs"], verdict["restarts"], verdict["not_rejoined"]) == (0, 0, 0)
    assert verdict["leaks"] == {"processes": 0, "threads": 0, "file_descriptors": 0, "namespaces": 0}
    assert len(verdict["faults"]) == 3
    assert verdict["ddp"]["failed"] == 4
    assert {p.name for p in Path(folder).iterdir()} == {"record.json", "README.md", "timeline.svg", "soak.svg"}


def test_a_cluster_must_be_entered():
    with pytest.raises(Exception, match="not running"):
        LabCluster(2, 1, network="loopback").pool()
