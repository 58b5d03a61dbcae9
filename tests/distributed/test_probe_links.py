"""`gossamer probe` on real workers: every link of an unequal layout is measured, once."""

import json

import pytest

from gossamer.cli import main
from gossamer.predict.advise import advise
from gossamer.predict.cluster import load
from gossamer.predict.methods import WIRES


@pytest.mark.timeout(180)
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
    assert out.read_text().startswith("# compute is a guess")
    assert advise(cluster, steps=20).notes
