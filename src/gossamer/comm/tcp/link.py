"""A worker's connections with its peers: a listening socket, and a link (socket and reading thread) per peer.

A link never blocks a worker: whoever sends can give up at any moment (a frame cut in two closes the link, which is made
anew), and a peer's messages are read as they come, whether somebody waits for them or not. The higher rank connects.
Short frames that tell of this worker (`send_all`) wait in the link until it is free, the latest of each kind only.
A peer is `late` when it was waited for in vain: nobody waits for it again until it takes part in rounds again.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gossamer.comm.tcp.frame import HEADER, Header, Kind, Refused, greet, read_exactly, read_into
from gossamer.comm.tcp.inbox import Inbox, Key
from gossamer.comm.transport import ChannelId

CHUNK = 2**20  # bytes read or written at once
ENOUGH = 2**17  # bytes to wake up for
POLL = 0.05  # seconds between looks at whether a send was given up
CONNECT = 1.0  # seconds for a connection
STRANGERS = 64  # handshakes at once; whoever takes longest makes room for the next one
About = tuple[Kind, ChannelId, int]  # what a short frame is about: kind, channel, bucket
STRANGER = -1  # whoever is not known by a rank
TRASH = memoryview(bytearray(CHUNK))


class NotMember(Refused):
    """One of us, but not of this epoch: it will learn of it, or we shall."""


class Lost(ConnectionError):
    """A peer did not take part."""


@dataclass(eq=False)
class Peer:
    """What this worker knows of another one."""

    rank: int
    address: tuple[str, int] | None = None
    incarnation: str = ""
    link: Link | None = None
    heard: float = field(default_factory=time.monotonic)
    dead: str = ""  # why it cannot come back as this process
    late: bool = False
    rounds: list[int] = field(default_factory=list)  # how far it was when last heard of
    passed: dict[About, bytes] = field(default_factory=dict)  # what it need not wait for: said again on every new link

    def goes_on(self, rounds: list[int]) -> None:
        """It says how far it is; one that moves is no longer late."""
        if rounds != self.rounds:
            self.late = False
        self.rounds = rounds


class Link:
    """One connection. `send`, `post` and `flush` may be called by any thread; a thread of its own reads."""

    def __init__(self, connection: socket.socket, peer: Peer, links: Links):
        self.connection, self.peer, self._links = connection, peer, links
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()  # held by whoever writes
        self._posted: dict[About, bytes] = {}  # short frames that wait
        self._posting = threading.Lock()
        self._rest = memoryview(b"")  # of a short frame that did not go at once
        self._writable = select.poll()
        self._writable.register(connection, select.POLLOUT)
        self._low = 1
        self.open = True
        self._thread = threading.Thread(target=self._read, name=f"gossamer-link-{peer.rank}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(
        self, header: Header, payload: memoryview | bytes = b"", given_up: Callable[[], bool] | None = None
    ) -> None:
        """Send a frame; Lost when the link closes, or `given_up()` before all of it has gone."""
        while not self._lock.acquire(timeout=POLL):
            if not self.open or (given_up is not None and given_up()):
                raise Lost(f"worker {self.peer.rank} takes nothing")
        try:
            rest, self._rest = self._rest, memoryview(b"")
            begun = bool(rest)
            for part in (rest, memoryview(header.pack()), memoryview(payload)):
                while len(part):
                    if not self.open:
                        raise Lost(f"the connection with worker {self.peer.rank} is closed")
                    if not self._writable.poll(POLL * 1000):
                        if given_up is not None and given_up():
                            if begun:  # half a frame cannot be taken back
                                self.close("it takes nothing")
                            raise Lost(f"worker {self.peer.rank} takes nothing")
                        continue
                    try:
                        part = part[self.connection.send(part[:CHUNK], socket.MSG_DONTWAIT) :]
                        begun = True
                    except BlockingIOError:
                        continue
                    except OSError as error:
                        self.close(str(error))
                        raise Lost(f"the connection with worker {self.peer.rank} broke: {error}") from error
            self._write_posted()  # before another long frame
        finally:
            self._lock.release()
            self.flush()

    def post(self, about: About, frame: bytes) -> None:
        """Leave a short frame for the next `flush`, in place of an older one about the same."""
        with self._posting:
            self._posted.pop(about, None)
            self._posted[about] = frame

    def flush(self) -> None:
        """Write what was posted, as much as the peer takes at once; after its own frame if somebody writes just now."""
        while self.open and (self._posted or self._rest) and self._lock.acquire(blocking=False):
            try:
                if not self._write_posted():
                    return  # the next sign of life tries again
            finally:
                self._lock.release()

    def _write_posted(self) -> bool:
        """Whether all went; never waits. The caller holds the lock."""
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
        """End the link, on both sides; everybody who waits for the peer is told."""
        if self.open:
            self.open = False
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            self._links.closed(self, why)

    def _read(self) -> None:
        links, why = self._links, "it closed the connection"
        try:
            while self.open:
                header = Header.unpack(read_exactly(self.connection, HEADER.size), links.run, links.most)
                self.peer.heard = time.monotonic()
                if header.kind is Kind.DATA:
                    self._take(header)
                else:
                    links.told(self.peer, header, bytes(read_exactly(self.connection, header.length)))
        except Refused as error:
            why = str(error)
            links.refused(self.peer.rank, why)
        except OSError as error:
            why = str(error) or why
        finally:
            self.close(why)
            with suppress(OSError):
                self.connection.close()

    def _take(self, header: Header) -> None:
        """A message of an exchange, into the buffer that waits for it."""
        inbox = self._links.inbox
        key = Key(self.peer.rank, header.channel, header.bucket, header.part)
        slot = inbox.coming(key, header.epoch, header.round, header.plan, header.length)
        if slot.failed:
            self._links.refused(self.peer.rank, slot.failed)
        readable = select.poll()
        readable.register(self.connection, select.POLLIN)
        done = 0
        while done < header.length:
            self._wake_at(min(header.length - done, ENOUGH))
            readable.poll()
            with slot.lock:  # so that a buffer can be taken back between two looks
                left = header.length - done
                target = TRASH[:left] if slot.canceled else slot.view[done : done + CHUNK]
                try:
                    got = self.connection.recv_into(target, flags=socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
            if got == 0:
                raise ConnectionError("it closed the connection in the middle of a message")
            done += got
            self.peer.heard = time.monotonic()
        self._wake_at(1)
        self.peer.late = False
        inbox.arrived(slot)

    def _wake_at(self, size: int) -> None:
        """Let `poll` return when so many bytes are there: waking up for each segment costs more than reading it."""
        if size != self._low:
            self._low = size
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)


def send_state(connection: socket.socket, run: bytes, data: bytes) -> None:
    """Answer a `fetch`."""
    connection.sendall(Header(Kind.STATE, run, len(data)).pack())
    connection.sendall(data)


class Links:
    """All links of a worker. `hello()` is what it says of itself; `accept(hello)` may refuse a peer by raising."""

    def __init__(
        self,
        rank: int,
        run: bytes,
        address: str,
        most: int,
        hello: Callable[[], dict[str, Any]],
        accept: Callable[[dict[str, Any]], None],
        told: Callable[[Peer, Header, bytes], None],
        serve: Callable[[socket.socket, dict[str, Any]], None],
        gone: Callable[[Peer], None],
    ):
        self.rank, self.run, self.most = rank, run, most
        self.inbox = Inbox()
        self.peers: dict[int, Peer] = {}
        self.refusals: dict[int, int] = {}
        self.last_refusal = ""
        self._hello, self._accept, self._told, self._serve, self._gone = hello, accept, told, serve, gone
        self._lock = threading.RLock()
        self._stopped = False
        self._strangers: list[socket.socket] = []  # in a handshake, the oldest first
        self._listener = socket.create_server((address, 0), backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._listen, name="gossamer-listen", daemon=True)
        self._thread.start()

    def peer(self, rank: int) -> Peer:
        with self._lock:
            return self.peers.setdefault(rank, Peer(rank))

    def know(self, rank: int, incarnation: str, address: tuple[str, int]) -> Peer:
        """A member's process and where it listens; a new process for an old rank starts afresh."""
        with self._lock:
            peer = self.peer(rank)
            if peer.incarnation == incarnation:
                return peer
            link, changed = peer.link, bool(peer.incarnation)
            fresh = Peer(rank, address, incarnation)
            self.peers[rank] = fresh
        if link is not None:
            link.close("another process has taken its place")
        if changed:
            self.inbox.lost(rank, "another process has taken its place", forget=True)
        return fresh

    def connect(self, peer: Peer) -> bool:
        """Open the link with `peer` if there is none and it is ours to open; whether it is there."""
        if peer.link is not None:
            return True
        if peer.address is None or peer.dead or self._stopped:
            return False
        try:
            connection = socket.create_connection(peer.address, timeout=CONNECT)
        except ConnectionRefusedError:
            peer.dead = "its port is closed"
            self.inbox.lost(peer.rank, "it is dead")
            return False
        except OSError:
            return False
        try:
            if self.rank < peer.rank:  # only a look at whether it is alive: the link is its to open
                connection.close()
                return False
            hello = greet(connection, {**self._hello(), "purpose": "link"}, first=True)
            peer.goes_on([int(k) for k in hello["rounds"]])
        except (OSError, Refused, struct.error, KeyError, TypeError, ValueError):
            connection.close()
            return False
        self._install(peer, connection)
        return True

    def fetch(self, address: tuple[str, int], request: dict[str, Any], timeout: float) -> bytes:
        """Ask whoever listens at `address` for its state, over a connection of its own."""
        with socket.create_connection(address, timeout=CONNECT) as connection:
            greet(connection, {**self._hello(), "purpose": "pull", **request}, first=True, seconds=timeout)
            connection.settimeout(timeout)
            header = Header.unpack(read_exactly(connection, HEADER.size), self.run, 2**40)
            data = bytearray(header.length)
            read_into(connection, memoryview(data))
            return bytes(data)

    def send_all(self, header: Header, payload: bytes = b"", *, to: Iterable[int] | None = None) -> None:
        """A short frame to every linked peer, or to those of `to`, as soon as each takes it; never waits."""
        about, frame = (header.kind, header.channel, header.bucket), header.pack() + payload
        with self._lock:
            peers = list(self.peers.values()) if to is None else [self.peer(rank) for rank in to]
            links = [link for peer in peers if (link := peer.link) is not None]
            for link in links:
                link.post(about, frame)
            if header.kind is Kind.PASSED:
                for peer in peers:
                    peer.passed[about] = frame
        for link in links:
            link.flush()

    def begin_anew(self) -> None:
        """This worker goes on as a new process would: what it said before holds no longer."""
        with self._lock:
            for peer in self.peers.values():
                peer.passed.clear()

    def closed(self, link: Link, why: str) -> None:
        peer = link.peer
        if peer.link is link:
            peer.link = None
            self.inbox.lost(peer.rank, why)
            if not self._stopped:
                self._gone(peer)

    def told(self, peer: Peer, header: Header, payload: bytes) -> None:
        if header.kind is Kind.PASSED:
            self.inbox.passed(peer.rank, header.channel, header.bucket, header.round)
        else:
            self._told(peer, header, payload)

    def refused(self, rank: int, why: str) -> None:
        """Count what was not mixed in, and whose it was."""
        self.refusals[rank] = self.refusals.get(rank, 0) + 1
        self.last_refusal = f"worker {rank}: {why}"

    def close(self) -> None:
        self._stopped = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in list(self.peers.values()):
            link = peer.link
            if link is not None:
                link.flush()
                link.close("this worker leaves")
        self._thread.join(timeout=1.0)

    def _install(self, peer: Peer, connection: socket.socket) -> None:
        link = Link(connection, peer, self)
        with self._lock:
            old, peer.link = peer.link, link
            for about, frame in peer.passed.items():
                link.post(about, frame)
            peer.heard = time.monotonic()
        if old is not None:
            old.close("it connected anew")
        link.start()
        link.flush()
        if self._stopped:
            link.close("this worker leaves")
        self.inbox.wake()

    def _listen(self) -> None:
        while not self._stopped:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # this worker leaves; or no descriptor is free, or whoever came has gone again
                if not self._stopped:
                    time.sleep(POLL)
                continue
            self._make_room(connection)
            # A thread each: a stranger that says nothing must not keep others waiting.
            thread = threading.Thread(target=self._welcome, args=(connection,), name="gossamer-hello", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # there can be no more threads just now
                self._greeted(connection)
                connection.close()

    def _make_room(self, connection: socket.socket) -> None:
        """One more handshake. One of us is through in no time, so it is the oldest that has to go if they are many."""
        with self._lock:
            self._strangers.append(connection)
            oldest = self._strangers.pop(0) if len(self._strangers) > STRANGERS else None
        if oldest is not None:
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread notices, and closes it

    def _greeted(self, connection: socket.socket) -> None:
        """A handshake is over, well or not."""
        with self._lock, suppress(ValueError):
            self._strangers.remove(connection)

    def _welcome(self, connection: socket.socket) -> None:
        """Who is there? Strangers are sent away; nothing they send can do more than end their own connection."""
        try:
            try:
                hello = greet(connection, self._hello(), first=False)
            finally:
                self._greeted(connection)
            if hello.get("run") != self.run.hex():
                raise Refused(f"a worker of run {hello.get('run')!r} came to run {self.run.hex()}")
            if hello.get("purpose") == "pull":
                connection.settimeout(None)
                self._serve(connection, hello)
                return
            self._accept(hello)
            self._install(self.peer(int(hello["rank"])), connection)
        except (OSError, Refused, struct.error, KeyError, TypeError, ValueError) as error:
            if isinstance(error, Refused) and not isinstance(error, NotMember):
                self.refused(STRANGER, str(error))
            connection.close()
