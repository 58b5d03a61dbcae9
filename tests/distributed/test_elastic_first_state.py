"""The initial parameters of an elastic job, when the worker that has them dies or stands still at the start."""

import threading

import torch

from elastic import PATIENCE, end_now, job, until
from gossamer.comm.tcp import Ask
from gossamer.comm.tcp.links import LinkTable
from gossamer.comm.tcp.liveness import Liveness
from gossamer.engine.elastic import state_transfer
from gossamer.engine.elastic.state_transfer import StateTransfer


def mean(gossip):
    with gossip.averaged() as model:
        return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def end(workers):
    values = end_now(workers)
    assert all(torch.equal(value, values[0]) for value in values)


def test_rank_0_dies_before_any_other_worker_has_its_state(monkeypatch):
    """The next founder begins with its own parameters, and the others take its state."""
    broadcast, dead = StateTransfer.broadcast, []

    def dying(self, members, record):
        if members.rank == 0:
            dead.append(members)
            self.close()
            members.close()
            raise RuntimeError("killed")
        return broadcast(self, members, record)

    monkeypatch.setattr(StateTransfer, "broadcast", dying)
    with job(monkeypatch, 4, topology="ring", soft_deadline=5.0, timeout=3600.0) as made:
        workers = made.all(100_000, mean, pause=0.005)
        others = workers[1:]
        for worker in others:
            worker.until(5)
        assert dead
        until(lambda: all(w.gossip.stats()["members"] == [1, 2, 3] for w in others))
        own = torch.cat([p.flatten() for p in made.make(1)[0].parameters()])
        assert torch.allclose(others[0].values[0], own, atol=0.1)  # one step of Adam with a rate of 0.01, and a round
        end(others)


def test_rank_0_stands_still_before_any_other_worker_has_its_state(monkeypatch):
    """It is dropped like any silent member, and takes the others' state when it goes on."""
    broadcast, serve = StateTransfer.broadcast, StateTransfer.serve
    still, go = [], threading.Event()

    def stopped(self, members, record):
        if members.rank == 0:
            send_all, members.links.send_all = members.links.send_all, lambda *a, **k: None  # as under SIGSTOP
            still.append(self)
            assert go.wait(300)
            members.links.send_all = send_all
        return broadcast(self, members, record)

    def served(self, connection, ask):
        if self in still:
            assert go.wait(300)
        serve(self, connection, ask)

    def hard_deadline(self, peer):
        return PATIENCE if peer.rank or go.is_set() else 3.0  # only worker 0 is dropped

    monkeypatch.setattr(StateTransfer, "broadcast", stopped)
    monkeypatch.setattr(StateTransfer, "serve", served)
    monkeypatch.setattr(state_transfer, "SILENCE", 0.5)
    monkeypatch.setattr(Liveness, "hard_deadline", hard_deadline)
    with job(monkeypatch, 3, topology="ring", soft_deadline=1.0, timeout=3600.0) as made:
        zero = made.start(0, 100_000, mean, pause=0.005)
        others = [made.start(rank, 100_000, mean, pause=0.005) for rank in (1, 2)]
        for worker in others:
            worker.until(5)
        go.set()
        monkeypatch.setattr(state_transfer, "SILENCE", 30.0)
        zero.until(1)
        until(lambda: all(w.gossip.stats()["members"] == [0, 1, 2] for w in [zero, *others]))
        end([zero, *others])


def test_a_founder_waits_for_a_parent_that_gives_signs(monkeypatch):
    """However long that parent waits for its own parent."""
    broadcast, fetch, send_sign = StateTransfer.broadcast, LinkTable.fetch, state_transfer.send_sign
    go, asked, signs = threading.Event(), [], []

    def late(self, members, record):
        if members.rank == 0:
            assert go.wait(300)
        return broadcast(self, members, record)

    def fetched(self, address, ask, *limits):
        asked.append((self.rank, ask))
        return fetch(self, address, ask, *limits)

    def counted(connection, run):
        send_sign(connection, run)
        signs.append(run)

    monkeypatch.setattr(StateTransfer, "broadcast", late)
    monkeypatch.setattr(LinkTable, "fetch", fetched)
    monkeypatch.setattr(state_transfer, "SIGN", 0.01)
    monkeypatch.setattr(state_transfer, "send_sign", counted)
    with job(monkeypatch, 4, topology="ring", soft_deadline=5.0, timeout=3600.0) as made:
        workers = made.all(100_000, mean, pause=0.005)
        until(lambda: len(signs) > 100)
        go.set()
        for worker in workers:
            worker.until(5)
        assert sorted(asked) == [(rank, Ask.INITIAL_STATE) for rank in (1, 2, 3)]
        end(workers)
