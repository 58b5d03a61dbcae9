"""Bringing everybody to one round before a collective call, whatever each has skipped.

Workers perform rounds in order, but one that skipped a step or ran out of data lags behind. An all-reduce of the
counters would deadlock: those ahead wait for it while those behind wait for a round. Instead:
1. k is the number of rounds a worker has launched.
2. The store holds a register R per lane that only grows. On entry a worker posts its k, raises R to k and parks:
   parked workers run mix-only rounds while k < R.
3. A training worker that stands still raises R to its own k as well, so that parked workers serve it. If it has
   several lanes it runs mix-only rounds in the others while k < R there: two workers that skipped different
   optimizers would otherwise wait for each other, each in another lane.
4. When all have posted, K is the largest k posted; everybody runs to K.
With one lane the number of mix-only rounds depends only on where everybody entered, so it is deterministic.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from gossamer.comm.process_groups import PrefixStore, Store
from gossamer.comm.transport import PeerError, clock

POLL = 0.02  # seconds between looks at the register while parked
LET_READ = 10.0  # seconds that the others may take to read what all have posted


class Counted(Protocol):
    """What is brought to one round."""

    k: int

    def mix_only(self) -> None: ...

    def serve(self) -> bool: ...


class Frozen(Protocol):
    """An asynchronous lane: begins no further event when frozen, then runs to an agreed one."""

    def verify(self) -> None: ...
    def freeze(self) -> int: ...
    def run_to(self, number: int) -> None: ...


class RoundBarrier:
    def __init__(self, store: Store, rank: int, size: int, timeout: float):
        self._store = PrefixStore("catch-up", store)
        self._rank, self._size, self._timeout = rank, size, timeout
        self._epoch = 0

    def nudge(self, lane: int, k: int) -> None:
        """Raise the register of `lane` to k."""
        key, expected = f"{self._epoch}/want/{lane}", ""
        with suppress(RuntimeError):  # the store died with its worker: the exchange that is waited for tells more
            while True:
                held = self._store.compare_set(key, expected, str(k)).decode()
                if held == str(k) or (held and int(held) >= k):
                    return
                expected = held

    def meet(self, lanes: Sequence[Counted], call: str) -> None:
        """Return when every worker is in the same call at the same round of each lane."""
        deadline = clock() + self._timeout
        if self._size > 1:
            self._store.set(f"{self._epoch}/at/{self._rank}", json.dumps([lane.k for lane in lanes]))
            for index, lane in enumerate(lanes):
                self.nudge(index, lane.k)
            self._store.add(f"{self._epoch}/posted", 1)
            while self._store.add(f"{self._epoch}/posted", 0) < self._size:
                if not self._serve(enumerate(lanes)):
                    if clock() > deadline:
                        raise PeerError(self._absent(call))
                    time.sleep(POLL)
            entries = [json.loads(self._store.get(f"{self._epoch}/at/{r}")) for r in range(self._size)]
            for index, lane in enumerate(lanes):
                goal = max(entry[index] for entry in entries)
                while lane.k < goal:
                    lane.mix_only()
            self._let_read(call)
        self._epoch += 1

    def meet_events(self, lanes: Sequence[Frozen], call: str) -> None:
        """The same for asynchronous lanes: everybody goes on exchanging until all are in the call, then all stop
        at one event of the shared sequence, the furthest that anybody has begun."""
        if self._size > 1:
            deadline = clock() + self._timeout
            self._store.set(f"{self._epoch}/at/{self._rank}", "here")
            self._store.add(f"{self._epoch}/posted", 1)
            while self._store.add(f"{self._epoch}/posted", 0) < self._size:
                for lane in lanes:
                    lane.verify()
                if clock() > deadline:
                    raise PeerError(self._absent(call))
                time.sleep(POLL)
            begun = json.dumps([lane.freeze() for lane in lanes])
            self._store.set(f"{self._epoch}/begun/{self._rank}", begun)
            entries = [json.loads(self._store.get(f"{self._epoch}/begun/{r}")) for r in range(self._size)]
            for index, lane in enumerate(lanes):
                lane.run_to(max(entry[index] for entry in entries))
            self._let_read(call)
        self._epoch += 1

    def _let_read(self, call: str) -> None:
        """Worker 0, in whose process the store may live, is the last to leave it."""
        if call != "close()":
            return
        read, deadline = f"{self._epoch}/read", clock() + LET_READ
        self._store.add(read, 1)
        while self._rank == 0 and self._store.add(read, 0) < self._size and clock() < deadline:
            time.sleep(POLL / 10)

    def assist(self, lanes: Sequence[Counted], waiting: int) -> None:
        """A training worker that stands still in lane `waiting` takes part in the other lanes meanwhile."""
        self._serve([(index, lane) for index, lane in enumerate(lanes) if index != waiting])

    def _serve(self, lanes: Iterable[tuple[int, Counted]]) -> bool:
        """One mix-only round for every lane that somebody needs; whether any was.

        None of them waits: whoever waits in one lane may be the one that others need in another.
        """
        served = False
        for index, lane in lanes:
            key = f"{self._epoch}/want/{index}"
            if self._store.check([key]) and lane.k < int(self._store.get(key)):
                served = lane.serve() or served
        return served

    def _absent(self, call: str) -> str:
        here = [self._store.check([f"{self._epoch}/at/{r}"]) for r in range(self._size)]
        missing = ", ".join(str(r) for r, there in enumerate(here) if not there)
        return (
            f"worker {self._rank} is in {call} but worker(s) {missing} did not call it within {self._timeout:g} s; "
            "it is collective: call it on every worker, outside of any `if rank == 0`"
        )
