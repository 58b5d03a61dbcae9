"""The training thread's side of asynchronous gossip: before and after a step, and in collective calls."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Literal

import torch
from torch import Tensor

from gossamer.comm import Job, PeerWait, Stamp, clock
from gossamer.engine.asynchronous.clock import VirtualClock, WallClock
from gossamer.engine.asynchronous.events import StoreNotes, Swap, Timetable
from gossamer.engine.asynchronous.state import EventMetrics, State
from gossamer.engine.asynchronous.thread import EventThread, StaticEventThread
from gossamer.engine.lane import STALLED_AFTER, Lane, LaneParts
from gossamer.engine.policies import A2CiD2, Asynchronous
from gossamer.errors import GossamerError, GossamerWarning, InputError
from gossamer.topology.a2cid2 import rates_of
from gossamer.topology.events import Event, Events


class AsyncLane(Lane):
    """One optimizer's state (x, x~), its step hooks, and the thread that exchanges."""

    def __init__(self, parts: LaneParts):
        super().__init__(parts)
        policy, topology = self.policy, self.schedule.topology
        pairing: Literal["rounds", "edges"] = "rounds" if policy.pairing == "rounds" else "edges"
        events = Events(topology, policy.rate, policy.seed + 7919 * self.index, policy.gaps, pairing)
        rates = rates_of(topology) if isinstance(policy, A2CiD2) else None
        self._lock = threading.Condition()  # guards the state, the clock and the timetable
        self.state = State(self.buckets, self.rank, topology.n, rates, policy.rate, parts.transport.accelerator)
        self.clock = WallClock() if policy.clock == "wall" else VirtualClock()
        wall = isinstance(self.clock, WallClock)
        self.timetable = Timetable(events, self.rank, trial=wall and policy.pairing == "auto")
        self.metrics = EventMetrics(self.rank, parts.layout, parts.writer, self.index, self.clock)
        self._swap = Swap(
            self.rank, topology.layout, self.state, self._out, self.wire, self.channel, self.metrics, self._stamp
        )
        self.metrics.sent.update(dict.fromkeys(sorted(set(events.neighbors(self.rank))), 0))  # no new keys while read
        self._thread: EventThread | None = None
        if parts.transport.threaded and not self.alone:
            self._thread = self._open_thread(parts)

    def _open_thread(self, parts: LaneParts) -> EventThread:
        self.timetable.rewind()
        name = f"events-{self.index}"
        return StaticEventThread(
            name,
            self._lock,
            self.clock,
            self.timetable,
            self._swap,
            self.channel,
            StoreNotes(parts.transport, name),
            self.policy,
            self.settings.timeout,
        )

    def _stamp(self, peer: int) -> Stamp | None:
        """The header of messages to `peer`, where messages carry one."""
        return None

    @property
    def policy(self) -> Asynchronous:
        assert isinstance(self.settings.algorithm, Asynchronous)
        return self.settings.algorithm

    # -- a step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def mix(self) -> None:
        """Before the step: y <- x. The training thread keeps the lock until the step is done."""
        self._computed()
        self._release_lock()  # a step that raised left it held
        if isinstance(self.clock, VirtualClock):
            self.reach(self.clock.time + self.coordinator.duration(self.rank, self.metrics.steps))
        self._hold_back()
        self._lock.acquire()
        try:
            self._raise_failure()
            self._adopt_loaded()
            self.state.show(self.timetable.horizon(self.clock.now()))
        except BaseException:
            self._release_lock()
            raise
        self._ready = True
        self._mark = clock()

    @torch.no_grad()
    def stepped(self) -> None:
        """After the step: add its displacement y - x to x and to x~."""
        self.state.displace()
        if isinstance(self.clock, WallClock):
            self.clock.lap()
        self._lock.notify_all()
        self._release_lock()
        if isinstance(self.clock, WallClock):
            self._check_unit(self.clock)
            self._check_backlog(self.clock)

    def _check_backlog(self, wall: WallClock) -> None:
        due = self.timetable.next
        late = None if due is None else wall.behind(due.time)
        if late is not None:
            rate = self.policy.rate
            warnings.warn(
                f"worker {self.rank}'s exchanges are {late:.0f} gradient times behind and fall back further: they take "
                f"longer than rate={rate:g} allows, so the workers mix less than they could. Use a lower rate=, a "
                "smaller wire= such as 'bf16', or a faster network",
                GossamerWarning,
                stacklevel=2,
            )

    def _check_unit(self, wall: WallClock) -> None:
        slow = wall.slow_start()
        if slow is not None and not self.alone:
            rate = self.policy.rate
            warnings.warn(
                f"worker {self.rank} took {slow.then:.2g} s per step at the start and takes {slow.now:.2g} s now, but "
                f"the workers have agreed on {slow.unit:.2g} s as the unit of time of their exchanges: there are about "
                f"{rate * slow.now / slow.unit:.2g} exchanges per step instead of rate={rate:g}. Take some steps "
                "before decentralize(), or raise rate=",
                GossamerWarning,
                stacklevel=2,
            )

    def values(self) -> list[Tensor]:
        with self._lock, torch.no_grad():
            self._adopt_loaded()
            with self.state.turns.training():  # the caller reads x after the events that were performed
                return self.state.x

    def total_steps(self) -> int:
        """Steps of all workers that this worker knows of. The number lags, so a budget is overshot a little."""
        with self._lock:
            return int(self.state.counts[0].sum())

    def _release_lock(self) -> None:
        """Release the lock, however often an interrupted call of this thread acquired it."""
        with suppress(RuntimeError):
            while True:
                self._lock.release()

    # -- waiting ----------------------------------------------------------------------------------------------

    def _hold_back(self) -> None:
        """Wait while a worker is more than `max_staleness` steps behind this one."""
        bound = self.policy.max_staleness
        if bound is None or self.alone:
            return

        def late() -> tuple[int, str]:
            straggler = self._straggler(bound)
            peer = self.state.slowest() if straggler is None else straggler
            return peer, f"which is more than max_staleness={bound} steps behind"

        with self._lock:
            self._stand_still(lambda: self._straggler(bound) is None, late)

    def _straggler(self, bound: int) -> int | None:
        """The slowest worker that is known, if it is more than `bound` steps behind this one. The caller holds the
        lock."""
        return self.state.slowest() if self.state.ahead() > bound else None

    def _stand_still(self, done: Callable[[], bool], late: Callable[[], tuple[int, str]]) -> None:
        """Wait, holding the lock, until `done` or a failure. `late` names the worker that is waited for, and why."""
        if done():
            return
        wait = PeerWait(self.rank, self.settings.timeout)
        peer, _ = late()
        while not self._lock.wait_for(lambda: self._failure() is not None or done(), STALLED_AFTER):
            peer, _ = late()
            if isinstance(self.clock, VirtualClock):
                self.coordinator.stalled(self, round(self.clock.goal), assist=True)
            wait.check(lambda: "worker {}, {}".format(*late()), "is it alive, and does it train as many steps?")
        self._raise_failure()
        since = wait.since
        self.metrics.waited_total += clock() - since
        self.metrics.waited[peer] += clock() - since
        self.metrics.span("wait", since, clock(), peer=peer, step=self.metrics.steps)

    def _partner(self) -> tuple[int, str]:
        assert self.timetable.next is not None
        return self.timetable.partner(), f"its partner in event {self.timetable.next.number}"

    def _failure(self) -> BaseException | None:
        return None if self._thread is None else self._thread.failure

    def _raise_failure(self) -> None:
        failure = self._failure()
        if failure is not None:
            kind = type(failure) if isinstance(failure, GossamerError) else GossamerError
            raise kind(str(failure)) from failure

    # -- the virtual clock ------------------------------------------------------------------------------------

    @property
    def _virtual(self) -> VirtualClock:
        assert isinstance(self.clock, VirtualClock)
        return self.clock

    @property
    def virtual_time(self) -> float:
        """Time of this worker's last step on the virtual clock."""
        return self._virtual.time

    def reach(self, time: float) -> None:
        """Move the virtual clock to `time` once all of this worker's events until then are done."""
        if not self.coordinator.drive(self.index, time) and self._thread is not None:
            with self._lock:
                self._virtual.goal = time
                self._lock.notify_all()
                self._stand_still(lambda: self.timetable.done_until(time), self._partner)
        self._virtual.time, self.k = time, round(time)

    def begin(self, event: Event) -> list[Job]:
        """Launch a virtual worker's part of an event."""
        self.timetable.started = event.number
        return [self._swap.greet(event, parked=False), *self._swap.send(event)]

    def end(self, event: Event, jobs: list[Job]) -> None:
        """Apply a virtual worker's event after its partner has launched it too."""
        self._swap.receive(event, jobs[1:])

    def mix_only(self) -> None:
        """Let one gradient's time pass without a step, so that other workers can continue."""
        self.reach(self._virtual.time + 1.0)
        self.metrics.mix_only += 1

    def serve(self) -> bool:
        """Like `mix_only`, but only if it need not wait; return whether it was done."""
        with self._lock:
            goal = self._virtual.time + 1.0
            self._virtual.goal = goal
            self._lock.notify_all()
            self._raise_failure()
            if not self.timetable.done_until(goal):
                return False
            self._virtual.time, self.k = goal, round(goal)
        self.metrics.mix_only += 1
        return True

    # -- for collective calls ---------------------------------------------------------------------------------

    def verify(self) -> None:
        """Raise the error that ended the communication thread, or the absence of a worker that has left."""
        with self._lock:
            self._raise_failure()
        if self._thread is not None:
            self._thread.raise_if_left("this collective call")

    def freeze(self) -> int:
        """Begin no further event; return the number of the last event begun."""
        with self._lock:
            self.timetable.limit = self.timetable.started
            return self.timetable.started

    def run_to(self, number: int) -> None:
        """Finish this worker's events up to `number` and begin none after it."""
        with self._lock:
            self.timetable.limit = number
            self._lock.notify_all()
            if self._thread is not None:
                self._stand_still(lambda: self.timetable.done_through(number), self._partner)
            if isinstance(self.clock, WallClock):
                self.clock.halt()

    def park(self) -> None:
        """This worker takes no steps for now, so `max_staleness` must not hold others back because of it."""
        self._release_lock()
        with self._lock:
            self._raise_failure()
            if self._thread is not None:
                self._thread.park(True)

    def resume(self) -> None:
        with self._lock:
            self.timetable.limit = None
            if isinstance(self.clock, WallClock):
                self.clock.pause()
                self.clock.go_on()
            if self._thread is not None:
                self._thread.park(False)

    @torch.no_grad()
    def adopt(self) -> None:
        """Take the parameters, which the user has written, as the state."""
        with self._lock:
            self.overwritten = False
            self.state.adopt()

    def _adopt_loaded(self) -> None:
        """If the user loaded other parameters, take them as the state. The caller holds the lock."""
        if self.overwritten:
            self.overwritten = False
            self.state.adopt()

    def count_steps(self, steps: int) -> None:
        state = self.state_dict()
        state["steps"] = steps
        state["counts"].fill_(steps)
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs. Inside a collective call: all workers have done the events up to the limit."""
        with self._lock, torch.no_grad():
            self._adopt_loaded()
            return {
                "algorithm": self.policy.name,
                "steps": self.metrics.steps,
                "exchanged": self.metrics.rounds,
                "started": self.timetable.reached(),
                "virtual": self.clock.time if isinstance(self.clock, VirtualClock) else 0.0,
                "rounds": self.timetable.switched(),
                **self.state.state_dict(),
            }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken: after the same event, at its time."""
        if state.get("algorithm") != self.policy.name:
            raise InputError(
                f"the state was saved by algorithm {state.get('algorithm', 'awc or atc')!r} and this run has "
                f"{self.policy.name!r}; resume with the same, or load only the model and the optimizer"
            )
        with self._lock:
            self.overwritten = False
            self.metrics.steps = state["steps"]
            self.metrics.rounds = state["exchanged"]
            self.state.load_state_dict(state)
            time = self.timetable.resume(state["started"], state["rounds"], live=self._thread is not None)
            if isinstance(self.clock, VirtualClock):
                self.clock.load(state["virtual"])
                self.k = round(self.clock.time)
            elif self._thread is not None:
                self.clock.rewind(time)
            if self._thread is not None:
                self.timetable.limit = state["started"]  # begin no event before this collective call ends
            self._lock.notify_all()

    def close(self, drain: float) -> None:
        with ExitStack() as ends:  # runs all callbacks, last one first, even if Ctrl-C interrupts one
            ends.callback(self._release)
            if self._thread is not None:
                ends.callback(self._thread.join)
            ends.callback(super().close, drain)  # ends an exchange that is still in flight
            if self._thread is not None:
                ends.callback(self._leave, self._thread)
            ends.callback(self._release_lock)

    def _leave(self, thread: EventThread) -> None:
        with self._lock:
            thread.stop()
        if not thread.parked:  # outside of a collective close(): other workers are still training
            thread.leave()

    def _release(self) -> None:
        with self._lock, torch.no_grad():
            self.state.release()
