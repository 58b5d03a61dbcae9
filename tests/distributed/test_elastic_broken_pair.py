"""Collective calls that cannot succeed with all members: they go on without one, or end with an error."""

import threading

import pytest

from elastic import finish, job, until
from gossamer import GossamerWarning
from gossamer.comm import Deadline, PeerError
from gossamer.comm.tcp import Membership
from gossamer.comm.tcp.links import LinkTable


def met(gossip):
    with gossip.averaged():
        return gossip.met.ranks, gossip.met.alone


def test_members_that_cannot_reach_each_other_do_not_block_a_meeting(monkeypatch):
    """Both reach everyone else, and the directory: nobody is dropped. The one with the higher rank stays away."""

    def linked(gossip, ranks):
        until(lambda: all(gossip.members.links.peer(rank).link is not None for rank in ranks))

    connect, mended, turns = LinkTable.connect, threading.Event(), threading.Barrier(3)

    def connected(self, peer):
        apart = {self.rank, peer.rank} == {1, 2} and not mended.is_set()
        return False if apart else connect(self, peer)

    def ends(gossip):
        linked(gossip, {0} if gossip.members.rank else {1, 2})
        turns.wait(300)  # the links that can be there are there
        found, numbers = [], []
        for _ in range(2):
            found.append(met(gossip))
            numbers.append(gossip.met.number)
        members = gossip.stats()["members"]
        if turns.wait(300) == 0:
            mended.set()
        linked(gossip, {0, 1, 2} - {gossip.members.rank})
        turns.wait(300)
        return [*found, met(gossip)], numbers[1] - numbers[0], members

    monkeypatch.setattr(LinkTable, "connect", connected)
    monkeypatch.setattr(Membership, "hard_deadline", lambda self, rank: 0.2)  # that of waits for a link
    with job(monkeypatch, 3, topology="ring", soft_deadline=0.2, timeout=3600.0) as made:
        warned = pytest.warns(GossamerWarning, match="worker 2's parameters only: it has no connection with worker 1")
        with warned as told:
            workers = made.all(10, ends)
            results = finish(workers)
    together = ((0, 1, 2), False)
    assert [meetings for meetings, _, _ in results] == [
        [((0, 1), False), ((0, 1), False), together],
        [((0, 1), False), ((0, 1), False), together],
        [((2,), True), ((2,), True), together],
    ]
    assert [meetings for _, meetings, _ in results] == [1, 1, 1]  # the second call failed nowhere
    assert all(members == [0, 1, 2] for _, _, members in results)
    assert len([w for w in told if "it has no connection with" in str(w.message)]) == 2


def test_a_call_that_fails_again_and_again_ends_on_all_participants(monkeypatch):
    def ends(gossip):
        gossip._meetings._retries = Deadline(0.0)  # it has failed for `timeout` seconds
        if gossip.members.rank == 1:

            def refuse(steps):
                list(zip(range(0), steps, strict=False))
                raise PeerError("the test refuses")

            gossip._run = refuse
        with pytest.raises(PeerError, match="failed again and again for more than 3600 s although all") as raised:
            met(gossip)
        assert not gossip.in_meeting
        return str(raised.value)

    with job(monkeypatch, 2, topology="ring", soft_deadline=5.0, timeout=3600.0) as made:
        results = finish(made.all(5, ends))
    assert results[1].endswith("alive: the test refuses")
