"""How a worker finds a member's state: pauses between attempts, which donors it asks, and for how long."""

import socket
import time
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from gossamer.comm import PeerError
from gossamer.comm.tcp import Ask, Member, Membership, Record, look
from gossamer.comm.tcp.membership import _forget_suspicions
from gossamer.engine.elastic import rejoining, state_transfer
from gossamer.engine.elastic.rejoining import Attempts
from gossamer.engine.elastic.state_transfer import StateTransfer
from linked import Worker


def record(*ranks, nodes=None):
    found = {r: Member(f"process-{r}", "127.0.0.1", 1 + r, "node" if nodes is None else nodes[r]) for r in ranks}
    return Record(1, found, [0])


def transfer():
    model = torch.nn.Linear(2, 2)
    return StateTransfer(model, [torch.optim.SGD(model.parameters(), 0.1)], bytes(8), 3600.0)


def test_attempts_that_fail_pause_for_longer_and_longer(monkeypatch):
    pauses = []
    monkeypatch.setattr(rejoining, "Deadline", lambda seconds: pauses.append(seconds) or SimpleNamespace(expired=True))
    attempts = Attempts(lambda: 0)
    for _ in range(8):
        assert attempts.due
        attempts.failed()
    attempts.succeeded()
    attempts.failed()
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30, 30, 0, 1]


def test_a_pause_ends_when_the_network_may_work_again():
    hopes = [0]
    attempts = Attempts(lambda: hopes[0])
    for _ in range(8):
        attempts.failed()
    assert not attempts.due
    hopes[0] = 1
    assert attempts.due
    attempts.failed()
    assert not attempts.due


def refusing(ranks, asked):
    def fetch(address, ask, *limits):
        asked.append(address[1] - 1)
        raise TimeoutError("it does not answer")

    donors = list(record(*ranks).members.values())
    return SimpleNamespace(donors=lambda: donors, links=SimpleNamespace(fetch=fetch))


def test_a_worker_that_trains_meanwhile_gives_up_after_a_few_donors():
    asked = []
    with pytest.raises(PeerError, match="no member of the running job sent its state"):
        transfer().fetch(refusing(range(8), asked))
    assert asked == [0, 1]


def test_a_new_worker_asks_all_donors_again_and_again(monkeypatch):
    asked, now = [], [100.0]  # time passes only in sleep()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    with pytest.raises(PeerError, match="no member of the running job sent its state"):
        transfer().fetch(refusing(range(3), asked), 0.2)
    assert asked[:6] == [0, 1, 2, 0, 1, 2]


def test_a_new_worker_does_not_wait_where_there_is_no_donor():
    with pytest.raises(PeerError, match="there is none"):
        transfer().fetch(refusing((), []), 3600.0)


def test_workers_ask_different_donors_first_and_those_of_their_node_before():
    nodes = ["a", "a", "a", "b", "b", "b"]
    now = record(*range(6), nodes=nodes)

    def donors(rank):
        members = SimpleNamespace(current=lambda: now, rank=rank, size=6, me=now.members[rank])
        return [donor.port - 1 for donor in Membership.donors(members)]

    assert [donors(rank) for rank in (0, 1, 2, 5)] == [
        [1, 2, 3, 4, 5],
        [2, 0, 3, 4, 5],
        [0, 1, 3, 4, 5],
        [3, 4, 0, 1, 2],
    ]


def test_a_donor_that_does_not_take_part_in_the_handshake_is_given_up_before_a_silent_one():
    worker = Worker(1, [])
    with socket.create_server(("127.0.0.1", 0)) as stopped, pytest.raises(TimeoutError):
        worker.fetch(stopped.getsockname(), Ask.STATE, 3600.0, 3600.0, 0.1)  # its system accepts, nobody answers
    worker.close()


def test_a_worker_that_leaves_waits_for_its_children_no_longer_than_it_may(monkeypatch):
    monkeypatch.setattr(state_transfer, "FAREWELL", 3600.0)
    made, looks, now = transfer(), [], record(0, 1)
    made._children = {1: now.members[1]}
    members = SimpleNamespace(record=now, links=SimpleNamespace(peer=lambda rank: SimpleNamespace(rounds=[])))
    made.await_children(members, lambda processes: looks.append(processes) or set(), 0.1)
    assert looks[0] == {1: "process-1"}


def test_suspicions_are_forgotten_with_the_member_that_was_dropped():
    store, now = HashStore(), record(0, 1, 2)
    for key in ("process-2/0", "process-2/1", "process-0/2", "process-0/1"):
        store.set(f"suspect/{key}", "a process")
    _forget_suspicions(now, 2, store)
    left = [
        key for key in ("process-2/0", "process-2/1", "process-0/2", "process-0/1") if look(store, f"suspect/{key}")
    ]
    assert left == ["process-0/1"]
