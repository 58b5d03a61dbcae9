"""The handle of a job that outlives its workers: collective calls are of those who are there."""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from gossamer.comm import Counted, Membership, PeerError, Record, Unreachable, clock, layout_of, look
from gossamer.engine.control import Control
from gossamer.engine.gossip import Collective, Gossip
from gossamer.engine.handover import Handover
from gossamer.engine.resilient import Meeting, Plans, ResilientLane, meeting_stamp
from gossamer.errors import GossamerError, GossamerWarning

POLL = 0.05  # seconds between looks at who has come
CALLS = 1024  # averages in one meeting, at most


class SurvivingGossip(Gossip):
    """`begin` enters the job. Everything else is as in `Gossip`, except that

    - `averaged()` and `consensus_distance()` are over the members that are alive, also those that ran out of data and
      wait there (they relay with a zero step meanwhile);
    - `close()` is not collective: this worker leaves, the others go on;
    - `state_dict()` inside `averaged()` belongs to the same meeting: all save, or none does.
    """

    lanes: list[ResilientLane]  # type: ignore[assignment]

    def begin(self, members: Membership, handover: Handover, plans: Plans, joins: bool) -> None:
        self.members, self.joined, self._handover = members, joins, handover
        handover.of(self.model, [lane.optimizer for lane in self.lanes])
        self._meetings = 0
        self.steps_met = 0  # the most steps of a worker that came to the last meeting
        self._averaging = False
        self._meet = self._gather
        if joins:
            progress = self._handover.fetch()
            members.admit(progress["rounds"])
        else:
            self._handover.found(members.record.ranks)
        for lane in self.lanes:
            lane.survive(members, plans, self._between)
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
            self._averaging = True
            try:
                yield model
            finally:
                self._averaging = False

    def state_dict(self) -> dict[str, Any]:
        return self._state() if self._averaging else super().state_dict()

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "topology": self.lanes[0].planned.topology.name}

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
        self._meetings = max(self._meetings, int(progress["meetings"]))
        deadline = clock() + self.settings.soft_deadline
        while clock() < deadline and len(self.members.record.members) > 1 and not self.members.ahead(0):
            time.sleep(POLL / 5)  # until a neighbor tells where the others are by now
        for lane, rounds, steps in zip(self.lanes, progress["rounds"], progress["steps"], strict=True):
            lane.take_over(max(rounds, self.members.ahead(lane.index)), steps)
            lane.launch(combine=False)

    # -- collective calls --------------------------------------------------------------------------------------

    def _collectively(self, call: str, steps: Callable[[], Collective]) -> Any:
        """Try until a meeting in which nobody died."""
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

    def _gather(self, lanes: Sequence[Counted], call: str) -> None:
        """Wait for all members, whoever they are by then; agree on who came."""
        deadline = clock() + self.settings.timeout
        unreachable = 0.0
        while True:
            record = self.members.record
            try:
                came = self.members.directory.ask(partial(self._look_around, record))
                unreachable = 0.0
            except Unreachable:
                unreachable = unreachable or clock()
                if clock() - unreachable > self.settings.hard_deadline:
                    self._alone(call)
                    return
                came = None
            if came is not None:
                if self.members.me.incarnation in {entry[1] for entry in came}:
                    self._convene(came)
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

    def _look_around(self, record: Record, store: Any) -> list[Any] | None:
        """[rank, process, node, rounds, steps] of all who came, once that is everybody."""
        name = f"meeting/{self._meetings}"
        decided = look(store, name)
        if not decided:
            store.set(f"{name}/{self.members.rank}", json.dumps(self._here()))
            came = []
            for rank, member in record.members.items():
                told = look(store, f"{name}/{rank}")
                if not told or json.loads(told)[1] != member.incarnation:
                    return None
                came.append(json.loads(told))
            if not came:
                return None
            decided = store.compare_set(name, "", json.dumps(sorted(came))).decode()
        return list(json.loads(decided))

    def _here(self) -> list[Any]:
        me = self.members.me
        rounds = [lane.k for lane in self.lanes]
        return [self.members.rank, me.incarnation, me.node, rounds, self.lanes[0].meter.steps]

    def _convene(self, came: list[Any]) -> None:
        ranks = tuple(int(entry[0]) for entry in came)
        layout = layout_of([entry[2] for entry in came])
        rounds = [max(entry[3][lane] for entry in came) for lane in range(len(self.lanes))]
        self.steps_met = max(int(entry[4]) for entry in came)
        meeting = Meeting(self._meetings, ranks, layout, rounds)
        self._meetings += 1
        self.control = Control(
            self.members.rank,
            layout,
            self.control.channel,
            ranks,
            partial(meeting_stamp, frozenset(ranks)),
            meeting.number * CALLS,
        )
        for lane in self.lanes:
            lane.convene(meeting)

    def _alone(self, call: str) -> None:
        warnings.warn(
            f"the directory does not answer, so {call} is of worker {self.members.rank} alone",
            GossamerWarning,
            stacklevel=5,
        )
        self._convene([self._here()])

    def _all_well(self, fine: bool) -> bool:
        """Whether everybody who came has what it came for; the same answer for all."""
        meeting = self.lanes[0].meeting
        assert meeting is not None
        if meeting.ranks == (self.members.rank,):
            return fine
        name = f"outcome/{meeting.number}"
        deadline = clock() + self.settings.timeout
        while clock() < deadline:
            gone = not set(meeting.ranks) <= set(self.members.record.members)

            def ask(store: Any, gone: bool = gone) -> str:
                if fine:
                    store.set(f"{name}/{self.members.rank}", "fine")
                if not fine or all(store.check([f"{name}/{r}"]) for r in meeting.ranks):
                    return str(store.compare_set(name, "", "fine" if fine else "failed").decode())
                if gone:
                    return str(store.compare_set(name, "", "failed").decode())
                return look(store, name)

            try:
                outcome = self.members.directory.ask(ask)
            except Unreachable:
                return fine  # nobody can be asked any more
            if outcome:
                return outcome == "fine"
            time.sleep(POLL / 5)
        raise GossamerError(f"workers {list(meeting.ranks)} did not all come to the end of a collective call")

    def _stop(self, drain: float) -> None:
        if self._open:
            self._handover.close()
        super()._stop(drain)
