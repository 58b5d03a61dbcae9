"""AD-PSGD and A2CiD2 in elastic jobs: the mean is conserved while nobody dies; the others continue when one does."""

import random
import threading

import pytest
import torch
from torch import nn

from elastic import end_now, finish, job, until
from gossamer.comm import Purpose
from gossamer.comm.tcp.frame import Kind
from gossamer.comm.tcp.link import Link

ALGORITHMS = ["ad-psgd", "a2cid2"]


def still(made):
    """Let the workers of `made` start apart and take steps of learning rate 0."""

    def make(rank):
        torch.manual_seed(rank)
        model = nn.Linear(8, 4, dtype=torch.float64)
        return model, torch.optim.SGD(model.parameters(), lr=0.0)

    def train(rank, step, model, optimizer):
        model(torch.ones(1, 8, dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    made.make, made.train = make, train
    return [torch.cat([p.detach().flatten() for p in make(rank)[0].parameters()]) for rank in range(made.n)]


def exchanged(workers, rounds):
    """Wait until each of `workers` has made so many further exchanges."""
    before = [w.gossip.stats()["rounds"] for w in workers]
    until(lambda: all(w.gossip.stats()["rounds"] > k + rounds for w, k in zip(workers, before, strict=True)))


def state(gossip):
    stats = gossip.stats()  # before any worker can have left
    lane = gossip.state_dict()["lanes"][0]
    return stats, lane["x"], lane["x_tilde"]


def mean(results):
    values = [torch.cat(x if xt is None else [(a + b) / 2 for a, b in zip(x, xt, strict=True)]) for _, x, xt in results]
    return torch.stack(values).mean(0)


def spread(results):
    values = torch.stack([torch.cat(x) for _, x, _ in results])
    return float((values - values.mean(0)).square().sum(1).mean().sqrt())


def aligned(vector):
    """As the engine lays out a weight of 32 and a bias of 4 elements of 8 bytes."""
    return torch.cat([vector, vector.new_zeros(4)])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_mean_is_conserved_although_connections_break(monkeypatch, algorithm):
    """A connection that breaks takes with it what it had accepted: one side has everything, the other has not."""
    draw, broken, send = random.Random(0), [], Link.send

    def unreliable(link, header, payload=b"", given_up=None):
        if header.kind is Kind.DATA and header.channel.purpose is Purpose.PARAMETERS and draw.random() < 0.2:
            broken.append(header.bucket)
            threading.Timer(0.02, link.close, ["the test broke it"]).start()
        else:
            send(link, header, payload, given_up)

    with job(monkeypatch, 4, topology="ring", algorithm=algorithm, broadcast=False) as made:
        starts = still(made)
        workers = made.all(10**6, state, pause=0.004)
        for worker in workers:
            worker.until(20)
        monkeypatch.setattr(Link, "send", unreliable)
        until(lambda: broken.count(0) > 5)
        exchanged(workers, 10)
        monkeypatch.setattr(Link, "send", send)
        exchanged(workers, 50)
        results = end_now(workers)
    assert all(stats["members"] == [0, 1, 2, 3] for stats, _, _ in results)
    torch.testing.assert_close(mean(results), aligned(torch.stack(starts).mean(0)), rtol=0, atol=1e-12)
    apart = torch.stack(starts)
    assert spread(results) < 0.5 * float((apart - apart.mean(0)).square().sum(1).mean().sqrt())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_others_continue_and_a_replacement_takes_both_copies(monkeypatch, algorithm):
    with job(monkeypatch, 4, topology="ring", algorithm=algorithm) as made:
        workers = made.all(10**6, state, pause=0.01)
        workers[0].until(40)
        workers[0].kill()
        others = workers[1:]
        until(lambda: all(w.gossip.stats()["members"] == [1, 2, 3] for w in others))
        exchanged(others, 5)
        begun = min(w.gossip.stats()["steps"] for w in others)  # each worker has its own pace
        replacement = made.start(0, 10**6, state, pause=0.01)
        replacement.until(1)
        members = [replacement, *others]
        until(lambda: all(w.gossip.stats()["members"] == [0, 1, 2, 3] for w in members))
        exchanged([replacement], 5)
        results = end_now(members)
    assert replacement.started_at >= begun > 0
    for stats, x, x_tilde in results:
        assert stats["members"] == [0, 1, 2, 3]
        assert all(bool(torch.isfinite(v).all()) for v in x)
        assert (x_tilde is None) == (algorithm == "ad-psgd")
    assert results[0][0]["joined"]
    assert results[0][0]["unit_seconds_by_lane"] == pytest.approx(results[1][0]["unit_seconds_by_lane"])


def test_the_rates_follow_the_members(monkeypatch):
    with job(monkeypatch, 5, topology="ring", algorithm="a2cid2") as made:
        workers = made.all(10**6, pause=0.01)
        for worker in workers:
            worker.until(20)
        eta = workers[0].gossip.lanes[0].state.eta
        workers[4].kill()
        until(lambda: all(w.gossip.lanes[0].state.eta > eta for w in workers[:4]))  # a smaller ring mixes faster
        lane = workers[0].gossip.lanes[0]
        assert lane.schedule.topology.n == 4
        assert lane.timetable.events.ranks == (0, 1, 2, 3)
        end_now(workers[:4])


def test_a_neighbor_that_stands_still_is_skipped_and_nobody_waits(monkeypatch):
    """The communication thread of worker 2 stops answering, its heartbeats too."""
    with job(monkeypatch, 4, topology="ring", algorithm="ad-psgd", soft_deadline=0.1) as made:
        workers = made.all(10**6, state, pause=0.005)
        until(lambda: all(w.gossip is not None and w.gossip.stats()["rounds"] > 5 for w in workers))
        lane = workers[2].gossip.lanes[0]
        lane._lock.acquire()  # neither its steps nor its events can go on
        try:
            at = [w.gossip.stats()["steps"] for w in workers]
            others = [w for w in workers if w.rank != 2]
            until(lambda: all(w.gossip.stats()["steps"] > at[w.rank] + 60 for w in others))
            given_up = [w.gossip.stats()["given_up_exchanges"] for w in others]
            until(lambda: sum(w.gossip.stats()["given_up_exchanges"] for w in others) > sum(given_up))
            exchanged(workers[:1], 15)  # with worker 1, or 3, which answer
            assert all(w.gossip.stats()["members"] == [0, 1, 2, 3] for w in others)
        finally:
            lane._lock.release()
        end_now(workers)


def test_max_staleness_does_not_wait_for_the_dead(monkeypatch):
    with job(monkeypatch, 3, topology="ring", algorithm="ad-psgd", max_staleness=5) as made:
        workers = made.all(120, pause=0.005)
        workers[1].until(20)
        workers[1].kill()
        finish([workers[0], workers[2]])


def test_max_staleness_does_not_wait_for_the_dead_although_the_directory_is_gone(monkeypatch):
    """They stay members. Worker 0 has no exchanges with worker 2, workers 1 and 3 have."""
    options = {"topology": "ring", "algorithm": "ad-psgd", "max_staleness": 5}
    with job(monkeypatch, 4, soft_deadline=0.2, **options) as made:
        workers = made.all(100000, pause=0.005)
        for worker in workers:
            worker.until(20)
        made.directory.close()
        workers[2].kill()
        others = [w for w in workers if w.rank != 2]
        for worker in others:
            worker.until(worker.gossip.stats()["steps"] + 30)
        assert all(w.gossip.stats()["members"] == [0, 1, 2, 3] for w in others)
        end_now(others)


def test_a_worker_that_was_dropped_while_it_was_held_back_joins_again(monkeypatch):
    """It hears of nobody's steps any more, and joins after a step of its own."""
    options = {"topology": "ring", "algorithm": "ad-psgd", "max_staleness": 5}
    with job(monkeypatch, 3, soft_deadline=5.0, **options) as made:
        workers = made.all(100000, pause=0.005)
        for worker in workers:
            worker.until(20)
        others = [workers[0], workers[2]]
        for worker in others:
            worker.frozen.set()
        gossip, lane = workers[1].gossip, workers[1].gossip.lanes[0]
        until(lambda: lane.state.ahead() > 5)
        incarnation = gossip.members.me.incarnation
        for worker in others:
            worker.gossip.members.links.peer(1).dead = "the test says so"
            worker.gossip.members._hurry.set()
        until(lambda: gossip.members.excluded)
        for worker in others:
            worker.frozen.clear()
        until(lambda: gossip.members.me.incarnation != incarnation and not gossip.members.excluded)
        until(lambda: all(w.gossip.stats()["members"] == [0, 1, 2] for w in workers))
        for worker in workers:
            worker.until(worker.gossip.stats()["steps"] + 20)
        end_now(workers)


def test_collective_calls_cover_the_members(monkeypatch):
    def end(gossip):
        first = gossip.consensus_distance()
        with gossip.averaged() as model:
            center = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        return first, center, gossip.met.ranks

    with job(monkeypatch, 4, topology="ring", algorithm="a2cid2") as made:
        made.deaths[3] = 30
        workers = made.all(80, end, pause=0.01)
        results = finish(workers[:3])
    for distance, center, ranks in results:
        assert ranks == (0, 1, 2)
        assert distance == pytest.approx(results[0][0])
        assert torch.equal(center, results[0][1])


def test_a_worker_that_was_dropped_joins_again(monkeypatch):
    with job(monkeypatch, 3, topology="ring", algorithm="a2cid2", soft_deadline=0.1) as made:
        workers = made.all(100000, pause=0.01)
        for worker in workers:
            worker.until(20)
        gossip = workers[1].gossip
        incarnation = gossip.members.me.incarnation
        for peer in (0, 2):  # the others find it dead
            workers[peer].gossip.members.links.peer(1).dead = "the test says so"
            workers[peer].gossip.members._hurry.set()
        until(lambda: gossip.members.me.incarnation != incarnation and not gossip.members.excluded)
        until(lambda: all(w.gossip.stats()["members"] == [0, 1, 2] for w in workers))
        exchanged(workers[1:2], 5)
        end_now(workers)


def test_threads_are_gone_after_close(monkeypatch):
    with job(monkeypatch, 3, topology="ring", algorithm="ad-psgd") as made:
        before = {t.name for t in threading.enumerate()}
        finish(made.all(30, pause=0.005))
        until(lambda: not {t.name for t in threading.enumerate() if t.name.startswith("gossamer")} - before)
