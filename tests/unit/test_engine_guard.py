"""What a neighbor sent is looked at before it is mixed in."""

import pytest
import torch

from gossamer import ConsensusGuard, InputError, NeighborGuard, VirtualCluster
from gossamer.engine.policies import Settings
from policies import policies


def workers(n, **options):
    models = [torch.nn.Linear(6, 4) for _ in range(n)]
    cluster = VirtualCluster(n)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.0) for m in models]
    return models, optimizers, cluster.decentralize(models, optimizers, **policies(**options))


def step(models, optimizers, times=1):
    for _ in range(times):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(1, 6)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_values_that_are_not_finite_are_refused_and_their_sender_named(value, wire, staleness):
    options = {"topology": "ring", "wire": wire, "staleness": staleness, "guard": NeighborGuard()}
    models, optimizers, gossips = workers(2, **options)
    with torch.no_grad():
        models[1].weight[0, 0] = value
    healthy = models[0].weight.detach().clone()
    step(models, optimizers, 3)
    assert torch.equal(models[0].weight, healthy)
    assert gossips[0].stats()["refused_by_peer"] == {1: 3}  # every one of them


def test_without_a_guard_values_that_are_not_finite_spread():
    models, optimizers, gossips = workers(2, topology="ring")
    with torch.no_grad():
        models[1].weight[0, 0] = float("nan")
    step(models, optimizers, 2)
    assert models[0].weight.isnan().any()
    assert gossips[0].stats()["refused_by_peer"] == {}


def test_a_jump_is_refused_and_an_ordinary_distance_is_not():
    models, optimizers, gossips = workers(2, topology="ring", guard=[NeighborGuard(max_jump=2.0)])
    with torch.no_grad():
        models[1].weight.mul_(1.5)
    step(models, optimizers, 2)
    assert gossips[0].stats()["refused_by_peer"] == {}
    assert torch.allclose(models[0].weight, models[1].weight)
    before = models[0].weight.detach().clone()
    step(models, optimizers)  # what is on its way is of the old values
    with torch.no_grad():
        models[1].weight.mul_(100.0)
    step(models, optimizers, 2)
    assert gossips[0].stats()["refused_by_peer"] == {1: 2}
    assert torch.allclose(models[0].weight, before)


def test_guards_may_be_combined_and_nonsense_is_refused():
    both = Settings.of(guard=[ConsensusGuard(), NeighborGuard(max_jump=3)])
    assert both.consensus_guard == ConsensusGuard()
    assert both.max_jump == 3
    assert Settings.of().max_jump is None
    assert Settings.of(on_failure="continue").max_jump == float("inf")  # there what is not finite is always refused
    with pytest.raises(InputError, match="max_jump must be a positive number, got 0"):
        NeighborGuard(max_jump=0)
    with pytest.raises(InputError, match="guard must be a ConsensusGuard, a NeighborGuard or a list of both"):
        Settings.of(guard="yes")
