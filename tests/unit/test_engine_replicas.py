"""`decentralize` tells optimizers that depend on it how many replicas gossip."""

import pytest
import torch

import gossamer


@pytest.mark.parametrize("algorithm", ["awc", "atc", "ad-psgd"])
def test_the_optimizer_learns_the_number_of_replicas(algorithm):
    models = [torch.nn.Linear(3, 2) for _ in range(5)]
    optimizers = [gossamer.GossipAdam(m.parameters(), discount=2.0) for m in models]
    assert {o.kappa(o.param_groups[0]) for o in optimizers} == {2.0}  # alone
    with gossamer.VirtualCluster(5) as cluster:
        cluster.decentralize(models, optimizers, topology="ring", algorithm=algorithm)
        assert {o.replicas for o in optimizers} == {5.0}
        assert {o.kappa(o.param_groups[0]) for o in optimizers} == {10.0}


def test_a_number_that_the_user_fixed_stays():
    models = [torch.nn.Linear(3, 2) for _ in range(4)]
    optimizers = [gossamer.GossipAdamW(m.parameters(), replicas=2, discount=1.0) for m in models]
    with gossamer.VirtualCluster(4) as cluster:
        cluster.decentralize(models, optimizers, topology="complete")
        assert {o.kappa(o.param_groups[0]) for o in optimizers} == {2.0}


def test_every_lane_tells_its_own_optimizer():
    models = [torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)) for _ in range(2)]
    pairs = [[gossamer.GossipAdam(m[0].parameters()), torch.optim.SGD(m[1].parameters(), lr=0.1)] for m in models]
    with gossamer.VirtualCluster(2) as cluster:
        cluster.decentralize(models, pairs, topology="complete")
        assert [p[0].replicas for p in pairs] == [2.0, 2.0]
