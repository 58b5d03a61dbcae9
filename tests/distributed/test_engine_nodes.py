"""Exact inside (DDP, FSDP2, or `gradients="node"`), gossip between nodes, against the dense reference."""

import os

import pytest
import torch
import torch.distributed as dist
from dense_reference import DenseCluster
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from workers import assert_close, batch, decentralize, error_of, mlp, process_group, seeded, vector

import gossamer
from policies import policies

STEPS = 6
KINDS = ["ddp", "fsdp", "node"]  # wrapped in DDP, sharded by FSDP2, or neither and gradients="node"


def uneven():
    """Five rows on two workers: shards of unequal sizes, and one that is empty (a bias of one element)."""
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 1), nn.Linear(1, 3))


def whole(model):
    """All parameters, gathered from their shards."""
    return torch.cat(
        [getattr(p, "full_tensor", lambda p=p: p)().detach().double().flatten() for p in model.parameters()]
    )


def node_loss(model, workers, step):
    """The loss of a node: the mean of its workers' losses, as DDP averages gradients."""
    return sum(nn.functional.mse_loss(model(batch(w, step)[0]), batch(w, step)[1]) for w in workers) / len(workers)


def dense_nodes(node, decentralize, members, make, steps, **settings):
    """The reference: a node is one worker that trains on all of its workers' batches."""
    model = seeded(0, make)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    seen = []
    with decentralize(model, optimizer, **settings) as gossip:
        for step in range(steps):
            node_loss(model, members[node], step).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(vector(model))
        with gossip.averaged():
            seen.append(vector(model))
        seen += [vector(model), torch.tensor(gossip.consensus_distance(), dtype=torch.float64)]
    return seen


def inside(rank, kind, make=mlp, steps=STEPS, **settings):
    with process_group():
        group = gossamer.node_group()
        assert gossamer.node_group() is group
        # Different on every worker, or on every node where its workers hold shards of it: all start from the first's.
        bare = model = seeded(int(os.environ["GROUP_RANK"]) if kind == "fsdp" else rank, make)
        if kind == "ddp":
            model = DistributedDataParallel(model, process_group=group)
        elif kind == "node":
            settings["gradients"] = "node"
        else:
            mesh = DeviceMesh.from_group(group, "cpu")
            for layer in model:
                if list(layer.parameters()):
                    fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            bare = model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        seen = []
        with decentralize(model, optimizer, **settings) as gossip:
            assert gossip.model is bare
            assert gossip.gradients == gossip.stats()["gradients"] == "node"
            for step in range(steps):
                nn.functional.mse_loss(model(batch(rank, step)[0]), batch(rank, step)[1]).backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(whole(bare))
            before = whole(bare)
            with gossip.averaged():
                seen.append(whole(bare))
                saved = {k: getattr(v, "full_tensor", lambda v=v: v)().clone() for k, v in bare.state_dict().items()}
            assert torch.equal(whole(bare), before)
            assert list(saved) == list(make().state_dict())
            assert torch.equal(torch.cat([v.double().flatten() for v in saved.values()]), seen[-1])
            seen += [before, torch.tensor(gossip.consensus_distance(), dtype=torch.float64)]
            inter = gossip.stats()["bytes_sent_inter"]
        return seen, inter


def check(pools, per_node, kind, make=mlp, steps=STEPS, **settings):
    results = pools(*per_node).run(inside, kind, make, steps, **settings)
    members, first = [], 0
    for count in per_node:
        members.append(list(range(first, first + count)))
        first += count
    dense = DenseCluster([1] * len(per_node)).run(dense_nodes, members, make, steps, **settings)
    node = [m for m, count in enumerate(per_node) for _ in range(count)]
    assert_close([seen for seen, _ in results], [dense[m] for m in node])
    return results


@pytest.mark.parametrize("settings", [{}, {"algorithm": "atc"}, {"every": 2, "average_every": 4}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_two_nodes_of_two(pools, kind, settings):
    results = check(pools, (2, 2), kind, **settings)
    assert all(inter > 0 for _, inter in results)  # each worker swaps its own shard


@pytest.mark.parametrize("topology", ["ring-static", "complete"])
@pytest.mark.parametrize("kind", KINDS)
def test_three_nodes_of_two(pools, kind, topology):
    check(pools, (2, 2, 2), kind, topology=topology)


@pytest.mark.parametrize("kind", ["ddp", "node"])
def test_fragments_between_nodes(pools, kind):
    """As one virtual worker per node, which trains on the batches of its node's workers."""
    settings = {"topology": "ring", "fragments": 2, "average_every": 5}
    results = pools(2, 2).run(inside, kind, mlp, 8, **settings)
    models = [seeded(0, mlp) for _ in range(2)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in models]
    with gossamer.VirtualCluster(2) as cluster:
        cluster.decentralize(models, optimizers, **policies(**settings))
        for step in range(8):
            for node, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                node_loss(model, [2 * node, 2 * node + 1], step).backward()
                optimizer.step()
                optimizer.zero_grad()
            for node, model in enumerate(models):
                for seen, _ in results[2 * node : 2 * node + 2]:
                    torch.testing.assert_close(seen[step], vector(model), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["fsdp", "node"])
def test_int4_between_nodes(pools, kind):
    """The workers of a node stay one replica, and rounding between nodes changes the mean by what it changes the
    gradients only."""
    settings = {"topology": "ring", "wire": "int4", "average_every": 4}
    results = pools(2, 2).run(inside, kind, mlp, 8, **settings)
    exact = pools(2, 2).run(inside, kind, mlp, 8, **{**settings, "wire": "fp32"})
    for step in range(8):
        for first in (0, 2):
            assert torch.equal(results[first][0][step], results[first + 1][0][step])
    averaged, wanted = results[0][0][8], exact[0][0][8]
    moved = (wanted - vector(seeded(0, mlp))).norm()
    assert (averaged - wanted).norm() < 0.05 * moved
    assert not torch.equal(results[0][0][1], exact[0][0][1])  # the wire is in use


def test_shards_of_unequal_sizes(pools):
    check(pools, (2, 2), "fsdp", uneven)


@pytest.mark.parametrize("kind", ["ddp", "node"])
def test_unequal_nodes_under_ddp(pools, kind):
    check(pools, (2, 1), kind, uneven)


@pytest.mark.parametrize("kind", ["ddp", "node"])
def test_one_node_is_plain_ddp(pools, kind):
    check(pools, (2,), kind)


def fsdp_unequal(rank, decentralize):
    model = seeded(0, mlp)
    fully_shard(model, mesh=DeviceMesh.from_group(gossamer.node_group(), "cpu"))
    decentralize(model, torch.optim.SGD(model.parameters(), lr=0.1))


def ddp_world(rank, decentralize):
    model = DistributedDataParallel(seeded(0, mlp))
    decentralize(model, torch.optim.SGD(model.parameters(), lr=0.1))


def partly_sharded(rank, decentralize):
    model = seeded(0, mlp)
    fully_shard(model[0], mesh=DeviceMesh.from_group(gossamer.node_group(), "cpu"))
    decentralize(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_unequal_nodes_are_refused_under_fsdp(pools):
    errors = pools(2, 1).run(error_of, fsdp_unequal)
    assert len(set(errors)) == 1
    assert errors[0][0] == "InputError"
    assert "same number of workers on every node, got [2, 1]" in errors[0][1]


def test_ddp_over_the_world_is_refused(pools):
    errors = pools(2, 2).run(error_of, ddp_world)
    assert len(set(errors)) == 1
    assert errors[0][0] == "InputError"
    assert "wrapped in DDP over workers [0, 1, 2, 3], but this node's workers are [0, 1]" in errors[0][1]
    assert "gossamer.node_group()" in errors[0][1]


def test_a_partly_sharded_model_is_refused(pools):
    errors = pools(2, 2).run(error_of, partly_sharded)
    assert len(set(errors)) == 1
    assert "apply fully_shard to the whole model" in errors[0][1]


def node_ranks(rank):
    with process_group():
        return dist.get_process_group_ranks(gossamer.node_group())


def test_node_group_is_made_anew_with_every_process_group(pools):
    for _ in range(2):
        assert pools(2, 1).run(node_ranks) == [[0, 1], [0, 1], [2]]


def resume_sharded(rank, settings):
    """Save in the middle, train on; then load into a new model and train the same steps."""
    with process_group():
        mesh = DeviceMesh.from_group(gossamer.node_group(), "cpu")

        def make(seed):
            model = seeded(seed, mlp)
            fully_shard(model, mesh=mesh)
            return model, torch.optim.AdamW(model.parameters(), lr=0.02)

        def train(model, optimizer, steps):
            for step in steps:
                nn.functional.mse_loss(model(batch(rank, step)[0]), batch(rank, step)[1]).backward()
                optimizer.step()
                optimizer.zero_grad()

        def local(state):
            return {k: v.to_local().clone() for k, v in state.items()}

        model, optimizer = make(0)
        with decentralize(model, optimizer, **settings) as gossip:
            train(model, optimizer, range(3))
            kept = local(model.state_dict()), gossip.state_dict()
            moments = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state_dict()["state"].items()}
            train(model, optimizer, range(3, 6))
            expected = vector_of_shards(model)
        again, optimizer2 = make(1)
        with torch.no_grad():
            for name, p in again.named_parameters():
                p.to_local().copy_(kept[0][name])
        state = optimizer2.state_dict()
        state["state"] = moments
        optimizer2.load_state_dict(state)
        with decentralize(again, optimizer2, broadcast=False, **settings) as gossip:
            gossip.load_state_dict(kept[1])
            train(again, optimizer2, range(3, 6))
            return expected, vector_of_shards(again)


def vector_of_shards(model):
    return torch.cat([p.to_local().detach().flatten() for p in model.parameters()]).clone()


@pytest.mark.parametrize("settings", [{}, {"fragments": 2, "average_every": 4, "wire": "int4"}], ids=str)
def test_sharded_run_resumes_bit_by_bit(pools, settings):
    for expected, resumed in pools(2, 2).run(resume_sharded, settings):
        assert torch.equal(expected, resumed)
