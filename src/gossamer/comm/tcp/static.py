"""TCP links for static jobs: the links and channels of elastic jobs, without their members, heartbeats and directory.

The workers learn each other's addresses from the job's store when the first channel is opened. A link that breaks is
not opened again: the job has lost its peer, and says so as every transport of static jobs does.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading

from gossamer.comm.accelerator import Accelerator
from gossamer.comm.exchange import Batch
from gossamer.comm.process_groups import Store, WorkerGroup
from gossamer.comm.store_transport import StoreTransport
from gossamer.comm.tcp.frame import Ask, FrameHeader, Hello, Kind, Refused
from gossamer.comm.tcp.link import Peer
from gossamer.comm.tcp.links import LinkTable
from gossamer.comm.tcp.listener import Listener
from gossamer.comm.tcp.rendezvous import own_address
from gossamer.comm.tcp.transport import TcpChannel
from gossamer.comm.transport import ChannelId, Job, PeerError, Stamp

RETRY = 0.2  # seconds between attempts to connect
PROBE = 1.0  # the same, of the side that does not open the link and only looks whether the other is there


class StaticTcpTransport(StoreTransport):
    """The TCP links of a worker of a static job.

    Args:
        longest: The largest message, in bytes, that this job can have.
    """

    def __init__(
        self,
        store: Store,
        workers: WorkerGroup,
        timeout: float,
        accelerator: Accelerator | None = None,
        *,
        longest: int,
    ):
        super().__init__(store, workers, timeout, accelerator)
        self._longest = longest
        self._links: StaticLinks | None = None

    def channel(self, channel: ChannelId, in_flight: int, timeout: float) -> StaticTcpChannel:
        if self._links is None:  # the first channel of every worker, after the workers agreed on their settings
            self._links = StaticLinks(self, self._longest)
        return StaticTcpChannel(self, self._links, channel, in_flight)

    def close(self) -> None:
        if self._links is not None:
            self._links.close()
        super().close()


class StaticLinks:
    """The links with the other workers, made when first used. Collective: the workers share their addresses."""

    def __init__(self, transport: StaticTcpTransport, longest: int):
        self.rank = transport.rank
        self._transport = transport
        server = socket.create_server((own_address(_head()), 0), backlog=128)
        host, port = server.getsockname()[:2]
        mine = {"host": host, "port": port, "incarnation": secrets.token_hex(8), "run": secrets.token_hex(8)}
        everyone = [json.loads(text) for text in transport.share("tcp", json.dumps(mine))]
        run = bytes.fromhex(everyone[0]["run"])
        self._hello = Hello(run.hex(), self.rank, mine["incarnation"], [])
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._connecting: set[int] = set()
        self.links = LinkTable(self.rank, run, longest, lambda: self._hello, self._on_frame, self._on_closed)
        for rank, entry in enumerate(everyone):
            if rank != self.rank:
                self.links.know(rank, entry["incarnation"], (entry["host"], entry["port"]))
        self._listener = Listener(server, run, lambda: self._hello, self._accept, self.links.refused)

    def connect_to(self, rank: int) -> None:
        """Open the link with a worker, or expect that it does."""
        with self._lock:
            if rank in self._connecting:
                return
            self._connecting.add(rank)
        peer = self.links.peer(rank)
        threading.Thread(target=self._connect, args=(peer,), name=f"gossamer-connect-{rank}", daemon=True).start()

    def close(self) -> None:
        self._stopped.set()
        self._listener.close()
        self.links.close()

    def _connect(self, peer: Peer) -> None:
        dials = self.rank > peer.rank
        while not self._stopped.is_set() and peer.link is None and not peer.dead:
            failed = self._transport.failed()
            if failed is not None:
                peer.dead = f"did not connect: worker {failed} has failed"
            elif dials and self.links.connect(peer):
                return
            if self._stopped.wait(RETRY if dials else PROBE) or peer.link is not None:
                return
            if not dials:
                self.links.connect(peer)  # marks the peer as dead if its port is closed
        self.links.inbox.wake()

    def _accept(self, connection: socket.socket, hello: Hello) -> None:
        peer = self.links.peers.get(hello.rank)
        if peer is None or peer.incarnation != hello.incarnation or hello.ask not in (Ask.LINK, Ask.NOTICE):
            raise Refused(f"a process that is not worker {hello.rank} of this job connected")
        if hello.ask is Ask.NOTICE:  # this worker connects soon anyway
            connection.close()
            return
        self.links.install(peer, connection)

    def _on_frame(self, peer: Peer, header: FrameHeader, payload: bytes) -> None:
        if header.kind is Kind.LEAVING:
            return
        raise Refused(f"worker {peer.rank} sent {header.kind.name}, which has no meaning in a static job")

    def _on_closed(self, peer: Peer) -> None:
        if not self._stopped.is_set():
            peer.dead = peer.dead or "closed its connection"
            self._transport.first_lost(peer.rank)


class StaticTcpChannel(TcpChannel):
    """A channel over the links of a static job."""

    leaves_out = False

    def __init__(self, transport: StaticTcpTransport, links: StaticLinks, channel: ChannelId, threads: int):
        self._transport = transport
        super().__init__(links, channel, threads, transport.pace, transport.staged(channel))

    def _carry(self, batch: Batch, job: Job) -> None:
        if job.stamp is None:
            job.stamp = Stamp(0, bytes(8), frozenset(peer for peer, _ in [*batch.sends, *batch.recvs]))
        super()._carry(batch, job)

    def _failure(self, job: Job, peer: int, reason: str) -> PeerError:
        return self._transport.loss(peer, job, reason)


def _head() -> tuple[str, int] | None:
    """The host of the job's store, if the environment names it."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "1")
    return (host, int(port)) if host and port.isdigit() else None
