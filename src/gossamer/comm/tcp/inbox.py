"""Where messages of exchanges meet the buffers that wait for them.

A message goes straight into the buffer of whoever waits for it. One that comes early is kept, the latest of its
kind only; one that comes late is read and forgotten. A waiting buffer can be taken back at any time: after `cancel`
nothing is written to it, however much of the message is still to come.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gossamer.comm.transport import ChannelId, Purpose


class Key(NamedTuple):
    """What a message is for: everything but when."""

    sender: int
    channel: ChannelId
    bucket: int
    part: int  # sequence number of the message within the exchange

    @property
    def in_a_round(self) -> bool:
        return self.channel.purpose is Purpose.PARAMETERS


@dataclass(eq=False)
class Slot:
    """A message expected or kept: waiting -> filled, or failed."""

    key: Key
    epoch: int
    round: int
    plan: bytes
    view: memoryview
    filled: bool = False
    failed: str = ""  # why it will not come
    canceled: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while bytes are written

    @property
    def over(self) -> bool:
        return self.filled or bool(self.failed)


class Inbox:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._waiting: dict[Key, Slot] = {}
        self._early: dict[Key, Slot] = {}
        self._passed: dict[tuple[int, ChannelId, int], int] = {}  # last round that (sender, channel, bucket) skips

    def post(self, key: Key, epoch: int, round: int, plan: bytes, view: memoryview) -> Slot:
        """Wait for a message. A channel has one exchange of a bucket under way, so a key has one slot."""
        slot = Slot(key, epoch, round, plan, view)
        with self.changed:
            early = self._early.get(key)
            if early is not None and (early.epoch, early.round) == (epoch, round) and early.filled:
                del self._early[key]
                if len(early.view) != len(view):
                    slot.failed = _lengths(early, len(view))
                else:
                    view[:] = early.view
                    slot.filled = True
                return slot
            if early is not None and early.round > round:
                slot.failed = f"worker {key.sender} is already in round {early.round}"
                return slot
            on_its_way = early is not None and early.round == round
            if self._passed.get((key.sender, key.channel, key.bucket), -1) >= round and not on_its_way:
                slot.failed = f"worker {key.sender} has gone on without it"
                return slot
            self._waiting[key] = slot
        return slot

    def cancel(self, slots: Iterable[Slot]) -> None:
        """Nothing is written to these buffers any more."""
        for slot in slots:
            with self.changed:
                if self._waiting.get(slot.key) is slot:
                    del self._waiting[slot.key]
            with slot.lock:
                slot.canceled = True

    def coming(self, key: Key, epoch: int, round: int, plan: bytes, length: int) -> Slot:
        """A message begins to arrive: where to put it. Whoever waits for an older one of this kind need not."""
        with self.changed:
            slot = self._waiting.get(key)
            if slot is not None and (slot.epoch, slot.round) == (epoch, round):
                if slot.plan == plan and len(slot.view) == length:
                    return slot
                slot.failed = "it follows another plan" if slot.plan != plan else _lengths(slot, length)
                del self._waiting[key]
                self.changed.notify_all()
                refused = Slot(key, epoch, round, plan, memoryview(b""), canceled=True)
                refused.failed = slot.failed
                return refused
            self._gone_on(key.sender, key.channel, key.bucket, round - 1)
            held = self._early.get(key)
            stale = (slot is not None and slot.round > round) or (held is not None and held.round > round)
            if stale:
                return Slot(key, epoch, round, plan, memoryview(b""), canceled=True)
            early = Slot(key, epoch, round, plan, memoryview(np.empty(length, np.uint8).data))
            self._early[key] = early
            return early

    def arrived(self, slot: Slot) -> None:
        """All bytes of a message are there."""
        with self.changed:
            if slot.canceled or slot.failed:
                return
            if self._waiting.get(slot.key) is slot:
                del self._waiting[slot.key]
            else:  # kept: somebody may have begun to wait for it meanwhile
                waiting = self._waiting.get(slot.key)
                if waiting is not None and (waiting.epoch, waiting.round) == (slot.epoch, slot.round):
                    self._early.pop(slot.key, None)
                    del self._waiting[slot.key]
                    if len(waiting.view) == len(slot.view) and waiting.plan == slot.plan:
                        waiting.view[:] = slot.view
                        waiting.filled = True
                    else:
                        waiting.failed = _lengths(slot, len(waiting.view))
            slot.filled = True
            self.changed.notify_all()

    def passed(self, sender: int, channel: ChannelId, bucket: int, round: int) -> None:
        """`sender` will send nothing more for that round, or for an earlier one."""
        with self.changed:
            key = (sender, channel, bucket)
            self._passed[key] = max(round, self._passed.get(key, -1))
            self._gone_on(sender, channel, bucket, round)

    def _gone_on(self, sender: int, channel: ChannelId, bucket: int, round: int) -> None:
        for key, slot in list(self._waiting.items()):
            if key[:3] == (sender, channel, bucket) and slot.round <= round:
                slot.failed = f"worker {sender} has gone on without it"
                del self._waiting[key]
        self.changed.notify_all()

    def moved(self, sender: int, rounds: list[int]) -> None:
        """`sender` will take part in no round of a lane before `rounds[lane]` any more."""
        with self.changed:
            for key, slot in list(self._waiting.items()):
                if key.sender == sender and key.in_a_round and slot.round < rounds[key.channel.lane]:
                    slot.failed = f"worker {sender} has gone on without it"
                    del self._waiting[key]
            self.changed.notify_all()

    def lost(self, sender: int, why: str, *, forget: bool = False) -> None:
        """Nothing more comes from `sender`; `forget` what it sent before (another process has taken its place)."""
        with self.changed:
            for key, slot in list(self._waiting.items()):
                if key.sender == sender:
                    slot.failed = why
                    del self._waiting[key]
            if forget:
                for key in [k for k in self._early if k.sender == sender]:
                    del self._early[key]
                for place in [p for p in self._passed if p[0] == sender]:
                    del self._passed[place]
            self.changed.notify_all()

    def replanned(self, epoch: int, starts: list[int]) -> None:
        """From round `starts[lane]` on only messages of `epoch` count: whoever waits for another one need not."""
        with self.changed:
            for key, slot in list(self._waiting.items()):
                if key.in_a_round and slot.epoch < epoch and slot.round >= starts[key.channel.lane]:
                    slot.failed = f"the members have changed (epoch {epoch})"
                    del self._waiting[key]
            self.changed.notify_all()

    def wake(self) -> None:
        with self.changed:
            self.changed.notify_all()


def _lengths(slot: Slot, length: int) -> str:
    return f"worker {slot.key.sender} sent {length} bytes where {len(slot.view)} were expected"
