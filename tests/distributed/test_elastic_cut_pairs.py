"""Elastic jobs in which a member cannot be reached and cannot be dropped, and links that only a meeting needs."""

import pytest
import torch
from torch import nn

from elastic import end_now, job, until
from gossamer.comm.tcp import TcpChannel, liveness
from gossamer.comm.tcp.links import LinkTable


@pytest.mark.parametrize("options", [{}, {"algorithm": "ad-psgd"}])
def test_a_member_that_cannot_be_dropped_is_not_waited_for_after_its_links_have_closed(monkeypatch, options):
    """The directory is gone, and a worker stands still for longer than the hard deadline."""
    connect, cut = LinkTable.connect, set()
    give_up, given_up = TcpChannel.give_up, []

    def noted(self, job):
        given_up.append(job.stamp.peers)
        give_up(self, job)

    monkeypatch.setattr(TcpChannel, "give_up", noted)
    monkeypatch.setattr(LinkTable, "connect", lambda s, p: 1 not in cut & {s.rank, p.rank} and connect(s, p))
    with job(monkeypatch, 3, 1, topology="ring", soft_deadline=0.3, **options) as made:
        workers = made.all(10**6, pause=0.005)
        for worker in workers:
            worker.until(20)
        until(lambda: all(w.gossip.stats()["members"] == [0, 1, 2] for w in workers))
        made.directory.close()
        cut.add(1)
        frozen = workers[1].gossip.members
        frozen.links.send_all = lambda *a, **k: None
        workers[1].frozen.set()
        others = [workers[0], workers[2]]
        for worker in others:
            worker.gossip.members._liveness._hard = 2.0  # not before: without the directory nobody could join again
        views = [w.gossip.members.links.peer(1) for w in others]
        until(lambda: all(view.link is None and view.late for view in views))  # each has waited for it once
        for worker in others:
            worker.gossip.members.deadlines.fixed = 60.0  # so that only a wait for worker 1 is ever given up
        for worker in others:
            worker.until(worker.gossip.stats()["steps"] + 3)
        given_up.clear()
        for worker in others:
            lost = worker.gossip.stats()["lost_exchanges"]
            until(lambda w=worker, lost=lost: w.gossip.stats()["lost_exchanges"] >= lost + 10)
        assert not [peers for peers in given_up if 1 in peers]
        workers[1].frozen.clear()
        workers[1].kill()
        end_now(others)


def test_a_pair_that_cannot_connect_mixes_with_its_other_neighbors(monkeypatch):
    """In a ring of four, the broken pair is connected by way of the two others, so all come to agree."""
    connect = LinkTable.connect
    monkeypatch.setattr(LinkTable, "connect", lambda s, p: {s.rank, p.rank} != {0, 1} and connect(s, p))

    def make(rank):
        torch.manual_seed(rank)
        model = nn.Linear(8, 4)
        return model, torch.optim.SGD(model.parameters(), lr=0.0)

    def train(rank, step, model, optimizer):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def spread():
        now = torch.stack([w.values[-1] for w in workers])
        return float((now - now.mean(0)).abs().max())

    options = {"broadcast": False, "soft_deadline": 0.3, "hard_deadline": 120.0}
    with job(monkeypatch, 4, 1, topology="ring-static", **options) as made:
        made.make, made.train = make, train
        start = torch.stack([torch.cat([p.detach().flatten() for p in make(r)[0].parameters()]) for r in range(4)])
        workers = made.all(10**6, pause=0.005)
        until(lambda: all(w.values for w in workers))
        until(lambda: spread() < 0.01 * float((start - start.mean(0)).abs().max()))
        stats = [w.gossip.stats() for w in workers]
        end_now(workers)
    assert all(s["members"] == [0, 1, 2, 3] for s in stats)
    for rank in (0, 1):
        assert stats[rank]["lost_exchanges"] > stats[rank]["given_up_exchanges"]


def test_links_of_a_meeting_close_and_the_next_meeting_opens_them_again(monkeypatch):
    met = {}

    def links(gossip):
        return {rank for rank, peer in gossip.members.links.peers.items() if peer.link is not None}

    with job(monkeypatch, 6, 1, topology="ring", soft_deadline=30.0, hard_deadline=60.0) as made:
        step = made.train

        def train(rank, k, model, optimizer):
            if k == 20 and rank not in met:
                workers[rank].gossip.consensus_distance()
                met[rank] = len(links(workers[rank].gossip))
            step(rank, k, model, optimizer)

        made.train = train
        workers = made.all(10**6, lambda g: g.consensus_distance(), pause=0.01)
        until(lambda: len(met) == 6)
        assert max(met.values()) > 2  # the meeting has opened links between workers that are no neighbors
        monkeypatch.setattr(liveness, "IDLE", 0.3, raising=False)
        for worker in workers:
            neighbors = {(worker.rank + 1) % 6, (worker.rank - 1) % 6}
            until(lambda g=worker.gossip, expected=neighbors: links(g) == expected)
        for worker in workers:
            worker.until(worker.gossip.stats()["steps"] + 10)
        assert all(w.gossip.stats()["lost_exchanges"] == 0 for w in workers)
        monkeypatch.setattr(liveness, "IDLE", 60.0)
        distances = end_now(workers)
    assert all(d == pytest.approx(distances[0]) for d in distances)
