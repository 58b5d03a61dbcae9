"""Asynchronous gossip on real processes and the wall clock: wires, buckets, nodes, budgets, schedules, leaving."""

import time

import pytest
import torch
from workers import loss_of, mlp, real, seeded, vector

import gossamer

ALGORITHMS = ["ad-psgd", "a2cid2"]


def idle(rank, decentralize, algorithm, wire):
    """No learning: whatever moves is communication. Every worker starts somewhere else; many buckets."""
    model = seeded(rank, lambda: mlp(200))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = {"topology": "ring", "algorithm": algorithm, "wire": wire, "rate": 2.0, "bucket_mib": 0.001}
    with decentralize(model, optimizer, broadcast=False, **settings) as gossip:
        state = gossip.lanes[0].state
        start = torch.cat(state.x).double()  # nothing is exchanged before the first steps
        before = gossip.consensus_distance()
        while gossip.stats()["rounds"] < 25:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
            time.sleep(0.002)
        with gossip._together("look"):
            mine = torch.cat(state.x).double() + torch.cat(state.x_tilde or state.x).double()
        after = gossip.consensus_distance()
        held = vector(model)
        with gossip.averaged():
            mean = vector(model)
        assert torch.equal(vector(model), held)
        stats = gossip.stats()
    return start, mine / 2, mean, (before, after), stats


@pytest.mark.parametrize(("algorithm", "wire"), [("ad-psgd", "int8"), ("a2cid2", "bf16"), ("a2cid2", "fp32")])
def test_every_wire_conserves_the_mean_between_and_inside_nodes(pools, algorithm, wire):
    results = pools(2, 2).run(real, idle, algorithm, wire)
    starts, states, means, distances, stats = zip(*results, strict=True)
    torch.testing.assert_close(sum(states), sum(starts), rtol=0, atol=2e-5)
    assert all(torch.equal(m, means[0]) for m in means)
    assert len(set(distances)) == 1  # everybody is told the same
    before, after = distances[0]
    assert after < 0.3 * before
    assert all(s["buckets"] > 1 for s in stats)
    assert len({s["unit_seconds_by_lane"][0] for s in stats}) == 1
    assert sum(s["bytes_sent_inter"] for s in stats) > 0
    assert sum(s["bytes_sent_intra"] for s in stats) > 0


def scheduled(rank, decentralize, total):
    """The learning rate falls with global progress; one worker is slow: it waits until the others have done more steps.
    Another's data are few and read again. `max_staleness` keeps together what a busy machine would drive apart."""
    model = seeded(0, mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    few = 3 if rank == 2 else 1000
    done, rates = [], []
    settings = {"topology": "ring", "algorithm": "a2cid2", "rate": 2.0, "max_staleness": 20}
    with decentralize(model, optimizer, **settings) as gossip:
        lane = gossip.lanes[0]
        counts = lane.state.counts[0]  # by worker; nothing is known of the others before they agree on a unit of time

        def others_are_ahead():
            return lane.clock.unit is None or min(counts[0], counts[2]) >= len(done) + 3

        for known in gossip.budget(total):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * (1 - known / total)
            loss_of(model, rank, len(done) % few).backward()
            while rank == 1 and gossip.total_steps < total and not others_are_ahead():
                time.sleep(0.002)
            time.sleep(0.004)
            optimizer.step()
            optimizer.zero_grad()
            done.append(known)
            rates.append(optimizer.param_groups[0]["lr"])
        known = gossip.total_steps
        with gossip.averaged():
            mean = vector(model)
    return len(done), done, rates, known, mean


def test_schedules_follow_global_progress_and_the_budget_is_spent_by_the_fast(pools):
    total = 240
    results = pools(3).run(real, scheduled, total)
    steps = [r[0] for r in results]
    assert steps[1] < min(steps[0], steps[2])
    assert total <= sum(steps)
    for _, done, rates, known, mean in results:
        assert done == sorted(done)
        assert known >= total
        assert rates == sorted(rates, reverse=True)
        assert rates[0] == pytest.approx(0.1)
        assert 0 < rates[-1] < 0.05  # the end of the schedule was reached by everybody, the slow one too
        assert torch.equal(mean, results[0][4])


def forgotten(rank, decentralize, algorithm):
    """Worker 1 ends without close(), in the middle of training; the others are told."""
    model = seeded(0, mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gossip = decentralize(model, optimizer, topology="complete", algorithm=algorithm, rate=2.0)
    try:
        for step in range(10**6):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 1 and gossip.stats()["rounds"] > 10:
                gossip._stop(drain=0.0)
                return None
    except gossamer.GossamerError as error:
        gossip._stop(drain=0.0)
        return type(error).__name__, str(error)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_worker_that_leaves_ends_the_others_with_a_sentence(pools, algorithm):
    left, stayed = pools(2).run(real, forgotten, algorithm)[::-1]
    assert left is None
    assert stayed[0] == "PeerError"
    assert "worker 0 lost worker 1" in stayed[1]
    assert "\n" not in stayed[1]
