"""A worker's events: which one is next, what two workers swap in one, and what all must agree on outside of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from gossamer.comm import (
    Batch,
    Channel,
    ExchangeSteps,
    Job,
    PrefixStore,
    Scratch,
    Stamp,
    Transport,
    Wire,
    default_store,
    exchange,
)
from gossamer.engine.asynchronous.state import State
from gossamer.engine.metrics import Metrics
from gossamer.topology import Layout
from gossamer.topology.events import Event, Events
from gossamer.topology.plan import Piece, Program, Step

TRIAL = 8.0  # time units after which the workers decide whether exchanges are paired in rounds


class Timetable:
    """This worker's events in order: which one is next, and how far it may go. The caller holds the lane's lock."""

    def __init__(self, events: Events, rank: int, *, trial: bool):
        self.events, self.rank = events, rank
        self._auto = trial
        self.trial: float | None = TRIAL if trial else None  # end of the trial of single pairs
        self.generation = 0  # counts event sequences: loading a state starts another one
        self.transfers: list[float] = []  # seconds per exchange during the trial
        self.started = -1  # number of the last event begun
        self.limit: int | None = None  # no event with a higher number may begin
        self._own: Iterator[Event] = iter(())
        self._all: Iterator[Event] | None = None  # from which `time_of` reads
        self._read: Event | None = None  # its last event
        self.next: Event | None = None  # the first own event that is not done

    def follow(self, events: Events) -> None:
        """Continue with the first event of another sequence: the members have changed."""
        self.events = events
        self.rewind()

    def time_of(self, number: int) -> float | None:
        """The time of an event of anybody; None if it is not in this sequence, or before one that was asked for."""
        if number < self.events.first or (self._read is not None and number < self._read.number):
            return None
        if self._all is None:
            self._all = self.events.stream()
        while self._read is None or self._read.number < number:
            self._read = next(self._all)
        return self._read.time

    def rewind(self, after: int = -1) -> None:
        """Continue with this worker's first event after number `after`."""
        self._all = self._read = None
        self._own = self.events.of(self.rank, after=after)
        self.advance()

    def advance(self) -> None:
        """Move to the next event: the current one is done."""
        self.next = next(self._own, None)

    def partner(self) -> int:
        assert self.next is not None
        return self.next.peer_of(self.rank)

    def horizon(self, now: float) -> float:
        """How far Mix may advance at `now`: not beyond the next event, which may be late.

        Note [Why Mix follows the events]: A2CiD2's momentum is stable if x and x~ are mixed, between two exchanges, for
        the time that the sequence has between them. If they were mixed for the time that passes on the wall while
        exchanges are late, long sparse graphs would diverge, even at learning rate 0.
        """
        return now if self.next is None else min(now, self.next.time)

    def done_until(self, time: float) -> bool:
        return self.next is not None and self.next.time > time

    def done_through(self, number: int) -> bool:
        return self.next is not None and self.next.number > number

    def reached(self) -> int:
        """Inside a collective call: the last event that all workers have done."""
        return self.started if self.limit is None else max(self.started, self.limit)

    # -- single pairs, or rounds of pairs ---------------------------------------------------------------------

    def switched(self) -> tuple[int, float] | None:
        """Where the workers agreed to change to rounds, as (first number, time); None if they did not."""
        changed = self._auto and self.events.pairing == "rounds"
        return (self.events.first, self.events.start) if changed else None

    def change_to_rounds(self, first: int, start: float) -> None:
        """From time `start` on, events are rounds of side-by-side pairs, numbered from `first`."""
        self.events = replace(self.events, seed=self.events.seed + 1, pairing="rounds", first=first, start=start)

    def resume(self, after: int, rounds: tuple[int, float] | None, *, live: bool) -> float:
        """Continue after event `after` of a sequence that had changed to `rounds`; return the time of that event.

        `live`: this worker performs its own events; virtual workers are driven by their cluster.
        """
        self.generation += 1
        self.started = after
        if self.switched() is not None:  # this run changed to rounds; the saved run did not, or at another event
            self.events = replace(self.events, seed=self.events.seed - 1, pairing="edges", first=0, start=0.0)
        if rounds is not None:
            self.change_to_rounds(*rounds)
        if not live:
            return 0.0
        self.rewind(after)
        begun = after >= self.events.first
        time = next(self.events.stream(after=after - 1)).time if begun else self.events.start
        self.trial, self.transfers = (time + TRIAL if self._auto and rounds is None else None), []
        return time


class Swap:
    """One side of an event: `greet`, then `send`, then `receive` once everything has arrived. The caller holds the
    lane's lock."""

    def __init__(
        self,
        rank: int,
        layout: Layout,
        state: State,
        outs: Sequence[Tensor],
        wire: Wire,
        channel: Channel,
        metrics: Metrics,
        stamp: Callable[[int], Stamp | None] = lambda peer: None,
    ):
        """`stamp` makes the header of messages to a peer, for transports that need one."""
        self._rank, self._layout, self._state, self._outs = rank, layout, state, outs
        self._wire, self._channel, self._metrics, self._stamp = wire, channel, metrics, stamp

    def greet(self, event: Event, *, parked: bool) -> Job:
        """Swap step counts. `parked`: this worker takes no steps for now."""
        if parked:
            self._state.excuse()
        ours = self._state.counts.clone()
        peer = event.peer_of(self._rank)
        swap = partial(_swap_counts, peer, ours, self._state.heard)
        return self._launch(Job(event.number, len(self._outs), swap, stamp=self._stamp(peer)))

    @torch.no_grad()
    def send(self, event: Event) -> list[Job]:
        """Swap x as it is now, one job per bucket."""
        peer = event.peer_of(self._rank)
        wired = self._layout.nodes == 1 or self._layout.node[peer] != self._layout.node[self._rank]
        self._state.depart(event.time)
        jobs = []
        for b, (sent, out) in enumerate(zip(self._state.sent, self._outs, strict=True)):
            whole = Piece(peer, 0, sent.numel(), 1.0)
            program: Program = (Step("swap", "x", wired, (whole,), (whole,)),)
            make = partial(exchange, program, sent, out, self._wire)
            jobs.append(self._launch(Job(event.number, b, make, stamp=self._stamp(peer))))
        return jobs

    @torch.no_grad()
    def receive(self, event: Event, jobs: Sequence[Job]) -> None:
        """Everything has arrived: update x and x~."""
        for job in jobs:
            self._metrics.exchanged(job)
        self._state.arrive(event.time, jobs)
        self._metrics.rounds += 1

    def _launch(self, job: Job) -> Job:
        with self._state.turns.beside():
            self._channel.launch(job)
        return job


def _swap_counts(peer: int, ours: Tensor, theirs: Tensor, scratch: Scratch) -> ExchangeSteps:
    """The step counts travel with the parameters."""
    yield Batch([(peer, ours)], [(peer, theirs)])
    return None


class StoreNotes:
    """Notes in the job's store: values that all workers must agree on, and which worker left first.

    The constructor is collective; no method waits for other workers. Connections are made when they are first used, so
    without a note the others would not notice a worker that leaves before its first exchange.
    """

    def __init__(self, transport: Transport, name: str):
        self._rank, self._size = transport.rank, transport.size
        run = transport.share(f"{name}/board", uuid4().hex)[0]
        prefixed: Any = PrefixStore(f"gossamer/{run}", default_store())
        self._store = prefixed.clone()  # a blocking call on another client must not delay this one

    def post(self, what: str, text: str) -> None:
        """Post this worker's note about `what`."""
        self._store.set(f"{what}/{self._rank}", text)

    def all(self, what: str) -> list[str] | None:
        """The notes of all workers about `what`, by rank; None while one is missing."""
        keys = [f"{what}/{r}" for r in range(self._size)]
        return [self._store.get(key).decode() for key in keys] if self._store.check(keys) else None

    def missing(self, what: str) -> list[int]:
        """Ranks that have not posted a note about `what`."""
        return [r for r in range(self._size) if not self._store.check([f"{what}/{r}"])]

    def leave(self) -> None:
        """Say that this worker leaves without being expected to."""
        with suppress(RuntimeError):  # the store died with its worker, which other errors report
            self._store.compare_set("left", "", str(self._rank))

    def first_left(self) -> int | None:
        """The first worker that left, if one did; later ones left because of it."""
        return int(self._store.get("left")) if self._store.check(["left"]) else None

    def close(self) -> None:
        self._store = None  # closes the socket now, not when the garbage collector runs
