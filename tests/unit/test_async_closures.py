"""Closures: evaluated at the parameters as they are, and an optimizer that ignores its closure is refused."""

import pytest
import torch
from torch import nn

from gossamer import GossamerError, VirtualCluster

ALGORITHMS = ["awc", "ad-psgd", "a2cid2"]


class Deaf(torch.optim.SGD):
    """Takes a closure and does not call it."""

    def step(self, closure=None):
        return super().step()


def cluster_of(n, algorithm, make):
    generator = torch.Generator().manual_seed(3)
    models = [nn.ParameterList([torch.randn(50, generator=generator)]) for _ in range(n)]
    optimizers = [make(m.parameters(), lr=0.1) for m in models]
    cluster = VirtualCluster(n)
    gossips = cluster.decentralize(models, optimizers, topology="ring", algorithm=algorithm, broadcast=False)
    return cluster, gossips, models, optimizers


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_with_a_closure_equals_backward_and_step(algorithm):
    ends = []
    for closed in (True, False):
        cluster, _, models, optimizers = cluster_of(4, algorithm, torch.optim.SGD)
        for _ in range(12):
            for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):

                def compute(model=model, optimizer=optimizer, target=i):
                    optimizer.zero_grad()
                    loss = (model[0] - target).square().mean()
                    loss.backward()
                    return loss

                if closed:
                    optimizer.step(compute)
                else:
                    compute()
                    optimizer.step()
        ends.append(torch.stack([m[0].detach().clone() for m in models]))
        cluster.close()
    assert torch.equal(*ends)


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_optimizer_that_ignores_its_closure_is_refused(algorithm, keyword):
    cluster, gossips, models, optimizers = cluster_of(2, algorithm, Deaf)
    for model in models:
        model[0].grad = torch.ones_like(model[0])
    with pytest.raises(GossamerError) as error:
        optimizers[0].step(closure=lambda: 0.0) if keyword else optimizers[0].step(lambda: 0.0)
    assert str(error.value).startswith("Deaf.step() was given a closure and did not call it")
    assert "\n" not in str(error.value)
    assert gossips[0].stats()["steps"] == 0
    cluster.close()


@pytest.mark.parametrize("algorithm", ["ad-psgd", "a2cid2"])
def test_the_refused_step_leaves_the_state_alone(algorithm):
    cluster, gossips, models, optimizers = cluster_of(1, algorithm, Deaf)
    before = models[0][0].detach().clone()
    models[0][0].grad = torch.ones_like(before)
    with pytest.raises(GossamerError):
        optimizers[0].step(lambda: 0.0)
    optimizers[0].step()
    assert torch.equal(models[0][0].detach(), before - 0.1)
    assert gossips[0].total_steps == 1
    cluster.close()
