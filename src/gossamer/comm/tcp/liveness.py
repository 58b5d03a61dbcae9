"""Which peers are alive: heartbeats, links with the watched peers, and silence that is too long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from gossamer.comm.tcp.edge_deadlines import silence_bound
from gossamer.comm.tcp.frame import FrameHeader
from gossamer.comm.tcp.link import Peer
from gossamer.comm.tcp.links import LinkTable
from gossamer.comm.tcp.record import Member

BEAT = 0.1  # seconds between heartbeats
RETRY = 0.2  # seconds between attempts to connect
IDLE = 60.0  # seconds for which a link stays open that no round needs, after its last use


class Liveness:
    """Sends heartbeats to all linked peers, keeps links with the watched members, and judges whether they live.

    Watched are the neighbors in rounds and, while a message of them is awaited and for IDLE seconds after that, members
    that this worker exchanges with otherwise, as in meetings. Links with others are closed, or n workers would keep
    n (n - 1) links after their first meeting. If a peer uses a link at the very moment at which this worker closes it,
    the exchange fails and is repeated as after any other broken connection.

    Args:
        links: The links of this worker.
        hard_deadline: Seconds of silence after which a peer counts as dead; None: learned from its heartbeats.
        members: Returns the current members, by rank.
        heartbeat: Returns the header and payload of the next heartbeat.
        on_doubt: Called when a watched member seems dead or refuses this worker.
    """

    def __init__(
        self,
        links: LinkTable,
        hard_deadline: float | None,
        members: Callable[[], Mapping[int, Member]],
        heartbeat: Callable[[], tuple[FrameHeader, bytes]],
        on_doubt: Callable[[], None],
    ):
        self._links, self._hard = links, hard_deadline
        self._members, self._heartbeat, self._on_doubt = members, heartbeat, on_doubt
        self._lock = threading.Lock()
        self.neighbors: frozenset[int] = frozenset()
        self._wanted: dict[int, float] = {}  # other ranks to have a link with, and since when
        self._watched: frozenset[int] = frozenset()
        self._connecting: set[int] = set()
        self._reported: set[str] = set()  # incarnations that seemed dead
        self._stopped = False
        self._beat = time.monotonic()  # when the latest heartbeat was due
        self._forgiven = 0.0  # the heartbeat after which this worker stood still
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gossamer-heartbeat", daemon=True)
        self._thread.start()

    def watch(self, ranks: Iterable[int]) -> None:
        """Have links with these members as long as they are the neighbors in rounds, and watch whether they live."""
        self.neighbors = frozenset(ranks)
        self._renew()
        self._hurry.set()

    def also_watch(self, rank: int) -> None:
        """Have a link with this member, too, for the next IDLE seconds."""
        with self._lock:
            self._wanted[rank] = time.monotonic()
            known = rank in self._watched
        if not known:
            self._renew()
            self._hurry.set()

    def _renew(self) -> None:
        """Determine who is watched. Of members that were not, nothing was expected before now."""
        awaited = self._links.inbox.awaited()
        with self._lock:
            now = time.monotonic()
            self._wanted = {rank: at for rank, at in self._wanted.items() if now - at < IDLE}
            watched = self.neighbors | self._wanted.keys() | awaited
            for rank in watched - self._watched:
                self._links.peer(rank).heard = now
            self._watched = watched

    def dead(self) -> list[tuple[int, Member]]:
        """Watched members that are dead, or silent for too long."""
        self._forgive_if_i_stood_still()
        return [(rank, member) for rank, member, peer in self._watched_members() if self._is_dead(peer)]

    def restart_silence(self) -> None:
        """Measure everybody's silence from now: this worker itself may have been stopped or cut off."""
        for peer in list(self._links.peers.values()):
            peer.heard = time.monotonic()

    def _forgive_if_i_stood_still(self) -> None:
        """After a stop any thread may be the first to run, and would find everybody silent. Forgive once a stop: the
        heartbeat's thread may also be late because a peer is dead."""
        if time.monotonic() - self._beat > 10 * BEAT and self._forgiven != self._beat:
            self._forgiven = self._beat
            self.restart_silence()

    def hurry(self) -> None:
        """Look at all links now, not at the next heartbeat."""
        self._hurry.set()

    def close(self) -> None:
        self._stopped = True
        self._hurry.set()
        self._thread.join(timeout=1.0)

    def _is_dead(self, peer: Peer) -> bool:
        return bool(peer.dead) or peer.silence() > self.hard_deadline(peer)

    def hard_deadline(self, peer: Peer) -> float:
        """Seconds of silence after which `peer` counts as dead."""
        return silence_bound(list(peer.gaps)) if self._hard is None else self._hard

    def _watched_members(self) -> list[tuple[int, Member, Peer]]:
        """Watched members whose peer is the process that the record names."""
        members = self._members()
        found = [(rank, members[rank], self._links.peer(rank)) for rank in sorted(self._watched & set(members))]
        return [entry for entry in found if entry[2].incarnation == entry[1].incarnation]

    def _run(self) -> None:
        while not self._stopped:
            self._forgive_if_i_stood_still()
            self._beat = time.monotonic()
            self._links.send_all(*self._heartbeat())
            self._renew()
            self._close_idle_links()
            for _, member, peer in self._watched_members():
                self._look_at(peer, member)
            self._hurry.wait(BEAT)
            self._hurry.clear()

    def _look_at(self, peer: Peer, member: Member) -> None:
        if peer.link is None and not peer.gone and peer.rank not in self._connecting:
            thread = threading.Thread(target=self._connect, args=(peer,), name="gossamer-connect", daemon=True)
            self._connecting.add(peer.rank)
            try:
                thread.start()
            except RuntimeError:  # the process cannot have more threads at the moment: try again at the next heartbeat
                self._connecting.discard(peer.rank)
        if self._is_dead(peer):
            link = peer.link
            if link is not None:
                link.close(f"it was silent for {peer.silence():.1f} s")
            if member.incarnation not in self._reported:
                self._reported.add(member.incarnation)
                self._on_doubt()
        else:
            self._reported.discard(member.incarnation)

    def _close_idle_links(self) -> None:
        if self._links.inbox.in_a_meeting():  # others may need a link later in the same exchange
            return
        now = time.monotonic()
        for peer in list(self._links.peers.values()):
            link = peer.link
            if link is not None and peer.rank not in self._watched and now - link.used > IDLE:
                link.close(f"it was not used for {IDLE:g} s")

    def _connect(self, peer: Peer) -> None:
        try:
            if not self._links.connect(peer) and not peer.dead:  # of a closed port `_look_at` tells
                self._on_doubt()  # this worker may not be a member any more
            time.sleep(RETRY)  # also after success: the other side may close the connection at once
        finally:
            self._connecting.discard(peer.rank)
