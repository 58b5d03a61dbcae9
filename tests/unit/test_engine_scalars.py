"""Numbers for experiment trackers: `scalars()`, and counts that continue after a resume."""

import math

import pytest
import torch
from torch import nn

import gossamer
from gossamer.engine.metrics import RECENT, Metrics
from gossamer.topology import Layout
from policies import policies


def started(n=3, lanes=1, **settings):
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)) for _ in range(n)]
    parts = [list(m) if lanes == 2 else [m] for m in models]
    optimizers = [[torch.optim.SGD(part.parameters(), lr=0.1) for part in each] for each in parts]
    cluster = gossamer.VirtualCluster(n)
    cluster.decentralize(models, optimizers, **policies(**settings))
    return cluster, models, optimizers


def train(models, optimizers, steps):
    for _ in range(steps):
        for model, mine in zip(models, optimizers, strict=True):
            model(torch.randn(5, 4)).square().mean().backward()
            for optimizer in mine:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("settings", [{}, {"lanes": 2}, {"algorithm": "ad-psgd"}, {"n": 1}], ids=str)
def test_all_values_are_finite_numbers_with_the_prefix(settings):
    cluster, models, optimizers = started(**settings)
    for _ in range(2):
        for found in (cluster.gossips[0].scalars(prefix="train/g_"), cluster.scalars(prefix="train/g_")):
            assert all(name.startswith("train/g_") for name in found)
            assert all(type(value) is float and math.isfinite(value) for value in found.values())
        train(models, optimizers, 4)
    found = cluster.gossips[0].scalars()
    stats = cluster.gossips[0].stats()
    assert found["gossip/steps"] == 8
    for name in ("rounds", "bytes_sent", "bytes_sent_inter", "seconds_waited"):
        assert found[f"gossip/{name}"] == stats[name]
    assert found["gossip/replicas"] == settings.get("n", 3)
    assert 0 <= found["gossip/waiting_share"] <= 1
    assert found["gossip/seconds_per_step"] > 0


def test_numbers_that_are_not_known_are_left_out():
    cluster, models, optimizers = started()
    known = set(cluster.gossips[0].scalars())
    assert not known & {"gossip/consensus_distance", "gossip/waiting_share", "gossip/seconds_per_step"}
    train(models, optimizers, 3)
    assert "gossip/consensus_distance" not in cluster.gossips[0].scalars()
    distance = cluster.consensus_distance()
    assert cluster.scalars()["gossip/consensus_distance"] == distance > 0


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_distance_is_that_of_the_guard(lanes):
    cluster, models, optimizers = started(lanes=lanes, guard=gossamer.ConsensusGuard(max_ratio=math.inf, every=4))
    train(models, optimizers, 2)
    assert "gossip/consensus_distance" not in cluster.gossips[0].scalars()
    train(models, optimizers, 8)
    found = cluster.gossips[0].scalars()["gossip/consensus_distance"]
    assert found == cluster.gossips[0].consensus_distance(exact=False) > 0


def test_the_pace_is_that_of_the_last_steps(monkeypatch):
    now = 0.0
    monkeypatch.setattr("gossamer.engine.metrics.clock", lambda: now)
    metrics = Metrics(0, Layout.flat(2), None)
    assert metrics.pace() is None
    for step in range(3 * RECENT):
        slow = step < RECENT
        now += 10.0 if slow else 2.0
        metrics.waited_total += 8.0 if slow else 0.5
        metrics.stepped()
        if step == 0:
            assert metrics.pace() is None
        elif step < RECENT:
            assert metrics.pace() == (10.0, 0.8)
    assert metrics.pace() == (2.0, 0.25)


@pytest.mark.parametrize(
    "settings", [{}, {"algorithm": "atc", "every": 2}, {"algorithm": "ad-psgd"}, {"lanes": 2}], ids=str
)
def test_steps_and_rounds_continue_after_a_resume(settings):
    cluster, models, optimizers = started(**settings)
    train(models, optimizers, 6)
    states, before = cluster.state_dicts(), [g.stats() for g in cluster.gossips]
    again, models, optimizers = started(**settings)
    again.load_state_dicts(states)
    for gossip, stats in zip(again.gossips, before, strict=True):
        assert gossip.stats()["steps"] == stats["steps"] == 6
        assert gossip.stats()["rounds"] == stats["rounds"] > 0
    train(models, optimizers, 6)
    assert all(g.stats()["rounds"] > s["rounds"] for g, s in zip(again.gossips, before, strict=True))


def test_an_empty_cluster_has_no_numbers():
    assert gossamer.VirtualCluster(2).scalars() == {}
