"""topology="auto": all workers take one choice, a file makes it the same after a restart, mistakes reach everyone."""

import io
from contextlib import redirect_stderr

import pytest
import torch

import gossamer
from gossamer.comm import process_groups
from gossamer.lab.workers import WorkerFailed, run_workers
from gossamer.predict.cluster import from_dict, load
from gossamer.predict.pick import pick_topology
from gossamer.topology import entries

pytestmark = pytest.mark.timeout(900)


def trained(rank, topologies, steps=2):
    process_groups.join_world()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = io.StringIO()
    with redirect_stderr(said):
        gossip = gossamer.decentralize(model, optimizer, topology=topologies[rank], gradients="worker", timeout=300)
    for _ in range(steps):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = gossip.state_dict()
    gossip.close()
    process_groups.leave_world()
    return state["topology"], said.getvalue()


def test_all_workers_take_one_choice_and_a_restart_repeats_it(tmp_path):
    file = tmp_path / "cluster.toml"
    names, said = zip(*run_workers(3, trained, [f"auto:{file}"] * 3, per_node=[2, 1]), strict=True)
    assert len(set(names)) == 1
    assert f"chose '{names[0]}': " in said[0]
    assert "ms per step are predicted" in said[0]
    assert not any(said[1:])  # worker 0 says it for all
    measured = load(file)
    assert (measured.layout.per_node, measured.compute.source) == ((2, 1), "guess")
    written = file.read_text()
    again, _ = zip(*run_workers(3, trained, [f"auto:{file}"] * 3, per_node=[2, 1]), strict=True)
    assert again == names
    assert file.read_text() == written  # read, not measured again
    for n in (2, 1):
        names, _ = zip(*run_workers(n, trained, ["auto"] * n), strict=True)
        assert names in [(e.name,) * n for e in entries()]


def test_mistakes_reach_every_worker(tmp_path):
    with pytest.raises(WorkerFailed, match="worker 0 asks for topology='auto' and worker 1 does not"):
        run_workers(2, trained, ["auto", "ring"])
    bad = tmp_path / "bad.toml"
    bad.write_text("nodes = 0")
    with pytest.raises(WorkerFailed, match=r"bad\.toml"):
        run_workers(2, trained, [f"auto:{bad}"] * 2)


def test_the_choice_follows_the_links():
    """Where links are slow, a topology that sends less is chosen; where they are free, one that averages faster."""

    def described(gbps):
        return from_dict(
            {
                "nodes": 8,
                "per_node": 1,
                "links": {"inter": {"bandwidth_gbps": gbps, "latency_us": 50}},
                "compute": {"seconds": 0.1},
                "model": {"mb": 50},
            }
        )

    slow, why = pick_topology(described(0.1))
    fast, _ = pick_topology(described(1000))
    assert slow in ("ring", "aer", "one-peer-exponential", "base", "random-matching")
    assert fast in ("complete", "exponential", "one-peer-exponential", "base")
    assert slow != "complete"
    assert "with DDP" in why
    assert "DDP is predicted to be as fast" in pick_topology(described(1000))[1]
