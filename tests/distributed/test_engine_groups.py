"""Gossip over a sub-group: 2 x 2 workers, gossip between the replicas, tensor parallelism inside each replica."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from workers import process_group

import gossamer
from gossamer.engine.signal import EVERY
from gossamer.errors import InputError

STEPS = 5


def batch(replica, step):
    generator = torch.Generator().manual_seed(100 * replica + step)
    return torch.randn(8, 6, generator=generator)


def whole_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def reference():
    """Two replicas that gossip on virtual workers: what every 2 x 2 job must come to."""
    models = [whole_model() for _ in range(2)]
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in models]
    with gossamer.VirtualCluster(2) as cluster:
        cluster.decentralize(models, optimizers, topology="ring")
        for step in range(STEPS):
            for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                model(batch(replica, step)).square().mean().backward()
                optimizer.step()
        cluster.catch_up()
        return [[p.detach().clone() for p in m.parameters()] for m in models]


class AllReduce(torch.autograd.Function):
    """Sum over the tensor-parallel group in forward, identity in backward."""

    @staticmethod
    def forward(ctx, value, group):
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Split(nn.Module):
    """The two-layer network of `whole_model` split by hand over two workers: columns, then rows."""

    def __init__(self, part, group):
        super().__init__()
        first, _, second = whole_model()
        rows = slice(4 * part, 4 * part + 4)
        self.up = nn.Parameter(first.weight.detach()[rows].clone())
        self.up_bias = nn.Parameter(first.bias.detach()[rows].clone())
        self.down = nn.Parameter(second.weight.detach()[:, rows].clone())
        self.bias = nn.Parameter(second.bias.detach().clone())
        self.group = group

    def forward(self, x):
        inside = torch.relu(nn.functional.linear(x, self.up, self.up_bias))
        return AllReduce.apply(nn.functional.linear(inside, self.down), self.group) + self.bias


def split_by_hand(rank):
    """Worker r holds part r % 2 of replica r // 2; equal parts gossip."""
    with process_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        replica, part = divmod(rank, 2)
        model = Split(part, mesh["tp"].get_group())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        with gossamer.decentralize(model, optimizer, topology="ring", process_group=mesh["dp"], timeout=300) as gossip:
            for step in range(STEPS):
                optimizer.zero_grad()
                model(batch(replica, step)).square().mean().backward()
                optimizer.step()
            gossip.consensus_distance()  # brings the replicas to one round
            found = [p.detach().clone() for p in (model.up, model.up_bias, model.down, model.bias)]
        return found


def corrected(rank):
    """The bias, of which every part has a copy, after GossipAdam has measured the signal in each group of parts."""
    with process_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        replica, part = divmod(rank, 2)
        model = Split(part, mesh["tp"].get_group())
        optimizer = gossamer.GossipAdam(model.parameters(), lr=0.05)
        with gossamer.decentralize(model, optimizer, topology="ring", process_group=mesh["dp"], timeout=300):
            for step in range(3 * EVERY):
                optimizer.zero_grad()
                model(batch(replica, step)).square().mean().backward()
                optimizer.step()
            measured = optimizer._shares[model.bias]
            return measured, model.bias.detach().clone()


def split_by_dtensor(rank):
    with process_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = whole_model()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        group = mesh["dp"].get_group()
        with gossamer.decentralize(model, optimizer, topology="ring", process_group=group, timeout=300) as gossip:
            for step in range(STEPS):
                optimizer.zero_grad()
                model(batch(rank // 2, step)).square().mean().backward()
                optimizer.step()
            gossip.consensus_distance()
            found = [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]
        return found


def started_apart(rank):
    """Replicas that start from different parameters: all take those of the first replica."""
    with process_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = whole_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(rank // 2)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with gossamer.decentralize(model, optimizer, topology="ring", process_group=mesh["dp"], timeout=300):
            return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


def without_group(rank):
    """The same without `process_group`: DTensors over workers that would gossip with each other."""
    with process_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = whole_model()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        try:
            gossamer.decentralize(model, optimizer, topology="ring", timeout=300)
        except InputError as error:
            return str(error)


def over_other_meshes(rank):
    """DTensors that lie over the workers that gossip, though not all of them, or not by default."""
    with process_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        found = []
        for plans, group in (
            ({"0": "tp", "2": "tp"}, "tp"),  # the wrong dimension
            ({"0": "tp", "2": "dp"}, "dp"),  # the second layer lies over the replicas
        ):
            model = whole_model()
            for layer, dimension in plans.items():
                parallelize_module(model, mesh[dimension], {layer: ColwiseParallel()})
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
            with pytest.raises(InputError) as error:
                gossamer.decentralize(model, optimizer, topology="ring", process_group=mesh[group], timeout=300)
            found.append(str(error.value))
        return found


def split_over_one(rank):
    """Tensor parallelism of size 1: every worker is a replica of its own."""
    with process_group():
        mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
        model = whole_model()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        with gossamer.decentralize(model, optimizer, process_group=mesh["dp"], timeout=300) as gossip:
            model(batch(rank, 0)).square().mean().backward()
            optimizer.step()
            return gossip.replicas, gossip.consensus_distance()


def wrong_mesh(rank):
    with process_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        others = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank < 2]
        for given in (mesh, "world", others):
            with pytest.raises(InputError) as error:
                gossamer.decentralize(model, optimizer, process_group=given, timeout=300)
            found.append(str(error.value))
        return found


def test_parts_split_by_hand_gossip_between_replicas(pools):
    found = pools(4).run(split_by_hand)
    for rank, parts in enumerate(found):
        replica, part = divmod(rank, 2)
        up, up_bias, down, bias = reference()[replica]
        rows = slice(4 * part, 4 * part + 4)
        for got, expected in zip(parts, (up[rows], up_bias[rows], down[:, rows], bias), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_a_parameter_that_all_parts_hold_stays_the_same_in_them(pools):
    found = pools(4).run(corrected)
    for first, second in (found[:2], found[2:]):
        assert first[0] is not None
        assert first[0] == second[0]
        assert torch.equal(first[1], second[1])


def test_dtensors_gossip_between_replicas(pools):
    found = pools(4).run(split_by_dtensor)
    for rank, values in enumerate(found):
        for got, expected in zip(values, reference()[rank // 2], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_sharded_replicas_start_from_the_first_one(pools):
    for values in pools(4).run(started_apart):
        for got, expected in zip(values, whole_model().parameters(), strict=True):
            torch.testing.assert_close(got, expected.detach())


def test_tensor_parallelism_without_a_group_is_refused(pools):
    for rank, said in enumerate(pools(4).run(without_group)):
        assert "worker 0: the parameters are DTensors over workers [0, 1]" in said, rank
        assert "process_group=" in said


def test_dtensors_over_workers_that_gossip_are_refused_by_their_name(pools):
    for rank, (dimension, second) in enumerate(pools(4).run(over_other_meshes)):
        first = rank - rank % 2
        assert f"the parameters are DTensors over workers [{first}, {first + 1}], which would gossip" in dimension
        assert f"the parameters are DTensors over workers [{rank % 2}, {rank % 2 + 2}], which would gossip" in second


def test_tensor_parallelism_of_one_worker_is_no_parallelism(pools):
    for replicas, distance in pools(4).run(split_over_one):
        assert replicas == 4
        assert distance > 0


def test_wrong_groups_are_named(pools):
    mesh, text, others = pools(4).run(wrong_mesh)[0]
    assert "one-dimensional DeviceMesh, got one of shape (2, 2)" in mesh
    assert "takes a ProcessGroup or a DeviceMesh, got str" in text
    assert "worker 0 is not in the process group that it passed" in others
