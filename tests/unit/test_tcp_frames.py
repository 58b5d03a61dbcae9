"""Frames of a member that make no sense, heartbeats, jumps and records: refused, counted, and nobody harmed."""

import json
import socket
import threading
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import TCPStore

from elastic import finish, job, until
from gossamer.comm.tcp import Arrival, DirectoryClient, HostedDirectory, Member, Membership, Record, Refused
from gossamer.comm.tcp.frame import FrameHeader, Kind
from gossamer.comm.tcp.record import Foundation

RUN = bytes(range(8))
NONSENSE = [
    "[Infinity]",
    "[NaN]",
    "[-1]",
    "[1e400]",
    "[9007199254740993]",
    "[1.5]",
    "[true]",
    "[20000000]",  # further than any worker can be ahead
    "[0, 0]",
    "{}",
    "[" * 3000,
]


@pytest.fixture(scope="module")
def members():
    """Worker 0 of two, whose neighbor accepts connections and says nothing."""
    hosted = HostedDirectory(address="127.0.0.1")
    client = DirectoryClient(
        lambda wait: TCPStore("127.0.0.1", hosted.port, is_master=False, wait_for_workers=False), first_wait=20.0
    )
    server, other = (socket.create_server(("127.0.0.1", 0), backlog=128) for _ in range(2))
    me = Member("a", *server.getsockname(), "node")
    founders = Record(1, {0: me, 1: Member("b", *other.getsockname(), "node")}, [0])
    arrival = Arrival(0, 2, 1, me, server, client, Foundation(RUN, "", {}), founders, joining=False)
    made = Membership(arrival, 2**20, None, 3600.0, lambda connection, ask: connection.close())
    yield made
    made.close()
    other.close()
    hosted.close()


def receive(members, kind, payload, **header):
    members.links.received(members.links.peer(1), FrameHeader(kind, RUN, len(payload), **header), payload)


@pytest.mark.parametrize("kind", [Kind.HEARTBEAT, Kind.JUMPED])
@pytest.mark.parametrize("payload", NONSENSE)
def test_rounds_that_are_no_counts_are_refused(members, kind, payload):
    with pytest.raises(Refused, match="a frame of worker 1 cannot be read"):
        receive(members, kind, payload.encode())
    assert members.furthest(0) == 0


def test_records_that_do_not_fit_the_job_are_refused(members):
    before = members.record
    for text in ('{"epoch": 99, "members": {}, "starts": []}', before.text().replace("[0]", "[0, 0]"), "[]", "{"):
        with pytest.raises(Refused, match="cannot be read"):
            receive(members, Kind.RECORD, text.replace('"epoch": 1,', '"epoch": 99,').encode())
    assert members.record.epoch < 99


numbers = st.lists(st.integers() | st.floats() | st.none() | st.text(max_size=3), max_size=4).map(json.dumps)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from([k for k in Kind if k not in (Kind.DATA, Kind.LEAVING)]),
    payload=st.binary(max_size=60) | numbers.map(str.encode),
    epoch=st.integers(0, 2**32 - 1),
    round=st.integers(0, 2**64 - 1),
    bucket=st.integers(0, 2**32 - 1),
)
def test_any_frame_is_understood_or_refused(members, kind, payload, epoch, round, bucket):
    with suppress(Refused):
        receive(members, kind, payload, epoch=epoch, round=round, bucket=bucket)
    assert members._thread.is_alive()
    assert members.record.members.keys() <= {0, 1}
    assert members.furthest(0) < 2**53


def test_wrong_news_of_a_meeting_ends_one_wait_only(members):
    """A stage that nobody has decided, as news, must not make this worker ask the directory without a pause."""
    receive(members, Kind.DECIDED, b"", round=2**40)
    stage = max(members.decided, 2**40) - 1
    assert members.await_news(stage, 60.0)  # at once: it may be true
    assert not members.await_news(stage, 0.01)  # it was not, so this waits
    assert not members.await_news(stage, 0.01)


def test_a_member_that_sends_nonsense_is_refused_counted_and_heard_again(monkeypatch):
    """The thread that reads the link must not end with another error than the one that it reports."""
    failures = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    with job(monkeypatch, 3, topology="ring", soft_deadline=5.0, hard_deadline=20.0) as made:
        workers = made.all(100000, pause=0.005)
        for worker in workers:
            worker.until(5)
        sender, receiver = workers[1].gossip.members, workers[0].gossip

        def counted(before, payload):
            sender.links.send_all(FrameHeader(Kind.HEARTBEAT, sender.run, len(payload)), payload, to=[0])
            return receiver.stats()["refused_by_peer"].get(1, 0) > before

        for text in NONSENSE:  # a frame is lost if there is no link at the moment, or if the next heartbeat replaces it
            before = receiver.stats()["refused_by_peer"].get(1, 0)
            until(lambda text=text, before=before: counted(before, text.encode()), f"{text} was not counted")
        assert "cannot be read" in receiver.stats()["last_refusal"]
        rounds = receiver.stats()["rounds"]
        until(lambda: receiver.stats()["rounds"] > rounds + 20)
        assert receiver.stats()["members"] == [0, 1, 2]
        for worker in workers:
            worker.steps = 0
        finish(workers)
    assert not failures, failures[0]
