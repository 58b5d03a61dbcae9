"""One link: a TCP connection between two members, with a thread that reads its frames.

A link never blocks a worker: a sender can give up at any moment (a frame that was cut in two closes the link, which
is then opened again), and frames are read as they come, whether or not a buffer waits for them. Short frames wait in
the link until the connection is free; only the latest about each subject is kept.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from gossamer.comm.tcp.edge_deadlines import WINDOW
from gossamer.comm.tcp.frame import HEADER, FrameHeader, Kind, Refused, read_exactly
from gossamer.comm.tcp.inbox import Inbox, Key
from gossamer.comm.transport import ChannelId

CHUNK = 2**20  # bytes to read or write at once
WAKE_UP = 2**17  # bytes to wake up for
POLL = 0.05  # seconds between checks of whether a send was given up
TRASH = memoryview(bytearray(CHUNK))
PORT_CLOSED = "its port is closed"  # the one reason of `Peer.dead` that does not last: see `Peer.gone`
Subject = tuple[Kind, ChannelId, int]  # what a short frame is about; the int is the bucket


class Lost(ConnectionError):
    """A peer did not take part in an exchange."""


@dataclass(eq=False)
class Peer:
    """What this worker knows about another process of the job.

    Note [Why a late peer is waited for once]: a peer that stands still would cost each of its neighbors the soft
    deadline in every step, and their neighbors wait for them in turn. So a peer is `late` after this worker has waited
    for it in vain, and nothing waits for it again until it sends a message or reports another round.
    """

    rank: int
    address: tuple[str, int] | None = None
    incarnation: str = ""
    link: Link | None = None
    heard: float = field(default_factory=time.monotonic)
    dead: str = ""  # the reason why exchanges with this process end at once
    late: bool = False
    rounds: list[int] = field(default_factory=list)  # as of the last heartbeat
    reported: float = field(default_factory=time.monotonic)  # when they last changed
    last_beat: float | None = None
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # seconds between the last heartbeats
    lasting: dict[Subject, bytes] = field(default_factory=dict)  # SKIPPED and VERDICT frames, repeated on new links

    @property
    def gone(self) -> bool:
        """Whether this process cannot come back. A closed port is no proof: a firewall refuses in the same way, and
        the process is there again once it connects, or is reached."""
        return bool(self.dead) and self.dead != PORT_CLOSED

    def beat(self) -> None:
        """Note that a heartbeat of the peer has arrived."""
        now = time.monotonic()
        if self.last_beat is not None:
            self.gaps.append(now - self.last_beat)
        self.last_beat = now

    def silence(self) -> float:
        """Seconds since anything was heard of the peer."""
        return time.monotonic() - self.heard

    def report(self, rounds: list[int]) -> None:
        """Note the peer's progress. A peer that makes progress is not late any more."""
        if rounds != self.rounds:
            self.late, self.reported = False, time.monotonic()
        self.rounds = rounds


class LinkOwner(Protocol):
    """What a link needs of the worker it belongs to."""

    run: bytes
    longest: int
    inbox: Inbox

    def received(self, peer: Peer, header: FrameHeader, payload: bytes) -> None: ...
    def refused(self, rank: int, why: str) -> None: ...
    def closed(self, link: Link, why: str) -> None: ...


class Link:
    """One connection. Any thread may call `send`, `post` and `flush`; call `start` to begin reading."""

    def __init__(self, connection: socket.socket, peer: Peer, owner: LinkOwner):
        self.connection, self.peer, self._owner = connection, peer, owner
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()  # held while a frame is written
        self._posted: dict[Subject, bytes] = {}  # short frames that wait
        self._posting = threading.Lock()
        self._rest = memoryview(b"")  # the unwritten part of a short frame
        self._writable = select.poll()
        self._writable.register(connection, select.POLLOUT)
        self._low = 1
        self.open = True
        self.used = time.monotonic()  # when it last carried a part of a message, or was opened
        self._thread = threading.Thread(target=self._read, name=f"gossamer-link-{peer.rank}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(
        self, header: FrameHeader, payload: memoryview | bytes = b"", given_up: Callable[[], bool] | None = None
    ) -> None:
        """Send a frame. Raise Lost if the link closes, or if `given_up()` before the whole frame is sent."""
        while not self._lock.acquire(timeout=POLL):
            if not self.open or (given_up is not None and given_up()):
                raise Lost(f"worker {self.peer.rank} accepts no data")
        try:
            rest, self._rest = self._rest, memoryview(b"")
            begun = bool(rest)
            parts = [rest, memoryview(header.pack()), memoryview(payload)]
            while parts:
                if not self.open:
                    raise Lost(f"the connection with worker {self.peer.rank} is closed")
                try:  # straight from the tensor's memory; the header travels in the first segment of the payload
                    sent = self.connection.sendmsg(_beginning(parts), (), socket.MSG_DONTWAIT)
                    parts, begun, self.used = _without(parts, sent), True, time.monotonic()
                except BlockingIOError:
                    accepted = self._writable.poll(POLL * 1000)
                    if not accepted and given_up is not None and given_up():
                        if begun:  # half a frame cannot be taken back
                            self.close("it accepts no data")
                        raise Lost(f"worker {self.peer.rank} accepts no data") from None
                except OSError as error:
                    self.close(str(error))
                    raise Lost(f"the connection with worker {self.peer.rank} broke: {error}") from error
            self._write_posted()  # before another long frame
        finally:
            self._lock.release()
            self.flush()

    def post(self, subject: Subject, frame: bytes) -> None:
        """Leave a short frame for the next `flush`, in place of an older one about the same subject."""
        with self._posting:
            self._posted.pop(subject, None)
            self._posted[subject] = frame

    def flush(self) -> None:
        """Write the posted frames, as many as the peer accepts now. If another thread is writing a frame, that thread
        writes them afterwards."""
        while self.open and (self._posted or self._rest) and self._lock.acquire(blocking=False):
            try:
                if not self._write_posted():
                    return  # the next heartbeat tries again
            finally:
                self._lock.release()

    def _write_posted(self) -> bool:
        """Write without waiting; return whether all posted frames were written. The caller holds the lock."""
        while self.open:
            if not self._rest:
                with self._posting:
                    if not self._posted:
                        return True
                    self._rest = memoryview(self._posted.pop(next(iter(self._posted))))
            try:
                self._rest = self._rest[self.connection.send(self._rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                break
            except OSError as error:
                self.close(str(error))
        return False

    def close(self, why: str) -> None:
        """Close the connection for both sides. Every wait for the peer ends with the reason `why`."""
        if self.open:
            self.open = False
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            self._owner.closed(self, why)

    def _read(self) -> None:
        owner, why = self._owner, "it closed the connection"
        try:
            while self.open:
                header = FrameHeader.unpack(read_exactly(self.connection, HEADER.size), owner.run, owner.longest)
                self.peer.heard = time.monotonic()
                if header.kind is Kind.DATA:
                    self._receive(header)
                else:
                    owner.received(self.peer, header, bytes(read_exactly(self.connection, header.length)))
        except Refused as error:
            why = str(error)
            owner.refused(self.peer.rank, why)
        except OSError as error:
            why = str(error) or why
        except Exception as error:  # a frame that nobody thought of
            why = f"a frame cannot be read: {error!r:.200}"
            owner.refused(self.peer.rank, why)
        finally:
            self.close(why)
            with suppress(OSError):
                self.connection.close()

    def _receive(self, header: FrameHeader) -> None:
        """Read a message of an exchange into the buffer that waits for it."""
        inbox = self._owner.inbox
        key = Key(self.peer.rank, header.channel, header.bucket, header.part)
        slot = inbox.begin(key, header.epoch, header.round, header.plan, header.length)
        if slot.failed:
            self._owner.refused(self.peer.rank, slot.failed)
        readable = select.poll()
        readable.register(self.connection, select.POLLIN)
        done = 0
        while done < header.length:
            self._wake_at(min(header.length - done, WAKE_UP))
            readable.poll()
            with slot.lock:  # released between reads, so that `Inbox.cancel` can withdraw the buffer
                left = header.length - done
                target = TRASH[:left] if slot.canceled else slot.view[done : done + CHUNK]
                try:
                    got = self.connection.recv_into(target, flags=socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
            if got == 0:
                raise ConnectionError("it closed the connection in the middle of a message")
            done += got
            self.peer.heard = self.used = time.monotonic()
        self._wake_at(1)
        self.peer.late = False
        inbox.complete(slot)

    def _wake_at(self, size: int) -> None:
        """Let `poll` return once `size` bytes have arrived: waking up for each segment costs more than reading it."""
        if size != self._low:
            self._low = size
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)


def _beginning(parts: list[memoryview]) -> list[memoryview]:
    """The first CHUNK bytes of `parts`."""
    chosen, room = [], CHUNK
    for part in parts:
        chosen.append(part[:room])
        room -= len(chosen[-1])
        if room <= 0:
            break
    return chosen


def _without(parts: list[memoryview], sent: int) -> list[memoryview]:
    """What is left of `parts` after the first `sent` bytes."""
    left = []
    for part in parts:
        taken = min(sent, len(part))
        sent -= taken
        if taken < len(part):
            left.append(part[taken:])
    return left
