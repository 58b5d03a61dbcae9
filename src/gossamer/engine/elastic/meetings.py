"""Meetings: how the members of an elastic job make a collective call together.

Meetings are numbered and agreed on in the directory. A worker that calls `averaged()` posts that it is there; once
every member that can come has posted, one compare-and-set fixes who takes part. At the end the participants agree in
the same way on whether the call succeeded for all of them; if not, they meet again.

Note [What becomes of two members without a link]: a member that cannot reach another one fails every meeting with it,
although both live and the others reach them. So a worker that has had no link with a participant for so long that a
dead one would have been dropped names both in the outcome of the meeting. The one with the higher rank then stays away
from this call, and from later ones as long as there is no link. Calls that fail again and again for another reason end
after `timeout`, for all participants.

Note [Why a meeting costs O(n) messages]: everyone who comes adds 1 to a counter, and only the worker that completes the
number of members reads what all have posted, decides, and says so on its links, where the others hear it. Counter and
news are hints and may be lost. So a worker that waits also reads the decision once per second, and, with a period that
grows with the number of members, everything, in order to find out who cannot come.

The directory remembers the last meetings, and which one is the oldest of them: a worker that was away for longer goes
on with that one. Attendance, in attendance.py, says who can come.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from gossamer.comm import Deadline, PeerError, PeerWait, Store
from gossamer.comm.round_barrier import COLLECTIVE, DifferentCalls
from gossamer.comm.tcp import Membership, Record, Unreachable, look, read_json, whole_numbers
from gossamer.engine.elastic.attendance import Attendance
from gossamer.engine.elastic.meeting import Attendee, Meeting
from gossamer.errors import GossamerError, GossamerWarning

POLL = 0.05  # seconds between two calls of what a worker does while it waits
RECHECK = 1.0  # seconds between reads of the directory by a worker that waits, and hears nothing on its links
THOROUGH = 0.1  # the same for reads of all members' keys, times the number of members
WATCH = 1.0  # seconds between checks of whether the others have given a meeting up
KEPT = 8  # meetings that the directory remembers
MOST_SWEPT = 16  # older ones that are deleted at once, if workers could not before
OLDEST = "meetings/oldest"  # the key of the oldest meeting that it remembers
PASSED = "passed"  # the outcome of a meeting that the directory has forgotten
FINE, FAILED = "fine", "failed"  # outcomes
GIVEN_UP = "given up"  # the outcome of a meeting that failed as others before it, for so long that there is no other
APART = "no link"  # the outcome of a meeting that failed for want of a link, followed by the two ranks
EVER = 2**62  # after every meeting


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
        self.left = False  # this worker has left for good: it meets nobody any more
        self._first: int | None = None  # the first meeting of the call under way, if that one failed
        self._retries: Deadline | None = None  # until when a call that has failed is made again
        self._unlinked: dict[int, Deadline] = {}  # participants without a link with this worker, until named
        self._apart: tuple[int, str] | None = None  # rank and process for want of a link with which this one stays away
        self._watched, self._thorough = 0.0, Deadline(0.0)

    def gather(self, call: str, here: Callable[[], Attendee], meanwhile: Callable[[], None]) -> Meeting:
        """Wait until all members that can come are in the call. A worker that has left the job meets alone.

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
        self._thorough = Deadline(self._period(len(meeting.ranks)))
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
        thorough = self._thorough.expired
        if thorough:
            self._thorough = Deadline(self._period(len(meeting.ranks)))

        def ask(store: Store) -> bool:
            outcome = look(store, f"outcome/{meeting.number}")
            return outcome not in ("", FINE) or (thorough and bool(self._absent(store, meeting)))

        try:
            return self._members.directory.ask(ask)
        except Unreachable:
            self._attendance.restart()
            return False

    def lacks_link(self, rank: int) -> bool:
        """Whether this worker has had no link with participant `rank`, which it waits for, for twice the time after
        which a silent member counts as dead: see Note [What becomes of two members without a link]."""
        if self._members.links.peer(rank).link is not None:
            self._unlinked.pop(rank, None)
            return False
        return self._unlinked.setdefault(rank, Deadline(2 * self._members.hard_deadline(rank))).expired

    def post_complaint(self) -> None:
        """Name the participant without a link as the outcome now, before the others give up for want of this worker's
        messages and say only that the meeting has failed."""
        meeting = self._current()
        name, text = f"outcome/{meeting.number}", self._complaint(meeting)
        with suppress(Unreachable):
            self._members.directory.ask(lambda store: store.compare_set(name, "", text))

    def conclude(self, fine: bool, why: str = "") -> bool:
        """Return whether the call succeeded for all participants; `fine` is whether it did for this worker, and `why`
        is why not. All participants that reach the directory get the same answer. If the call has failed for too long,
        raise PeerError on all of them."""
        meeting = self._current()
        outcome = self._conclude(meeting, FINE if fine else self._complaint(meeting))
        succeeded = outcome == FINE
        if not succeeded:
            self._first = meeting.number if self._first is None else self._first
            self._retries = self._retries or Deadline(self._timeout)
            self._stay_away(meeting, outcome)
        if meeting.ranks[0] == self._members.rank and not self._current().alone:
            with suppress(Unreachable):
                self._members.directory.ask(partial(self._sweep, meeting.number))
        if outcome == GIVEN_UP:
            raise PeerError(
                f"a collective call of workers {list(meeting.ranks)} has failed again and again for more than "
                f"{self._timeout:g} s although all of them are alive: {why or 'it succeeded on this worker'}"
            )
        return succeeded

    def _complaint(self, meeting: Meeting) -> str:
        """The outcome of a meeting that has failed for this worker."""
        apart = [r for r in meeting.ranks if r in self._unlinked and self.lacks_link(r)]
        if apart:
            return f"{APART} {min(self._members.rank, apart[0])} {max(self._members.rank, apart[0])}"
        return GIVEN_UP if self._retries is not None and self._retries.expired else FAILED

    def _stay_away(self, meeting: Meeting, outcome: str) -> None:
        """Remember the other worker if `outcome` names this worker as the one that stays away."""
        *_, lower, higher = outcome.split(" ") if outcome.startswith(APART) else ("", "")
        if higher == str(self._members.rank):
            self._apart = next(((rank, process) for rank, process in meeting.came if str(rank) == lower), None)

    def _without_link(self) -> int | None:
        """The member for want of a link with which this worker stays away from meetings."""
        if self._apart is None:
            return None
        rank, process = self._apart
        member = self._members.record.members.get(rank)
        self._members.connect_to(rank)
        if member is None or member.incarnation != process or self._members.links.peer(rank).link is not None:
            self._apart = None
            return None
        return rank

    def _period(self, workers: int) -> float:
        """Seconds between two reads of all keys of so many workers."""
        return max(RECHECK, THOROUGH * workers)

    def _conclude(self, meeting: Meeting, mine: str) -> str:
        """Agree on the outcome; `mine` is this worker's."""
        if meeting.ranks == (self._members.rank,):
            return mine
        deadline, stage = Deadline(self._timeout), 2 * meeting.number + 1
        thorough = Deadline(THOROUGH * len(meeting.ranks))
        self._attendance.restart()
        first = True
        while not deadline.expired:
            gone = meeting.gone(self._members.record)
            check = first or bool(gone) or thorough.expired
            if thorough.expired:
                thorough = Deadline(self._period(len(meeting.ranks)))
            try:
                outcome = self._members.directory.ask(partial(self._outcome, meeting, mine, gone, first, check))
            except Unreachable:  # the others cannot be asked any more
                return self._alone_with(meeting, mine)
            if outcome == PASSED:  # the others have met again and again since
                return self._alone_with(meeting, mine)
            if outcome:
                self._members.announce(stage)
                return outcome
            first = False
            self._members.await_news(stage, min(RECHECK, thorough.remaining))
        raise GossamerError(f"workers {list(meeting.ranks)} did not all reach the end of a collective call")

    def _alone_with(self, meeting: Meeting, mine: str) -> str:
        """This worker alone concludes `meeting`."""
        self.last = replace(meeting, alone=True)
        self._attendance.skip(meeting.number)
        return mine

    def end_call(self) -> None:
        """The collective call is over: the next meeting belongs to another call."""
        self._first, self._retries = None, None
        self._unlinked.clear()

    def seen(self, processes: Mapping[int, str]) -> set[int]:
        """Those of `processes` (incarnation by rank) that have given a sign of attendance, as all do once they have a
        state to train from. Nobody if the directory does not answer."""

        def ask(store: Store) -> set[int]:
            return {rank for rank, process in processes.items() if process in look(store, f"present/{rank}")}

        try:
            return self._members.directory.ask(ask) if processes else set()
        except Unreachable:
            return set()

    def silent(self, processes: Mapping[int, str]) -> set[int]:
        """Those of `processes` (incarnation by rank) that have given no sign of attendance for `hard_deadline` seconds,
        as this worker has seen in earlier calls. Raise Unreachable if the directory does not answer."""
        return self._members.directory.ask(lambda store: self._attendance.absent(store, processes, EVER))

    def close(self) -> None:
        self._attendance.close()

    def _current(self) -> Meeting:
        assert self.last is not None
        return self.last

    def _gather(self, call: str, here: Callable[[], Attendee], meanwhile: Callable[[], None]) -> Meeting:
        wait = PeerWait(self._members.rank, self._timeout)
        directory_deadline: Deadline | None = None  # while the directory does not answer
        nobody: Deadline | None = None  # while this worker is no member, and no member can come
        missing: list[int] = []
        posted: tuple[int, str] | None = None  # the meeting, and the process as which this worker came
        look_at, thorough = Deadline(0.0), Deadline(RECHECK)
        heard, epoch = -1, self._members.record.epoch
        self._attendance.restart()
        while True:
            if self.left:
                return self._alone(call, here(), "it has left the job")
            other = self._without_link()
            if other is not None:
                return self._alone(call, here(), f"it has no connection with worker {other}")
            record, me = self._members.record, here()
            first = posted != (self.next, me.incarnation)
            news = self._members.decided >= 2 * self.next and heard != self._members.decided
            changed = record.epoch != epoch
            if first or news or changed or look_at.expired:
                heard, epoch = self._members.decided, record.epoch
                check = changed or thorough.expired
                if thorough.expired:
                    thorough = Deadline(self._period(len(record.members)))
                decided = None
                try:
                    request = partial(self._look_around, record, me, first, check)
                    decided, known = self._members.directory.ask(request)
                    missing = missing if known is None else known
                    posted, directory_deadline = (self.next, me.incarnation), None
                    if known is not None:
                        nobody = None if known or decided else nobody or Deadline(self._hard)
                    if nobody is not None and nobody.expired:
                        return self._alone(call, here(), "all other members have left or died")
                except Unreachable:
                    self._attendance.restart()
                    directory_deadline = directory_deadline or Deadline(self._hard)
                    if directory_deadline.expired:
                        return self._alone(call, here(), "the directory did not answer")
                if decided is not None:
                    if me.incarnation in {a.incarnation for a in decided.came}:
                        self._check_calls(call, decided.came)
                        self._members.announce(2 * self.next)
                        return Meeting.of(self.next, decided.epoch, decided.came)
                    self.next = decided.following  # that meeting took place without this worker
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

        `first`: this worker has just come. `check`: find out who is missing, and cannot come. Nobody takes part and
        nobody is missing if this worker is no member, and no member can come.
        """
        name, lanes = f"meeting/{self.next}", len(here.rounds)
        decided = look(store, name)
        if not decided:
            if first or check:
                oldest = _oldest(store)
                if oldest > self.next:
                    return _Decided(0, [], oldest), []
                store.set(f"{name}/{self._members.rank}", json.dumps(here))
            complete = first and store.add(f"{name}/count", 1) >= len(record.members) > 0
            if not (complete or check):
                return None, None
            found, missing = self._came(store, name, record, lanes, complete)
            if missing or not found:
                return None, missing
            decided = store.compare_set(name, "", json.dumps([record.epoch, sorted(found)])).decode()
        epoch, attendees = read_json(decided)
        whole_numbers([epoch])
        return _Decided(epoch, [Attendee.of(a, lanes) for a in attendees], self.next + 1), []

    def _came(
        self, store: Store, name: str, record: Record, lanes: int, complete: bool
    ) -> tuple[list[Attendee], list[int]]:
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
            try:
                attendee = Attendee.of(read_json(text), lanes) if text else None
            except ValueError as error:  # that worker will post again
                self._members.directory.refuse(f"what worker {rank} has posted cannot be read: {error}")
                attendee = None
            if attendee is not None and (rank, record.members[rank].incarnation) == attendee[:2]:
                found.append(attendee)
            else:
                missing.append(rank)
        return found, missing

    def _alone(self, call: str, here: Attendee, why: str) -> Meeting:
        warnings.warn(
            f"{call} used worker {self._members.rank}'s parameters only: {why}",
            GossamerWarning,
            stacklevel=2,
        )
        self._attendance.skip(self.next)
        record = self._members.record
        return Meeting.of(self.next, record.epoch, [here], alone=bool(record.members.keys() - {here.rank}))

    def _absent(self, store: Store, meeting: Meeting) -> set[int]:
        """Participants that have lost the directory since, or continued without the others."""
        others = {rank: incarnation for rank, incarnation in meeting.came if rank != self._members.rank}
        return self._attendance.absent(store, others, meeting.number)

    def _outcome(self, meeting: Meeting, mine: str, gone: set[int], first: bool, check: bool, store: Store) -> str:
        """Post this worker's outcome; return the agreed one once that is decided, PASSED if it is forgotten, else an
        empty text. `first` and `check` as in `_look_around`."""
        name = f"outcome/{meeting.number}"
        decided = look(store, name)
        if decided:
            return decided
        if (first or check) and _oldest(store) > meeting.number:
            return PASSED
        if mine != FINE:
            return str(store.compare_set(name, "", mine).decode())
        keys = [f"{name}/{r}" for r in meeting.ranks]
        if first or check:
            store.set(f"{name}/{self._members.rank}", FINE)
        complete = first and store.add(f"{name}/count", 1) >= len(keys)
        if (complete or check) and store.check(keys):
            return str(store.compare_set(name, "", FINE).decode())
        if check and not first:
            missing = {r for r, key in zip(meeting.ranks, keys, strict=True) if not store.check([key])}
            if missing & (gone | self._absent(store, meeting)):
                return str(store.compare_set(name, "", FAILED).decode())
        return ""

    def _sweep(self, number: int, store: Store) -> None:
        """Forget the meetings that are older than the last KEPT ones, of which `number` is the latest."""
        oldest, kept = _oldest(store), number - KEPT + 1
        if kept <= oldest:
            return
        store.set(OLDEST, str(kept))  # first: nobody may wait at a meeting that is deleted
        for k in range(max(oldest, kept - MOST_SWEPT), kept):
            for name in (f"meeting/{k}", f"outcome/{k}"):
                for key in (name, f"{name}/count", *(f"{name}/{rank}" for rank in range(self._members.size))):
                    store.delete_key(key)


class _Decided(NamedTuple):
    """Who takes part in a meeting, as the directory holds it. Nobody: the directory has forgotten that meeting."""

    epoch: int
    came: list[Attendee]
    following: int  # the next meeting


def _oldest(store: Store) -> int:
    """The oldest meeting that the directory remembers."""
    return int(look(store, OLDEST) or 0)
