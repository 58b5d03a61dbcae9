"""Exchanges over TCP links, for elastic jobs. Arithmetic, threads and plans are those of every other transport.

Note [Why elastic jobs do not use gloo]: gloo cannot stop waiting for a peer without losing the connection, and may
still write to the buffer of an abandoned receive. On these links a wait ends at once when the peer dies, skips the
round or is given up, the connection stays open, and the buffer is safe afterwards.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from gossamer.comm.accelerator import Accelerator
from gossamer.comm.exchange import Batch, OtherAnchor, Scratch
from gossamer.comm.pace import Pace
from gossamer.comm.staging import Stage
from gossamer.comm.tcp.frame import FrameHeader, Kind
from gossamer.comm.tcp.inbox import Key, Slot
from gossamer.comm.tcp.link import Link, Lost
from gossamer.comm.tcp.links import LinkTable
from gossamer.comm.tcp.membership import Membership
from gossamer.comm.threaded import ThreadedChannel
from gossamer.comm.transport import ChannelId, Job, PeerError, Purpose, Stamp, Transport

RENEW = 0.2  # seconds between calls of `connect_to` while a link is awaited


class TcpTransport(Transport):
    """The TCP links of one member of an elastic job. Parameters on an `accelerator` are copied through the host."""

    def __init__(self, membership: Membership, timeout: float, accelerator: Accelerator | None = None):
        self.rank, self.size, self.membership = membership.rank, membership.size, membership
        self._timeout, self.accelerator = timeout, accelerator
        self.pace = Pace.from_environment(self.rank)

    def channel(self, channel: ChannelId, in_flight: int, timeout: float) -> TcpChannel:
        return TcpChannel(self.membership, channel, in_flight, self.pace, self.staged(channel))

    def share(self, name: str, text: str) -> list[str]:
        texts = self.membership.directory.share(name, self.rank, self.size, text, self._timeout)
        assert texts is not None
        return texts

    def close(self) -> None:
        self.membership.close()


class Connected(Protocol):
    """What a channel needs of the worker that it belongs to."""

    rank: int
    links: LinkTable

    def connect_to(self, rank: int) -> None: ...


class TcpChannel(ThreadedChannel):
    """One channel over the links. A job on it needs a stamp, and can be given up.

    Note [Leaving out a peer]: in a weighted round a worker swaps with one neighbor after the other. If a neighbor does
    not answer, the swap with it takes this worker's own value in place of the neighbor's, which changes nothing: the
    neighbor's weight goes to this worker, and the swaps with the other neighbors are carried out. So a pair that
    cannot reach each other does not keep either of them from mixing with the rest. A uniform group averages jointly:
    its members need everyone's part, so an exchange of a group fails as a whole.
    """

    leaves_out = True  # whether rounds go on without a peer that does not answer

    def __init__(
        self,
        membership: Connected,
        channel: ChannelId,
        threads: int,
        pace: Pace | None,
        accelerator: Accelerator | None = None,
    ):
        self._members, self._links = membership, membership.links
        self._closing = False
        super().__init__(channel, threads, pace, accelerator)

    def give_up(self, job: Job) -> None:
        """Stop waiting for the peers that have not answered. The job ends at once, and these peers count as late."""
        job.given_up = True
        self._links.inbox.wake()

    def _cut(self) -> None:
        self._closing = True
        self._links.inbox.wake()

    def _over(self, job: Job) -> bool:
        return job.given_up or self._closing

    def _perform(self, job: Job, scratch: Scratch, stage: Stage | None) -> None:
        try:
            super()._perform(job, scratch, stage)
        except OtherAnchor as error:  # both sides of a pair find it; others may wait for what would have followed
            assert job.stamp is not None
            self._links.refused(error.peer, str(error))
            self._skip(job, self._channel, job.stamp)
            raise PeerError(
                f"worker {self._members.rank} continues without round {job.round}, bucket {job.bucket}: {error}"
            ) from None

    def _carry(self, batch: Batch, job: Job) -> None:
        stamp = job.stamp
        assert stamp is not None, "a job on TCP links needs a stamp"
        channel = self._channel
        if stamp.meeting and channel.purpose is Purpose.PARAMETERS:  # apart from the messages of rounds
            channel = ChannelId(channel.lane, Purpose.MEETING)
        inbox = self._links.inbox
        slots: list[Slot] = []
        peer, expired = -1, job.given_up
        try:
            for peer, message in batch.recvs:
                key = Key(peer, channel, job.bucket, stamp.received[peer])
                slots.append(inbox.post(key, stamp.epoch, job.round, stamp.plan, _bytes(message)))
                stamp.received[peer] += 1
            for peer, message in batch.sends:
                payload = _bytes(message)
                header = FrameHeader(
                    Kind.DATA,
                    self._links.run,
                    len(payload),
                    stamp.plan,
                    channel,
                    stamp.epoch,
                    job.round,
                    job.bucket,
                    stamp.sent[peer],
                )
                with job.waiting_for(peer):
                    self._link(peer, job, stamp).send(header, payload, lambda: self._over(job))
                stamp.sent[peer] += 1
                job.count(peer, message)
            for slot in slots:
                peer = slot.key.sender
                with job.waiting_for(peer), inbox.changed:
                    inbox.changed.wait_for(lambda slot=slot: slot.over or self._over(job))  # type: ignore[misc]
                if not slot.filled:
                    raise Lost(slot.failed or f"worker {peer} is late")
        except Lost as error:
            inbox.cancel(slots)
            if job.given_up and not expired and not stamp.meeting:
                self._note_late(peer, slots)
            if self._left_out(batch, job, stamp):
                self._say_skipped(job, channel, {peer for peer, _ in (*batch.sends, *batch.recvs)})
                return
            self._skip(job, channel, stamp)
            raise self._failure(job, peer, str(error)) from None

    def _left_out(self, batch: Batch, job: Job, stamp: Stamp) -> bool:
        """Take this worker's own values in place of those of `batch`, in which a peer did not answer. Return False if
        the job cannot go on like that: see Note [Leaving out a peer]."""
        if not (batch.optional and self.leaves_out) or stamp.meeting or self._closing:
            return False
        own = dict(batch.sends)
        job.left_out |= own.keys() | dict(batch.recvs).keys()
        alone = stamp.peers - {self._members.rank} <= job.left_out
        if alone or any(peer not in own or own[peer].shape != message.shape for peer, message in batch.recvs):
            return False
        for peer, message in batch.recvs:
            message.copy_(own[peer])
        return True

    def _failure(self, job: Job, peer: int, reason: str) -> PeerError:
        """The error of a job that `peer` did not answer."""
        return PeerError(
            f"worker {self._members.rank} continues without round {job.round}, bucket {job.bucket}: {reason}"
        )

    def _note_late(self, peer: int, slots: list[Slot]) -> None:
        """Mark `peer`, for which this worker has waited in vain, and others that it waited for beside it, as late: see
        Note [Why a late peer is waited for once] in link.py."""
        late = {slot.key.sender for slot in slots if not slot.over}
        if peer not in {slot.key.sender for slot in slots}:
            late.add(peer)
        for rank in late:
            self._links.peer(rank).late = True

    def _skip(self, job: Job, channel: ChannelId, stamp: Stamp) -> None:
        """Tell the peers of a failed job not to wait for this worker."""
        if stamp.meeting:
            for rank in stamp.peers - {self._members.rank}:
                self._members.connect_to(rank)  # a peer that waits for this worker may have no link with it yet
        self._say_skipped(job, channel, stamp.peers)

    def _say_skipped(self, job: Job, channel: ChannelId, peers: Collection[int]) -> None:
        skipped = FrameHeader(Kind.SKIPPED, self._links.run, channel=channel, bucket=job.bucket, round=job.round)
        self._links.send_all(skipped, to=peers)

    def _link(self, rank: int, job: Job, stamp: Stamp) -> Link:
        """Wait for the link with a peer, and return it."""
        links = self._links
        peer = links.peer(rank)

        def decided() -> bool:
            late = peer.late and not stamp.meeting
            return peer.link is not None or bool(peer.dead) or late or self._over(job) or links.peer(rank) is not peer

        ready = False
        while not ready:
            self._members.connect_to(rank)
            with links.inbox.changed:
                ready = links.inbox.changed.wait_for(decided, RENEW)
        if peer.late and not stamp.meeting:
            raise Lost(f"worker {rank} was late before, and has made no progress since")
        if peer.link is None:
            raise Lost(f"worker {rank} {peer.dead or 'did not connect'}")
        return peer.link


def _bytes(message: Tensor) -> memoryview:
    return memoryview(message.view(-1).view(torch.uint8).numpy().data)
