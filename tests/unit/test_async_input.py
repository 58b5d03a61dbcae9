"""Asynchronous gossip: what is conserved, for every wire, and what is refused, in one sentence."""

import networkx as nx
import pytest
import torch
from torch import nn

from gossamer import ConsensusGuard, InputError, VirtualCluster
from policies import policies

ALGORITHMS = ["ad-psgd", "a2cid2"]


def cluster_of(n, make=lambda ps: torch.optim.SGD(ps, lr=0.0), **settings):
    generator = torch.Generator().manual_seed(1)
    models = [nn.ParameterList([torch.randn(300, generator=generator)]) for _ in range(n)]
    optimizers = [make(m.parameters()) for m in models]
    cluster = VirtualCluster(n)
    gossips = cluster.decentralize(models, optimizers, broadcast=False, **policies(**{"topology": "ring", **settings}))
    return cluster, gossips, models, optimizers


@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("topology", ["ring", "star", "complete"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_mean_is_conserved_and_workers_approach_each_other(algorithm, topology, wire):
    cluster, gossips, _, optimizers = cluster_of(6, topology=topology, algorithm=algorithm, wire=wire, rate=2.0)

    def total():
        states = [g.lanes[0].state for g in gossips]
        return sum((sum(a.double() for a in (*s.x, *(s.x_tilde or s.x))) for s in states), torch.zeros(()))

    before, first = total(), cluster.consensus_distance()
    for _ in range(60):
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(total(), before, rtol=0, atol=2e-5)
    floor = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.02, "int8": 0.3}[wire]
    assert cluster.consensus_distance() < floor * first


@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_pair_gains_what_it_loses(algorithm, wire):
    cluster, gossips, *_ = cluster_of(2, algorithm=algorithm, wire=wire)
    lanes = [g.lanes[0] for g in gossips]
    for event, _ in zip(lanes[0].timetable.events.stream(), range(20), strict=False):
        before = [lane.state.x[0].double() for lane in lanes]
        jobs = [lane.begin(event) for lane in lanes]
        mixed = [lane.state.x[0].double() for lane in lanes]  # after Mix, before the exchange
        for lane, launched in zip(lanes, jobs, strict=True):
            lane.end(event, launched)
        after = [lane.state.x[0].double() for lane in lanes]
        scale = max(x.abs().max() for x in before)
        assert (after[0] + after[1] - mixed[0] - mixed[1]).abs().max() <= 4 * torch.finfo(torch.float32).eps * scale
    cluster.close()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rate": 0}, "rate must be a positive number of exchanges per gradient, got 0"),
        ({"rate": -1.0}, "rate must be a positive number of exchanges per gradient, got -1.0"),
        ({"max_staleness": 0}, "max_staleness=0 would keep all workers in step"),
        ({"max_staleness": 0, "gaps": "fixed"}, "max_staleness=0 would keep all workers in step"),
        ({"max_staleness": -2}, "max_staleness must be an integer of at least 1, got -2"),
        ({"max_staleness": 1, "clock": "virtual"}, "the virtual clock fixes their pace"),
        ({"every": 2}, "algorithm 'a2cid2' exchanges at random times and has no rounds, so every does not apply"),
        ({"staleness": 1}, "algorithm 'a2cid2' has no setting 'staleness'"),
        ({"average_every": 4}, "algorithm 'a2cid2' has no setting 'average_every'"),
        ({"guard": ConsensusGuard()}, "needs rounds"),
        ({"gaps": "uniform"}, "gaps must be one of poisson, fixed, got 'uniform'"),
        ({"pairing": "random"}, "pairing must be one of auto, edges, rounds, got 'random'"),
        ({"clock": "sun"}, "clock must be one of wall, virtual, got 'sun'"),
    ],
)
def test_bad_settings_are_refused(settings, sentence):
    with pytest.raises(InputError) as error:
        cluster_of(3, algorithm="a2cid2", **settings)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["rate", "max_staleness", "clock"])
def test_synchronous_algorithms_refuse_asynchronous_settings(name):
    with pytest.raises(
        InputError, match=f"algorithm 'awc' has no setting '{name}'; it takes every, average_every, .*staleness"
    ):
        cluster_of(3, algorithm="awc", **{name: {"rate": 2.0, "max_staleness": 3, "clock": "virtual"}[name]})


def test_lbfgs_is_refused():
    with pytest.raises(InputError, match="LBFGS"):
        cluster_of(2, torch.optim.LBFGS, algorithm="a2cid2")


def test_a_disconnected_topology_is_refused():
    with pytest.raises(InputError, match="topology 'custom' is disconnected: workers 0 and 2 never reach each other"):
        cluster_of(4, algorithm="a2cid2", topology=nx.Graph([(0, 1), (2, 3)]))


def test_a_state_of_another_algorithm_is_refused():
    first, *_ = cluster_of(3, algorithm="ad-psgd")
    second, *_ = cluster_of(3, algorithm="a2cid2")
    with pytest.raises(InputError, match=r"saved by algorithm 'ad-psgd' and this run has 'a2cid2'"):
        second.load_state_dicts(first.state_dicts())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_budget_counts_the_steps_of_all(algorithm):
    cluster, gossips, _, optimizers = cluster_of(4, algorithm=algorithm, rate=2.0)
    budget = gossips[0].budget(40)
    done = []
    for known in budget:
        done.append(known)
        for optimizer in optimizers:
            optimizer.step()
    total = sum(g.lanes[0].metrics.steps for g in gossips)
    assert done[0] == 0
    assert done == sorted(done)
    assert 40 <= total <= 40 + 4 * 6  # what worker 0 had not heard of yet
    assert gossips[0].total_steps <= total
    with pytest.raises(InputError, match="a budget must be a positive number of steps, got 0"):
        next(gossips[0].budget(0))
    cluster.close()
