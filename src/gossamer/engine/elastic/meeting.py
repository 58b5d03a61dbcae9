"""Meetings: how the members of an elastic job make a collective call together.

Meetings are numbered and agreed on in the directory. A worker that calls `averaged()` posts that it is there; once
every member that can come has posted, one compare-and-set fixes who takes part. At the end the participants agree in
the same way on whether the call succeeded for all of them; if not, they meet again.

Note [Why a meeting costs O(n) messages]: everyone who comes adds 1 to a counter, and only the worker that completes the
number of members reads what all have posted, decides, and says so on its links, where the others hear it. Counter and
news are hints and may be lost. So a worker that waits also reads the decision once per second, and, with a period that
grows with the number of members, everything, in order to find out who cannot come.

A worker that has lost the directory cannot come, although its neighbors hear its heartbeats. Therefore every worker
renews a sign of attendance in the directory; a worker whose sign has not changed for `hard_deadline` seconds is not
waited for. A worker that had to continue without a meeting writes that meeting's number beside its sign.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from gossamer.comm import Deadline, PeerWait, Stamp, Store, layout_of
from gossamer.comm.round_barrier import COLLECTIVE, DifferentCalls
from gossamer.comm.tcp import Membership, Record, Unreachable, look
from gossamer.errors import GossamerError, GossamerWarning
from gossamer.topology import Layout

SIGN = 1.0  # seconds between two signs of attendance, at most
LOOK = 0.5  # seconds between reads of the others' signs, at least
POLL = 0.05  # seconds between two calls of what a worker does while it waits
RECHECK = 1.0  # seconds between reads of the directory by a worker that waits, and hears nothing on its links
THOROUGH = 0.1  # the same for reads of all members' keys, times the number of members
WATCH = 1.0  # seconds between checks of whether the others have given a meeting up


class Attendee(NamedTuple):
    """A worker that came to a meeting. In the directory it is a JSON list."""

    rank: int
    incarnation: str
    node: str
    rounds: list[int]  # of each lane
    steps: int
    call: str  # the collective call that it made


@dataclass(frozen=True)
class Meeting:
    """A collective call of the workers that are alive."""

    number: int
    epoch: int  # of the members that were expected
    came: tuple[tuple[int, str], ...]  # rank and incarnation: a replacement of the same rank is another process
    layout: Layout
    rounds: list[int]  # the furthest of each lane
    steps: int  # the most that a worker has taken
    alone: bool = False  # the directory did not answer: the other workers may meet without this one

    @classmethod
    def of(cls, number: int, epoch: int, came: list[Attendee], *, alone: bool = False) -> Meeting:
        layout = layout_of([a.node for a in came])
        rounds = [max(of_lane) for of_lane in zip(*(a.rounds for a in came), strict=True)]
        steps = max(a.steps for a in came)
        return cls(number, epoch, tuple((a.rank, a.incarnation) for a in came), layout, rounds, steps, alone)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, _ in self.came)

    def gone(self, record: Record) -> set[int]:
        """Ranks that came and are not members any more."""
        if record.epoch < self.epoch:
            return set()  # this record does not know all of them yet
        members = {(rank, member.incarnation) for rank, member in record.members.items()}
        return {rank for rank, incarnation in self.came if (rank, incarnation) not in members}


def meeting_stamp(peers: frozenset[int]) -> Stamp:
    """The stamp of a meeting's exchanges. They are numbered by the meeting, so they belong to no epoch and no plan."""
    return Stamp(0, bytes(8), peers, meeting=True)


class Attendance:
    """This worker's sign in the directory, and its view of the others' signs."""

    def __init__(self, members: Membership, hard_deadline: float):
        self._members, self._hard = members, hard_deadline
        self._every = min(SIGN, hard_deadline / 4)
        self._skipped = -1  # the last meeting that this worker does not come to
        self._count = 0
        self._seen: dict[int, tuple[str, float]] = {}  # by rank: its sign, and since when it has not changed
        self._looked = 0.0
        self._stopped = False
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gossamer-attendance", daemon=True)
        self._thread.start()

    def skip(self, meeting: int) -> None:
        """Announce that this worker does not come to `meeting` or to an earlier one."""
        self._skipped = meeting
        self._hurry.set()

    def restart(self) -> None:
        """Measure from now how long signs have not changed."""
        self._seen, self._looked = {}, 0.0

    def absent(self, store: Store, expected: Mapping[int, str], meeting: int) -> set[int]:
        """Return the ranks of `expected` (incarnation by rank) that do not come to `meeting`. Runs on the directory's
        thread."""
        now, seen = time.monotonic(), self._seen
        if now - self._looked > min(LOOK, self._every):
            self._looked = now
            for rank in expected:
                sign = look(store, f"present/{rank}")
                if rank not in seen or seen[rank][0] != sign:
                    seen[rank] = sign, now
        away = set()
        for rank, incarnation in expected.items():
            sign, since = seen.get(rank, ("", now))
            process, skipped, _ = json.loads(sign or '["", -1, 0]')
            if now - since > self._hard or (process == incarnation and skipped >= meeting):
                away.add(rank)
        return away

    def close(self) -> None:
        self._stopped = True
        self._hurry.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        key = f"present/{self._members.rank}"
        while not self._stopped:
            self._count += 1
            sign = json.dumps([self._members.me.incarnation, self._skipped, self._count])
            with suppress(Unreachable):
                self._members.directory.ask(lambda store, sign=sign: store.set(key, sign))  # type: ignore[misc]
            self._hurry.wait(self._every)
            self._hurry.clear()


class Meetings:
    """Agrees with the other members on who takes part in a collective call, and on whether it succeeded.

    Args:
        members: The members of the job.
        timeout: Seconds to wait for a member that is alive but does not come.
        hard_deadline: Seconds to wait for the directory, or for a member that has lost it.
    """

    def __init__(self, members: Membership, timeout: float, hard_deadline: float):
        self._members, self._timeout, self._hard = members, timeout, hard_deadline
        self._attendance = Attendance(members, hard_deadline)
        self.next = 0  # number of the next meeting
        self.last: Meeting | None = None
        self.parked = False  # this worker waits for the others to come
        self._first: int | None = None  # the first meeting of the call under way, if that one failed
        self._watched = 0.0

    def gather(self, call: str, here: Callable[[], Attendee], meanwhile: Callable[[], None]) -> Meeting:
        """Wait until all members that can come are in the call.

        Args:
            call: The name of the call, for messages.
            here: Returns this worker's attendance.
            meanwhile: Called again and again while this worker waits.
        """
        self.parked = True
        try:
            meeting = self._gather(call, here, meanwhile)
        finally:
            self.parked = False
        self.last, self.next, self._watched = meeting, meeting.number + 1, time.monotonic()
        return meeting

    def skip_to(self, number: int, *, absent_from: int | None = None) -> None:
        """Let `number`, or a later one, be the next meeting. `absent_from`: nobody should wait for this worker in that
        meeting."""
        self.next = max(self.next, number)
        if absent_from is not None:
            self._attendance.skip(absent_from)

    def failed(self) -> bool:
        """Whether the meeting under way has failed: a participant says so, is gone, or has lost the directory."""
        meeting = self._current()
        if meeting.gone(self._members.record):
            return True
        if time.monotonic() - self._watched < WATCH:
            return False
        self._watched = time.monotonic()

        def ask(store: Store) -> bool:
            return look(store, f"outcome/{meeting.number}") == "failed" or bool(self._absent(store, meeting))

        try:
            return self._members.directory.ask(ask)
        except Unreachable:
            self._attendance.restart()
            return False

    def conclude(self, fine: bool) -> bool:
        """Return whether the call succeeded for all participants; `fine` is whether it did for this worker. All
        participants that reach the directory get the same answer."""
        meeting = self._current()
        succeeded = self._conclude(meeting, fine)
        if not succeeded and self._first is None:
            self._first = meeting.number
        return succeeded

    def _conclude(self, meeting: Meeting, fine: bool) -> bool:
        if meeting.ranks == (self._members.rank,):
            return fine
        deadline, stage = Deadline(self._timeout), 2 * meeting.number + 1
        thorough = Deadline(THOROUGH * len(meeting.ranks))
        self._attendance.restart()
        first = True
        while not deadline.expired:
            gone = meeting.gone(self._members.record)
            check = first or bool(gone) or thorough.expired
            if thorough.expired:
                thorough = Deadline(max(RECHECK, THOROUGH * len(meeting.ranks)))
            try:
                outcome = self._members.directory.ask(partial(self._outcome, meeting, fine, gone, first, check))
            except Unreachable:  # the others cannot be asked any more
                self.last = replace(meeting, alone=True)
                self._attendance.skip(meeting.number)
                return fine
            if outcome:
                self._members.announce(stage)
                return outcome == "fine"
            first = False
            self._members.await_news(stage, min(RECHECK, thorough.remaining))
        raise GossamerError(f"workers {list(meeting.ranks)} did not all reach the end of a collective call")

    def end_call(self) -> None:
        """The collective call is over: the next meeting belongs to another call."""
        self._first = None

    def close(self) -> None:
        self._attendance.close()

    def _current(self) -> Meeting:
        assert self.last is not None
        return self.last

    def _gather(self, call: str, here: Callable[[], Attendee], meanwhile: Callable[[], None]) -> Meeting:
        wait = PeerWait(self._members.rank, self._timeout)
        directory_deadline: Deadline | None = None  # while the directory does not answer
        missing: list[int] = []
        posted: tuple[int, str] | None = None  # the meeting, and the process as which this worker came
        look_at, thorough = Deadline(0.0), Deadline(RECHECK)
        heard, epoch = -1, self._members.record.epoch
        self._attendance.restart()
        while True:
            record, me = self._members.record, here()
            first = posted != (self.next, me.incarnation)
            news = self._members.decided >= 2 * self.next and heard != self._members.decided
            changed = record.epoch != epoch
            if first or news or changed or look_at.expired:
                heard, epoch = self._members.decided, record.epoch
                check = changed or thorough.expired
                if thorough.expired:
                    thorough = Deadline(max(RECHECK, THOROUGH * len(record.members)))
                decided = None
                try:
                    request = partial(self._look_around, record, me, first, check)
                    decided, known = self._members.directory.ask(request)
                    missing = missing if known is None else known
                    posted, directory_deadline = (self.next, me.incarnation), None
                except Unreachable:
                    self._attendance.restart()
                    directory_deadline = directory_deadline or Deadline(self._hard)
                    if directory_deadline.expired:
                        return self._alone(call, here())
                if decided is not None:
                    if me.incarnation in {a.incarnation for a in decided.came}:
                        self._check_calls(call, decided.came)
                        self._members.announce(2 * self.next)
                        return Meeting.of(self.next, decided.epoch, decided.came)
                    self.next += 1  # that meeting took place without this worker
                    continue
                look_at = Deadline(min(RECHECK, self._hard / 2))
            meanwhile()
            wait.check(lambda: f"worker(s) {', '.join(map(str, missing))} in {call}", COLLECTIVE)  # noqa: B023
            self._members.await_news(2 * self.next, POLL)

    def _check_calls(self, call: str, came: list[Attendee]) -> None:
        """Raise, on every participant, if the participants made different calls."""
        other = next((a for a in came if a.call != call), None)
        if other is not None:
            self.next += 1
            raise DifferentCalls(
                f"different collective calls met: worker {self._members.rank} is in {call}, worker {other.rank} is in "
                f"{other.call}. Every worker must make the same collective calls in the same order"
            )

    def _look_around(
        self, record: Record, here: Attendee, first: bool, check: bool, store: Store
    ) -> tuple[_Decided | None, list[int] | None]:
        """Post this worker's attendance. Return who takes part, once every member that can come has posted, and the
        ranks that are missing, if it was found out.

        `first`: this worker has just come. `check`: find out who is missing, and cannot come.
        """
        name = f"meeting/{self.next}"
        decided = look(store, name)
        if not decided:
            if first or check:
                store.set(f"{name}/{self._members.rank}", json.dumps(here))
            complete = first and store.add(f"{name}/count", 1) >= len(record.members)
            if not (complete or check):
                return None, None
            found, missing = self._came(store, name, record, complete)
            if missing or not found:
                return None, missing
            decided = store.compare_set(name, "", json.dumps([record.epoch, sorted(found)])).decode()
        epoch, attendees = json.loads(decided)
        return _Decided(epoch, [Attendee(*a) for a in attendees]), []

    def _came(self, store: Store, name: str, record: Record, complete: bool) -> tuple[list[Any], list[int]]:
        """The members that have posted, and those that are missing although they can come. `complete`: probably all
        have posted, so that two requests read everything."""
        keys = [f"{name}/{rank}" for rank in record.ranks]
        if complete and store.check(keys):
            texts, away = [text.decode() for text in store.multi_get(keys)], set()
        else:
            others = {r: m.incarnation for r, m in record.members.items() if r != self._members.rank}
            away = self._attendance.absent(store, others, self.next if self._first is None else self._first)
            texts = [look(store, key) for key in keys]
        found, missing = [], []
        for rank, text in zip(record.ranks, texts, strict=True):
            if rank in away:
                continue
            if text and Attendee(*json.loads(text)).incarnation == record.members[rank].incarnation:
                found.append(json.loads(text))
            else:
                missing.append(rank)
        return found, missing

    def _alone(self, call: str, here: Attendee) -> Meeting:
        warnings.warn(
            f"{call} used worker {self._members.rank}'s parameters only: the directory did not answer",
            GossamerWarning,
            stacklevel=2,
        )
        self._attendance.skip(self.next)
        record = self._members.record
        return Meeting.of(self.next, record.epoch, [here], alone=len(record.members) > 1)

    def _absent(self, store: Store, meeting: Meeting) -> set[int]:
        """Participants that have lost the directory since, or continued without the others."""
        others = {rank: incarnation for rank, incarnation in meeting.came if rank != self._members.rank}
        return self._attendance.absent(store, others, meeting.number)

    def _outcome(self, meeting: Meeting, fine: bool, gone: set[int], first: bool, check: bool, store: Store) -> str:
        """Post this worker's result; return "fine" or "failed" once that is decided, else an empty text. `first` and
        `check` as in `_look_around`."""
        name = f"outcome/{meeting.number}"
        decided = look(store, name)
        if decided:
            return decided
        if not fine:
            return str(store.compare_set(name, "", "failed").decode())
        keys = [f"{name}/{r}" for r in meeting.ranks]
        if first or check:
            store.set(f"{name}/{self._members.rank}", "fine")
        complete = first and store.add(f"{name}/count", 1) >= len(keys)
        if (complete or check) and store.check(keys):
            return str(store.compare_set(name, "", "fine").decode())
        if check and not first:
            missing = {r for r, key in zip(meeting.ranks, keys, strict=True) if not store.check([key])}
            if missing & (gone | self._absent(store, meeting)):
                return str(store.compare_set(name, "", "failed").decode())
        return ""


class _Decided(NamedTuple):
    """Who takes part in a meeting, as the directory holds it."""

    epoch: int
    came: list[Attendee]
