"""Who is declared dead: two observers are needed, or all living ones where there are fewer."""

import pytest
from torch.distributed import TCPStore

from gossamer.comm.tcp import HostedDirectory, Member, Record, suspicion
from gossamer.comm.tcp.suspicion import Suspicions
from linked import LIMIT, PatientClient

RING = Record(1, {r: Member(f"process-{r}", "127.0.0.1", 1 + r, "node") for r in range(5)}, [0])


def ring(record, rank):
    ranks = record.ranks
    at = ranks.index(rank)
    return {ranks[at - 1], ranks[(at + 1) % len(ranks)]}


@pytest.fixture
def observers():
    """Makes the suspicions of a rank; `alive` are the ranks that answer it."""
    hosted, clients = HostedDirectory(address="127.0.0.1"), []

    def of(rank, alive):
        client = PatientClient(
            lambda wait: TCPStore("127.0.0.1", hosted.port, is_master=False, wait_for_workers=False), first_wait=LIMIT
        )
        clients.append(client)
        return Suspicions(rank, client, ring, lambda member: int(member.incarnation[-1]) in alive, 0.0)

    yield of
    for client in clients:
        client.close()
    hosted.close()


def test_two_observers_are_needed(observers):
    one, three = observers(1, {0, 2, 3, 4}), observers(3, {0, 1, 2, 4})
    assert not one.confirmed(RING, 2)
    assert not one.confirmed(RING, 2)  # saying it twice does not help
    assert three.confirmed(RING, 2)
    assert one.confirmed(RING, 2)


def test_a_single_living_observer_is_enough(observers):
    assert observers(1, {0, 4}).confirmed(RING, 2)  # worker 3 does not answer


def test_a_suspicion_that_was_withdrawn_does_not_count(observers):
    one, three = observers(1, {0, 2, 3, 4}), observers(3, {0, 1, 2, 4})
    assert not one.confirmed(RING, 2)
    one.withdraw(["process-2"])
    one.withdraw([])
    assert not three.confirmed(RING, 2)
    assert one.confirmed(RING, 2)


def test_a_suspicion_of_an_earlier_process_does_not_count(observers):
    one, three = observers(1, {0, 2, 3, 4}), observers(3, {0, 1, 2, 4})
    assert not one.confirmed(RING, 2)
    newer = Record(3, {**RING.members, 1: Member("process-1-again", "127.0.0.1", 9, "node")}, [0])
    assert not Suspicions(3, three._directory, ring, lambda member: True, 0.0).confirmed(newer, 2)


def test_of_two_workers_one_is_enough(observers):
    pair = Record(1, {r: RING.members[r] for r in (0, 1)}, [0])
    assert observers(0, {1}).confirmed(pair, 1)


def test_an_observer_that_gives_signs_is_alive_although_it_does_not_answer(observers, monkeypatch):
    """A worker that reaches the directory and none of its peers declares nobody dead."""
    now = 100.0
    monkeypatch.setattr(suspicion.time, "monotonic", lambda: now)
    cut_off, store = observers(1, set()), observers(3, set())._directory

    def sign(text):
        store.ask(lambda s: s.set("present/3", text))

    sign("process-3 1")
    assert not cut_off.confirmed(RING, 2)
    now += suspicion.RENEWED - 0.1
    sign("process-3 2")
    assert not cut_off.confirmed(RING, 2)
    now += suspicion.RENEWED + 0.1  # the sign has not changed since: worker 3 is dead, too
    assert cut_off.confirmed(RING, 2)


def test_the_sign_of_another_process_does_not_count(observers):
    cut_off = observers(1, set())
    cut_off._directory.ask(lambda s: s.set("present/3", "another 1"))
    assert cut_off.confirmed(RING, 2)
