"""A weighted round takes each neighbor with its weight, whatever the weight and the order of the neighbors."""

import numpy as np
import pytest
import torch
from torch import nn

import gossamer
from policies import policies

HALVES = np.array([[0.25, 0.25, 0.5], [0.25, 0.5, 0.25], [0.5, 0.25, 0.25]])


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]])
def test_a_neighbor_of_weight_one_half_beside_others(order):
    """Half of the neighbor and half of oneself, as between two workers, would halve what came from others before."""
    matrix = HALVES[np.ix_(order, order)]
    models = [nn.Linear(3, 1, bias=False) for _ in order]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.0) for m in models]
    cluster = gossamer.VirtualCluster(per_node=[1, 1, 1])
    cluster.decentralize(models, optimizers, topology=matrix, **policies(algorithm="awc", broadcast=False))
    before = np.stack([m.weight.detach().double().numpy().ravel() for m in models])
    for _ in range(2):  # the first step's exchange is applied by the second one
        for model, optimizer in zip(models, optimizers, strict=True):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
    after = np.stack([m.weight.detach().double().numpy().ravel() for m in models])
    assert np.allclose(after, matrix @ before, atol=1e-6)
