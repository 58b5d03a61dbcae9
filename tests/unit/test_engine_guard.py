"""The sketched consensus distance and the guard that averages exactly when it passes the limit."""

import math

import pytest
import torch
from torch import nn

import gossamer
from gossamer import ConsensusGuard
from gossamer.errors import GossamerError, InputError


def start(n=4, spread=1.0, elements=20000, lanes=1, lr=0.0, **settings):
    """Workers with gaussian parameters: common + spread * own."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(lanes, elements, generator=generator)
    models = []
    for _ in range(n):
        own = torch.randn(lanes, elements, generator=generator)
        models.append(nn.ParameterList([common[j] + spread * own[j] for j in range(lanes)]))
    optimizers = [[torch.optim.SGD([p], lr=lr) for p in m] for m in models]
    cluster = gossamer.VirtualCluster(n)
    gossips = cluster.decentralize(models, optimizers, broadcast=False, **settings)
    return cluster, gossips, models, optimizers


def step(models, optimizers):
    for m, os in zip(models, optimizers, strict=True):
        for p, o in zip(m, os, strict=True):
            p.grad = torch.zeros_like(p)
            o.step()


def exact(models):
    x = torch.stack([torch.cat([p.detach().double() for p in m]) for m in models])
    return float((x - x.mean(dim=0)).square().sum(dim=1).mean().sqrt()), float(x.square().sum(dim=1).mean().sqrt())


@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("lanes", [1, 2])
def test_the_sketch_is_near_the_exact_distance(spread, lanes):
    guard = ConsensusGuard(max_ratio=math.inf, every=4)
    _cluster, gossips, models, optimizers = start(spread=spread, lanes=lanes, guard=guard)
    distance, norm = exact(models)
    for _ in range(3):  # started beside round 0, read at round 2
        step(models, optimizers)
    sketched = [g.consensus_distance(exact=False) for g in gossips]
    assert len(set(sketched)) == 1
    assert sketched[0] == pytest.approx(distance, rel=0.15)
    assert gossips[0].stats()["guard_averages"] == 0
    if lanes == 1:
        assert gossips[0].stats()["consensus_ratio"] == pytest.approx(distance / norm, rel=0.15)


@pytest.mark.parametrize("algorithm", ["awc", "atc"])
def test_the_guard_averages_at_the_same_round_everywhere_and_counts_it(algorithm):
    guard = ConsensusGuard(max_ratio=0.1, every=4)
    _cluster, gossips, models, optimizers = start(5, topology="ring", guard=guard, algorithm=algorithm)
    mean = torch.stack([m[0].detach().double() for m in models]).mean(dim=0)
    for t in range(6):
        step(models, optimizers)
        forced = [g.stats()["guard_averages"] for g in gossips]
        assert forced == [int(t >= 2)] * 5, t  # round 2 reads what round 0 measured
    for m in models:
        torch.testing.assert_close(m[0].detach().double(), mean, rtol=1e-5, atol=1e-6)
    assert [g.stats()["exact_averages"] for g in gossips] == [1] * 5
    for _ in range(8):  # consensus is reached: the later sketches, of rounds 4 and 8, ask for nothing
        step(models, optimizers)
    assert [g.stats()["guard_averages"] for g in gossips] == [1] * 5
    assert gossips[0].consensus_distance(exact=False) < 1e-4


def test_below_the_limit_nothing_happens():
    guard = ConsensusGuard(max_ratio=0.5, every=2)
    _cluster, gossips, models, optimizers = start(spread=0.1, topology="ring", guard=guard)
    twin = start(spread=0.1, topology="ring")
    for _ in range(9):
        step(models, optimizers)
        step(twin[2], twin[3])
    assert [g.stats()["guard_averages"] for g in gossips] == [0] * 4
    assert all(torch.equal(a[0], b[0]) for a, b in zip(models, twin[2], strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_raises_the_same_clear_error_on_every_worker(bad):
    _cluster, _gossips, models, optimizers = start(topology="ring", guard=ConsensusGuard(every=4))
    with torch.no_grad():
        models[2][0][7] = bad
    for _ in range(2):
        step(models, optimizers)
    said = []
    for m, os in zip(models, optimizers, strict=True):
        m[0].grad = torch.zeros_like(m[0])
        with pytest.raises(GossamerError, match=r"not finite .* in round 0; lower the learning rate") as caught:
            os[0].step()
        said.append(str(caught.value))
    assert len(set(said)) == 1


def test_no_sketch_without_a_guard():
    _, gossips, _, _ = start()
    with pytest.raises(InputError, match=r"no sketch without a guard; pass guard=ConsensusGuard\(\) or"):
        gossips[0].consensus_distance(exact=False)


def test_before_the_first_sketch_it_is_nan():
    _, gossips, _, _ = start(guard=ConsensusGuard())
    assert math.isnan(gossips[0].consensus_distance(exact=False))


def test_one_worker_has_no_distance():
    _, gossips, models, optimizers = start(1, guard=ConsensusGuard(every=2))
    for _ in range(4):
        step(models, optimizers)
    assert gossips[0].consensus_distance(exact=False) == 0.0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_ratio": 0}, "max_ratio must be a positive number, got 0"),
        ({"max_ratio": -1.0}, "max_ratio must be a positive number, got -1.0"),
        ({"max_ratio": math.nan}, "max_ratio must be a positive number, got nan"),
        ({"max_ratio": "5%"}, "max_ratio must be a positive number, got '5%'"),
        ({"every": 1}, "every must be an integer of at least 2 rounds, got 1"),
        ({"every": 2.5}, "every must be an integer of at least 2 rounds, got 2.5"),
    ],
)
def test_bad_guards(wrong, said):
    with pytest.raises(InputError, match=said):
        ConsensusGuard(**wrong)
