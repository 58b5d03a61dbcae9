"""Handshakes with somebody else: another run, another process, a replay, a reflection; and a donor that is busy."""

import json
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.comm.tcp import send_sign, send_state
from gossamer.comm.tcp.frame import MAGIC, NONCE, Ask, FrameHeader, Hello, Kind, Refused, _proof, meet
from linked import LIMIT, RUN, Worker, patient, until

__all__ = ["patient"]

OTHER_RUN = "ff" * 8


@pytest.fixture
def two():
    """Two workers that know each other's address and are not linked."""
    zero, one = Worker(0, []), Worker(1, [])
    one.know(0, "a", zero.address)
    zero.know(1, "b", one.address)
    yield zero, one
    zero.close()
    one.close()


def ended(connection):
    """Whether the other side ends the connection."""
    connection.settimeout(LIMIT)
    with suppress(ConnectionError):
        while connection.recv(4096):
            pass
    return True


def test_a_worker_of_another_run_is_refused_and_counted_by_the_listener(two):
    zero, _ = two
    with socket.create_connection(zero.address, timeout=LIMIT) as connection:
        meet(connection, Hello(OTHER_RUN, 1, "b", [0]), first=True, seconds=LIMIT)
        assert ended(connection)
    until(lambda: zero.refusals == {-1: 1})
    assert f"a worker of run {OTHER_RUN!r} connected to run {RUN.hex()}" in zero.last_refusal
    assert zero.peer(1).link is None


def test_another_run_at_the_address_of_a_peer_is_refused_and_the_peer_is_dead(two):
    zero, one = two
    zero.says = replace(zero.says, run=OTHER_RUN)
    zero.listener._run = bytes.fromhex(OTHER_RUN)
    assert not one.connect(one.peer(0))
    assert one.peer(0).link is None
    assert "another run has its port" in one.peer(0).dead
    assert one.refusals == {0: 1}
    assert not one.connect(one.peer(0))
    assert one.refusals == {0: 1}  # it is not tried again


def test_another_process_at_the_address_of_a_peer_gets_no_link(two):
    """It may have joined again, which this worker has not heard of yet."""
    zero, one = two
    zero.says = replace(zero.says, incarnation="the next one")
    assert not one.connect(one.peer(0))
    assert one.peer(0).link is None
    assert not one.peer(0).dead
    assert one.refusals == {}
    one.know(0, "the next one", zero.address)
    assert one.connect(one.peer(0))


@pytest.mark.parametrize("changed", [{"rank": 5}, {"rounds": []}, {"rounds": [0, 0]}])
def test_another_rank_or_number_of_lanes_gets_no_link_and_is_counted(two, changed):
    zero, one = two
    zero.says = replace(zero.says, **changed)
    assert not one.connect(one.peer(0))
    assert one.peer(0).link is None
    assert one.refusals == {0: 1}


class Tap:
    """A connection that also notes what is written to it."""

    def __init__(self, connection):
        self._connection, self.sent = connection, b""

    def sendall(self, data):
        self.sent += bytes(data)
        self._connection.sendall(data)

    def __getattr__(self, name):
        return getattr(self._connection, name)


def test_a_replayed_handshake_is_refused_and_counted(two, monkeypatch):
    monkeypatch.setenv("GOSSAMER_TOKEN", "secret")
    zero, one = two
    with socket.create_connection(zero.address, timeout=LIMIT) as connection:
        tap = Tap(connection)
        assert meet(tap, one.says, first=True, seconds=LIMIT) == zero.says
        until(lambda: zero.peer(1).link is not None)
    assert zero.refusals == {}
    with socket.create_connection(zero.address, timeout=LIMIT) as stranger:
        stranger.sendall(tap.sent)  # every byte that the worker sent
        assert ended(stranger)
    until(lambda: zero.refusals == {-1: 1})
    assert "does not know this job's token" in zero.last_refusal


def test_a_reflected_handshake_is_refused_and_counted(two, monkeypatch):
    """A stranger at a peer's address sends back what it gets, nonce and proof."""
    monkeypatch.setenv("GOSSAMER_TOKEN", "secret")
    _, one = two
    mirror = socket.create_server(("127.0.0.1", 0))

    def reflect():
        connection, _ = mirror.accept()
        with connection, suppress(OSError):
            while data := connection.recv(4096):
                connection.sendall(data)

    thread = threading.Thread(target=reflect, daemon=True)
    thread.start()
    one.know(0, "c", mirror.getsockname())
    assert not one.connect(one.peer(0))
    assert "does not know this job's token" in one.last_refusal
    thread.join(300)
    mirror.close()


@pytest.mark.parametrize(
    "fields",
    [
        '{"run": "a", "rank": Infinity, "incarnation": "b", "rounds": [0], "ask": 1}',
        '{"run": "a", "rank": 1, "incarnation": "b", "rounds": [Infinity], "ask": 1}',
        '{"run": "a", "rank": 1, "incarnation": "b", "rounds": [NaN], "ask": 1}',
        '{"run": "a", "rank": 1, "incarnation": "b", "rounds": [-1], "ask": 1}',
        '{"run": "a", "rank": 1, "incarnation": "b", "rounds": [1e400], "ask": 1}',
        '{"run": "a", "rank": 1, "incarnation": "b", "rounds": [9007199254740993], "ask": 1}',
        '{"run": "a", "rank": true, "incarnation": "b", "rounds": [0], "ask": 1}',
        '{"run": "a", "rank": 1, "incarnation": "b", "rounds": [0], "ask": Infinity}',
        '{"run": "a", "rank": 1, "incarnation": "b", "rounds": "12", "ask": 1}',
    ],
)
def test_numbers_that_are_no_counts_are_refused_in_a_hello(fields):
    with pytest.raises(Refused, match="a hello cannot be read"):
        Hello.parse(json.loads(fields))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(run=anything, rank=anything, incarnation=anything, rounds=anything | st.lists(anything), ask=anything)
def test_any_fields_are_a_hello_or_refused(run, rank, incarnation, rounds, ask):
    fields = {"run": run, "rank": rank, "incarnation": incarnation, "rounds": rounds, "ask": ask}
    with suppress(Refused):
        hello = Hello.parse(fields)
        assert hello.rank >= 0
        assert all(0 <= k < 2**53 for k in hello.rounds)


@pytest.mark.parametrize("text", [b"[" * 4000, b'{"a":' * 800, b"null", b"[]", b"\xff\xfe"])
def test_nonsense_with_a_right_proof_is_refused_and_counted(two, text):
    """A token may be empty, so anybody may have it. Deep nesting ends Python's reader of JSON with another error."""
    zero, _ = two
    with socket.create_connection(zero.address, timeout=LIMIT) as connection:
        connection.sendall(MAGIC + bytes(NONCE))
        theirs = connection.recv(len(MAGIC) + NONCE, socket.MSG_WAITALL)
        connection.sendall(struct.pack("!I", len(text)) + text + _proof(theirs[len(MAGIC) :], b"opened", text))
        assert ended(connection)
    until(lambda: zero.refusals == {-1: 1})


# -- fetching a state -------------------------------------------------------------------------------------------------


class Donor(Worker):
    """Sends signs, then its state."""

    def __init__(self, answer):
        super().__init__(0, [])
        self.answer, self.asked = answer, []

    def _accept(self, connection, hello):
        self.asked.append(hello.ask)
        with connection:
            self.answer(connection)


@pytest.fixture
def asker():
    worker = Worker(1, [])
    donors = []

    def fetch(answer, **limits):
        donors.append(Donor(answer))
        return worker.fetch(donors[-1].address, Ask.STATE, **{"timeout": LIMIT, "handshake": LIMIT, **limits})

    yield fetch
    for donor in donors:
        donor.close()
    worker.close()


def test_a_busy_donor_is_waited_for(asker):
    def busy(connection):
        for _ in range(5):
            send_sign(connection, RUN)
        send_state(connection, RUN, b"x" * 3_000_000)

    assert asker(busy, silence=LIMIT).getvalue() == b"x" * 3_000_000


def test_a_donor_that_never_comes_to_the_end_of_its_step_is_given_up(asker):
    def endless(connection):
        with suppress(OSError):
            while True:
                send_sign(connection, RUN)

    with pytest.raises(TimeoutError, match=r"did not come to the end of its step within 0\.05 s"):
        asker(endless, timeout=0.05, silence=LIMIT)


def test_a_silent_donor_is_given_up_before_the_timeout(asker):
    release = threading.Event()
    with pytest.raises(TimeoutError):
        asker(lambda connection: release.wait(LIMIT), timeout=3600.0, silence=0.2)
    release.set()


def test_a_donor_that_hangs_up_or_sends_something_else_is_given_up(asker):
    with pytest.raises(ConnectionError):
        asker(lambda connection: None)
    with pytest.raises(Refused, match="a message of run"):
        asker(lambda connection: send_state(connection, b"otherrun", b"x"))
    with pytest.raises(Refused, match="more than the"):
        asker(lambda connection: connection.sendall(FrameHeader(Kind.STATE, RUN, 2**62).pack()))
