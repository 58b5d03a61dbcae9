"""From measurements to a cluster file: order of the probes, links that differ, compute times from three sources."""

import json
import os
from itertools import combinations

import pytest
import torch

import gossamer
from gossamer.cli import main
from gossamer.comm import cost_probe, node_name
from gossamer.comm.cost_probe import CpuMeter
from gossamer.comm.link_probe import tournament
from gossamer.errors import InputError
from gossamer.jobs import probe
from gossamer.predict.cluster import from_dict, to_toml
from gossamer.predict.probed import cluster_from_probe, read_compute, unknown
from gossamer.topology import Layout
from gossamer.trace import TraceWriter


@pytest.mark.parametrize("nodes", range(2, 12))
def test_every_pair_of_nodes_is_probed_once(nodes):
    rounds = tournament(nodes)
    assert sorted(p for r in rounds for p in r) == sorted(combinations(range(nodes), 2))
    for pairs in rounds:
        busy = [node for p in pairs for node in p]
        assert len(set(busy)) == len(busy)


def link(a, b, rate, flow=None, latency=1e-4):
    flow = rate if flow is None else flow
    return {"nodes": (a, b), "latency_s": latency, "flow_bytes_per_s": flow, "link_bytes_per_s": rate, "flows": 2}


def test_pairs_that_differ_get_their_own_entry():
    inter = [link(0, 1, 6.25e6), link(0, 2, 6.25e6), link(1, 2, 1.25e6)]
    links = {"per_node": (2, 2, 2), "inter": inter, "intra": [link(0, 0, 1e9)]}
    cluster = cluster_from_probe(links, {"seconds": 0.4}, 4.0)
    assert cluster.links.inter.bandwidth_gbps == pytest.approx(0.05)
    assert [(p.nodes, p.bandwidth_gbps) for p in cluster.links.pairs] == [((1, 2), pytest.approx(0.01))]
    assert cluster.links.intra.bandwidth_gbps == pytest.approx(8.0)
    import tomllib

    assert from_dict(tomllib.loads(to_toml(cluster))) == cluster


def test_bandwidth_of_one_connection_is_recorded_if_less():
    links = {"per_node": (2, 1), "inter": [link(0, 1, 1e8, flow=5e7)], "intra": []}
    found = cluster_from_probe(links, {"seconds": 0.4}, 4.0)
    assert found.per_node == (2, 1)
    assert found.links.inter.flow_gbps == pytest.approx(0.4)


def test_what_the_probe_did_not_see_is_said():
    found = cluster_from_probe({"per_node": (2,), "inter": [], "intra": [link(0, 0, 1e9)]}, read_compute(None), None)
    assert (found.compute.source, found.model.source, found.links.inter) == ("guess", "guess", None)
    said = " ".join(unknown(found))
    for word in ("compute is a guess", "size is a guess", "one node was measured", "no [costs]"):
        assert word in said
    with pytest.raises(InputError, match="--link 25gbit"):
        found.resized(Layout.of([2, 2]))


def trained(model, optimizer):
    loss = model(torch.ones(2, 100)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_the_probe_measures_a_step_and_restores_everything(tmp_path):
    model = torch.nn.Linear(100, 10, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    before, random = model.weight.detach().clone(), torch.get_rng_state()
    path = gossamer.probe(model, optimizer, lambda: trained(model, optimizer), tmp_path / "compute.json", steps=4)
    assert torch.equal(model.weight, before)
    assert torch.equal(torch.get_rng_state(), random)
    assert not optimizer.state
    said = read_compute(str(path))
    assert len(said["samples"]) == 4
    assert said["model_mb"] == pytest.approx(4e-3)
    assert said["source"] == "measured"
    assert 0 < said["update_seconds"] < 300
    assert 0 < said["backward_share"] <= 1
    gossamer.probe(model, optimizer, lambda: trained(model, optimizer), path, steps=2)
    assert len(read_compute(str(tmp_path / "compute.1.json"))["samples"]) == 4  # the earlier file is kept
    assert len(read_compute(str(path))["samples"]) == 2


def test_mistakes_with_the_probe(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="did not call backward"):
        gossamer.probe(model, optimizer, lambda: None, tmp_path / "x.json")
    with pytest.raises(InputError, match="a single worker; start the script by torchrun"):
        gossamer.probe(model, optimizer, lambda: None, tmp_path / "x.toml")
    with pytest.raises(InputError, match=r"\.toml file"):
        gossamer.probe(model, optimizer, lambda: None, tmp_path / "x")
    with pytest.raises(InputError, match="step must be a function"):
        gossamer.probe(model, optimizer, model.weight, tmp_path / "x.json")


def test_probe_as_one_process_is_one_sentence(capsys):
    assert main(["probe"]) == 2
    assert "this is one process; start it under a launcher, for example torchrun" in capsys.readouterr().err
    assert main(["probe", "--n", "1"]) == 2
    assert "one worker has none" in capsys.readouterr().err


def test_compute_from_a_trace_and_from_a_number(tmp_path):
    with TraceWriter(tmp_path, 0, [0]) as writer:
        for step in range(4):
            writer.record("forward", step, step + 0.1, step=step)
            writer.record("backward", step + 0.1, step + 0.3, step=step)
            writer.record("wait", step + 0.3, step + 0.8, step=step)
            writer.record("step", step + 0.8, step + 0.9, step=step)
    assert read_compute(str(tmp_path))["seconds"] == pytest.approx(0.3)
    assert len(read_compute(str(tmp_path))["samples"]) == 3
    assert read_compute(str(tmp_path))["update_seconds"] == pytest.approx(0.1)
    assert read_compute("0.25") == {"seconds": 0.25}


@pytest.mark.parametrize("content", ["", "{}", '{"samples": "many"}', '{"samples": []}', "[1, 2]"])
def test_files_without_compute_times(tmp_path, content):
    path = tmp_path / "compute.json"
    path.write_text(content)
    with pytest.raises(InputError, match="compute times"):
        read_compute(str(path))
    with pytest.raises(InputError, match="cannot read"):
        read_compute(str(tmp_path / "missing.json"))


def test_samples_are_subsampled_evenly(tmp_path):
    path = tmp_path / "compute.json"
    path.write_text(json.dumps({"samples": [1.0] * 5000 + [3.0] * 5000}))
    said = read_compute(str(path))
    assert said["seconds"] == pytest.approx(2.0)
    assert len(said["samples"]) <= 512
    assert sum(said["samples"]) / len(said["samples"]) == pytest.approx(2.0, rel=0.02)


def test_the_kernels_work_for_the_network_is_shared_by_the_workers_of_a_machine(monkeypatch, tmp_path):
    ticks = os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"
    stat.write_text("cpu  10 0 5 100 0 3 7 0 0 0\ncpu0 10 0 5 100 0 3 7 0 0 0\n")
    monkeypatch.setattr(cost_probe, "STAT", stat)
    monkeypatch.setattr(cost_probe.time, "process_time", lambda: 2.0)
    meter = CpuMeter(active=4)
    stat.write_text(f"cpu  90 0 5 100 0 {3 + ticks} {7 + 2 * ticks} 0 0 0\n")
    assert meter.seconds() == pytest.approx(3 / 4)  # three seconds of interrupts, four workers; no time of its own
    stat.unlink()  # not Linux
    meter.start()
    assert meter.seconds() == 0.0


def test_workers_of_one_kernel_know_it(monkeypatch, tmp_path):
    boot = tmp_path / "boot_id"
    boot.write_text("one\n")
    monkeypatch.setattr(cost_probe, "BOOT", boot)
    assert cost_probe.machine() == "one"
    boot.unlink()
    assert cost_probe.machine() == node_name()


def test_the_probe_measures_beyond_the_caches_and_with_an_anchor(monkeypatch):
    """int8 and int4 read the anchor too, so it must be a part of what is measured."""
    seen = []
    real = cost_probe.exchange

    def watched(program, x, out, wire, scratch, **given):
        seen.append((wire.name, x.numel() * 4, given["anchor"]))
        return real(program, x, out, wire, scratch, **given)

    monkeypatch.setattr(cost_probe, "exchange", watched)
    made = cost_probe.probe_processing(lambda name: None)
    assert set(made.merge) == set(made.encode) | {"fp32"}
    assert {nbytes for _, nbytes, _ in seen} == {2**26}
    assert all(anchor.id == 0 and anchor.value.numel() * 4 == 2**26 for _, _, anchor in seen)


def test_the_update_of_gossipadam_is_the_one_of_static_jobs(monkeypatch):
    optimizers = []
    step = gossamer.GossipAdam.step
    monkeypatch.setattr(gossamer.GossipAdam, "step", lambda self: (optimizers.append(self), step(self))[1])
    monkeypatch.setattr(probe, "UPDATE_BYTES", 64)
    assert probe._update("gossipadam") > 0
    (state,) = optimizers[0].state.values()
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"}  # no q: the signal is measured
