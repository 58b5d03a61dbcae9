"""What a handle leaves behind: the mean of all workers, or with `average=False` each worker's own values."""

import pytest
import torch
from torch import nn

import gossamer
from elastic import finish, job
from gossamer.errors import GossamerError
from policies import policies


class Counted(nn.Module):
    """A module with floating-point and integer buffers."""

    def __init__(self, worker):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        self.register_buffer("mask", torch.tensor([worker]))

    def forward(self, x):
        return self.net(x)


def trained(settings, steps=3, n=4):
    torch.manual_seed(0)
    models = [Counted(worker) for worker in range(n)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    cluster = gossamer.VirtualCluster(n)
    cluster.decentralize(models, optimizers, broadcast=False, **policies(**settings))
    for _ in range(steps):
        for m, o in zip(models, optimizers, strict=True):
            o.zero_grad()
            m(torch.randn(8, 4)).square().mean().backward()
            o.step()
    return cluster, models


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"algorithm": "atc", "topology": "ring"},
        {"staleness": 2},
        {"wire": "int8"},
        {"algorithm": "ad-psgd"},
        {"algorithm": "a2cid2", "topology": "ring"},
    ],
    ids=str,
)
def test_every_worker_holds_the_mean_after_close(settings):
    cluster, models = trained(settings)
    with cluster.averaged():
        expected = state_of(models[0])
    assert not torch.equal(models[0].net[0].weight, models[1].net[0].weight)
    cluster.close()
    for model in models:
        for name, value in model.state_dict().items():
            assert torch.equal(value, expected[name]), name
    assert expected["mask"].tolist() == [3]


def test_buffers_stay_local_if_they_are_local():
    cluster, models = trained({"buffers": "local"})
    cluster.close()
    assert torch.equal(models[0].net[0].weight, models[3].net[0].weight)
    assert [int(m.mask) for m in models] == [0, 1, 2, 3]


@pytest.mark.parametrize("settings", [{}, {"algorithm": "ad-psgd"}], ids=str)
def test_without_averaging_every_worker_keeps_its_own(settings):
    cluster, _ = trained(settings)
    cluster.catch_up()
    own = [g.lanes[0].values()[0].clone() for g in cluster.gossips]
    places = [g.lanes[0].flats[0].places[0] for g in cluster.gossips]
    cluster.close(average=False)
    for mine, place, other in zip(own, places, [*own[1:], own[0]], strict=True):
        value = mine[place.start : place.start + place.elements]
        assert torch.equal(place.parameter.detach().flatten(), value)
        assert not torch.equal(value, other[place.start : place.start + place.elements])


def test_an_error_in_the_block_leaves_every_worker_its_own():
    cluster, models = trained({})
    before = [state_of(m) for m in models]
    with pytest.raises(ZeroDivisionError), cluster:
        raise ZeroDivisionError
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_parameter_that_is_not_mixed_is_not_averaged():
    cluster, models = trained({"parameters": lambda name, p: name != "net.2.bias"})
    before = [m.net[2].bias.detach().clone() for m in models]
    cluster.close()
    assert all(torch.equal(m.net[2].bias, b) for m, b in zip(models, before, strict=True))


def vector(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("average", [False, True])
def test_elastic_workers_leave_with_their_own_values_or_with_the_mean(monkeypatch, average):
    def end(gossip):
        with gossip.averaged() as model:
            mean = vector(model)
        own = vector(gossip.model)
        assert 1 <= gossip.scalars()["gossip/members"] <= 3  # others may have left already
        if average:
            gossip.close(average=True)
            assert not gossip.in_meeting
        else:
            gossip.close()
        with pytest.raises(GossamerError, match="after close"):
            gossip.consensus_distance()
        return own, mean, vector(gossip.model)

    with job(monkeypatch, 3, topology="ring") as made:
        results = finish(made.all(3, end))
    for own, mean, left in results:
        assert torch.equal(left, mean if average else own)
        assert not torch.equal(own, mean)
