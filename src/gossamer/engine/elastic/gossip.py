"""The handle of a job that outlives its workers: collective calls are of those who are there."""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from gossamer.comm import Counted, Job, Membership, PeerError, Record, Unreachable, clock, layout_of, look
from gossamer.engine.averages import Control
from gossamer.engine.elastic.attendance import Attendance
from gossamer.engine.elastic.lane import ElasticLane, Meeting, Plans, meeting_stamp
from gossamer.engine.elastic.state_transfer import StateTransfer
from gossamer.engine.gossip import Collective, Gossip
from gossamer.errors import GossamerError, GossamerWarning

POLL = 0.05  # seconds between looks at who has come
WATCH = 1.0  # seconds between looks at whether the others have given a meeting up
CALLS = 1024  # averages in one meeting, at most


class ElasticGossip(Gossip):
    """`begin` enters the job. Everything else is as in `Gossip`, except that

    - `averaged()` and `consensus_distance()` are over the members that are alive, also those that ran out of data and
      wait there (they relay with a zero step meanwhile);
    - `close()` is not collective: this worker leaves, the others go on;
    - `state_dict()` inside `averaged()` belongs to the same meeting: all save, or none does.
    """

    lanes: list[ElasticLane]  # type: ignore[assignment]

    def begin(self, members: Membership, handover: StateTransfer, plans: Plans, joins: bool) -> None:
        assert self.settings.elastic is not None
        self._soft, self._hard = self.settings.elastic.soft, self.settings.elastic.hard
        self.members, self.joined, self._handover = members, joins, handover
        handover.of(self.model, [lane.optimizer for lane in self.lanes])
        self._meetings = 0
        self.met: Meeting | None = None  # the last one
        self.averaging = False  # inside averaged(): the others are, or were, in the same meeting
        self._parked = False
        self._retried: int | None = None  # the first meeting of the call under way, if that one failed
        self.newcomer = False  # it has a member's state, and has met nobody since
        self._donors = -1  # the meeting which that member was about to come to
        self._watched = 0.0
        self._meet = self._gather
        if joins:
            progress = self._handover.fetch()
            members.admit(progress["rounds"])
        else:
            self._handover.found(members.record.ranks)
        self._presence = Attendance(members, self._hard)
        for lane in self.lanes:
            lane.survive(members, plans, self._between, self._dissolved)
        if joins:
            self._continue_from(progress)

    def stats(self) -> dict[str, Any]:
        """As ever, and: the members, exchanges lost, the longest stall, whose messages were refused."""
        links, stats = self.members.links, super().stats()
        refused = Counter(stats["refused_by_peer"]) + Counter(links.refusals)
        why = next((lane.meter.last_refusal for lane in self.lanes if lane.meter.last_refusal), links.last_refusal)
        return {
            **stats,
            "epoch": self.members.record.epoch,
            "members": list(self.members.record.ranks),
            "joined": self.joined,
            "lost_exchanges": sum(lane.lost for lane in self.lanes),
            "given_up_exchanges": sum(lane.given_up for lane in self.lanes),
            "longest_stall_s": max(lane.longest_stall for lane in self.lanes),
            "refused_by_peer": dict(sorted(refused.items())),
            "last_refusal": why,
        }

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        with super().averaged() as model:
            self.averaging = True
            try:
                yield model
            finally:
                self.averaging = False

    def state_dict(self) -> dict[str, Any]:
        return self._state() if self.averaging else super().state_dict()

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "topology": self.lanes[0].planned.topology.name}

    def skip_meeting(self) -> None:
        """For a worker that joined, or came back, at a step after which all meet: it has missed that meeting. Nobody
        waits for it there, and it comes to the next one."""
        self._meetings = max(self._meetings, self._donors + 1)
        self._presence.skip(self._donors)

    def catch_up(self) -> None:
        """Count as many steps as the furthest of those who came to the last meeting: this worker had missed one."""
        if self.met is not None:
            for lane in self.lanes:
                lane.meter.steps = max(lane.meter.steps, self.met.steps)

    def close(self) -> None:
        """Leave: the others go on without this worker. Every parameter gets storage of its own again."""
        if self._open:
            try:
                for lane in self.lanes:
                    lane.drop()
                self.members.leave()
            finally:
                self._stop(drain=1.0)

    # -- between steps -----------------------------------------------------------------------------------------

    def _between(self) -> None:
        """After a step: hand over to whoever asked, and come back if the others went on without this worker."""
        self._handover.between_steps(self._progress)
        if self.members.excluded:
            self._come_back()

    def _progress(self) -> dict[str, Any]:
        return {
            "rounds": [lane.k for lane in self.lanes],
            "steps": [lane.meter.steps for lane in self.lanes],
            "meetings": self._meetings,
            "parked": self._parked,
        }

    def _come_back(self) -> None:
        """It was stopped or cut off for too long: take a member's state, which is further, and be one again."""
        try:
            progress = self._handover.fetch()
            self.members.admit(progress["rounds"])
        except (PeerError, Unreachable, OSError):
            return  # still cut off: train on alone, and try again after the next step
        self._continue_from(progress)

    def _continue_from(self, progress: dict[str, Any]) -> None:
        self.newcomer, self._donors = True, int(progress["meetings"])
        self._meetings = max(self._meetings, self._donors)
        if progress["parked"] and not self._parked:
            self.skip_meeting()
        deadline = clock() + self._soft
        while clock() < deadline and len(self.members.record.members) > 1 and not self.members.ahead(0):
            time.sleep(POLL / 5)  # until a neighbor tells where the others are by now
        for lane, rounds, steps in zip(self.lanes, progress["rounds"], progress["steps"], strict=True):
            lane.take_over(max(rounds, self.members.ahead(lane.index)), steps)
            lane.launch(combine=False)

    # -- collective calls --------------------------------------------------------------------------------------

    def _collectively(self, call: str, steps: Callable[[], Collective]) -> Any:
        """Try until a meeting in which nobody died."""
        try:
            while True:
                with self._together(call):
                    result, fine = None, True
                    try:
                        result = self._run(steps())
                    except PeerError:
                        fine = False
                    if self._all_well(fine):
                        return result
                    if callable(result):
                        result()  # what this worker had done already is undone
                assert self.met is not None
                self._retried = self.met.number if self._retried is None else self._retried
        finally:
            self._retried = None

    def _run(self, steps: Collective) -> Any:
        jobs: list[Job] = []
        try:
            while True:
                jobs = next(steps)
                for job in jobs:
                    self.lanes[0].wait(job)
        except StopIteration as stop:
            return stop.value
        except PeerError:
            self.lanes[0].abandon(jobs)
            raise

    def _gather(self, lanes: Sequence[Counted], call: str) -> None:
        """Wait for all members, whoever they are by then; agree on who came."""
        self._parked = True
        try:
            self._wait_for_all(call)
        finally:
            self._parked = False

    def _wait_for_all(self, call: str) -> None:
        deadline = clock() + self.settings.timeout
        unreachable = 0.0
        self._presence.look_anew()
        while True:
            record = self.members.record
            decided = None
            try:
                decided = self.members.directory.ask(partial(self._look_around, record))
                unreachable = 0.0
            except Unreachable:
                self._presence.look_anew()
                unreachable = unreachable or clock()
                if clock() - unreachable > self._hard:
                    self._alone(call)
                    return
            if decided is not None:
                epoch, came = decided
                if self.members.me.incarnation in {entry[1] for entry in came}:
                    self._convene(epoch, came)
                    return
                self._meetings += 1  # that one took place without this worker
                continue
            for lane in self.lanes:
                lane.relay()
            self._between()
            if clock() > deadline:
                raise PeerError(
                    f"worker {self.members.rank} is in {call} with members {list(record.ranks)}, and not all of them "
                    f"called it within {self.settings.timeout:g} s; call it on every worker"
                )
            time.sleep(POLL)

    def _look_around(self, record: Record, store: Any) -> Any:
        """[epoch, [[rank, process, node, rounds, steps] of all who came]], once that is everybody who will come."""
        name = f"meeting/{self._meetings}"
        decided = look(store, name)
        if not decided:
            store.set(f"{name}/{self.members.rank}", json.dumps(self._here()))
            others = {r: m.incarnation for r, m in record.members.items() if r != self.members.rank}
            first = self._meetings if self._retried is None else self._retried
            away = self._presence.absent(store, others, first)
            came = []
            for rank, member in record.members.items():
                if rank in away:
                    continue
                told = look(store, f"{name}/{rank}")
                if not told or json.loads(told)[1] != member.incarnation:
                    return None
                came.append(json.loads(told))
            if not came:
                return None
            decided = store.compare_set(name, "", json.dumps([record.epoch, sorted(came)])).decode()
        return json.loads(decided)

    def _here(self) -> list[Any]:
        me = self.members.me
        rounds = [lane.k for lane in self.lanes]
        return [self.members.rank, me.incarnation, me.node, rounds, self.lanes[0].meter.steps]

    def _convene(self, epoch: int, came: list[Any], *, alone: bool = False) -> None:
        layout = layout_of([entry[2] for entry in came])
        rounds = [max(entry[3][lane] for entry in came) for lane in range(len(self.lanes))]
        processes = tuple((int(entry[0]), str(entry[1])) for entry in came)
        steps = max(int(entry[4]) for entry in came)
        self.met = meeting = Meeting(self._meetings, epoch, processes, layout, rounds, steps, alone)
        self._meetings += 1
        self.newcomer, self._watched = False, clock()
        self.control = Control(
            self.members.rank,
            layout,
            self.control.channel,
            meeting.ranks,
            partial(meeting_stamp, frozenset(meeting.ranks)),
            meeting.number * CALLS,
        )
        for lane in self.lanes:
            lane.convene(meeting)

    def _alone(self, call: str) -> None:
        warnings.warn(
            f"the directory does not answer, so {call} is of worker {self.members.rank} alone",
            GossamerWarning,
            stacklevel=6,
        )
        self._presence.skip(self._meetings)
        record = self.members.record
        self._convene(record.epoch, [self._here()], alone=len(record.members) > 1)

    def _dissolved(self) -> bool:
        """Whether the meeting under way has failed: another worker says so, or one of those who came is gone."""
        meeting = self.met
        assert meeting is not None
        if meeting.gone(self.members.record):
            return True
        if clock() - self._watched < WATCH:
            return False
        self._watched = clock()

        def ask(store: Any) -> bool:
            return look(store, f"outcome/{meeting.number}") == "failed" or bool(self._absent(store, meeting))

        try:
            return self.members.directory.ask(ask)
        except Unreachable:
            self._presence.look_anew()
            return False

    def _absent(self, store: Any, meeting: Meeting) -> set[int]:
        """Who came and has lost the directory since, or gone on without the others."""
        others = {rank: process for rank, process in meeting.came if rank != self.members.rank}
        return self._presence.absent(store, others, meeting.number)

    def _all_well(self, fine: bool) -> bool:
        """Whether everybody who came has what it came for; the same answer for all who can be asked."""
        meeting = self.met
        assert meeting is not None
        if meeting.ranks == (self.members.rank,):
            return fine
        name = f"outcome/{meeting.number}"
        deadline = clock() + self.settings.timeout
        self._presence.look_anew()
        while clock() < deadline:
            gone = meeting.gone(self.members.record)

            def ask(store: Any, gone: set[int] = gone) -> str:
                if fine:
                    store.set(f"{name}/{self.members.rank}", "fine")
                missing = {r for r in meeting.ranks if not store.check([f"{name}/{r}"])}
                if not fine or not missing:
                    return str(store.compare_set(name, "", "fine" if fine else "failed").decode())
                if missing & (gone | self._absent(store, meeting)):
                    return str(store.compare_set(name, "", "failed").decode())
                return look(store, name)

            try:
                outcome = self.members.directory.ask(ask)
            except Unreachable:  # nobody can be asked any more
                self.met = replace(meeting, alone=True)
                self._presence.skip(meeting.number)
                return fine
            if outcome:
                return outcome == "fine"
            time.sleep(POLL / 5)
        raise GossamerError(f"workers {list(meeting.ranks)} did not all come to the end of a collective call")

    def _stop(self, drain: float) -> None:
        if self._open:
            self._handover.close()
            self._presence.close()
        super()._stop(drain)
