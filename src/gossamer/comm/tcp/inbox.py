"""Delivers the messages of exchanges into the buffers that wait for them.

A message is read straight into the buffer that waits for it. A message that arrives early is kept (only the latest
with the same key); a message that arrives late is read and discarded. A waiting buffer can be withdrawn at any time:
after `cancel` nothing is written to it, even if a part of the message is still to come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gossamer.comm.tcp.frame import Verdict
from gossamer.comm.transport import ChannelId, Purpose


class Key(NamedTuple):
    """Identifies a message, apart from its round."""

    sender: int
    channel: ChannelId
    bucket: int
    part: int  # sequence number of the message within the exchange

    @property
    def in_a_round(self) -> bool:
        return self.channel.purpose is Purpose.PARAMETERS


@dataclass(eq=False)
class Slot:
    """A message that is expected or kept: waiting -> filled, or failed."""

    key: Key
    epoch: int
    round: int
    plan: bytes
    view: memoryview
    filled: bool = False
    failed: str = ""  # the reason why the message will not come
    canceled: bool = False
    posted: float = field(default_factory=lambda: time.monotonic())
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while bytes are written

    @property
    def over(self) -> bool:
        return self.filled or bool(self.failed)


class Inbox:
    """The messages that one worker waits for. `changed` is notified whenever a slot is filled or fails."""

    def __init__(self, arrived: Callable[[int, float], None] = lambda sender, lag: None) -> None:
        """`arrived(sender, lag)` is called for the first message of each exchange of a round or event."""
        self._arrived = arrived
        self._missed: dict[Key, Slot] = {}  # given up before the message came
        self.changed = threading.Condition()
        self._waiting: dict[Key, Slot] = {}
        self._early: dict[Key, Slot] = {}
        # Memory of early messages, by length. New memory for each would cost more than its transfer: page faults.
        self._spare: dict[int, list[memoryview]] = {}
        self._skipped: dict[tuple[int, ChannelId, int], int] = {}  # last round that (sender, channel, bucket) skips
        self._verdicts: dict[tuple[int, int], Verdict] = {}  # by sender and lane

    def post(self, key: Key, epoch: int, round: int, plan: bytes, view: memoryview) -> Slot:
        """Wait for a message. A channel has one exchange of a bucket under way, so a key has one slot."""
        slot = Slot(key, epoch, round, plan, view)
        with self.changed:
            early = self._early.get(key)
            if early is not None and (early.epoch, early.round) == (epoch, round) and early.filled:
                del self._early[key]
                if len(early.view) != len(view):
                    slot.failed = _lengths(early, len(view))
                    return slot
            else:
                arriving = early is not None and early.round == round
                if early is not None and early.round > round:
                    slot.failed = f"worker {key.sender} is already in round {early.round}"
                elif self._skipped.get((key.sender, key.channel, key.bucket), -1) >= round and not arriving:
                    slot.failed = f"worker {key.sender} skipped the round"
                else:
                    self._waiting[key] = slot
                return slot
        self._hand_over(early, slot)
        return slot

    def cancel(self, slots: Iterable[Slot]) -> None:
        """Withdraw the buffers of `slots`: nothing is written to them after this call."""
        for slot in slots:
            with self.changed:
                if self._waiting.get(slot.key) is slot:
                    del self._waiting[slot.key]
                    self._missed[slot.key] = slot
            with slot.lock:
                slot.canceled = True

    def begin(self, key: Key, epoch: int, round: int, plan: bytes, length: int) -> Slot:
        """Return the slot for a message that begins to arrive. Slots that wait for an older message with this key
        fail, because the sender sends in order."""
        with self.changed:
            missed = self._missed.pop(key, None)
            if missed is not None and missed.round == round:
                self._count(missed)
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
            self._fail_skipped(key.sender, key.channel, key.bucket, round - 1)
            held = self._early.get(key)
            stale = (slot is not None and slot.round > round) or (held is not None and held.round > round)
            if stale:
                return Slot(key, epoch, round, plan, memoryview(b""), canceled=True)
            spare = self._spare.get(length)
            early = Slot(key, epoch, round, plan, spare.pop() if spare else memoryview(np.empty(length, np.uint8).data))
            self._early[key] = early
            return early

    def complete(self, slot: Slot) -> None:
        """Mark the message of `slot` as complete: all of its bytes have arrived."""
        taker: Slot | None = None
        with self.changed:
            if slot.canceled or slot.failed:
                return
            if self._waiting.get(slot.key) is slot:
                del self._waiting[slot.key]
                self._count(slot)
            else:  # it was kept as early, and a buffer may have been posted for it since
                waiting = self._waiting.get(slot.key)
                if waiting is not None and (waiting.epoch, waiting.round) == (slot.epoch, slot.round):
                    self._early.pop(slot.key, None)
                    del self._waiting[slot.key]
                    if len(waiting.view) != len(slot.view) or waiting.plan != slot.plan:
                        waiting.failed = _lengths(slot, len(waiting.view))
                    else:
                        taker = waiting
            if taker is None:
                slot.filled = True
                self.changed.notify_all()
        if taker is not None:
            self._hand_over(slot, taker)

    def _hand_over(self, early: Slot, slot: Slot) -> None:
        """Copy a message that arrived early to the buffer that was posted for it since, without holding up others."""
        with slot.lock:
            if not slot.canceled:
                np.copyto(np.frombuffer(slot.view, np.uint8), np.frombuffer(early.view, np.uint8))
        with self.changed:
            self._spare.setdefault(len(early.view), []).append(early.view)
            slot.filled = True
            self._count(slot)
            self.changed.notify_all()

    def _count(self, slot: Slot) -> None:
        """The message of `slot` is there: note how long after `post` it came."""
        if slot.key.in_a_round and slot.key.part == 0:
            self._arrived(slot.key.sender, time.monotonic() - slot.posted)

    def skip(self, sender: int, channel: ChannelId, bucket: int, round: int) -> None:
        """Expect nothing more from `sender` for `round` and earlier rounds of this channel and bucket."""
        with self.changed:
            key = (sender, channel, bucket)
            self._skipped[key] = max(round, self._skipped.get(key, -1))
            self._fail_skipped(sender, channel, bucket, round)

    def _fail_skipped(self, sender: int, channel: ChannelId, bucket: int, round: int) -> None:
        for key, slot in list(self._waiting.items()):
            if key[:3] == (sender, channel, bucket) and slot.round <= round:
                slot.failed = f"worker {sender} skipped the round"
                del self._waiting[key]
        self.changed.notify_all()

    def judge(self, sender: int, lane: int, verdict: Verdict) -> None:
        """Note what `sender` says about its asynchronous exchanges with this worker."""
        with self.changed:
            self._verdicts[sender, lane] = verdict
            self.changed.notify_all()

    def verdict(self, sender: int, lane: int) -> Verdict:
        """What `sender` said last."""
        return self._verdicts.get((sender, lane), Verdict())

    def jump(self, sender: int, rounds: list[int]) -> None:
        """Expect nothing more from `sender` for any round of a lane before `rounds[lane]`."""
        with self.changed:
            for key, slot in list(self._waiting.items()):
                if key.sender == sender and key.in_a_round and slot.round < rounds[key.channel.lane]:
                    slot.failed = f"worker {sender} skipped the round"
                    del self._waiting[key]
            self.changed.notify_all()

    def lose(self, sender: int, why: str, *, forget: bool = False) -> None:
        """Expect nothing more from `sender`; `forget` also what it sent before (a new process has its rank)."""
        with self.changed:
            for key, slot in list(self._waiting.items()):
                if key.sender == sender:
                    slot.failed = why
                    del self._waiting[key]
            if forget:
                for key in [k for k in self._early if k.sender == sender]:
                    del self._early[key]
                for place in [p for p in self._skipped if p[0] == sender]:
                    del self._skipped[place]
                for pair in [p for p in self._verdicts if p[0] == sender]:
                    del self._verdicts[pair]
                for key in [k for k in self._missed if k.sender == sender]:
                    del self._missed[key]
            self.changed.notify_all()

    def replan(self, epoch: int, starts: list[int]) -> None:
        """Expect only messages of `epoch` from round `starts[lane]` on.

        See Note [Why a plan starts at an announced round] in membership.py.
        """
        with self.changed:
            self._spare.clear()  # messages of the new plan have other lengths
            for key, slot in list(self._waiting.items()):
                if key.in_a_round and slot.epoch < epoch and slot.round >= starts[key.channel.lane]:
                    slot.failed = f"the members have changed (epoch {epoch})"
                    del self._waiting[key]
            self.changed.notify_all()

    def wake(self) -> None:
        """Let every thread that waits for `changed` check its condition again."""
        with self.changed:
            self.changed.notify_all()


def _lengths(slot: Slot, length: int) -> str:
    return f"worker {slot.key.sender} sent {length} bytes where {len(slot.view)} were expected"
