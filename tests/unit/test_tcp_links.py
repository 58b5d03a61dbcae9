"""TCP links between workers: delivery, refusals, skipped rounds, handshakes, and strangers on the port."""

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

from gossamer.comm.tcp.frame import HEADER, MAGIC, FrameHeader, Kind, Refused, Verdict, greet
from gossamer.comm.tcp.inbox import Inbox, Key
from gossamer.comm.tcp.link import Lost
from gossamer.comm.tcp.listener import HANDSHAKES
from gossamer.comm.tcp.transport import TcpChannel
from gossamer.comm.transport import ChannelId, Job, Purpose, Stamp
from linked import CHANNEL, LIMIT, PLAN, RUN, a_pair, patient, send, slot, until

__all__ = ["patient"]


@pytest.fixture
def pair():
    zero, one, frames = a_pair()
    yield zero, one, frames
    zero.close()
    one.close()


def test_a_message_is_delivered_to_a_waiting_buffer_and_kept_if_it_is_early(pair):
    zero, one, _ = pair
    buffer, waiting = slot(zero, 1, 5, 300_000)
    send(one, 0, 5, bytes(range(250)) * 1200)
    until(lambda: waiting.over)
    assert waiting.filled
    assert bytes(buffer) == bytes(range(250)) * 1200
    send(one, 0, 6, b"early")
    until(lambda: any(early.filled for early in list(zero.inbox._early.values())))
    buffer, waiting = slot(zero, 1, 6, 5)
    assert waiting.filled
    assert bytes(buffer) == b"early"


def test_waits_for_an_older_round_fail_when_a_newer_message_arrives(pair):
    zero, one, _ = pair
    _, waiting = slot(zero, 1, 5, 3)
    send(one, 0, 7, b"new")
    until(lambda: waiting.over)
    assert "skipped the round" in waiting.failed
    _, late = slot(zero, 1, 6, 3)
    assert "already in round 7" in late.failed
    buffer, now = slot(zero, 1, 7, 3)
    until(lambda: now.over)
    assert now.filled
    assert bytes(buffer) == b"new"


def test_a_canceled_buffer_is_not_written_to(pair):
    zero, one, _ = pair
    buffer, waiting = slot(zero, 1, 5, 2**20)
    link = one.peer(0).link
    link.connection.sendall(FrameHeader(Kind.DATA, RUN, 2**20, PLAN, CHANNEL, 1, 5, 0, 0).pack() + b"\1" * 2**18)
    until(lambda: buffer[0] == 1)
    zero.inbox.cancel([waiting])
    buffer[:] = bytes(2**20)
    link.connection.sendall(b"\1" * (2**20 - 2**18))
    buffer6, next_one = slot(zero, 1, 6, 2)
    send(one, 0, 6, b"ok")  # the rest of the old message was discarded
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
        (FrameHeader(Kind.DATA, b"otherrun", 4).pack() + b"four", "a message of run"),
        (b"GET / HTTP/1.1\r\nHost: somebody-else.example\r\n\r\n" * 2, "not a message of Gossamer"),
        (FrameHeader(Kind.DATA, RUN, 2**40).pack(), "more than the"),
        (FrameHeader(Kind.DATA, RUN, 4, round=2**53).pack() + b"four", "which cannot be true"),
    ],
)
def test_bytes_that_are_not_a_frame_of_this_run_close_the_link(pair, data, complaint):
    zero, one, _ = pair
    _, waiting = slot(zero, 1, 5, 4)
    one.peer(0).link.connection.sendall(data)
    until(lambda: waiting.over)
    assert complaint in waiting.failed
    assert zero.refusals == {1: 1}
    assert complaint in zero.last_refusal
    until(lambda: one.connect(one.peer(0)))  # and it can be opened again


def test_a_dead_peer_fails_all_waits_for_it(pair):
    zero, one, _ = pair
    slots = [slot(zero, 1, 5, 4, bucket=b)[1] for b in range(3)]
    one.close()
    until(lambda: all(s.over for s in slots))
    zero.connect(zero.peer(1))
    assert zero.peer(1).dead == "its port is closed"


def test_a_sender_can_give_up(pair):
    zero, one, _ = pair
    _buffer, waiting = slot(zero, 1, 5, 2**26)
    waiting.lock.acquire()  # the reader stops
    begun = time.monotonic()
    header = FrameHeader(Kind.DATA, RUN, 2**26, PLAN, CHANNEL, 1, 5, 0, 0)
    with pytest.raises(Lost, match="accepts no data"):
        one.peer(0).link.send(header, bytes(2**26), lambda: time.monotonic() - begun > 0.2)
    waiting.lock.release()
    assert one.peer(0).link is None  # half a frame cannot be taken back


def send_skipped(links, to, round, bucket=0):
    links.send_all(FrameHeader(Kind.SKIPPED, RUN, channel=CHANNEL, bucket=bucket, round=round), to={to})


def test_skipped_frames_are_sent_after_the_message_under_way(pair):
    zero, one, frames = pair
    _buffer, long = slot(zero, 1, 5, 2**26, bucket=1)
    _, short = slot(zero, 1, 5, 4, bucket=2)
    long.lock.acquire()  # the reader stops, so the message fills the link
    sending = threading.Thread(target=send, args=(one, 0, 5, bytes(2**26)), kwargs={"bucket": 1}, daemon=True)
    sending.start()
    until(one.peer(0).link._lock.locked)
    send_skipped(one, 0, 5, bucket=2)
    for round in range(1000):
        one.send_all(FrameHeader(Kind.HEARTBEAT, RUN, 3, epoch=1), b"%03d" % round)
    assert sending.is_alive()  # none of these calls waited for the link
    assert not short.over
    long.lock.release()
    sending.join(300)
    until(lambda: long.filled and short.over)
    assert "skipped the round" in short.failed
    until(lambda: frames)
    assert [payload for *_, payload in frames] == [b"999"]  # older heartbeats were not kept


@pytest.mark.parametrize("linked", [False, True])  # there is no link at that time; or it breaks, perhaps with the frame
def test_skipped_frames_are_repeated_on_the_next_link(pair, linked):
    zero, one, _ = pair
    if linked:
        send_skipped(one, 0, 7)
    one.peer(0).link.close("for this test")
    until(lambda: zero.peer(1).link is None)
    zero.inbox.lose(1, "for this test", forget=True)
    if not linked:
        send_skipped(one, 0, 7)
    _, waiting = slot(zero, 1, 7, 4)
    assert one.connect(one.peer(0))
    until(lambda: waiting.over)
    assert "skipped the round" in waiting.failed


def test_a_worker_that_gives_up_a_meeting_connects_to_all_its_peers(pair):
    zero, _, _ = pair
    wanted = []
    channel = TcpChannel(SimpleNamespace(rank=0, links=zero, connect_to=wanted.append), CHANNEL, 1, None)
    stamp = Stamp(0, PLAN, frozenset({0, 1, 2}), meeting=True)
    channel._skip(Job(3, 0, lambda scratch: None), ChannelId(0, Purpose.MEETING), stamp)
    channel.close(0.0)
    assert sorted(wanted) == [1, 2]


def test_a_worker_that_joins_again_does_not_repeat_skipped_frames(pair):
    zero, one, frames = pair
    one.peer(0).link.close("for this test")
    until(lambda: zero.peer(1).link is None)
    send_skipped(one, 0, 7)
    one.forget_lasting()
    _, waiting = slot(zero, 1, 7, 4)
    assert one.connect(one.peer(0))
    one.send_all(FrameHeader(Kind.HEARTBEAT, RUN))  # is sent after the first frames of the link
    until(lambda: frames)
    assert not waiting.over


def test_a_wrong_token_is_refused(monkeypatch):
    ours, theirs = socket.socketpair()
    results = []

    def accept():
        try:
            results.append(greet(theirs, {"who": "accepted"}, first=False, seconds=LIMIT))
        except Refused as error:
            results.append(error)
            theirs.close()

    thread = threading.Thread(target=accept)
    monkeypatch.setenv("GOSSAMER_TOKEN", "secret")
    thread.start()
    ours.sendall(MAGIC + bytes(16))
    ours.recv(20)
    text = json.dumps({"who": "stranger"}).encode()
    ours.sendall(struct.pack("!I", len(text)) + text + bytes(32))
    thread.join(300)
    assert isinstance(results[0], Refused)
    assert "GOSSAMER_TOKEN" in str(results[0])


def test_the_same_token_is_accepted(monkeypatch):
    monkeypatch.setenv("GOSSAMER_TOKEN", "secret")
    ours, theirs = socket.socketpair()
    heard = []
    thread = threading.Thread(target=lambda: heard.append(greet(theirs, {"who": "b"}, first=False, seconds=LIMIT)))
    thread.start()
    assert greet(ours, {"who": "a"}, first=True, seconds=LIMIT) == {"who": "b"}
    thread.join(300)
    assert heard == [{"who": "a"}]


@pytest.fixture(scope="module")
def besieged():
    zero, one, _frames = a_pair()
    yield zero, one
    zero.close()
    one.close()


def attack(besieged, data):
    """Send garbage to the port: the worker keeps listening, and its links stay open."""
    zero, one = besieged
    with (
        socket.create_connection(zero.address, timeout=LIMIT) as stranger,
        suppress(OSError),
    ):  # may be closed
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(4096):
            pass
    assert zero.listener.thread.is_alive()
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
    """A listening socket of a process that has no free descriptor for a while."""

    def __init__(self, listener, times):
        self._listener, self.times = listener, times

    def accept(self):
        if self.times > 0:
            self.times -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()

    def __getattr__(self, name):
        return getattr(self._listener, name)


def test_a_worker_without_descriptors_accepts_connections_later(pair):
    zero, one, _ = pair
    one.peer(0).link.close("for this test")
    zero.listener._server = Exhausted(zero.server, 3)
    socket.create_connection(zero.address, timeout=LIMIT).close()  # ends the call of accept that is under way
    until(lambda: zero.listener._server.times == 0)
    until(lambda: one.connect(one.peer(0)))


def test_silent_strangers_are_limited_and_do_not_keep_workers_out(pair):
    zero, one, _ = pair
    one.peer(0).link.close("for this test")
    until(lambda: zero.peer(1).link is None)
    strangers = [socket.create_connection(zero.address, timeout=LIMIT) for _ in range(2 * HANDSHAKES)]
    until(lambda: one.connect(one.peer(0)))  # here, handshakes have no time limit that could end those of the strangers
    until(lambda: [t.name for t in threading.enumerate()].count("gossamer-hello") <= HANDSHAKES)
    assert strangers[0].recv(100).startswith(MAGIC)
    assert strangers[0].recv(100) == b""  # the oldest was closed
    for stranger in strangers:
        stranger.close()


class Dripping:
    """A connection over which a byte comes every 0.05 s, of a clock that only this moves."""

    def __init__(self, monkeypatch):
        self.now, self.timeout, self.read = 100.0, None, 0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def settimeout(self, seconds):
        self.timeout = seconds

    def sendall(self, data):
        pass

    def recv_into(self, view):
        self.now += min(self.timeout, 0.05)
        if self.timeout < 0.05:
            raise TimeoutError
        self.read += 1
        view[:1] = MAGIC[:1]
        return 1


def test_the_handshake_deadline_covers_all_bytes_together(monkeypatch):
    connection = Dripping(monkeypatch)
    with pytest.raises(TimeoutError):
        greet(connection, {}, first=False, seconds=0.3)
    assert connection.read < len(MAGIC) + 16  # it did not wait for the rest of the first message


@given(data=st.binary(min_size=HEADER.size, max_size=HEADER.size))
def test_random_bytes_are_refused_as_a_header(data):
    with pytest.raises(Refused):
        FrameHeader.unpack(data, RUN, 100)


@given(
    kind=st.sampled_from(list(Kind)),
    length=st.integers(0, 100),
    epoch=st.integers(0, 2**32 - 1),
    round=st.integers(0, 2**53 - 1),
    lane=st.integers(0, 2**16 - 1),
    purpose=st.sampled_from(list(Purpose)),
    bucket=st.integers(0, 2**32 - 1),
    part=st.integers(0, 2**16 - 1),
)
def test_a_header_is_unpacked_as_it_was_packed(kind, length, epoch, round, lane, purpose, bucket, part):
    header = FrameHeader(kind, RUN, length, PLAN, ChannelId(lane, purpose), epoch, round, bucket, part)
    assert FrameHeader.unpack(header.pack(), RUN, 100) == header


def test_a_new_epoch_fails_waits_of_the_old_plan():
    inbox = Inbox()
    old = inbox.post(Key(1, CHANNEL, 0, 0), 1, 12, PLAN, memoryview(bytearray(1)))
    before = inbox.post(Key(1, CHANNEL, 1, 0), 1, 9, PLAN, memoryview(bytearray(1)))
    inbox.replan(2, [10])
    assert "epoch 2" in old.failed
    assert not before.over  # this round still follows the old plan


@pytest.mark.parametrize("payload", [b"", b"x", bytes(15), bytes(17), bytes(4096)])
def test_a_verdict_that_cannot_be_read_closes_its_link_and_is_counted(pair, payload):
    zero, one, _ = pair
    link = zero.peer(1).link
    one.peer(0).link.send(FrameHeader(Kind.VERDICT, RUN, len(payload), channel=CHANNEL), payload)
    until(lambda: not link.open)
    assert zero.refusals == {1: 1}
    assert "a verdict has 16 bytes" in zero.last_refusal
    assert zero.inbox.verdict(1, 0) == Verdict()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=64), st.integers(0, 2**40))
def test_any_bytes_are_a_verdict_or_refused(data, number):
    try:
        verdict = Verdict.unpack(data)
    except Refused:
        assert len(data) != 16
        return
    assert verdict.pack() == data
    assert verdict.on(number) in (True, False, None)


def test_a_verdict_is_repeated_on_the_next_link(pair):
    zero, one, _ = pair
    first = one.peer(0).link
    payload = Verdict(done=7, skipped=3).pack()
    one.send_all(FrameHeader(Kind.VERDICT, RUN, len(payload), channel=CHANNEL), payload, to=[0])
    until(lambda: zero.inbox.verdict(1, 0).on(7) is True)
    first.close("the test broke it")
    until(lambda: zero.peer(1).link is None)
    zero.inbox.judge(1, 0, Verdict())  # as if it had been lost with the connection
    until(lambda: one.connect(one.peer(0)))
    until(lambda: zero.inbox.verdict(1, 0) == Verdict(7, 3))
