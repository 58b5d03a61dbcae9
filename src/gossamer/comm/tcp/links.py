"""All links of one worker. Of two workers, the one with the higher rank opens their link."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from gossamer.comm.deadline import Deadline
from gossamer.comm.tcp.frame import (
    HANDSHAKE,
    HEADER,
    Ask,
    FrameHeader,
    Hello,
    Kind,
    Refused,
    Verdict,
    meet,
    read_exactly,
    read_into,
)
from gossamer.comm.tcp.inbox import Inbox
from gossamer.comm.tcp.link import CHUNK, PORT_CLOSED, Link, Peer

CONNECT = 1.0  # seconds to open a connection
LONGEST_STATE = 2**40


class LinkTable:
    """The peers of a worker and the links with them.

    Args:
        rank: This worker's rank.
        run: The id of the run; frames of other runs are refused.
        longest: The largest payload, in bytes, that a frame of this job can have, and the most that is kept of the
            early messages of a peer.
        hello: Returns what this worker says about itself in a handshake.
        on_frame: Called with every frame that is not a message of an exchange, by the thread that read it.
        on_closed: Called when a link has closed, except by `close`.
        arrived: Called with the sender of a message, and how late the message was.
    """

    def __init__(
        self,
        rank: int,
        run: bytes,
        longest: int,
        hello: Callable[[], Hello],
        on_frame: Callable[[Peer, FrameHeader, bytes], None],
        on_closed: Callable[[Peer], None],
        arrived: Callable[[int, float], None] = lambda sender, lag: None,
    ):
        self.rank, self.run, self.longest = rank, run, longest
        self.inbox = Inbox(arrived, longest, len(hello().rounds) or None)  # no rounds: a static job
        self.peers: dict[int, Peer] = {}
        self.refusals: dict[int, int] = {}  # by rank, -1 for strangers
        self.last_refusal = ""
        self._hello, self._on_frame, self._on_closed = hello, on_frame, on_closed
        self._lock = threading.RLock()
        self._stopped = False

    def peer(self, rank: int) -> Peer:
        with self._lock:
            return self.peers.setdefault(rank, Peer(rank))

    def know(self, rank: int, incarnation: str, address: tuple[str, int]) -> Peer:
        """Note the process of a member and its address. A new process of a known rank starts afresh."""
        with self._lock:
            peer = self.peer(rank)
            if peer.incarnation == incarnation:
                return peer
            link, changed = peer.link, bool(peer.incarnation)
            fresh = Peer(rank, address, incarnation)
            self.peers[rank] = fresh
        if link is not None:
            link.close("another process has its rank now")
        if changed:
            self.inbox.lose(rank, "another process has its rank now", forget=True)
        return fresh

    def connect(self, peer: Peer) -> bool:
        """Return whether there is a link with `peer`; open it first if this worker has the higher rank.

        The worker with the lower rank only gives notice: the peer may not know yet that this worker is a member, and
        would read the record of the members half a second later. A closed port marks the peer as dead, until it is
        reached or connects.
        """
        if peer.link is not None:
            return True
        if peer.address is None or peer.gone or self._stopped:
            return False
        try:
            connection = socket.create_connection(peer.address, timeout=CONNECT)
        except ConnectionRefusedError:
            with self._lock:  # it may have connected meanwhile
                refused = peer.link is None
                if refused:
                    peer.dead = peer.dead or PORT_CLOSED
            if refused:
                self.inbox.lose(peer.rank, "it is dead")
            return False
        except OSError:
            return False
        if self.rank < peer.rank:
            with connection, suppress(OSError, Refused):
                theirs = meet(connection, replace(self._hello(), ask=Ask.NOTICE), first=True)
                if (theirs.run, theirs.incarnation) == (self.run.hex(), peer.incarnation):
                    self._answers(peer)
            return False
        try:
            mine = self._hello()
            theirs = meet(connection, mine, first=True)
            self._check(peer, mine, theirs)
        except (OSError, Refused) as error:
            if isinstance(error, Refused):
                self.refused(peer.rank, str(error))
            connection.close()
            return False
        if theirs.incarnation != peer.incarnation:  # the members may have changed, which this worker will hear of
            connection.close()
            return False
        peer.report(theirs.rounds)
        self.install(peer, connection)
        return True

    def _check(self, peer: Peer, mine: Hello, theirs: Hello) -> None:
        """Raise Refused if `theirs`, who answered at the address of `peer`, is a worker of another job."""
        if theirs.run != mine.run:
            peer.dead = "is gone, and another run has its port"
            self.inbox.lose(peer.rank, "it is dead")
            raise Refused(f"run {theirs.run!r:.100} answers at its address in place of run {mine.run}")
        if theirs.rank != peer.rank or len(theirs.rounds) != len(mine.rounds):
            raise Refused(f"worker {theirs.rank} with {len(theirs.rounds)} lanes answers at its address")

    def _answers(self, peer: Peer) -> None:
        """The process of `peer` is there: a refused connection did not mean that it is dead."""
        with self._lock:
            if peer.dead and not peer.gone:
                peer.dead = ""

    def install(self, peer: Peer, connection: socket.socket) -> None:
        """Use `connection` as the link with `peer`, in place of an older one, whose messages may be lost."""
        link = Link(connection, peer, self)
        with self._lock:
            old, peer.link = peer.link, link
            self._answers(peer)
            for subject, frame in peer.lasting.items():
                link.post(subject, frame)
            peer.heard = time.monotonic()
        if old is not None:
            old.close("it connected again")
            self.inbox.lose(peer.rank, "it connected again")  # before the new link is read: its messages are awaited
        link.start()
        link.flush()
        if self._stopped:
            link.close("this worker leaves")
        self.inbox.wake()

    def is_alive(self, address: tuple[str, int], incarnation: str) -> bool:
        """Whether the process `incarnation` of this run answers at `address`."""
        try:
            with socket.create_connection(address, timeout=CONNECT) as connection:
                hello = meet(connection, self._hello(), first=True)
        except (OSError, Refused):
            return False
        return (hello.run, hello.incarnation) == (self.run.hex(), incarnation)

    def fetch(
        self,
        address: tuple[str, int],
        ask: Ask,
        timeout: float,
        silence: float | None = None,
        handshake: float = HANDSHAKE,
    ) -> io.BytesIO:
        """Return the state of the worker at `address`, over a connection of its own.

        Raise TimeoutError if that worker does not take part in the `handshake` in so many seconds, does not begin to
        send within `timeout` seconds, or was silent for `silence` seconds (default: `timeout`); it sends heartbeats
        until it comes to the end of its step.
        """
        deadline = Deadline(timeout)
        with socket.create_connection(address, timeout=CONNECT) as connection:
            theirs = meet(connection, replace(self._hello(), ask=ask), first=True, seconds=handshake)
            if theirs.run != self.run.hex():
                raise Refused(f"it belongs to run {theirs.run!r:.100}")
            connection.settimeout(timeout if silence is None else silence)
            while True:
                header = FrameHeader.unpack(read_exactly(connection, HEADER.size), self.run, LONGEST_STATE)
                if header.kind is Kind.STATE:
                    break
                if header.kind is not Kind.HEARTBEAT or header.length:
                    raise Refused(f"it sent {header.kind.name} in place of its state")
                if deadline.expired:
                    raise TimeoutError(f"it did not come to the end of its step within {timeout:g} s")
            data = io.BytesIO()  # filled in place: a state is as large as the model and its optimizers
            try:
                data.seek(max(0, header.length - 1))
                data.write(bytes(min(1, header.length)))
            except MemoryError:
                raise Refused(f"its state has {header.length} bytes, more than this worker has memory for") from None
            read_into(connection, data.getbuffer())
            return data

    def send_all(self, header: FrameHeader, payload: bytes = b"", *, to: Iterable[int] | None = None) -> None:
        """Send a short frame to every linked peer, or to the ranks `to`. Never waits: a link sends it when free."""
        subject, frame = (header.kind, header.channel, header.bucket), header.pack() + payload
        with self._lock:
            peers = list(self.peers.values()) if to is None else [self.peer(rank) for rank in to]
            links = [link for peer in peers if (link := peer.link) is not None]
            for link in links:
                link.post(subject, frame)
            if header.kind in (Kind.SKIPPED, Kind.VERDICT):
                for peer in peers:
                    peer.lasting[subject] = frame
        for link in links:
            link.flush()

    def forget_lasting(self) -> None:
        """Do not repeat earlier SKIPPED and VERDICT frames on new links: this worker joins again, at another round."""
        with self._lock:
            for peer in self.peers.values():
                peer.lasting.clear()

    def received(self, peer: Peer, header: FrameHeader, payload: bytes) -> None:
        """Handle a frame that is not a message of an exchange."""
        why = ""
        if header.kind is Kind.SKIPPED:
            why = self.inbox.skip(peer.rank, header.channel, header.bucket, header.round)
        elif header.kind is Kind.VERDICT:
            why = self.inbox.judge(peer.rank, header.channel.lane, Verdict.unpack(payload))
        else:
            self._on_frame(peer, header, payload)
        if why:
            self.refused(peer.rank, f"{header.kind.name}: {why}")

    def refused(self, rank: int, why: str) -> None:
        """Count a message that was refused, by the rank that sent it."""
        self.refusals[rank] = self.refusals.get(rank, 0) + 1
        self.last_refusal = f"worker {rank}: {why}"

    def closed(self, link: Link, why: str) -> None:
        """Note that `link` has closed."""
        peer = link.peer
        if peer.link is link:
            peer.link = None
            self.inbox.lose(peer.rank, why)
            if not self._stopped:
                self._on_closed(peer)

    def close(self) -> None:
        """Close all links, without a word to the peers."""
        self._stopped = True
        for peer in list(self.peers.values()):
            link = peer.link
            if link is not None:
                link.flush()
                link.close("this worker leaves")


def send_state(connection: socket.socket, run: bytes, data: bytes | memoryview) -> None:
    """Answer a `LinkTable.fetch`. The timeout of `connection` holds for each CHUNK bytes, not for all of them."""
    view = memoryview(data)
    connection.sendall(FrameHeader(Kind.STATE, run, len(view)).pack())
    for at in range(0, len(view), CHUNK):
        connection.sendall(view[at : at + CHUNK])


def send_sign(connection: socket.socket, run: bytes) -> None:
    """Tell a worker in `LinkTable.fetch` that its answer will come."""
    connection.sendall(FrameHeader(Kind.HEARTBEAT, run).pack())
