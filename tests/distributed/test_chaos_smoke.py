"""A job that loses workers continues: a short chaos run on real processes, and the command."""

import json
from pathlib import Path

import pytest

from gossamer.cli import main
from gossamer.lab import LabCluster, why_unavailable
from gossamer.lab.chaos import ChaosConfig
from gossamer.lab.chaos import job as chaos_job
from gossamer.lab.chaos.job import run_job
from gossamer.lab.chaos.plan import Fault
from gossamer.lab.chaos.verdict import leaks, meetings, rejoins
from gossamer.lab.chaos.worker import final_loss, train

NETWORK = "loopback" if why_unavailable() else "namespaces"

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Makes a run of so many seconds, or a longer one if victims have not come back before its end: a machine may be
    busy. There, a worker that stands still for a while does not hang either."""
    for limit in ("HANG", "LEAVING"):
        monkeypatch.setattr(chaos_job, limit, 300.0)

    def make(plan, seconds, **setup):
        for k in range(4):
            folder = tmp_path / str(k)
            folder.mkdir()
            chaos = ChaosConfig(**setup, link=None, seconds=seconds * 2**k, faults=0, compute=0.1, timeout=300.0)
            with chaos.cluster() as cluster, cluster.directory() as address:
                job = chaos.job(folder, seed=0, seconds=chaos.seconds)
                record = run_job(cluster, job, train, plan, env={"GOSSAMER_DIRECTORY": address})
            assert record.hung == []
            assert [e for e in record.ended if e["at"] < chaos.seconds] == [], "no worker ended unexpectedly"
            back = [r for r in rejoins(record) if r["seconds"] is not None]
            if len(back) == sum(len(fault.victims) for fault in plan) and not record.ended:
                break
        assert record.ended == []
        return record, job

    return make


@pytest.mark.parametrize(("method", "leaves"), [("dadam:aer", "term"), ("a2cid2:ring", "join")])
def test_killed_rank_0_and_a_worker_that_left_are_replaced(run, method, leaves):
    plan = [Fault(2.0, "kill", (0,), 3.5), Fault(7.0, leaves, (3,), 8.5)]
    record, job = run(plan, 14.0, per_node=(2, 2), network=NETWORK, method=method)
    assert record.began
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
def test_nodes_that_cannot_reach_each_other_stay_in_the_job(run):
    record, _ = run([Fault(2.0, "pair", (0, 1), 10.0, 0, "packets lost", 1)], 20.0, per_node=(1, 1, 1))
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
