"""`gossamer probe` on real workers: every link of an unequal layout is measured, once."""

import json

import pytest
import torch

import gossamer
from gossamer.cli import main
from gossamer.comm import process_groups
from gossamer.lab.workers import run_workers
from gossamer.predict.advise import advise
from gossamer.predict.cluster import load
from gossamer.predict.methods import WIRES


@pytest.mark.timeout(900)
def test_probe_measures_every_link(tmp_path, capsys):
    out = tmp_path / "cluster.toml"
    command = ["probe", "--per-node", "2,2,1", "-o", str(out), "--seconds", "0.02", "--model-mb", "8", "--json"]
    assert main(command) == 0
    said = json.loads(capsys.readouterr().out)
    assert [tuple(s["nodes"]) for s in said["measured"]["inter"]] == [(0, 1), (0, 2), (1, 2)]
    assert [tuple(s["nodes"]) for s in said["measured"]["intra"]] == [(0, 0), (1, 1)]
    assert all(s["flow_bytes_per_s"] > 0 and s["latency_s"] > 0 for s in said["measured"]["inter"])
    assert len(said["measured"]["allreduce"]["seconds"]) >= 1
    cluster = load(out)
    assert cluster.layout.per_node == (2, 2, 1)
    assert (cluster.model.mb, cluster.compute.source) == (8, "guess")
    costs = cluster.costs
    assert set(costs.merge_gb_per_s) == set(WIRES)
    assert set(costs.encode_gb_per_s) == set(WIRES) - {"fp32"}
    assert costs.allreduce.per_node == (2, 2, 1)
    assert {"adam", "gossipadam"} <= set(costs.update_gb_per_s)
    assert costs.step_us > 0
    assert cluster.links.inter.by_size
    assert 0 < cluster.links.inter.shared <= 1
    assert out.read_text().startswith("# compute is a guess")
    assert advise(cluster, steps=20).notes


def probed(rank, out):
    process_groups.join_world()
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step():
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    path = gossamer.probe(model, optimizer, step, out, steps=3, seconds=0.02)
    process_groups.leave_world()
    return path is not None


@pytest.mark.timeout(900)
def test_a_script_probes_its_own_step(tmp_path):
    out = tmp_path / "cluster.toml"
    assert run_workers(2, probed, str(out), timeout=300) == [True, False]  # worker 0 writes
    cluster = load(out)
    assert (cluster.compute.source, len(cluster.compute.samples)) == ("measured", 3)
    assert cluster.model.mb == pytest.approx(4 * (64 * 64 + 64) / 1e6)
    assert 0 < cluster.compute.update_seconds < 300
    assert not any("compute is a guess" in note for note in advise(cluster, steps=20).notes)
