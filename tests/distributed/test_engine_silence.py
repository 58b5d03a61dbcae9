"""Jobs in which gossip does nothing say so: one sentence, once, by worker 0."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from workers import QUICK_NAMES, error_of, loss_of, mlp, process_group, real, seeded

import gossamer


def said_while(call):
    """The texts of the GossamerWarnings in `call()`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if issubclass(w.category, gossamer.GossamerWarning)]


# One replica.


def one_replica(rank, decentralize, kind):
    model, settings = seeded(0, mlp), {}
    if kind == "DDP":
        model = DistributedDataParallel(model)
    elif kind == "FSDP2":
        fully_shard(model, mesh=DeviceMesh.from_group(gossamer.node_group(), "cpu"))
    else:
        settings["gradients"] = "node"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        with decentralize(model, optimizer, **settings) as gossip:
            for step in range(10):
                loss_of(model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step % 4 == 0:
                    gossip.consensus_distance()

    return said_while(train)


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("DDP", "pass the bare model"),
        ("FSDP2", "pass a model that is sharded over fewer workers"),
        ("gradients='node'", "pass gradients='worker'"),
    ],
)
def test_one_replica_has_nothing_to_gossip(pools, kind, remedy):
    (said,), *others = pools(2).run(real, one_replica, kind)
    assert f"all 2 workers are on one node, where {kind} averages their gradients" in said
    assert "nothing to gossip" in said
    assert remedy in said
    assert others == [[]]


# Gradients that are averaged already.


def measured(rank, decentralize, wrap, settings):
    """Train, and measure the consensus distance from step 13 on. `wrap`: a framework has wrapped the model in DDP, and
    the bare model is passed to decentralize, as in a Lightning hook."""
    model = seeded(0, mlp)
    called = DistributedDataParallel(model) if wrap else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    distances = []

    def train():
        with decentralize(model, optimizer, **settings) as gossip:
            for step in range(20):
                loss_of(called, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step >= 12 and step % 2 == 0:
                    distances.append(gossip.consensus_distance())

    return said_while(train), distances


def test_gradients_that_are_averaged_elsewhere_are_noticed(pools):
    (said, distances), *others = pools(3).run(real, measured, True, {})
    assert max(distances) < 1e-6  # the rounding of the mean
    first, second = said
    assert "all 3 workers had the same gradient in their first step" in first
    assert "strategy='ddp'" in first
    assert "the consensus distance is still 0 after 15 steps: the 3 replicas take equal steps" in second
    assert [texts for texts, _ in others] == [[], []]


def test_equal_workers_after_an_exact_combination_are_fine(pools):
    """atc on the complete topology: equal after every step, by the method itself."""
    (said, distances), *_ = pools(3).run(real, measured, False, {"algorithm": "atc", "topology": "complete"})
    assert said == []
    assert max(distances) < 1e-6


def ddp_in_a_wrapper(rank, decentralize, kind):
    model = seeded(0, mlp)
    if kind == "fabric":
        from lightning.fabric import Fabric
        from lightning.fabric.plugins.environments import TorchElasticEnvironment

        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=[TorchElasticEnvironment()])
        fabric.launch()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model = torch.compile(DistributedDataParallel(model), backend="eager")
    decentralize(model, optimizer)


@pytest.mark.parametrize(("kind", "name"), [("fabric", "_forward_module"), ("compile", "_orig_mod")])
def test_ddp_inside_another_wrapper_is_refused(pools, kind, name):
    if kind == "fabric":
        pytest.importorskip("lightning")
    for error, said in pools(2).run(error_of, ddp_in_a_wrapper, kind):
        assert error == "InputError", said
        assert f"the model contains DistributedDataParallel at {name!r}" in said
        assert "averages the gradients of workers [0, 1]" in said


# No step.


UNSEEN = """
    import torch, gossamer
    torch.distributed.init_process_group("gloo", init_method="file://{folder}/store", rank=0, world_size=1)
    kept = []  # until the job ends
    for kind in ("seen", "unseen", "idle"):
        model = torch.nn.Linear(4, 4)
        given, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters())
        kept += [given, other, gossamer.decentralize(model, other if kind == "unseen" else given)]
        model(torch.randn(2, 4)).sum().backward()
        if kind != "idle":
            given.step()
"""


def test_a_job_that_ends_without_a_step_of_its_optimizer_says_so(tmp_path):
    """Also without any collective call before the end."""
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(UNSEEN).format(folder=tmp_path))
    environment = {**os.environ, **QUICK_NAMES, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("no step of Adam was seen, so nothing has been exchanged") == 1
    assert "no step of SGD" not in done.stderr


# Meshes.


def hybrid(rank, group):
    with process_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        model = seeded(0, mlp)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            gossamer.decentralize(model, optimizer, process_group=mesh["replicas"] if group else None, timeout=300)
        except gossamer.InputError as error:
            return str(error)


@pytest.mark.parametrize("group", [False, True])
def test_the_error_of_hsdp_names_the_mesh_that_fits(pools, group):
    for said in pools(2, 2).run(hybrid, group):
        assert "shards the model over the dimension 'shards' of its mesh" in said
        assert "averages gradients over the dimension 'replicas' in every step (HSDP)" in said
        assert "fully_shard(model, mesh=mesh['shards'])" in said
        assert "decentralize(..., process_group=mesh['replicas'])" in said


def sharded_beside_gossip(rank):
    """What the error proposes, on nodes that do not match the mesh: shards on both nodes."""
    with process_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        model = seeded(0, mlp)
        fully_shard(model, mesh=mesh["shards"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        group = mesh["replicas"]
        with gossamer.decentralize(model, optimizer, topology="complete", process_group=group, timeout=300) as gossip:
            for step in range(4):
                loss_of(model, rank // 2, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            apart = gossip.consensus_distance()
        return apart, [p.full_tensor().detach() for p in model.parameters()]


def test_shards_gossip_over_the_other_dimension_of_the_mesh(pools):
    models = [seeded(0, mlp) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    with gossamer.VirtualCluster(2) as cluster:
        cluster.decentralize(models, optimizers, topology="complete")
        for step in range(4):
            for replica, (m, o) in enumerate(zip(models, optimizers, strict=True)):
                loss_of(m, replica, step).backward()
                o.step()
                o.zero_grad()
        assert cluster.consensus_distance() > 0
    for apart, values in pools(4).run(sharded_beside_gossip):
        assert apart > 0
        for got, expected in zip(values, models[0].parameters(), strict=True):
            torch.testing.assert_close(got, expected.detach(), rtol=1e-5, atol=1e-6)
