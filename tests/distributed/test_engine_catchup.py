"""Workers that skip steps and have different amounts of data: no worker waits forever, all end at the same round."""

import random

import pytest
import torch
from dense_reference import DenseCluster
from workers import assert_close, decentralize, loss_of, mlp, process_group, real, seeded, vector

TRIALS = 5


def random_trial(rank, decentralize, seed, lanes, algorithm="awc"):
    """Seeded skips and lengths; the seed is the same on all workers, what each draws from it is not."""
    draw = random.Random(seed * 100 + rank)
    shared = random.Random(seed)
    topology = shared.choice(["ring", "ring-static", "aer", "one-peer-exponential", "complete", "random-matching"])
    chance = shared.choice([0.0, 0.2, 0.5])
    model = seeded(0, mlp)
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)]
    optimizer = optimizers if lanes == 2 else torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with decentralize(model, optimizer, topology=topology, algorithm=algorithm) as gossip:
        for epoch in range(2):
            for step in range(draw.randint(0, 8)):
                loss_of(model, rank, step + 50 * epoch).backward()
                for each in optimizers if lanes == 2 else [optimizer]:
                    if draw.random() >= chance:
                        each.step()
                model.zero_grad()
                seen.append(vector(model))
            with gossip.averaged():
                mean = vector(model)
            seen += [mean, vector(model)]
        rounds = [lane.k for lane in gossip.lanes]
        distance = gossip.consensus_distance()
    return seen, rounds, mean, distance


def trials(rank, seeds, lanes, algorithm="awc"):
    with process_group():
        return [random_trial(rank, decentralize, seed, lanes, algorithm) for seed in seeds]


@pytest.mark.parametrize(("n", "algorithm"), [(3, "awc"), (4, "awc"), (5, "awc"), (3, "atc")])
def test_two_lanes_do_not_deadlock(pools, n, algorithm):
    seeds = range(1000 * n, 1000 * n + TRIALS)
    for trial in zip(*pools(n).run(trials, seeds, 2, algorithm, timeout=300), strict=True):
        _, rounds, mean, distance = trial[0]
        for _, their_rounds, their_mean, their_distance in trial:
            assert their_rounds == rounds
            assert torch.equal(their_mean, mean)
            assert their_distance == distance


@pytest.mark.parametrize("n", [3, 4])
def test_one_lane_is_deterministic_and_equals_the_dense_reference(pools, n):
    seeds = range(2000 * n, 2000 * n + TRIALS)
    first, second = (pools(n).run(trials, seeds, 1) for _ in range(2))
    for at, seed in enumerate(seeds):
        dense = DenseCluster((n,)).run(random_trial, seed, 1)
        for rank in range(n):
            assert all(torch.equal(x, y) for x, y in zip(first[rank][at][0], second[rank][at][0], strict=True))
            assert first[rank][at][1] == dense[rank][1]
        assert_close([r[at][0] for r in first], [d[0] for d in dense])


def lone_lag(rank, decentralize):
    """Worker 0 has no data at all and serves the others; then it is the only one to go on for a while."""
    model = seeded(0, mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with decentralize(model, optimizer, topology="complete") as gossip:
        for epoch, idle in enumerate((rank == 0, rank != 0)):
            for step in range(0 if idle else 4):
                loss_of(model, rank, step + 10 * epoch).backward()
                optimizer.step()
                optimizer.zero_grad()
            with gossip.averaged():
                seen.append(vector(model))
    return seen


def test_a_worker_without_data_serves_the_others(pools):
    assert_close(pools(3).run(real, lone_lag), DenseCluster((3,)).run(lone_lag))
