"""Delivers the messages of exchanges into the buffers that wait for them.

A message is read straight into the buffer that waits for it. A message that arrives early is kept (only the latest
with the same key); a message that arrives late is read and discarded. A waiting buffer can be withdrawn at any time:
after `cancel` nothing is written to it, even if a part of the message is still to come.

What is kept has bounds, so that no member can fill the memory of another: the early messages of a sender together have
at most `longest` bytes, and they are forgotten once their round is over here, or once their sender is not a member any
more.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gossamer.comm.tcp.frame import Verdict
from gossamer.comm.transport import ChannelId, Purpose

ENTRY = 1024  # bytes that an early message counts beside its own, so that empty ones have a limit as well
MOST_SKIPS = 2**16  # channels and buckets of one sender of which the inbox remembers the last skipped round


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
    """The messages that one worker waits for. `changed` is notified whenever a slot is filled or fails.

    Args:
        arrived: Called with sender and lag for the first message of each exchange of a round or event.
        longest: The most bytes of early messages that are kept of one sender, and of memory for later ones.
        lanes: The number of lanes of the job, if it is known: what is about other lanes is refused.
    """

    def __init__(
        self,
        arrived: Callable[[int, float], None] = lambda sender, lag: None,
        longest: int = 2**40,
        lanes: int | None = None,
    ) -> None:
        self._arrived, self._longest, self._lanes = arrived, longest, lanes
        self._missed: dict[Key, Slot] = {}  # given up before the message came
        self.changed = threading.Condition()
        self._waiting: dict[Key, Slot] = {}
        self._early: dict[Key, Slot] = {}
        self._held: Counter[int] = Counter()  # what the early messages of each sender count
        self._reached: dict[ChannelId, int] = {}  # the latest round that this worker waited for
        # Memory of early messages, by length. New memory for each would cost more than its transfer: page faults.
        self._spare: dict[int, list[memoryview]] = {}
        self._spare_bytes = 0
        self._skipped: dict[tuple[int, ChannelId, int], int] = {}  # last round that (sender, channel, bucket) skips
        self._skips: Counter[int] = Counter()  # entries of each sender in it
        self._verdicts: dict[tuple[int, int], Verdict] = {}  # by sender and lane

    def post(self, key: Key, epoch: int, round: int, plan: bytes, view: memoryview) -> Slot:
        """Wait for a message. A channel has one exchange of a bucket under way, so a key has one slot."""
        slot = Slot(key, epoch, round, plan, view)
        with self.changed:
            self._reach(key.channel, round)
            early = self._early.get(key)
            if early is not None and (early.epoch, early.round) == (epoch, round) and early.filled:
                self._take_early(key)
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

    def awaited(self) -> set[int]:
        """The ranks of which a message is awaited."""
        with self.changed:
            return {key.sender for key in self._waiting}

    def in_a_meeting(self) -> bool:
        """Whether a message is awaited that belongs to no round."""
        with self.changed:
            return any(not key.in_a_round for key in self._waiting)

    def cancel(self, slots: Iterable[Slot]) -> None:
        """Withdraw the buffers of `slots`: nothing is written to them after this call."""
        for slot in slots:
            with self.changed:
                if self._waiting.get(slot.key) is slot:
                    del self._waiting[slot.key]
                    self._missed[slot.key] = slot
            with slot.lock:
                slot.canceled, slot.view = True, memoryview(b"")

    def begin(self, key: Key, epoch: int, round: int, plan: bytes, length: int) -> Slot:
        """Return the slot for a message that begins to arrive; one that is canceled and failed if it is refused. Slots
        that wait for an older message with this key fail, because the sender sends in order."""
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
                return _discarded(key, epoch, round, plan, slot.failed)
            self._fail_skipped(key.sender, key.channel, key.bucket, round - 1)
            held = self._early.get(key)
            stale = (slot is not None and slot.round > round) or (held is not None and held.round > round)
            if stale:
                return _discarded(key, epoch, round, plan)
            self._drop_early(key)
            why = self._unknown(key.channel.lane)
            if self._held[key.sender] + length + ENTRY > self._longest:
                why = f"the messages that it has sent too early have more than {self._longest} bytes"
            if why:
                return _discarded(key, epoch, round, plan, why)
            early = Slot(key, epoch, round, plan, self._memory(length))
            self._early[key] = early
            self._held[key.sender] += length + ENTRY
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
                    if self._early.get(slot.key) is slot:
                        self._take_early(slot.key)
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
            self._keep_memory(early.view)
            slot.filled = True
            self._count(slot)
            self.changed.notify_all()

    def _count(self, slot: Slot) -> None:
        """The message of `slot` is there: note how long after `post` it came."""
        if slot.key.in_a_round and slot.key.part == 0:
            self._arrived(slot.key.sender, time.monotonic() - slot.posted)

    # -- what is kept; the caller holds `changed` -------------------------------------------------------------

    def _reach(self, channel: ChannelId, round: int) -> None:
        """This worker is in `round` of a channel: forget what has come for rounds that it will not wait for again."""
        if self._reached.get(channel) == round:
            return
        self._reached[channel] = round  # not the furthest: a worker may return to an earlier round
        for key in [k for k, slot in self._early.items() if k.channel == channel and slot.round < round - 1]:
            self._drop_early(key)

    def _unknown(self, lane: int) -> str:
        """Why what is about `lane` is refused; an empty text if it is not."""
        known = self._lanes is None or lane < self._lanes
        return "" if known else f"it is about lane {lane}, and this job has {self._lanes}"

    def _take_early(self, key: Key) -> None:
        slot = self._early.pop(key)
        self._held[key.sender] -= len(slot.view) + ENTRY

    def _drop_early(self, key: Key) -> None:
        """Forget the early message with this key, of which more may be arriving now."""
        slot = self._early.get(key)
        if slot is None:
            return
        self._take_early(key)
        if slot.filled:
            self._keep_memory(slot.view)
        slot.canceled = True  # its memory is still written to, but is nobody's

    def _memory(self, length: int) -> memoryview:
        spare = self._spare.get(length)
        if not spare:
            return memoryview(np.empty(length, np.uint8).data)
        self._spare_bytes -= length
        return spare.pop()

    def _keep_memory(self, view: memoryview) -> None:
        if self._spare_bytes + len(view) <= self._longest:
            self._spare_bytes += len(view)
            self._spare.setdefault(len(view), []).append(view)

    # -- what the peers say -----------------------------------------------------------------------------------

    def skip(self, sender: int, channel: ChannelId, bucket: int, round: int) -> str:
        """Expect nothing more from `sender` for `round` and earlier rounds of this channel and bucket. Return why that
        is refused, an empty text if it is not."""
        with self.changed:
            key = (sender, channel, bucket)
            if key not in self._skipped:
                why = self._unknown(channel.lane)
                if self._skips[sender] >= MOST_SKIPS:
                    why = f"it has skipped rounds of more than {MOST_SKIPS} buckets"
                if why:
                    return why
                self._skips[sender] += 1
            self._skipped[key] = max(round, self._skipped.get(key, -1))
            self._fail_skipped(sender, channel, bucket, round)
            return ""

    def _fail_skipped(self, sender: int, channel: ChannelId, bucket: int, round: int) -> None:
        for key, slot in list(self._waiting.items()):
            if key[:3] == (sender, channel, bucket) and slot.round <= round:
                slot.failed = f"worker {sender} skipped the round"
                del self._waiting[key]
        self.changed.notify_all()

    def judge(self, sender: int, lane: int, verdict: Verdict) -> str:
        """Note what `sender` says about its asynchronous exchanges with this worker. Return why that is refused, an
        empty text if it is not."""
        with self.changed:
            why = self._unknown(lane)
            if not why:
                self._verdicts[sender, lane] = verdict
                self.changed.notify_all()
            return why

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
        """Expect nothing more from `sender` on the connection that it had, not even the rest of a message that has
        begun; `forget` also what it sent before (a new process has its rank)."""
        with self.changed:
            for key, slot in list(self._waiting.items()):
                if key.sender == sender:
                    slot.failed = why
                    del self._waiting[key]
            for key in [k for k, slot in self._early.items() if k.sender == sender and (forget or not slot.filled)]:
                self._drop_early(key)
            if forget:
                self._forget(sender)
            self.changed.notify_all()

    def _forget(self, sender: int) -> None:
        for key in [k for k in self._early if k.sender == sender]:
            self._drop_early(key)
        for place in [p for p in self._skipped if p[0] == sender]:
            del self._skipped[place]
        del self._skips[sender], self._held[sender]
        for pair in [p for p in self._verdicts if p[0] == sender]:
            del self._verdicts[pair]
        for key in [k for k in self._missed if k.sender == sender]:
            del self._missed[key]

    def replan(self, epoch: int, starts: list[int], members: Collection[int] | None = None) -> None:
        """Expect only messages of `epoch` from round `starts[lane]` on, and forget what has come from ranks that are
        not among the `members`.

        See Note [Why a plan starts at an announced round] in membership.py.
        """

        def outdated(key: Key, slot: Slot) -> bool:
            lane = key.channel.lane
            return key.in_a_round and slot.epoch < epoch and lane < len(starts) and slot.round >= starts[lane]

        with self.changed:
            for key, slot in list(self._waiting.items()):
                if outdated(key, slot):
                    slot.failed = f"the members have changed (epoch {epoch})"
                    del self._waiting[key]
            for key in [k for k, slot in self._early.items() if outdated(k, slot)]:
                self._drop_early(key)
            if members is not None:
                for sender in {*self._held, *self._skips, *(k.sender for k in self._missed)} - set(members):
                    self._forget(sender)
            self._spare.clear()  # messages of the new plan have other lengths
            self._spare_bytes = 0
            self.changed.notify_all()

    def wake(self) -> None:
        """Let every thread that waits for `changed` check its condition again."""
        with self.changed:
            self.changed.notify_all()


def _discarded(key: Key, epoch: int, round: int, plan: bytes, why: str = "") -> Slot:
    """A slot for a message that is read and discarded; `why` it is refused, if it is."""
    return Slot(key, epoch, round, plan, memoryview(b""), failed=why, canceled=True)


def _lengths(slot: Slot, length: int) -> str:
    return f"worker {slot.key.sender} sent {length} bytes where {len(slot.view)} were expected"
