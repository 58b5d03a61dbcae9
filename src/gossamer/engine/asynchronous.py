"""Asynchronous pairwise gossip: AD-PSGD and A2CiD2, for any optimizer, without a coordinator.

Every worker takes gradient steps at its own pace; a communication thread averages pairwise with neighbors, in the
order of an event sequence that all workers draw from one seed (gossamer.topology.events). The true state is x and,
for A2CiD2, its momentum companion x~ (Nabli, Belilovsky, Oyallon, NeurIPS 2023):
    between events   Mix(dt): d = (1 - exp(-2 eta dt)) / 2 (x~ - x);  x += d;  x~ -= d
    gradient step    Mix; the optimizer's own displacement is added to x and to x~ (Adam, momentum, decay: all right)
    exchange with j  Mix; send x; Mix; m = x_i - x_j of the two vectors that were sent;  x -= m / 2;  x~ -= alpha~ m
m is the same on both sides but for its sign, so the pair's sum is conserved. eta = 0, alpha~ = 1/2 is AD-PSGD, which
needs no x~. Times are in mean gradient times, one unit agreed by all workers at the start.

The model's parameters y are a copy of x, refreshed when a step begins: forward and backward read y undisturbed while
x moves. The lock is held for vector operations only, and while the optimizer steps; a step that raises leaves x and
x~ as they were.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer.comm import Batch, Exchange, Job, PeerError, Scratch, Transport, clock, exchange
from gossamer.engine.lane import NUDGE_AFTER, Lane
from gossamer.errors import GossamerError, InputError
from gossamer.topology.events import Event, Events
from gossamer.topology.plan import Piece, Program, Step
from gossamer.topology.rates import Rates

CHUNK = 2**16  # elements
WARM_UP = 5  # steps whose mean time makes the unit
TRIAL = 8.0  # time units after which exchanges that proved long are paired in rounds
LONG = 0.4  # of the time between a worker's exchanges: above it, waiting for each other's order would cost time
POLL = 0.05  # seconds between looks at what the others said


class AsyncLane(Lane):
    """One optimizer's state (x, x~), its step hooks, and the thread that exchanges."""

    def begin_gossip(self, transport: Transport, events: Events, rates: Rates) -> None:
        """Take over the parameters as they are now and start exchanging."""
        settings = self.settings
        self.events, self._transport = events, transport
        accelerated = settings.algorithm == "a2cid2" and rates.eta is not None and rates.alpha_tilde is not None
        self.eta = settings.rate * (rates.eta or 0.0) if accelerated else 0.0
        self.alpha, self.alpha_tilde = 0.5, (rates.alpha_tilde or 0.5) if accelerated else 0.5
        n = events.topology.n
        self.x = [b.x.clone() for b in self.buckets]
        self.x_tilde = [b.x.clone() for b in self.buckets] if accelerated else None
        self._sent = None if self.alone else [torch.empty_like(b.x) for b in self.buckets]
        self.counts = torch.zeros(2, n, dtype=torch.int64)  # steps known of each worker; the same, not held back
        self._heard = torch.zeros(2, n, dtype=torch.int64)
        self._state = threading.Condition()  # guards x, x_tilde, counts and what follows
        self._time = 0.0  # until when Mix has been applied
        self._wall: tuple[float, float] | None = None  # (origin, unit) of the wall clock, once agreed
        self._resumed = 0.0  # the wall clock's first time
        self._virtual = self._virtual_goal = 0.0  # the virtual clock's time, and how far events may go
        self.drive: Callable[[int, float], None] | None = None  # performs virtual workers' events up to a time
        self.durations: Callable[[int], float] = lambda step: 1.0  # of a gradient, on the virtual clock
        self.started = -1  # number of the last event begun
        self._own: Iterator[Event] = iter(())
        self._next: Event | None = None  # the first own event that is not done
        self._limit: int | None = None  # no event with a higher number may begin
        self._stopping = self._parked = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._trial: float | None = TRIAL if settings.clock == "wall" and settings.pairing == "auto" else None
        self._generation = 0  # of the event sequence: loading a state starts another
        self._transfers: list[float] = []  # seconds that exchanges of the trial took
        self._steps_seconds: list[float] = []
        self._last_step = clock()
        self.meter.sent.update(dict.fromkeys(sorted(set(events.neighbors(self.rank))), 0))  # no new keys while read
        if transport.threaded and not self.alone:
            self._rewind(after=-1)
            self._thread = threading.Thread(target=self._gossip, name=f"gossamer-events-{self.index}", daemon=True)
            self._thread.start()

    # -- the training thread -----------------------------------------------------------------------------------

    @torch.no_grad()
    def mix(self) -> None:
        """Before the step: y <- x. The lock stays with the training thread until the step is done."""
        self._computed()
        self._let_go()  # a step that raised left it held
        if self.settings.clock == "virtual":
            self.reach(self._virtual + self.durations(self.meter.steps))
        self._hold_back()
        self._state.acquire()
        try:
            self._raise_failure()
            self._momentum(self._now())
            for bucket, x in zip(self.buckets, self.x, strict=True):
                bucket.x.copy_(x)
        except BaseException:
            self._let_go()
            raise
        self._ready = True
        self._mark = clock()

    @torch.no_grad()
    def stepped(self) -> None:
        """After the step: its displacement y - x goes to x and to x~."""
        for b, bucket in enumerate(self.buckets):
            if self.x_tilde is None:
                self.x[b].copy_(bucket.x)
                continue
            for y, x, xt in _chunks(bucket.x, self.x[b], self.x_tilde[b]):
                xt.add_(y - x)
                x.copy_(y)
        self.counts[:, self.rank] += 1
        if self._wall is None and self._thread is not None and self.settings.clock == "wall":
            self._steps_seconds.append(clock() - self._last_step)
            self._last_step = clock()
        self._state.notify_all()
        self._let_go()

    def values(self) -> list[Tensor]:
        return self.x

    def total_steps(self) -> int:
        """Steps of all workers, as far as this one has heard: it lags, so a budget is overshot a little."""
        with self._state:
            return int(self.counts[0].sum())

    def _let_go(self) -> None:
        """Give up the lock, however often an interrupted call of this thread took it."""
        with suppress(RuntimeError):
            while True:
                self._state.release()

    def _hold_back(self) -> None:
        """Wait while this worker is more than `max_staleness` steps ahead of the slowest it knows of."""
        bound = self.settings.max_staleness
        if bound is None or self.alone:
            return

        def ahead() -> int:
            return int(self.counts[0, self.rank] - self.counts[1].min())

        def late() -> tuple[int, str]:
            return int(self.counts[1].argmin()), f"which is more than max_staleness={bound} steps behind"

        with self._state:
            self._stand_still(lambda: ahead() <= bound, late)

    def _stand_still(self, done: Callable[[], bool], late: Callable[[], tuple[int, str]]) -> None:
        """Wait, with the lock, until `done` or a failure; `late` says for whom and why."""
        if done():
            return
        since = clock()
        peer, why = late()
        while not self._state.wait_for(lambda: self._failure is not None or done(), NUDGE_AFTER):
            peer, why = late()
            if self.settings.clock == "virtual":
                self._nudge(self.index, round(self._virtual_goal))
                if self.assist is not None:
                    self.assist()
            if clock() - since > self.settings.timeout:
                raise PeerError(
                    f"worker {self.rank} waited {clock() - since:.0f} s for worker {peer}, {why}; is it alive, and "
                    "does it train as many steps? Raise timeout= if it really takes that long"
                )
        self._raise_failure()
        self.meter.waited_total += clock() - since
        self.meter.waited[peer] += clock() - since
        self.meter.span("wait", since, clock(), peer=peer, step=self.meter.steps)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            kind = type(self._failure) if isinstance(self._failure, GossamerError) else GossamerError
            raise kind(str(self._failure)) from self._failure

    # -- time --------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        """Time in units: virtual, or wall time once the unit is agreed (before that nothing mixes)."""
        if self.settings.clock == "virtual":
            return self._virtual
        return self._resumed if self._wall is None else (clock() - self._wall[0]) / self._wall[1]

    def _start_clock(self, unit: float) -> None:
        self._wall = (clock() - self._resumed * unit, unit)

    @property
    def virtual_time(self) -> float:
        """When this worker's last step was, on the virtual clock."""
        return self._virtual

    def reach(self, time: float) -> None:
        """Move the virtual clock to `time`, when all of this worker's events until then are done."""
        if self.drive is not None:
            self.drive(self.index, time)
        elif self._thread is not None:
            with self._state:
                self._virtual_goal = time
                self._state.notify_all()
                self._stand_still(lambda: self._done_until(time), self._partner)
        self._virtual, self.k = time, round(time)

    def _done_until(self, time: float) -> bool:
        return self._next is not None and self._next.time > time

    def _partner(self) -> tuple[int, str]:
        assert self._next is not None
        return self._next.peer_of(self.rank), f"its partner in event {self._next.number}"

    def _momentum(self, now: float) -> None:
        """Mix(dt): x and x~ approach each other; their sum stays."""
        elapsed, self._time = now - self._time, max(now, self._time)
        if self.x_tilde is None or elapsed <= 0:
            return
        share = -math.expm1(-2 * self.eta * elapsed) / 2
        for b in range(len(self.buckets)):
            for x, xt in _chunks(self.x[b], self.x_tilde[b]):
                d = (xt - x).mul_(share)
                x.add_(d)
                xt.sub_(d)

    # -- one event ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, event: Event) -> list[Job]:
        """Send x as it is now, and the step counts."""
        assert self._sent is not None
        peer = event.peer_of(self.rank)
        layout = self.schedule.topology.layout
        wired = layout.nodes == 1 or layout.node[peer] != layout.node[self.rank]
        with self._state:
            self.started = event.number
            self._momentum(event.time if self.settings.clock == "virtual" else self._now())
            for sent, x in zip(self._sent, self.x, strict=True):
                sent.copy_(x)
            if self._parked:
                self.counts[1, self.rank] = self.counts[1].max()
            header = self.counts.clone()
        jobs = [Job(event.number, len(self.buckets), partial(_trade_counts, peer, header, self._heard))]
        for b, sent in enumerate(self._sent):
            whole = Piece(peer, 0, sent.numel(), 1.0)
            program: Program = (Step("swap", "x", wired, (whole,), (whole,)),)
            jobs.append(Job(event.number, b, partial(exchange, program, sent, self._out[b], self.wire)))
        for job in jobs:
            self.channel.launch(job)
        return jobs

    @torch.no_grad()
    def end(self, event: Event, jobs: list[Job]) -> None:
        """The exchange has arrived: x -= m / 2, x~ -= alpha~ m."""
        assert self._sent is not None
        with self._state:
            self._momentum(event.time if self.settings.clock == "virtual" else self._now())
            for job in jobs[1:]:
                self.meter.exchanged(job)
                assert job.result is not None
                b = job.bucket
                theirs, ours, x = job.result.out, self._sent[b], self.x[b]
                x_tilde = x if self.x_tilde is None else self.x_tilde[b]
                for got, sent, mine, companion in _chunks(theirs, ours, x, x_tilde):
                    towards = got.sub_(sent)
                    mine.add_(towards, alpha=self.alpha)
                    if self.x_tilde is not None:
                        companion.add_(towards, alpha=self.alpha_tilde)
            torch.maximum(self.counts, self._heard, out=self.counts)
            self.meter.rounds += 1
            self._state.notify_all()

    # -- the communication thread ------------------------------------------------------------------------------

    def _gossip(self) -> None:
        try:
            with self._state:
                if self.settings.clock == "wall":
                    self._agree_on_unit()
            while (event := self._take_turn()) is not None:
                jobs = self.begin(event)
                for job in jobs:
                    self._await(job)
                self.end(event, jobs)
                with self._state:
                    if self._trial is not None:  # the counts arrive when the partner is there
                        ends = [job.finished or 0.0 for job in jobs]
                        self._transfers.append(max(ends) - ends[0])
                    self._next = next(self._own)
                    self._state.notify_all()
        except BaseException as error:  # handed to the training thread, which raises it
            with self._state:
                if not self._stopping:
                    self._failure = error
                self._state.notify_all()

    def _take_turn(self) -> Event | None:
        """The next event, claimed, once its time has come and it may begin; None when the lane stops."""
        with self._state:
            while not self._stopping:
                assert self._next is not None
                event, early = self._next, None
                if self._trial is not None and event.time > self._trial:
                    self._agree_on_pairing()
                    continue
                if self._limit is not None:
                    if event.number <= self._limit:
                        early = 0.0  # others wait for it: no matter the time
                elif self.settings.clock == "virtual":
                    if event.time <= self._virtual_goal:
                        early = 0.0
                else:
                    assert self._wall is not None
                    early = max(0.0, event.time - self._now()) * self._wall[1]
                if early == 0.0:
                    self.started = event.number  # under the same lock: a collective call must not overlook it
                    return event
                self._state.wait(early)
            return None

    def _agree_on_unit(self) -> None:
        """Wait for the first steps, then take the median of everybody's mean step time as the unit."""
        bound = self.settings.max_staleness
        enough = WARM_UP if bound is None else min(WARM_UP, bound)
        for attempt in itertools.count():
            self._state.wait_for(lambda: self._stopping or self._parked or len(self._steps_seconds) > enough)
            seconds = self._steps_seconds[1:]
            said = self._hear_all(f"unit/{attempt}", statistics.mean(seconds) if seconds else None)
            known = [s for s in said or () if s is not None]
            if known:
                self._start_clock(statistics.median(known))
            if known or self._stopping:
                return
            # All were in a collective call before the first step: try again after it.
            self._state.wait_for(lambda: self._stopping or not self._parked)

    def _agree_on_pairing(self) -> None:
        """The trial is over: where exchanges proved long, all go on in rounds of side-by-side pairs."""
        assert self._wall is not None
        assert self._next is not None
        assert self._trial is not None
        seconds = statistics.mean(self._transfers) if self._transfers else 0.0
        busy = self.settings.rate * seconds / self._wall[1]
        generation = self._generation
        said = self._hear_all(f"pairing/{generation}", [busy, self._next.number])
        if said is None or generation != self._generation:
            return
        if statistics.median(s[0] for s in said) > LONG:
            # No event after the trial has begun anywhere: the rounds may take over their numbers.
            self.events = self._in_rounds(max(s[1] for s in said), self._trial)
            self._rewind(after=-1)
        self._trial = None

    def _in_rounds(self, first: int, start: float) -> Events:
        return replace(self.events, seed=self.events.seed + 1, pairing="rounds", first=first, start=start)

    def _rewind(self, after: int) -> None:
        self._own = self.events.of(self.rank, after=after)
        self._next = next(self._own)

    def _hear_all(self, what: str, mine: Any) -> list[Any] | None:
        """What everybody has to say, waiting without the lock; None if the lane stops or another state is loaded."""
        since, generation = clock(), self._generation
        ask = self._transport.collect(f"{what}/{self.index}", json.dumps(mine))
        while (said := ask()) is None:
            self._state.wait(POLL)
            if self._stopping or (self._wall is not None and generation != self._generation):
                return None
            if self._parked:  # everybody will be there, or the collective call says who is not
                since = clock()
            elif clock() - since > self.settings.timeout:
                raise PeerError(
                    f"worker {self.rank} waited {clock() - since:.0f} s for all workers to agree on the "
                    f"{what.partition('/')[0]} of their exchanges; does every worker take steps? Each needs "
                    f"{WARM_UP + 1} at the start"
                )
        return [json.loads(text) for text in said]

    def _await(self, job: Job) -> None:
        since = clock()
        while not self.channel.wait(job, 1.0):
            if self._stopping:
                raise GossamerError("closed while an exchange was under way")
            if clock() - since > self.settings.timeout:
                raise PeerError(
                    f"worker {self.rank} waited {clock() - since:.0f} s for worker {job.blocked_on} (event "
                    f"{job.round}) and gives up; is that worker alive? Raise timeout= if it really takes that long"
                )
        if job.error is not None:
            raise job.error

    # -- for collective calls ----------------------------------------------------------------------------------

    def mix_only(self) -> None:
        """On the virtual clock: let a gradient's time pass without a step, so that others can go on."""
        self.reach(self._virtual + 1.0)
        self.meter.mix_only += 1

    def serve(self) -> bool:
        """The same if nothing has to be waited for; whether it was done."""
        with self._state:
            goal = self._virtual + 1.0
            self._virtual_goal = goal
            self._state.notify_all()
            self._raise_failure()
            if not self._done_until(goal):
                return False
            self._virtual, self.k = goal, round(goal)
        self.meter.mix_only += 1
        return True

    def verify(self) -> None:
        """Raise what ended the communication thread, if anything did."""
        with self._state:
            self._raise_failure()

    def freeze(self) -> int:
        """Begin no further event; the number of the last one begun."""
        with self._state:
            self._limit = self.started
            return self.started

    def run_to(self, number: int) -> None:
        """Finish all own events up to `number` and stay there."""
        with self._state:
            self._limit = number
            self._state.notify_all()
            if self._thread is not None:
                self._stand_still(lambda: self._next is not None and self._next.number > number, self._partner)

    def resume(self) -> None:
        with self._state:
            self._limit, self._parked = None, False
            self._last_step = clock()
            self._state.notify_all()

    def park(self) -> None:
        """This worker takes no steps for now: nobody is to be held back by it."""
        self._let_go()
        with self._state:
            self._raise_failure()
            self._parked = True
            self._state.notify_all()

    def adopt(self) -> None:
        """The parameters were written by the user: they are the state now."""
        with self._state, torch.no_grad():
            for b, bucket in enumerate(self.buckets):
                self.x[b].copy_(bucket.x)
                if self.x_tilde is not None:
                    self.x_tilde[b].copy_(bucket.x)

    def state_dict(self) -> dict[str, Any]:
        """Inside a collective call: all events up to the limit are done, everywhere."""
        with self._state:
            return {
                "algorithm": self.settings.algorithm,
                "steps": self.meter.steps,
                "started": self.started if self._limit is None else max(self.started, self._limit),
                "time": self._time,
                "virtual": self._virtual,
                "rounds": (self.events.first, self.events.start) if self._switched else None,
                "counts": self.counts.clone(),
                "x": [x.clone() for x in self.x],
                "x_tilde": None if self.x_tilde is None else [x.clone() for x in self.x_tilde],
            }

    @property
    def _switched(self) -> bool:
        return self.events.pairing == "rounds" and self.settings.pairing == "auto"

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken: after the same event, at its time, however long ago that was."""
        if state.get("algorithm") != self.settings.algorithm:
            raise InputError(
                f"the state was saved by algorithm {state.get('algorithm', 'awc or atc')!r} and this run has "
                f"{self.settings.algorithm!r}; resume with the same, or load only the model and the optimizer"
            )
        with self._state:
            self.meter.steps, self.started = state["steps"], state["started"]
            self._time, self._virtual = state["time"], state["virtual"]
            self.k = round(self._virtual)
            self._virtual_goal = self._virtual
            self.counts.copy_(state["counts"])
            for mine, saved in zip(self.x, state["x"], strict=True):
                mine.copy_(saved)
            if self.x_tilde is not None:
                for mine, saved in zip(self.x_tilde, state["x_tilde"], strict=True):
                    mine.copy_(saved)
            if self._thread is not None:
                self._resume_events(state["rounds"])

    def _resume_events(self, rounds: tuple[int, float] | None) -> None:
        self._generation += 1
        if self._switched:  # this run had changed to rounds; the saved one had not, or elsewhere
            self.events = replace(self.events, seed=self.events.seed - 1, pairing="edges", first=0, start=0.0)
        if rounds is not None:
            self.events = self._in_rounds(*rounds)
        self._rewind(after=self.started)
        if self.settings.clock == "wall":
            reached = self.started >= self.events.first
            self._resumed = next(self.events.stream(after=self.started - 1)).time if reached else self.events.start
            self._time = self._resumed
            if self._wall is not None:
                self._start_clock(self._wall[1])
            auto = self.settings.pairing == "auto" and rounds is None
            self._trial, self._transfers = (self._resumed + TRIAL if auto else None), []
        self._state.notify_all()

    def close(self, drain: float) -> None:
        self._let_go()
        with self._state:
            self._stopping = True
            self._state.notify_all()
        super().close(drain)  # ends an exchange that is still under way
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        with self._state, torch.no_grad():
            for bucket, x in zip(self.buckets, self.x, strict=True):
                bucket.x.copy_(x)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matching pieces that stay in the cache between the passes of an update."""
    return zip(*(torch.split(t, CHUNK) for t in tensors), strict=True)


def _trade_counts(peer: int, ours: Tensor, theirs: Tensor, scratch: Scratch) -> Exchange:
    """The step counts travel with the parameters."""
    yield Batch([(peer, ours)], [(peer, theirs)])
    return None
