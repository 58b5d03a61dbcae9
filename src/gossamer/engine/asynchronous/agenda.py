"""Which of the shared event sequence is this worker's next, and how far it may go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gossamer.topology.events import Event, Events

TRIAL = 8.0  # time units after which exchanges that proved long are paired in rounds


class Agenda:
    """This worker's events in order. Used with the lane's lock."""

    def __init__(self, events: Events, rank: int, *, trial: bool):
        self.events, self.rank = events, rank
        self._auto = trial
        self.trial: float | None = TRIAL if trial else None  # until when pairs are tried one by one
        self.generation = 0  # of the event sequence: loading a state starts another
        self.transfers: list[float] = []  # seconds that exchanges of the trial took
        self.started = -1  # number of the last event begun
        self.limit: int | None = None  # no event with a higher number may begin
        self._own: Iterator[Event] = iter(())
        self.next: Event | None = None  # the first own event that is not done

    def rewind(self, after: int = -1) -> None:
        """Begin with the first event with a number above `after`."""
        self._own = self.events.of(self.rank, after=after)
        self.advance()

    def advance(self) -> None:
        """The next event is done."""
        self.next = next(self._own)

    def partner(self) -> int:
        assert self.next is not None
        return self.next.peer_of(self.rank)

    def done_until(self, time: float) -> bool:
        return self.next is not None and self.next.time > time

    def done_through(self, number: int) -> bool:
        return self.next is not None and self.next.number > number

    def reached(self) -> int:
        """The last event that is done everywhere, inside a collective call."""
        return self.started if self.limit is None else max(self.started, self.limit)

    # -- pairs one by one, or rounds of them -------------------------------------------------------------------

    def switched(self) -> tuple[int, float] | None:
        """Where the sequence changed to rounds by agreement, if it did: (first number, time)."""
        changed = self._auto and self.events.pairing == "rounds"
        return (self.events.first, self.events.start) if changed else None

    def change_to_rounds(self, first: int, start: float) -> None:
        """From `start` on the events are rounds of side-by-side pairs, numbered from `first`."""
        self.events = replace(self.events, seed=self.events.seed + 1, pairing="rounds", first=first, start=start)

    def resume(self, after: int, rounds: tuple[int, float] | None, *, live: bool) -> float:
        """Go on after event `after` of a sequence that had changed to `rounds`; its time. `live`: events are taken
        from here, not driven by a cluster of virtual workers."""
        self.generation += 1
        self.started = after
        if self.switched() is not None:  # this run had changed; the saved one had not, or elsewhere
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
