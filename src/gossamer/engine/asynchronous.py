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
x moves. The lock is held for vector operations only, and while the optimizer steps.
"""

from __future__ import annotations

import json
import math
import statistics
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer.comm import Batch, Exchange, Job, PeerError, Scratch, Transport, clock, exchange
from gossamer.engine.lane import NUDGE_AFTER, Lane
from gossamer.errors import GossamerError
from gossamer.topology.events import Event, Events
from gossamer.topology.plan import Piece, Program, Step
from gossamer.topology.rates import Rates

CHUNK = 2**16  # elements
WARM_UP = 5  # steps whose mean time makes the unit
TRIAL = 8.0  # time units after which exchanges that proved long are paired in rounds
LONG = 0.4  # of a unit: above it, workers that wait for each other's order would lose time


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
        self._held = False  # the training thread is inside step()
        self._time = 0.0  # until when Mix has been applied
        self._wall: tuple[float, float] | None = None  # (origin, unit) of the wall clock, once agreed
        self._virtual = self._virtual_goal = 0.0  # the virtual clock's time, and how far events may go
        self.drive: Callable[[int, float], None] | None = None  # performs virtual workers' events up to a time
        self.durations: Callable[[int], float] = lambda step: 1.0  # of a gradient, on the virtual clock
        self.started = -1  # number of the last event begun
        self._next: Event | None = None
        self._limit: int | None = None  # no event with a higher number may begin
        self._stopping = self._parked = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._steps_seconds: list[float] = []
        self._last_step = clock()
        if transport.threaded and not self.alone:
            self._thread = threading.Thread(target=self._gossip, name=f"gossamer-events-{self.index}", daemon=True)
            self._thread.start()

    # -- the training thread -----------------------------------------------------------------------------------

    @torch.no_grad()
    def mix(self) -> None:
        """Before the step: y <- x. The lock stays with the training thread until the step is done."""
        now = clock()
        self.meter.span("backward" if self._forwarded else "compute", self._mark, now, step=self.meter.steps)
        self._forwarded = False
        self._check()
        self._let_go()  # a step that raised left it held
        if self.settings.clock == "virtual":
            self._reach(self._virtual + self.durations(self.meter.steps))
        self._hold_back()
        self._state.acquire()
        self._held = True
        self._raise_failure()
        self._momentum(self._now())
        for bucket, x in zip(self.buckets, self.x, strict=True):
            bucket.x.copy_(x)
        self._ready = True
        self._mark = clock()

    @torch.no_grad()
    def launch(self, *, combine: bool = True) -> None:
        """After the step: its displacement y - x goes to x and to x~."""
        for b, bucket in enumerate(self.buckets):
            if self.x_tilde is None:
                self.x[b].copy_(bucket.x)
                continue
            for y, x, xt in _chunks(bucket.x, self.x[b], self.x_tilde[b]):
                xt.add_(y - x)
                x.copy_(y)
        self.counts[:, self.rank] += 1
        self.counts[1, self.rank] = max(self.counts[1, self.rank], self.counts[0, self.rank])
        self._steps_seconds.append(clock() - self._last_step)
        self._last_step = clock()
        self._state.notify_all()
        self._let_go()

    def values(self) -> list[Tensor]:
        return self.x

    def total_steps(self) -> int:
        """Steps of all workers, as far as this one has heard: it lags, so a budget is overshot a little."""
        return int(self.counts[0].sum())

    def _let_go(self) -> None:
        if self._held:
            self._held = False
            self._state.release()

    def _hold_back(self) -> None:
        """Wait while this worker is more than `max_staleness` steps ahead of the slowest it knows of."""
        bound = self.settings.max_staleness
        if bound is None or self.alone:
            return
        since = clock()
        with self._state:
            while int(self.counts[0, self.rank]) - int(self.counts[1].min()) > bound:
                self._raise_failure()
                if clock() - since > self.settings.timeout:
                    late = int(self.counts[1].argmin())
                    raise PeerError(
                        f"worker {self.rank} waited {clock() - since:.0f} s for worker {late}, which is more than "
                        f"max_staleness={bound} steps behind; is it alive? Raise timeout= or max_staleness="
                    )
                self._state.wait(0.2)
        waited = clock() - since
        self.meter.waited_total += waited

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise GossamerError(str(self._failure)) from self._failure

    # -- time --------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        """Time in units: virtual, or wall time once the unit is agreed (before that nothing mixes)."""
        if self.settings.clock == "virtual":
            return self._virtual
        return 0.0 if self._wall is None else (clock() - self._wall[0]) / self._wall[1]

    def _reach(self, time: float) -> None:
        """Move the virtual clock to `time`, when all of this worker's events until then are done."""
        since = clock()
        with self._state:
            self._virtual_goal = time
            self._state.notify_all()
            if self.drive is not None:
                self.drive(self.index, time)
            elif self._thread is not None:
                while not self._state.wait_for(lambda: self._done_until(time), NUDGE_AFTER):
                    self._nudge(self.index, round(time))
                    if clock() - since > self.settings.timeout:
                        peer = self._next.peer_of(self.rank) if self._next is not None else "any peer"
                        raise PeerError(
                            f"worker {self.rank} waited {clock() - since:.0f} s for its exchange with {peer}; is that "
                            "worker alive, and does it train as many steps?"
                        )
                self._raise_failure()
            self._virtual, self.k = time, round(time)

    def _done_until(self, time: float) -> bool:
        return self._failure is not None or (self._next is not None and self._next.time > time)

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
            if self.settings.clock == "wall":
                self._agree_on_unit()
            for event in self._own_events():
                with self._state:
                    self._next = event
                    self._state.notify_all()
                if not self._wait_for_turn(event):
                    return
                jobs = self.begin(event)
                for job in jobs:
                    self._await(job)
                self.end(event, jobs)
        except BaseException as error:  # handed to the training thread, which raises it
            with self._state:
                if not self._stopping:
                    self._failure = error
                self._state.notify_all()

    def _own_events(self) -> Iterator[Event]:
        """This worker's events; after a trial, in rounds where exchanges proved long, by agreement."""
        events = self.events
        if self.settings.clock == "virtual" or self.settings.pairing != "auto":
            yield from events.of(self.rank, after=self.started)
            return
        trial, last = [], self.started
        for event in events.of(self.rank, after=self.started):
            last = event.number
            if event.time > TRIAL:
                break
            began = clock()
            yield event
            trial.append(clock() - began)
        assert self._wall is not None
        mine = statistics.mean(trial) / self._wall[1] if trial else 0.0
        shares = [json.loads(t) for t in self._transport.share(f"pairing/{self.index}", json.dumps([mine, last]))]
        if statistics.median(s[0] for s in shares) <= LONG:
            yield from events.of(self.rank, after=last - 1)
            return
        offset = max(s[1] for s in shares)
        rounds = Events(events.topology, events.rate, events.seed + 1, events.gaps, "rounds")
        for event in rounds.of(self.rank, since=TRIAL):
            yield event._replace(number=event.number + offset)

    def _agree_on_unit(self) -> None:
        """Wait for the first steps, then take the median of everybody's mean step time as the unit."""
        with self._state:
            bound = self.settings.max_staleness
            enough = WARM_UP if bound is None else min(WARM_UP, bound)
            self._state.wait_for(lambda: self._stopping or self._parked or len(self._steps_seconds) > enough)
            if self._stopping:
                raise GossamerError("closed before the first exchange")
            seconds = self._steps_seconds[1:]
        mine = statistics.mean(seconds) if seconds else None
        said = [json.loads(t) for t in self._transport.share(f"unit/{self.index}", json.dumps(mine))]
        known = [s for s in said if s is not None]
        with self._state:
            self._wall = (clock(), statistics.median(known) if known else 1.0)

    def _wait_for_turn(self, event: Event) -> bool:
        """Until the event's time has come and it may begin; False when the lane stops."""
        with self._state:
            while not self._stopping:
                if self._limit is not None:
                    if event.number <= self._limit:
                        return True  # others wait for it: no matter the time
                    self._state.wait()
                elif self.settings.clock == "virtual":
                    if event.time <= self._virtual_goal:
                        return True
                    self._state.wait()
                else:
                    assert self._wall is not None
                    early = (event.time - self._now()) * self._wall[1]
                    if early <= 0:
                        return True
                    self._state.wait(early)
            return False

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
        self._reach(self._virtual + 1.0)
        self.meter.mix_only += 1

    def serve(self) -> bool:
        """The same if nothing has to be waited for; whether it was done."""
        with self._state:
            goal = self._virtual + 1.0
            self._virtual_goal = goal
            self._state.notify_all()
            if not self._done_until(goal):
                return False
            self._raise_failure()
            self._virtual, self.k = goal, round(goal)
        self.meter.mix_only += 1
        return True

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
            done = self._state.wait_for(
                lambda: self._failure is not None or self._next is None or self._next.number > number,
                self.settings.timeout,
            )
            self._raise_failure()
            if not done:
                raise PeerError(
                    f"worker {self.rank} waited {self.settings.timeout:g} s for event {number}; are all alive?"
                )

    def resume(self) -> None:
        with self._state:
            self._limit, self._parked = None, False
            self._last_step = clock()
            self._state.notify_all()

    def park(self) -> None:
        """This worker takes no steps for now: nobody is to be held back by it."""
        with self._state:
            self._parked = True
            self._state.notify_all()

    def finish(self, *, assisting: bool = False) -> None:
        pass

    def settle(self) -> None:
        pass

    def drop(self) -> None:
        pass

    def adopt(self) -> None:
        """The parameters were written by the user: they are the state now."""
        with self._state, torch.no_grad():
            for b, bucket in enumerate(self.buckets):
                self.x[b].copy_(bucket.x)
                if self.x_tilde is not None:
                    self.x_tilde[b].copy_(bucket.x)

    def state_dict(self) -> dict[str, Any]:
        with self._state:
            return {
                "steps": self.meter.steps,
                "started": self.started,
                "time": self._time,
                "virtual": self._virtual,
                "counts": self.counts.clone(),
                "x": [x.clone() for x in self.x],
                "x_tilde": None if self.x_tilde is None else [x.clone() for x in self.x_tilde],
            }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._state:
            self.meter.steps, self.started = state["steps"], state["started"]
            self._time, self._virtual = state["time"], state["virtual"]
            self.k = round(self._virtual)
            self._virtual_goal = self._virtual
            self.counts.copy_(state["counts"])
            for mine, saved in zip(self.x, state["x"], strict=True):
                mine.copy_(saved)
            if self.x_tilde is not None and state["x_tilde"] is not None:
                for mine, saved in zip(self.x_tilde, state["x_tilde"], strict=True):
                    mine.copy_(saved)

    def close(self, drain: float) -> None:
        self._let_go()
        with self._state:
            self._stopping = True
            self._state.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
        with torch.no_grad():
            for bucket, x in zip(self.buckets, self.x, strict=True):
                bucket.x.copy_(x)
        super().close(drain)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matching pieces that stay in the cache between the passes of an update."""
    return zip(*(torch.split(t, CHUNK) for t in tensors), strict=True)


def _trade_counts(peer: int, ours: Tensor, theirs: Tensor, scratch: Scratch) -> Exchange:
    """The step counts travel with the parameters."""
    yield Batch([(peer, ours)], [(peer, theirs)])
    return None
