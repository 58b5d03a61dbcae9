"""`gossamer probe` on real workers: every link of an unequal layout is measured, once."""

import json

import pytest

from gossamer.cli import main
from gossamer.predict.cluster import load


@pytest.mark.timeout(180)
def test_probe_measures_every_link(tmp_path, capsys):
    out = tmp_path / "cluster.toml"
    command = ["probe", "--per-node", "2,2,1", "-o", str(out), "--seconds", "0.02", "--model-mb", "8", "--json"]
    assert main(command) == 0
    said = json.loads(capsys.readouterr().out)
    assert [tuple(s["nodes"]) for s in said["measured"]["inter"]] == [(0, 1), (0, 2), (1, 2)]
    assert [tuple(s["nodes"]) for s in said["measured"]["intra"]] == [(0, 0), (1, 1)]
    assert all(s["flow_bytes_per_s"] > 0 and s["latency_s"] > 0 for s in said["measured"]["inter"])
    assert len(said["measured"]["allreduce_s"]) >= 1
    cluster = load(out)
    assert cluster.layout.per_node == (2, 2, 1)
    assert cluster.model.mb == 8
