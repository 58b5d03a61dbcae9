"""Outer steps on real processes, with exact averages inside nodes, and in elastic jobs."""

import pytest
import torch
from workers import decentralize, loss_of, mlp, process_group, seeded, vector

import gossamer
from elastic import end_now, job
from policies import policies

STEPS = 8
CASES = [
    {"topology": "ring", "algorithm": "awc", "every": 2, "outer": gossamer.Nesterov()},
    {"topology": "aer", "algorithm": "atc", "every": 3, "outer": gossamer.HeavyBall(lr=0.5)},
    {"topology": "one-peer-exponential", "algorithm": "awc", "every": 2, "outer": gossamer.Accelerated(lr=0.5)},
    {"topology": "ring", "algorithm": "awc", "average_every": 3, "outer": gossamer.SlowMo()},
]


def worker(rank):
    model = seeded(rank, lambda: mlp(16))
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def on_processes(rank, cases):
    results = []
    with process_group():
        for case in cases:
            model, optimizer = worker(rank)
            with decentralize(model, optimizer, gradients="worker", **case) as gossip:
                for step in range(STEPS):
                    loss_of(model, rank, step).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                own = vector(model)
                with gossip.averaged():
                    results.append((own, vector(model)))
    return results


def test_processes_equal_virtual_workers_bit_by_bit(pools):
    results = pools(2, 2).run(on_processes, CASES)
    for at, case in enumerate(CASES):
        parts = [worker(rank) for rank in range(4)]
        models = [model for model, _ in parts]
        with gossamer.VirtualCluster(per_node=[2, 2]) as cluster:
            cluster.decentralize(models, [optimizer for _, optimizer in parts], **policies(**case))
            for step in range(STEPS):
                for rank, (model, optimizer) in enumerate(parts):
                    loss_of(model, rank, step).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            for rank in range(4):
                assert torch.equal(results[rank][at][0], vector(models[rank])), f"{case}, worker {rank}"
            with cluster.averaged():
                assert torch.equal(results[0][at][1], vector(models[0]))


def inside_nodes(rank, algorithm):
    seen = []
    with process_group():
        model, optimizer = worker(rank)
        settings = {"every": 2, "outer": gossamer.Nesterov(), "algorithm": algorithm, "topology": "ring"}
        with decentralize(model, optimizer, gradients="node", **settings):
            for step in range(STEPS):
                loss_of(model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(vector(model))
    return seen


@pytest.mark.parametrize("algorithm", ["awc", "atc"])
def test_the_workers_of_a_node_stay_one_replica(pools, algorithm):
    """Exact inside: a node takes the outer step of one worker with the node's batches, bit-equal on its workers."""
    results = pools(2, 2).run(inside_nodes, algorithm)
    parts = [worker(0) for _ in range(2)]
    with gossamer.VirtualCluster(2) as cluster:
        settings = {"every": 2, "outer": gossamer.Nesterov(), "algorithm": algorithm, "topology": "ring"}
        cluster.decentralize([m for m, _ in parts], [o for _, o in parts], **policies(**settings))
        for step in range(STEPS):
            for node, (model, optimizer) in enumerate(parts):
                sum(loss_of(model, 2 * node + i, step) for i in range(2)).div(2).backward()
                optimizer.step()
                optimizer.zero_grad()
            for rank in range(4):
                assert torch.equal(results[rank][step], results[rank - rank % 2][step])
                torch.testing.assert_close(results[rank][step], vector(parts[rank // 2][0]), rtol=2e-5, atol=2e-6)


def test_an_elastic_job_loses_and_regains_a_member(monkeypatch):
    """A member's death costs its exchanges; a newcomer starts at its donor's parameters without velocity."""
    options = {"topology": "ring", "every": 4, "outer": gossamer.Nesterov(lr=0.5, momentum=0.3)}
    with job(monkeypatch, 3, 1, soft_deadline=5.0, **options) as made:
        workers = made.all(10**6, lambda gossip: gossip.consensus_distance(), pause=0.01)
        workers[2].until(20)
        workers[2].kill()
        workers[0].until(50)
        replacement = made.start(2, 10**6, lambda gossip: gossip.consensus_distance(), pause=0.01)
        replacement.until(1)
        replacement.until(replacement.gossip.stats()["steps"] + 50)
        distances = end_now([*workers[:2], replacement])
    assert replacement.gossip.stats()["joined"]
    assert max(distances) < 0.5
