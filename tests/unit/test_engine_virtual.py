"""Virtual workers: uneven data, order of steps, and what they refuse; every bad setting in one clear sentence."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import gossamer
from gossamer.engine.policies import Settings
from gossamer.errors import InputError
from gossamer.topology import Layout, build
from policies import policies


def start(per_node, lr=0.0, broadcast=False, **settings):
    n = sum(per_node)
    torch.manual_seed(0)
    models = [nn.Linear(4, 3) for _ in range(n)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=lr) for m in models]
    cluster = gossamer.VirtualCluster(per_node=per_node)
    gossips = cluster.decentralize(models, optimizers, broadcast=broadcast, **policies(**settings))
    return cluster, gossips, models, optimizers


def values(models):
    return np.stack([torch.cat([p.detach().double().flatten() for p in m.parameters()]).numpy() for m in models])


def step(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()


@pytest.mark.parametrize("algorithm", ["awc", "atc"])
@pytest.mark.parametrize("topology", ["complete", "ring", "ring-static", "aer", "random-matching"])
def test_parked_workers_serve_their_neighbors(topology, algorithm):
    """Workers run out of data one after the other; those left train on, and rounds stay W(k)."""
    for per_node in ([5], [2, 2], [1, 2, 1]):
        n = sum(per_node)
        cluster, gossips, models, optimizers = start(per_node, topology=topology, algorithm=algorithm)
        built = build(topology, Layout.of(per_node))
        want = values(models)
        last = [12] + [3 + 2 * i for i in range(1, n)]  # steps of each worker's data
        for t in range(12):
            for i in range(n):
                if t == last[i]:
                    cluster.park(i)
            for i in range(n):
                if t < last[i]:
                    step(optimizers[i])
        cluster.catch_up()
        assert [g.stats()["rounds"] for g in gossips] == [12] * n
        assert [g.stats()["mix_only_rounds"] for g in gossips] == [12 - min(12, s) for s in last]
        for k in range(12 if algorithm == "atc" else 11):
            want = built.matrix(k) @ want
        np.testing.assert_allclose(values(models), want, atol=1e-6)


def test_catch_up_brings_all_workers_to_one_round():
    cluster, gossips, models, optimizers = start([4], topology="complete")
    mean = values(models).mean(axis=0)
    step(optimizers[2])
    cluster.catch_up()
    assert [g.lanes[0].k for g in gossips] == [1, 1, 1, 1]
    assert [g.stats()["mix_only_rounds"] for g in gossips] == [1, 1, 0, 1]
    for o in optimizers:
        step(o)
    np.testing.assert_allclose(values(models), np.tile(mean, (4, 1)), atol=1e-6)


@pytest.mark.parametrize("algorithm", ["awc", "atc"])
def test_stepping_twice_before_the_others_is_a_clear_error(algorithm):
    _cluster, gossips, _models, optimizers = start([3], topology="complete", algorithm=algorithm)
    step(optimizers[1])
    with pytest.raises(
        gossamer.PeerError,
        match=r"virtual worker 1 needs round 0 of worker\(s\) 0, 2, which have not stepped yet; step every worker once",
    ):
        step(optimizers[1])
    step(optimizers[0])
    step(optimizers[2])
    step(optimizers[1])  # and goes on
    assert gossips[1].stats()["steps"] == 2


@pytest.mark.parametrize("call", ["averaged", "consensus_distance", "state_dict", "reset", "close"])
def test_collective_calls_belong_to_the_cluster(call):
    _, gossips, _, _ = start([2])

    def ask(gossip):
        asked = getattr(gossip, call)()
        if call == "averaged":
            asked.__enter__()

    with pytest.raises(InputError, match=rf"{call}\(\) is collective, and virtual workers share one thread; call"):
        ask(gossips[0])


BAD_SIZES = [{"n": 0}, {"n": -3}, {"n": 2.5}, {"per_node": []}, {"per_node": [2, 0]}]


@pytest.mark.parametrize("wrong", [{}, {"n": 2, "per_node": [1, 1]}, *BAD_SIZES])
def test_bad_clusters(wrong):
    with pytest.raises(InputError, match=r"pass|write"):
        gossamer.VirtualCluster(**wrong)


def test_wrong_number_of_models():
    models = [nn.Linear(2, 2) for _ in range(3)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    with pytest.raises(InputError, match="2 virtual workers need as many models and optimizers, got 3 and 3"):
        gossamer.VirtualCluster(2).decentralize(models, optimizers)


def test_a_cluster_in_use_is_refused():
    cluster, _, models, optimizers = start([2])
    with pytest.raises(InputError, match=r"this VirtualCluster is in use; close\(\) it first"):
        cluster.decentralize(models, optimizers)


@pytest.mark.parametrize("rank", [-1, 3, "0"])
def test_parking_a_worker_that_does_not_exist(rank):
    cluster, _, _, _ = start([3])
    with pytest.raises(InputError, match=r"cannot park worker .*: the workers are 0..2"):
        cluster.park(rank)


def other_shape():
    return nn.Linear(4, 2)


def other_name():
    m = nn.Module()
    m.weights, m.bias = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(3))
    return m


def other_buffer():
    m = nn.Linear(4, 3)
    m.register_buffer("seen", torch.zeros(1))
    return m


@pytest.mark.parametrize("other", [other_shape, other_name, other_buffer])
def test_workers_with_different_models_are_named(other):
    models = [nn.Linear(4, 3), nn.Linear(4, 3), other()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    with pytest.raises(InputError, match=r"workers disagree on .*: worker 0 has .*, worker 2 has .*; every"):
        gossamer.VirtualCluster(3).decentralize(models, optimizers)


def test_a_topology_of_another_size():
    models = [nn.Linear(4, 3) for _ in range(3)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    with pytest.raises(InputError, match="4"):
        gossamer.VirtualCluster(3).decentralize(models, optimizers, topology=build("ring", Layout.flat(4)))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"algorithm": "dsgd"}, r"algorithm must be one of awc, atc, ad-psgd, a2cid2, got 'dsgd'"),
        ({"wire": "fp8"}, r"unknown wire 'fp8'; choose one of fp32, bf16, fp16, int8"),
        ({"buffers": "max"}, r"buffers must be one of average, local, got 'max'"),
        ({"every": 0}, r"every must be an integer of at least 1, got 0"),
        ({"every": 1.5}, r"every must be an integer of at least 1, got 1.5"),
        ({"every": True}, r"every must be an integer of at least 1, got True"),
        ({"staleness": -1}, r"staleness must be an integer of at least 0, got -1"),
        ({"average_every": -1}, r"average_every must be an integer of at least 0, got -1"),
        ({"in_flight": 0}, r"in_flight must be an integer of at least 1, got 0"),
        ({"bucket_mib": 0}, r"bucket_mib must be a positive number of MiB, got 0; leave it out"),
        ({"bucket_mib": float("inf")}, r"bucket_mib must be a positive number of MiB, got inf; leave it out"),
        ({"bucket_mib": "25"}, r"bucket_mib must be a positive number of MiB, got '25'; leave it out"),
        ({"timeout": 0}, r"timeout must be a positive duration \(seconds or a timedelta\), got 0"),
        ({"timeout": None}, r"timeout must be a positive duration \(seconds or a timedelta\), got None"),
        ({"algorithm": "atc", "staleness": 1}, r"'atc' has no setting 'staleness'; it takes every, average_every"),
        ({"every": 4, "average_every": 6}, r"must be a multiple of every=4, got 6; use 8"),
        ({"every": 4, "average_every": 1}, r"must be a multiple of every=4, got 1; use 4"),
        ({"guard": 0.05}, r"guard must be a ConsensusGuard, a NeighborGuard or a list of both, got 0.05; pass Cons"),
    ],
)  # fmt: skip
def test_bad_settings(wrong, said):
    with pytest.raises(InputError, match=said) as caught:
        Settings.of(**policies(**wrong))
    assert "\n" not in str(caught.value)


def test_an_anchor_that_is_never_renewed_is_warned_of_once():
    with pytest.warns(gossamer.GossamerWarning, match=r"wire='int4' .*average_every=64") as caught:
        start([1] * 4, wire="int4")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start([1] * 4, wire="int4", average_every=8)
        start([1] * 4, wire="bf16")
