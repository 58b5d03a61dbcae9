"""The signal is measured between nodes whose workers hold one replica, or shards of it, and GossipAdam steps by it."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from workers import batch, decentralize, mlp, process_group, seeded

import gossamer
from gossamer.engine.clipping import GradientClipper
from policies import policies

STEPS = 24
SETTINGS = {"topology": "ring"}


def optimizer_of(model):
    return gossamer.GossipAdam(model.parameters(), lr=0.02, betas=(0.9, 0.98), weight_decay=0.3)


def loss_of(model, worker, step):
    x, y = batch(worker, step)
    return nn.functional.mse_loss(model(x), y)


def inside(rank, kind):
    """Returns the parameters after every step, and the shares in the end."""
    with process_group():
        model, settings = seeded(0, mlp), SETTINGS
        if kind == "fsdp":
            fully_shard(model, mesh=DeviceMesh.from_group(gossamer.node_group(), "cpu"))
        else:
            settings = {**SETTINGS, "gradients": "node"}
        optimizer, seen = optimizer_of(model), []
        with decentralize(model, optimizer, **settings):
            for step in range(STEPS):
                loss_of(model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                whole = [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]
                seen.append(torch.cat([p.flatten() for p in whole]))
            shares = [optimizer._shares[p] for p in model.parameters()]
            assert not any("signal_sq" in state for state in optimizer.state.values())
        return seen, shares


def virtual():
    """One virtual worker per node, which trains on the batches of its node's two workers."""
    models = [seeded(0, mlp) for _ in range(2)]
    optimizers, seen = [optimizer_of(m) for m in models], [[], []]
    with gossamer.VirtualCluster(2) as cluster:
        cluster.decentralize(models, optimizers, **policies(**SETTINGS))
        for step in range(STEPS):
            for node, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                (sum(loss_of(model, worker, step) for worker in (2 * node, 2 * node + 1)) / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
                seen[node].append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        return seen, [optimizers[0]._shares[p] for p in models[0].parameters()]


@pytest.mark.parametrize("kind", ["node", "fsdp"])
def test_two_nodes_of_two_step_as_two_workers(pools, kind):
    expected, shares = virtual()
    results = pools(2, 2).run(inside, kind)
    for rank, (seen, found) in enumerate(results):
        assert found == results[0][1]
        # A share is pooled with the others by its number of coordinates, of which a shard has fewer than the whole.
        assert found == pytest.approx(shares, abs=1e-4 if kind == "node" else 0.05)
        early = 5 if kind == "fsdp" else STEPS  # steps until the first measurement
        for got, wanted in zip(seen[:early], expected[rank // 2][:early], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(seen[-1], expected[rank // 2][-1], rtol=0.05, atol=0.01)


def clipped(rank):
    """The clipped gradients of sharded parameters, and those of whole ones with the same norms and shares."""
    with process_group():
        model, plain = seeded(0, mlp), seeded(0, mlp)
        fully_shard(model, mesh=DeviceMesh.from_group(gossamer.node_group(), "cpu"))
        optimizer, clipper, seen = optimizer_of(model), GradientClipper(), []
        with decentralize(model, optimizer, **SETTINGS) as gossip:
            for step in range(STEPS):
                (loss_of(model, rank, step) * (100.0 if step == STEPS - 1 else 1.0)).backward()
                for whole, part in zip(plain.parameters(), model.parameters(), strict=True):
                    whole.grad = part.grad.full_tensor()
                share = gossip.lanes[0].meter.share
                norm = gossip.clip_grad_norm_(0.5)
                if share is not None:
                    same = clipper.clip(list(plain.parameters()), 0.5, 2, share)
                    torch.testing.assert_close(norm.full_tensor(), same)
                    seen.append(
                        [
                            (p.grad.full_tensor(), q.grad)
                            for p, q in zip(model.parameters(), plain.parameters(), strict=True)
                        ]
                    )
                optimizer.step()
                optimizer.zero_grad()
        return seen


def test_sharded_gradients_are_clipped_as_whole_ones_where_the_share_is_measured(pools):
    results = pools(2, 2).run(clipped)
    for seen in results:
        assert len(seen) > STEPS // 2
        for step in seen:
            for got, expected in step:
                torch.testing.assert_close(got, expected)
    norms = [torch.cat([g.flatten() for g, _ in step]).norm() for step in results[0]]
    assert norms[-1] < 1.0, "a spike is clipped near the threshold"
