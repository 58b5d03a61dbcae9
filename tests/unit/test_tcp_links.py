"""Links between workers: what is refused, what is forgotten, and that strangers harm nobody."""

import errno
import json
import socket
import struct
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gossamer.comm.tcp.frame import HEADER, MAGIC, Header, Kind, Refused, greet
from gossamer.comm.tcp.inbox import Inbox, Key
from gossamer.comm.tcp.link import STRANGERS, Links, Lost
from gossamer.comm.tcp.transport import TcpChannel
from gossamer.comm.transport import ChannelId, Job, Purpose, Stamp

RUN = bytes(range(8))
PLAN = b"the plan"
CHANNEL = ChannelId(0, Purpose.PARAMETERS)


def a_pair(**options):
    """Two workers' links, 1 connected with 0."""
    made = [
        Links(
            rank,
            options.get("run", RUN),
            "127.0.0.1",
            2**27,
            lambda rank=rank: {"run": RUN.hex(), "rank": rank, "rounds": [0]},
            lambda hello: None,
            lambda peer, header, payload: told.append((peer.rank, header.kind, payload)),
            lambda connection, hello: connection.close(),
            lambda peer: None,
        )
        for rank in (0, 1)
    ]
    told = []
    made[1].know(0, "a", made[0].address)
    made[0].know(1, "b", made[1].address)
    assert made[1].connect(made[1].peer(0))
    until(lambda: made[0].peer(1).link is not None)
    return *made, told


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def slot(links, sender, round, size, *, epoch=1, plan=PLAN, bucket=0):
    buffer = bytearray(size)
    key = Key(sender, CHANNEL, bucket, 0)
    return buffer, links.inbox.post(key, epoch, round, plan, memoryview(buffer))


def send(links, to, round, payload, *, epoch=1, plan=PLAN, bucket=0, run=RUN):
    header = Header(Kind.DATA, run, len(payload), plan, CHANNEL, epoch, round, bucket, 0)
    links.peer(to).link.send(header, payload)


@pytest.fixture
def pair():
    zero, one, told = a_pair()
    yield zero, one, told
    zero.close()
    one.close()


def test_a_message_finds_whoever_waits_and_waits_for_whoever_comes(pair):
    zero, one, _ = pair
    buffer, waiting = slot(zero, 1, 5, 300_000)
    send(one, 0, 5, bytes(range(250)) * 1200)
    until(lambda: waiting.over)
    assert waiting.filled
    assert bytes(buffer) == bytes(range(250)) * 1200
    send(one, 0, 6, b"early")
    time.sleep(0.1)
    buffer, waiting = slot(zero, 1, 6, 5)
    assert waiting.filled
    assert bytes(buffer) == b"early"


def test_an_older_message_is_forgotten_and_whoever_waits_for_it_is_told(pair):
    zero, one, _ = pair
    _, waiting = slot(zero, 1, 5, 3)
    send(one, 0, 7, b"new")
    until(lambda: waiting.over)
    assert "has gone on" in waiting.failed
    _, late = slot(zero, 1, 6, 3)
    assert "already in round 7" in late.failed
    buffer, now = slot(zero, 1, 7, 3)
    until(lambda: now.over)
    assert now.filled
    assert bytes(buffer) == b"new"


def test_a_buffer_that_was_taken_back_is_not_written_to(pair):
    zero, one, _ = pair
    buffer, waiting = slot(zero, 1, 5, 2**20)
    link = one.peer(0).link
    link.connection.sendall(Header(Kind.DATA, RUN, 2**20, PLAN, CHANNEL, 1, 5, 0, 0).pack() + b"\1" * 2**18)
    until(lambda: buffer[0] == 1)
    zero.inbox.cancel([waiting])
    buffer[:] = bytes(2**20)
    link.connection.sendall(b"\1" * (2**20 - 2**18))
    buffer6, next_one = slot(zero, 1, 6, 2)
    send(one, 0, 6, b"ok")  # the rest of the old message was read away
    until(lambda: next_one.over)
    assert bytes(buffer6) == b"ok"
    assert not any(buffer)


def test_a_message_of_another_plan_or_length_is_refused_and_counted(pair):
    zero, one, _ = pair
    _, waiting = slot(zero, 1, 5, 4)
    send(one, 0, 5, b"four", plan=b"not that")
    until(lambda: waiting.over)
    assert "another plan" in waiting.failed
    _, waiting = slot(zero, 1, 6, 9)
    send(one, 0, 6, b"four")
    until(lambda: waiting.over)
    assert "4 bytes where 9 were expected" in waiting.failed
    until(lambda: zero.refusals == {1: 2})
    buffer, waiting = slot(zero, 1, 7, 4)  # the link itself is fine
    send(one, 0, 7, b"fine")
    until(lambda: waiting.over)
    assert bytes(buffer) == b"fine"


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (Header(Kind.DATA, b"otherrun", 4).pack() + b"four", "a message of run"),
        (b"GET / HTTP/1.1\r\nHost: somebody-else.example\r\n\r\n" * 2, "not a message of Gossamer"),
        (Header(Kind.DATA, RUN, 2**40).pack(), "more than the"),
    ],
)
def test_a_message_that_is_none_of_ours_ends_the_link(pair, data, complaint):
    zero, one, _ = pair
    _, waiting = slot(zero, 1, 5, 4)
    one.peer(0).link.connection.sendall(data)
    until(lambda: waiting.over)
    assert complaint in waiting.failed
    assert zero.refusals == {1: 1}
    assert complaint in zero.last_refusal
    assert one.connect(one.peer(0)) or one.connect(one.peer(0))  # and it can be made anew


def test_a_dead_peer_is_noticed_by_all_who_wait(pair):
    zero, one, _ = pair
    slots = [slot(zero, 1, 5, 4, bucket=b)[1] for b in range(3)]
    one.close()
    until(lambda: all(s.over for s in slots))
    zero.connect(zero.peer(1))
    assert zero.peer(1).dead == "its port is closed"


def test_whoever_sends_can_give_up(pair):
    zero, one, _ = pair
    _buffer, waiting = slot(zero, 1, 5, 2**26)
    waiting.lock.acquire()  # whoever reads there stands still
    begun = time.monotonic()
    header = Header(Kind.DATA, RUN, 2**26, PLAN, CHANNEL, 1, 5, 0, 0)
    with pytest.raises(Lost, match="takes nothing"):
        one.peer(0).link.send(header, bytes(2**26), lambda: time.monotonic() - begun > 0.2)
    waiting.lock.release()
    assert one.peer(0).link is None  # half a frame cannot be taken back: the link is made anew


def tell_passed(links, to, round, bucket=0):
    links.send_all(Header(Kind.PASSED, RUN, channel=CHANNEL, bucket=bucket, round=round), to={to})


def test_what_nobody_need_wait_for_is_told_after_the_message_that_is_under_way(pair):
    zero, one, told = pair
    _buffer, long = slot(zero, 1, 5, 2**26, bucket=1)
    _, short = slot(zero, 1, 5, 4, bucket=2)
    long.lock.acquire()  # whoever reads there stands still, so the message fills the link
    sending = threading.Thread(target=send, args=(one, 0, 5, bytes(2**26)), kwargs={"bucket": 1}, daemon=True)
    sending.start()
    until(one.peer(0).link._lock.locked)
    began = time.monotonic()
    tell_passed(one, 0, 5, bucket=2)
    for round in range(1000):
        one.send_all(Header(Kind.BEAT, RUN, 3, epoch=1), b"%03d" % round)
    assert time.monotonic() - began < 0.5  # whoever trains is not held up
    assert not short.over
    long.lock.release()
    sending.join(20)
    until(lambda: long.filled and short.over)
    assert "has gone on without it" in short.failed
    until(lambda: told)
    assert [payload for *_, payload in told] == [b"999"]  # older signs of life were not kept


@pytest.mark.parametrize("linked", [False, True])  # there is no link just then; or it breaks, perhaps with the message
def test_what_nobody_need_wait_for_is_told_on_the_next_link(pair, linked):
    zero, one, _ = pair
    if linked:
        tell_passed(one, 0, 7)
    one.peer(0).link.close("for this test")
    until(lambda: zero.peer(1).link is None)
    zero.inbox.lost(1, "for this test", forget=True)
    if not linked:
        tell_passed(one, 0, 7)
    _, waiting = slot(zero, 1, 7, 4)
    assert one.connect(one.peer(0))
    until(lambda: waiting.over, 5)
    assert "has gone on without it" in waiting.failed


def test_one_that_gives_up_a_meeting_sees_to_it_that_all_can_hear_of_it(pair):
    zero, _, _ = pair
    wanted = []
    channel = TcpChannel(SimpleNamespace(rank=0, links=zero, want=wanted.append), CHANNEL, 1, None)
    stamp = Stamp(0, PLAN, frozenset({0, 1, 2}), meeting=True)
    channel._passed_by(Job(3, 0, lambda scratch: None), ChannelId(0, Purpose.MEETING), stamp, [])
    channel.close(0.0)
    assert sorted(wanted) == [1, 2]


def test_one_that_begins_anew_takes_back_what_it_said(pair):
    zero, one, told = pair
    one.peer(0).link.close("for this test")
    until(lambda: zero.peer(1).link is None)
    tell_passed(one, 0, 7)
    one.begin_anew()
    _, waiting = slot(zero, 1, 7, 4)
    assert one.connect(one.peer(0))
    one.send_all(Header(Kind.BEAT, RUN))  # comes after whatever the link began with
    until(lambda: told)
    assert not waiting.over


def test_the_token_must_be_the_same(monkeypatch):
    ours, theirs = socket.socketpair()
    results = []

    def accept():
        try:
            results.append(greet(theirs, {"who": "accepted"}, first=False))
        except Refused as error:
            results.append(error)
            theirs.close()

    thread = threading.Thread(target=accept)
    monkeypatch.setenv("GOSSAMER_TOKEN", "secret")
    thread.start()
    ours.sendall(MAGIC + bytes(16))
    ours.recv(20)
    text = json.dumps({"who": "a stranger"}).encode()
    ours.sendall(struct.pack("!I", len(text)) + text + bytes(32))
    thread.join(10)
    assert isinstance(results[0], Refused)
    assert "GOSSAMER_TOKEN" in str(results[0])


def test_those_who_know_the_token_meet(monkeypatch):
    monkeypatch.setenv("GOSSAMER_TOKEN", "secret")
    ours, theirs = socket.socketpair()
    heard = []
    thread = threading.Thread(target=lambda: heard.append(greet(theirs, {"who": "b"}, first=False)))
    thread.start()
    assert greet(ours, {"who": "a"}, first=True) == {"who": "b"}
    thread.join(10)
    assert heard == [{"who": "a"}]


@pytest.fixture(scope="module")
def besieged():
    zero, one, _told = a_pair()
    yield zero, one
    zero.close()
    one.close()


def attack(besieged, data):
    """Garbage on the listening port: nobody falls, and friends can still talk."""
    zero, one = besieged
    with socket.create_connection(zero.address, timeout=5) as stranger, suppress(OSError):  # sent away at any moment
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(10)
        while stranger.recv(4096):
            pass
    assert zero._thread.is_alive()
    assert one.peer(0).link is not None
    assert one.peer(0).link.open


hello_like = st.builds(
    lambda nonce, rest: MAGIC + nonce + rest, st.binary(min_size=16, max_size=16), st.binary(max_size=200)
)


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.one_of(st.binary(max_size=400), hello_like))
def test_garbage_on_the_port(besieged, data):
    attack(besieged, data)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.one_of(st.binary(max_size=4000), hello_like))
def test_much_garbage_on_the_port(besieged, data):
    attack(besieged, data)


class Exhausted:
    """A listening socket whose worker has no descriptor left for a while."""

    def __init__(self, listener, times):
        self._listener, self.times = listener, times

    def accept(self):
        if self.times > 0:
            self.times -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()

    def __getattr__(self, name):
        return getattr(self._listener, name)


def test_a_worker_without_descriptors_listens_again_later(pair):
    zero, one, _ = pair
    one.peer(0).link.close("for this test")
    zero._listener = Exhausted(zero._listener, 3)
    socket.create_connection(zero.address, timeout=5).close()  # the call of accept that was under way
    until(lambda: zero._listener.times == 0)
    until(lambda: one.connect(one.peer(0)), 5)


def test_silent_strangers_are_few_and_keep_nobody_out(pair):
    zero, one, _ = pair
    one.peer(0).link.close("for this test")
    until(lambda: zero.peer(1).link is None)
    strangers = [socket.create_connection(zero.address, timeout=5) for _ in range(2 * STRANGERS)]
    until(lambda: one.connect(one.peer(0)), 1)  # before the first of them is sent away for being slow
    until(lambda: [t.name for t in threading.enumerate()].count("gossamer-hello") <= STRANGERS, 1)
    assert strangers[0].recv(100).startswith(MAGIC)
    assert strangers[0].recv(100) == b""  # the oldest had to go
    for stranger in strangers:
        stranger.close()


def test_a_stranger_that_speaks_slowly_is_not_waited_for_byte_by_byte():
    ours, theirs = socket.socketpair()
    stop = threading.Event()

    def drip():
        while not stop.wait(0.05):
            with suppress(OSError):
                theirs.send(MAGIC[:1])

    thread = threading.Thread(target=drip)
    thread.start()
    began = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            greet(ours, {}, first=False, seconds=0.3)
        assert time.monotonic() - began < 0.8  # 20 bytes would have taken a second
    finally:
        stop.set()
        thread.join()
        ours.close()
        theirs.close()


@given(data=st.binary(min_size=HEADER.size, max_size=HEADER.size))
def test_a_header_is_ours_or_refused(data):
    with pytest.raises(Refused):
        Header.unpack(data, RUN, 100)


@given(
    kind=st.sampled_from(list(Kind)),
    length=st.integers(0, 100),
    epoch=st.integers(0, 2**32 - 1),
    round=st.integers(0, 2**64 - 1),
    lane=st.integers(0, 2**16 - 1),
    purpose=st.sampled_from(list(Purpose)),
    bucket=st.integers(0, 2**32 - 1),
    part=st.integers(0, 2**16 - 1),
)
def test_a_header_is_unpacked_as_it_was_packed(kind, length, epoch, round, lane, purpose, bucket, part):
    header = Header(kind, RUN, length, PLAN, ChannelId(lane, purpose), epoch, round, bucket, part)
    assert Header.unpack(header.pack(), RUN, 100) == header


def test_a_changed_membership_ends_waits_of_the_old_plan():
    inbox = Inbox()
    old = inbox.post(Key(1, CHANNEL, 0, 0), 1, 12, PLAN, memoryview(bytearray(1)))
    before = inbox.post(Key(1, CHANNEL, 1, 0), 1, 9, PLAN, memoryview(bytearray(1)))
    inbox.replanned(2, [10])
    assert "epoch 2" in old.failed
    assert not before.over  # it is still done by the old plan
