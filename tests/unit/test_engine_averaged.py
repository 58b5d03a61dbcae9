"""averaged() and consensus_distance(): exact, and without a trace on the training."""

import copy

import pytest
import torch
from torch import nn

import gossamer
from policies import policies
from reference import distance


def network():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def start(per_node, **settings):
    n = sum(per_node)
    torch.manual_seed(0)
    models = [network() for _ in range(n)]
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in models]
    cluster = gossamer.VirtualCluster(per_node=per_node)
    cluster.decentralize(models, optimizers, **policies(**settings))
    return cluster, models, optimizers


def train(models, optimizers, steps, first=0):
    for t in range(first, first + steps):
        for i, (m, o) in enumerate(zip(models, optimizers, strict=True)):
            g = torch.Generator().manual_seed(1000 * t + i)
            o.zero_grad()
            m(torch.randn(4 + i % 3, 6, generator=g)).square().mean().backward()
            o.step()


def states(models):
    return [{k: v.clone() for k, v in m.state_dict().items()} for m in models]


def same(a, b):
    return all(torch.equal(x[k], y[k]) for x, y in zip(a, b, strict=True) for k in x)


@pytest.mark.parametrize("algorithm", ["awc", "atc"])
@pytest.mark.parametrize("per_node", [[1], [3], [2, 2], [4, 4, 2]], ids=str)
@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_averaged_is_the_exact_mean_and_restores_every_bit(per_node, algorithm, wire):
    cluster, models, optimizers = start(per_node, algorithm=algorithm, wire=wire)
    train(models, optimizers, 3)
    before = states(models)
    with cluster.averaged() as model:
        assert model is models[0]
        for name, value in models[0].named_parameters():
            mean = torch.stack([s[name].double() for s in before]).mean(dim=0)
            for m in models:
                torch.testing.assert_close(m.get_parameter(name).double(), mean, rtol=1e-6, atol=1e-7)
            assert value.requires_grad
        for m in models:
            mean = torch.stack([s["1.running_var"] for s in before]).double().mean(dim=0)
            torch.testing.assert_close(m[1].running_var.double(), mean, rtol=1e-6, atol=1e-7)
    assert same(states(models), before)


@pytest.mark.parametrize("settings", [{}, {"algorithm": "atc"}, {"staleness": 2}, {"every": 2}], ids=str)
def test_collective_calls_do_not_change_training(settings):
    one, models, optimizers = start([2, 2], **settings)
    other, others, other_optimizers = start([2, 2], **settings)
    train(models, optimizers, 3)
    train(others, other_optimizers, 3)
    with one.averaged():
        pass
    one.consensus_distance()
    one.state_dicts()
    train(models, optimizers, 3, first=3)
    train(others, other_optimizers, 3, first=3)
    assert same(states(models), states(others))
    assert [g.stats()["rounds"] for g in one.gossips] == [g.stats()["rounds"] for g in other.gossips]


def test_integer_buffers_take_the_maximum():
    cluster, models, _optimizers = start([3])
    for i, m in enumerate(models):
        m[1].num_batches_tracked.fill_(10 + 5 * i)
    with cluster.averaged():
        assert [int(m[1].num_batches_tracked) for m in models] == [20, 20, 20]
        assert models[0][1].num_batches_tracked.dtype == torch.int64
    assert [int(m[1].num_batches_tracked) for m in models] == [10, 15, 20]


def test_local_buffers_stay():
    cluster, models, optimizers = start([3], buffers="local")
    train(models, optimizers, 2)
    before = states(models)
    with cluster.averaged():
        for m, s in zip(models, before, strict=True):
            assert torch.equal(m[1].running_mean, s["1.running_mean"])


def test_boolean_and_half_buffers():
    models = [nn.Linear(2, 2) for _ in range(3)]
    for i, m in enumerate(models):
        m.register_buffer("flag", torch.tensor([i == 1, False]))
        m.register_buffer("small", torch.full((2,), float(i), dtype=torch.bfloat16))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    cluster = gossamer.VirtualCluster(3)
    cluster.decentralize(models, optimizers, broadcast=False)
    with cluster.averaged():
        for m in models:
            assert m.flag.tolist() == [True, False]
            assert m.flag.dtype == torch.bool
            assert m.small.tolist() == [1.0, 1.0]
    assert [m.flag.tolist() for m in models] == [[False, False], [True, False], [False, False]]


LAYOUTS = [[3], [2, 1], [1, 2, 1], [2, 2]]


def with_buffer(per_node, values):
    """Workers of one linear layer each, with buffer `mask` of their own."""
    models = [nn.Linear(2, 2) for _ in values]
    for model, value in zip(models, values, strict=True):
        model.register_buffer("mask", value.clone())
    cluster = gossamer.VirtualCluster(per_node=per_node)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    cluster.decentralize(models, optimizers, broadcast=False)
    return cluster, models


@pytest.mark.parametrize("per_node", LAYOUTS, ids=str)
@pytest.mark.parametrize("equal", [True, False])
def test_infinite_buffers_stay_infinite(per_node, equal):
    """A causal mask: minus infinity minus itself would be NaN."""
    values = [torch.full((3, 3), float("-inf")).triu(1) + (0 if equal else r) for r in range(sum(per_node))]
    cluster, models = with_buffer(per_node, values)
    mean = torch.stack(values).mean(0)
    with cluster.averaged():
        for model in models:
            torch.testing.assert_close(model.mask, mean)
    assert all(map(torch.equal, [m.mask for m in models], values))


@pytest.mark.parametrize("per_node", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32]
)
def test_integer_buffers_of_every_dtype_are_exact(per_node, dtype):
    top = 1 if dtype == torch.bool else torch.iinfo(dtype).max
    least = 0 if dtype == torch.bool else torch.iinfo(dtype).min
    values = [
        torch.tensor([top - (r != 1), least, least + (r == 0)], dtype=torch.int64).to(dtype)
        for r in range(sum(per_node))
    ]
    cluster, models = with_buffer(per_node, values)
    with cluster.averaged():
        for model in models:
            assert model.mask.dtype == dtype
            assert model.mask.to(torch.int64).tolist() == [top, least, least + 1]


def test_complex_buffers_are_averaged():
    values = [torch.tensor([1 + 2j, 3j]) * (r + 1) for r in range(3)]
    cluster, models = with_buffer([3], values)
    with cluster.averaged():
        for model in models:
            torch.testing.assert_close(model.mask, torch.stack(values).mean(0))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_equal_buffers_do_not_travel_and_others_travel_once(dtype, monkeypatch):
    """Bytes of the collective call: a checksum each for equal buffers, the buffers' own size for others."""
    size, n = 4000, 4
    jobs = []
    for equal in (True, False):
        values = [torch.ones(size, dtype=dtype) for _ in range(n)]
        values[1][0] = 0 if not equal else 1
        cluster, models = with_buffer([n], values)
        start = cluster._hub.start
        begun = []
        monkeypatch.setattr(cluster._hub, "start", lambda *a, s=start, b=begun: (b.append(a[-1]), s(*a)))
        with cluster.averaged():
            models[0].mask.zero_()  # what the block writes is undone, also in buffers that are equal everywhere
        assert all(map(torch.equal, [m.mask for m in models], values))
        jobs.append(sum(sum(job.sent.values()) for job in begun))
    own = size * torch.ones(1, dtype=dtype).element_size()
    assert jobs[0] < 2000 * n
    assert jobs[1] - jobs[0] == n * own * 2 * (n - 1) / n


def test_nested_blocks():
    cluster, models, optimizers = start([3])
    train(models, optimizers, 2)
    before = states(models)
    with cluster.averaged():
        outer = states(models)
        with cluster.averaged():
            torch.testing.assert_close(models[1][0].weight, models[2][0].weight, rtol=1e-6, atol=1e-7)
        assert same(states(models), outer)
    assert same(states(models), before)


def test_an_error_in_the_block_restores():
    cluster, models, optimizers = start([2, 2])
    train(models, optimizers, 2)
    before = states(models)
    with pytest.raises(RuntimeError, match="evaluation failed"), cluster.averaged():
        raise RuntimeError("evaluation failed")
    assert same(states(models), before)
    train(models, optimizers, 1, first=2)


def test_writes_inside_averaged_are_undone():
    cluster, models, _optimizers = start([2])
    before = states(models)
    with cluster.averaged(), torch.no_grad():
        models[0][0].weight.fill_(7.0)
    assert same(states(models), before)


@pytest.mark.parametrize("per_node", [[1], [2], [5], [3, 3]], ids=str)
def test_consensus_distance_is_its_definition(per_node):
    cluster, models, optimizers = start(per_node)
    train(models, optimizers, 4)
    values = torch.stack([torch.cat([p.detach().double().flatten() for p in m.parameters()]) for m in models])
    assert cluster.consensus_distance() == pytest.approx(distance(values.numpy()), rel=1e-5, abs=1e-12)


def test_consensus_distance_sums_over_lanes_and_skips_local_parameters():
    torch.manual_seed(0)
    models = [nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2)}) for _ in range(3)]
    optimizers = [[torch.optim.SGD(m[k].parameters(), lr=0.1) for k in "ab"] for m in models]
    cluster = gossamer.VirtualCluster(3)
    cluster.decentralize(models, optimizers, broadcast=False, parameters=lambda name, p: name != "b.bias")
    values = torch.stack(
        [torch.cat([p.detach().double().flatten() for n, p in m.named_parameters() if n != "b.bias"]) for m in models]
    )
    assert cluster.consensus_distance() == pytest.approx(distance(values.numpy()), rel=1e-6)


def test_saving_inside_the_block_saves_the_mean():
    cluster, models, optimizers = start([2])
    train(models, optimizers, 2)
    with cluster.averaged() as model:
        saved = copy.deepcopy(model.state_dict())
        torch.testing.assert_close(saved["0.weight"], models[1].state_dict()["0.weight"], rtol=1e-6, atol=1e-7)
    assert not torch.equal(saved["0.weight"], models[0].state_dict()["0.weight"])
