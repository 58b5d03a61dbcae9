"""Links of a worker: with its neighbors always, with others for a while, and again after a refused connection."""

import socket
import threading
import time
from types import SimpleNamespace

import pytest

from gossamer.comm.tcp import liveness as module
from gossamer.comm.tcp.frame import FrameHeader, Kind
from gossamer.comm.tcp.inbox import Key
from gossamer.comm.tcp.liveness import Liveness
from gossamer.comm.tcp.membership import Membership
from gossamer.comm.tcp.record import Member
from gossamer.comm.transport import ChannelId, Purpose
from linked import CHANNEL, PLAN, RUN, Worker, patient, until

__all__ = ["patient"]


class Group:
    """Workers that know each other. `watch(rank)` returns the liveness of one of them."""

    def __init__(self, n):
        self.workers = [Worker(rank, []) for rank in range(n)]
        self.members = {w.rank: Member(w.says.incarnation, *w.address, "node") for w in self.workers}
        for worker in self.workers:
            for rank, member in self.members.items():
                if rank != worker.rank:
                    worker.know(rank, member.incarnation, member.address)
        self.beats, self.started = 0, []

    def watch(self, rank, hard_deadline=20.0):
        made = Liveness(self.workers[rank], hard_deadline, lambda: self.members, self._heartbeat, lambda: None)
        self.started.append(made)
        return made

    def _heartbeat(self):
        self.beats += 1
        return FrameHeader(Kind.HEARTBEAT, RUN), b""

    def close(self):
        for liveness in self.started:
            liveness.close()
        for worker in self.workers:
            worker.close()


@pytest.fixture
def three():
    group = Group(3)
    yield group
    group.close()


@pytest.fixture
def closed_port():
    """An address that nobody else can take, and that refuses connections."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()


def test_a_link_that_no_round_needs_is_closed_after_its_last_use(three, monkeypatch):
    two, liveness = three.workers[2], three.watch(2)
    liveness.watch({0})
    liveness.also_watch(1)
    until(lambda: two.peer(0).link is not None and two.peer(1).link is not None)
    neighbor = two.peer(0).link
    monkeypatch.setattr(module, "IDLE", 0.2, raising=False)
    until(lambda: two.peer(1).link is None)
    until(lambda: three.workers[1].peer(2).link is None)
    assert two.peer(0).link is neighbor
    assert neighbor.open
    monkeypatch.setattr(module, "IDLE", 60.0)
    liveness.also_watch(1)  # and it can be opened again
    until(lambda: two.peer(1).link is not None)


def test_links_of_a_meeting_are_not_closed_while_it_lasts(three, monkeypatch):
    two, liveness = three.workers[2], three.watch(2)
    for rank in (0, 1):
        liveness.also_watch(rank)
    until(lambda: two.peer(0).link is not None and two.peer(1).link is not None)
    key = Key(0, ChannelId(0, Purpose.MEETING), 0, 0)
    waiting = two.inbox.post(key, 0, 5, PLAN, memoryview(bytearray(4)))
    links = [two.peer(rank).link for rank in (0, 1)]  # worker 1's will be needed after worker 0's message
    monkeypatch.setattr(module, "IDLE", 0.2, raising=False)
    until(lambda: 1 not in liveness._watched)
    beats = three.beats
    until(lambda: three.beats > beats + 10)
    assert 0 in liveness._watched
    assert [two.peer(rank).link for rank in (0, 1)] == links
    two.inbox.cancel([waiting])
    until(lambda: two.peer(0).link is None and two.peer(1).link is None)


def test_a_link_is_used_while_it_carries_messages(three, monkeypatch):
    two, zero, liveness = three.workers[2], three.workers[0], three.watch(2)
    liveness.also_watch(0)
    until(lambda: two.peer(0).link is not None and zero.peer(2).link is not None)
    link, other = two.peer(0).link, zero.peer(2).link
    before = link.used, other.used
    link.send(FrameHeader(Kind.DATA, RUN, 4, PLAN, CHANNEL, 1, 5), b"four")
    assert link.used > before[0]
    until(lambda: other.used > before[1])
    link.used = time.monotonic() + 1000.0  # as if messages were sent again and again
    monkeypatch.setattr(module, "IDLE", 0.2, raising=False)
    until(lambda: 0 not in liveness._watched)
    beats = three.beats
    until(lambda: three.beats > beats + 10)
    assert two.peer(0).link is link
    link.used = time.monotonic()
    until(lambda: two.peer(0).link is None)


@pytest.mark.parametrize("rank", [0, 2])  # the side that opens links, and the other one
def test_a_worker_that_refused_a_connection_is_asked_again(three, closed_port, rank):
    """A firewall that rejects refuses like the port of a dead process."""
    other = three.workers[1]
    liveness = three.watch(rank)
    peer = three.workers[rank].peer(1)
    port, peer.address = peer.address, closed_port
    liveness.watch({1})
    until(lambda: peer.dead == "its port is closed")
    assert [at for at, _ in liveness.dead()] == [1]
    peer.address = port
    if rank == 2:
        until(lambda: peer.link is not None)
    until(lambda: not peer.dead)
    assert not liveness.dead()
    if rank == 0:
        assert other.connect(other.peer(0))
        until(lambda: peer.link is not None)


def test_a_worker_that_refused_a_connection_is_not_dead_once_it_connects(three, closed_port):
    zero, one = three.workers[:2]
    peer = zero.peer(1)
    peer.address = closed_port
    assert not zero.connect(peer)
    assert peer.dead == "its port is closed"
    liveness = three.watch(0)
    liveness.watch({1})
    assert one.connect(one.peer(0))
    until(lambda: peer.link is not None)
    link, beats = peer.link, three.beats
    until(lambda: three.beats > beats + 5)
    assert peer.link is link
    assert not peer.dead


def test_a_worker_that_cannot_come_back_is_not_asked_again(three):
    two, liveness = three.workers[2], three.watch(2)
    two.peer(1).dead = "has left"
    liveness.watch({0, 1})
    until(lambda: two.peer(0).link is not None)
    beats = three.beats
    until(lambda: three.beats > beats + 5)
    assert two.peer(1).link is None
    assert two.peer(1).dead == "has left"


def test_the_news_of_a_decision_is_passed_on_to_the_neighbors_only():
    sent = []
    links = SimpleNamespace(send_all=lambda header, to=None: sent.append(to))
    members = SimpleNamespace(
        _news=threading.Condition(),
        decided=-1,
        links=links,
        run=RUN,
        record=SimpleNamespace(epoch=3),
        _liveness=SimpleNamespace(neighbors=frozenset({1, 5})),
    )
    Membership.announce(members, 4)  # found in the directory: all others are told
    Membership.announce(members, 5, heard=True)
    Membership.announce(members, 5, heard=True)
    assert sent == [None, {1, 5}]


def test_a_worker_that_stood_still_judges_nobody_by_the_silence_of_that_time(three, monkeypatch):
    """Its heartbeats go on after another thread has asked who is dead. A thread that stays late shields nobody."""
    release, waiting = threading.Event(), threading.Event()
    two, liveness = three.workers[2], three.watch(2, hard_deadline=5.0)
    liveness.watch({0})
    until(lambda: two.peer(0).link is not None)

    def heartbeat():
        waiting.set()
        release.wait(300)
        return FrameHeader(Kind.HEARTBEAT, RUN), b""

    monkeypatch.setattr(liveness, "_heartbeat", heartbeat)
    until(waiting.is_set)
    try:
        liveness._beat = two.peer(0).heard = time.monotonic() - 100.0
        assert liveness.dead() == []
        two.peer(0).heard = time.monotonic() - 100.0
        assert [rank for rank, _ in liveness.dead()] == [0]
    finally:
        release.set()
