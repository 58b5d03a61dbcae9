"""What a worker takes from a member: whole values, at any length of a step, and nothing of an earlier life is added."""

import random
import threading
from dataclasses import replace

import pytest
import torch

from elastic import end_now, job, until
from gossamer.comm import Purpose
from gossamer.comm.tcp import Membership
from gossamer.comm.tcp.frame import Kind
from gossamer.comm.tcp.link import Link
from gossamer.engine.elastic import state_transfer
from gossamer.engine.elastic.coordinator import ElasticCoordinator
from gossamer.engine.elastic.event_thread import ElasticEventThread
from gossamer.engine.elastic.state_transfer import StateTransfer


def declare_dead(workers, rank):
    """Let all other workers find `rank` dead."""
    for worker in workers:
        if worker.rank != rank:
            worker.gossip.members.links.peer(rank).dead = "the test says so"
            worker.gossip.members._hurry.set()


def test_a_donation_does_not_change_with_later_events(monkeypatch):
    with job(monkeypatch, 2, topology="ring", algorithm="a2cid2", soft_deadline=5.0) as made:
        workers = made.all(100000, pause=0.005)
        workers[0].until(10)
        lane = workers[0].gossip.lanes[0]
        with lane._lock:
            given = lane.donation()
            before = [x.clone() for x in lane.state.x_tilde]
            for x in lane.state.x_tilde:
                x.add_(1.0)  # as an event would, once the lock is free
            changed = all(torch.equal(a, b) for a, b in zip(given["x_tilde"], before, strict=True))
            for x in lane.state.x_tilde:
                x.sub_(1.0)
        assert changed
        end_now(workers)


def test_an_event_in_flight_ends_before_another_state_is_taken(monkeypatch):
    """The worker was dropped while it waited for its partner's verdict."""
    held, release, fetched = threading.Event(), threading.Event(), []
    both_done, fetch = ElasticEventThread._both_done, StateTransfer.fetch

    def slowly(self, event, peer):
        if self._members.rank != 1 or not armed or release.is_set():
            return both_done(self, event, peer)
        held.set()
        assert release.wait(300)
        return True

    def watched(self, members, *args):
        if members.rank == 1:
            fetched.append(workers[1].gossip.lanes[0]._thread._busy)
        return fetch(self, members, *args)

    armed = []
    monkeypatch.setattr(ElasticEventThread, "_both_done", slowly)
    monkeypatch.setattr(StateTransfer, "fetch", watched)
    with job(monkeypatch, 3, topology="ring", algorithm="a2cid2", soft_deadline=5.0) as made:
        workers = made.all(100000, pause=0.005)
        for worker in workers:
            worker.until(20)
        armed.append(True)
        assert held.wait(300)
        declare_dead(workers, 1)
        lane = workers[1].gossip.lanes[0]
        until(lambda: fetched or lane.timetable.limit is not None)  # it begins to take a member's state
        release.set()
        until(lambda: fetched)
        assert fetched[0] is False, "the event would have added what it received to the new state"
        until(lambda: not workers[1].gossip.members.excluded and lane.timetable.limit is None)
        end_now(workers)


def test_a_worker_that_was_away_goes_on_with_the_events_of_the_others(monkeypatch):
    """Not with those that have passed: it would stay as far behind as it was away."""
    join, away = ElasticCoordinator._join_again, threading.Event()
    monkeypatch.setattr(
        ElasticCoordinator, "_join_again", lambda self, lanes: None if away.is_set() else join(self, lanes)
    )
    with job(monkeypatch, 3, topology="ring", algorithm="ad-psgd", soft_deadline=0.2) as made:
        workers = made.all(100000, pause=0.005)
        for worker in workers:
            worker.until(20)
        away.set()
        declare_dead(workers, 1)
        gossip = workers[1].gossip
        until(lambda: gossip.members.excluded)
        at = gossip.lanes[0].timetable.next.number
        until(lambda: workers[0].gossip.lanes[0].k > at + 600)
        away.clear()
        until(lambda: not gossip.members.excluded)
        lost, rounds = gossip.stats()["lost_exchanges"], gossip.stats()["rounds"]
        until(lambda: gossip.stats()["rounds"] > rounds + 5)
        assert gossip.stats()["lost_exchanges"] - lost < 200  # of 400 that have passed
        end_now(workers)


def test_a_replacement_waits_for_donors_that_are_in_a_long_step(monkeypatch):
    signs, send_sign = [], state_transfer.send_sign

    def counted(connection, run):
        send_sign(connection, run)
        signs.append(run)

    monkeypatch.setattr(state_transfer, "SIGN", 0.01)
    monkeypatch.setattr(state_transfer, "send_sign", counted)
    with job(monkeypatch, 3, topology="ring", soft_deadline=5.0, timeout=300.0) as made:
        workers = made.all(100000, pause=0.005)
        for worker in workers:
            worker.until(20)
        until(lambda: all(w.gossip.members.deadlines.learned() is not None for w in workers))
        workers[2].kill()
        others = workers[:2]
        until(lambda: all(w.gossip.stats()["members"] == [0, 1] for w in others))
        for worker in others:
            worker.frozen.set()  # a long step, or an evaluation
        replacement = made.start(2, 100000, pause=0.005)
        until(lambda: len(signs) > 20)
        assert replacement.gossip is None
        for worker in others:
            worker.frozen.clear()
        replacement.until(10)
        assert replacement.gossip.joined
        assert replacement.gossip.members.deadlines.learned() is not None
        end_now([*others, replacement])


def test_a_donor_that_leaves_lets_the_replacement_ask_somebody_else(monkeypatch):
    """Both with a connection that it has accepted, and with one that comes while it leaves."""
    monkeypatch.setattr(state_transfer, "SIGN", 0.01)
    with job(monkeypatch, 3, topology="ring", soft_deadline=5.0, timeout=300.0) as made:
        workers = made.all(100000, pause=0.005)
        for worker in workers:
            worker.until(5)
        workers[2].kill()
        until(lambda: all(w.gossip.stats()["members"] == [0, 1] for w in workers[:2]))
        workers[0].frozen.set()
        transfer = workers[0].gossip._job._transfer
        replacement = made.start(2, 100000, pause=0.005)
        until(lambda: not transfer._asked.empty())  # it asks worker 0 first
        transfer.close()
        replacement.until(10)
        transfer._closed.clear()
        workers[0].frozen.clear()
        end_now([*workers[:2], replacement])


def test_a_message_that_never_comes_holds_an_event_up_but_not_those_after_it(monkeypatch):
    """Its sender believes that the partner has it, and lives: the partner would wait for ever."""
    send, lost = Link.send, []

    def misdirected(link, header, payload=b"", given_up=None):
        parameters = header.kind is Kind.DATA and header.channel.purpose is Purpose.PARAMETERS and header.bucket == 0
        if armed and not lost and link._owner.rank == 1 and link.peer.rank == 0 and parameters:
            lost.append(header.round)
            header = replace(header, part=77)
        send(link, header, payload, given_up)

    armed = []
    monkeypatch.setattr(Link, "send", misdirected)
    monkeypatch.setattr(Membership, "hard_deadline", lambda self, rank: 2.0)  # that of waits
    with job(monkeypatch, 2, topology="ring", algorithm="ad-psgd", soft_deadline=0.2) as made:
        workers = made.all(100000, pause=0.005)
        for worker in workers:
            worker.until(20)
        armed.append(True)
        until(lambda: lost)
        until(lambda: all(w.gossip.lanes[0].k > lost[0] + 1 for w in workers))
        rounds = [w.gossip.stats()["rounds"] for w in workers]
        until(lambda: all(w.gossip.stats()["rounds"] > k + 5 for w, k in zip(workers, rounds, strict=True)))
        end_now(workers)


@pytest.mark.parametrize("algorithm", ["ad-psgd", "a2cid2"])
def test_asynchronous_messages_that_make_no_sense_harm_nobody(monkeypatch, algorithm):
    """Worker 1's greetings, verdicts and the headers of its messages are changed at random."""
    draw, send, send_all = random.Random(0), Link.send, None
    changed, failures = [], []
    monkeypatch.setattr(threading, "excepthook", failures.append)

    def noise(size):
        return bytes(draw.choice((0, 1, 127, 255, draw.randrange(256))) for _ in range(size))

    def garbled(link, header, payload=b"", given_up=None):
        ours = link._owner.rank == 1 and header.kind is Kind.DATA and armed and draw.random() < 0.3
        if ours and header.bucket == buckets:  # a greeting
            changed.append("greeting")
            payload = noise(len(payload))
        elif ours:
            changed.append("header")
            other = {"round": 2**53 + draw.randrange(2**60), "plan": noise(8), "length": draw.randrange(header.length)}
            field = draw.choice(list(other))
            header = replace(header, **{field: other[field]})
        send(link, header, payload, given_up)

    with job(monkeypatch, 3, topology="ring", algorithm=algorithm, soft_deadline=0.2) as made:
        workers = made.all(100000, pause=0.005)
        armed, buckets = [], -1
        for worker in workers:
            worker.until(20)
        buckets = len(workers[0].gossip.lanes[0].buckets)
        links = workers[1].gossip.members.links
        send_all = links.send_all

        def told(header, payload=b"", *, to=None):
            if header.kind is Kind.VERDICT and draw.random() < 0.3:
                changed.append("verdict")
                payload = noise(len(payload))
            send_all(header, payload, to=to)

        monkeypatch.setattr(Link, "send", garbled)
        monkeypatch.setattr(links, "send_all", told)
        armed.append(True)
        kinds = ("greeting", "header", "verdict")
        until(lambda: all(changed.count(kind) > 10 for kind in kinds))
        armed.clear()
        monkeypatch.setattr(Link, "send", send)
        monkeypatch.setattr(links, "send_all", send_all)
        for worker in workers:
            stats = worker.gossip.stats()
            worker.until(stats["steps"] + 30)
            assert stats["members"] == [0, 1, 2]
            lane = worker.gossip.lanes[0]
            assert lane.total_steps() < 10**9
            assert all(bool(torch.isfinite(x).all()) for x in lane.values())
        refused = [w.gossip.stats()["refused_by_peer"].get(1, 0) for w in (workers[0], workers[2])]
        assert sum(refused) > 0
        assert "worker 1: the step counts of event" in " ".join(w.gossip.stats()["last_refusal"] for w in workers)
        rounds = [w.gossip.stats()["rounds"] for w in workers]
        until(lambda: all(w.gossip.stats()["rounds"] > k + 5 for w, k in zip(workers, rounds, strict=True)))
        end_now(workers)
    assert not failures, failures[0]
