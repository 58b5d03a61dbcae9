"""Bringing all workers to one round before a collective call, however many steps each of them has skipped.

Note [Why nothing deadlocks]: workers perform rounds in order, but a worker that skipped a step or ran out of data lags
behind. An all-reduce of the round counters would deadlock: workers ahead would wait for the all-reduce while workers
behind wait for a round. Instead:
1. k is the number of rounds a worker has launched.
2. The store holds a register R per lane that only grows. On entry a worker posts its k, raises R to k and parks: parked
   workers run rounds without a step while k < R.
3. A training worker that stands still raises R to its own k as well, so that parked workers run its round. If it has
   several lanes it runs rounds without a step in the other lanes while k < R there: two workers that skipped different
   optimizers would otherwise wait for each other, each in another lane.
4. When all workers have posted, K is the largest k posted, and every worker runs to K.
With one lane the number of rounds without a step depends only on the k that each worker posts, so it is deterministic.

Workers post the name of the call too, so that two different calls do not meet.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from gossamer.comm.deadline import LET_READ, WARN_AFTER, Deadline
from gossamer.comm.process_groups import PrefixStore, Store, StoreError
from gossamer.comm.transport import PeerError, Transport
from gossamer.errors import GossamerWarning

POLL = 0.02  # seconds between looks at the register while parked
LOOK = 0.2  # seconds between looks at which call the other workers are in, and at lost workers


COLLECTIVE = "The call is collective: make it on every worker, outside of any `if rank == 0`."


class DifferentCalls(PeerError):
    """Workers are in different collective calls."""


class Counted(Protocol):
    """A lane that is brought to an agreed round."""

    k: int

    def mix_only(self) -> None: ...

    def serve(self) -> bool: ...


class Frozen(Protocol):
    """An asynchronous lane: once frozen it begins no further event, and then runs to an agreed one."""

    def verify(self) -> None: ...
    def freeze(self) -> int: ...
    def run_to(self, number: int) -> None: ...


class RoundBarrier:
    """The meeting point of one worker. Collective calls are counted: the epoch is the number of calls so far."""

    def __init__(
        self,
        store: Store,
        transport: Transport,
        timeout: float,
        *,
        warn_after: float = WARN_AFTER,
        verify: Callable[[str], None] | None = None,
    ):
        """`verify(call)`, called while others are missing in a call, raises an error if they cannot come."""
        self._store = PrefixStore("catch-up", store)
        self._transport, self._rank, self._size = transport, transport.rank, transport.size
        self._timeout, self._warn_after, self._verify = timeout, warn_after, verify
        self._epoch = 0

    def nudge(self, lane: int, k: int) -> None:
        """Raise the register of `lane` to k."""
        key, expected = f"{self._epoch}/want/{lane}", ""
        with suppress(RuntimeError):  # the store died with its worker: the error of the exchange says more
            while True:
                held = self._store.compare_set(key, expected, str(k)).decode()
                if held == str(k) or (held and int(held) >= k):
                    return
                expected = held

    def meet(self, lanes: Sequence[Counted], call: str) -> None:
        """Return when every worker is in `call`, at the same round of each lane."""
        if self._size > 1:
            for index, lane in enumerate(lanes):
                self.nudge(index, lane.k)
            posted = self._post(call, "at", [lane.k for lane in lanes], lambda: self._serve(enumerate(lanes)))
            for index, lane in enumerate(lanes):
                goal = max(rounds[index] for rounds in posted)
                while lane.k < goal:
                    lane.mix_only()
            self._let_read(call)
        self._epoch += 1

    def meet_events(self, lanes: Sequence[Frozen], call: str) -> None:
        """The same for asynchronous lanes. Workers continue to exchange until all of them are in the call; then all
        stop at one event of the shared sequence, the latest that any worker has begun."""

        def verify() -> bool:
            for lane in lanes:
                lane.verify()
            return False

        if self._size > 1:
            self._post(call, "at", None, verify)
            posted = self._post(call, "begun", [lane.freeze() for lane in lanes], verify)
            for index, lane in enumerate(lanes):
                lane.run_to(max(numbers[index] for numbers in posted))
            self._let_read(call)
        self._epoch += 1

    def assist(self, lanes: Sequence[Counted], waiting: int) -> None:
        """Take part in the other lanes while this worker's training stands still in lane `waiting`."""
        self._serve([(index, lane) for index, lane in enumerate(lanes) if index != waiting])

    def _post(self, call: str, name: str, value: Any, work: Callable[[], bool]) -> list[Any]:
        """Post `value` under `name` and return all workers' values, by rank. `work` is called while some are missing;
        it returns whether it did something."""
        keys = [f"{self._epoch}/{name}/{r}" for r in range(self._size)]
        deadline, look, warned = Deadline(self._timeout), Deadline(0.0), False
        warn = Deadline(self._warn_after)
        try:
            self._store.set(keys[self._rank], json.dumps([call, value]))
            while not self._store.check(keys):
                if look.expired:
                    look = Deadline(LOOK)
                    lost = self._transport.lost()
                    if lost is not None and self._store.check(keys):
                        break  # that worker had posted, met the others and left
                    if lost is not None:
                        raise PeerError(
                            f"worker {self._rank} is in {call} and lost worker {lost}, which died or left without "
                            f"calling it. {COLLECTIVE} If worker {lost} died, restart the job from its last checkpoint"
                        )
                    missing = self._missing(call, keys)
                    if self._verify is not None:
                        self._verify(call)
                    if deadline.expired:
                        raise PeerError(
                            f"worker {self._rank} is in {call} but worker(s) {_names(missing)} did not call it within "
                            f"{self._timeout:g} s. {COLLECTIVE}"
                        )
                    if warn.expired and not warned:
                        warned = True
                        warnings.warn(
                            f"worker {self._rank} has waited {self._warn_after:g} s in {call} for worker(s) "
                            f"{_names(missing)}. {COLLECTIVE} It gives up after timeout={self._timeout:g} s",
                            GossamerWarning,
                            stacklevel=2,
                        )
                if not work():
                    time.sleep(POLL)
            self._missing(call, keys)
            return [json.loads(self._store.get(key))[1] for key in keys]
        except DifferentCalls:
            raise
        except StoreError as error:
            raise PeerError(
                f"worker {self._rank} is in {call} and lost the store of the process group, which lives in worker 0's "
                "process or in the launcher's. If worker 0 died, restart the job from its last checkpoint"
            ) from error
        except BaseException:
            with suppress(Exception):  # this worker has left the call: workers that come later must not count it
                self._store.delete_key(keys[self._rank])
            raise

    def _missing(self, call: str, keys: Sequence[str]) -> list[int]:
        """The ranks that have not posted. Raise, on every worker, if workers have posted different calls."""
        missing, calls = [], {}
        for rank, key in enumerate(keys):
            if not self._store.check([key]):
                missing.append(rank)
            else:
                calls[rank] = json.loads(self._store.get(key))[0]
        other = next((rank for rank, theirs in calls.items() if theirs != call), None)
        if other is not None:
            self._epoch += 1  # as all workers do, because all of them raise
            raise DifferentCalls(
                f"different collective calls met: worker {self._rank} is in {call}, worker {other} is in "
                f"{calls[other]}. Every worker must make the same collective calls in the same order"
            )
        return missing

    def _let_read(self, call: str) -> None:
        """Let worker 0, in whose process the store may live, leave last."""
        if call != "close()":
            return
        read, deadline = f"{self._epoch}/read", Deadline(LET_READ)
        self._store.add(read, 1)
        while self._rank == 0 and self._store.add(read, 0) < self._size and deadline.sleep(POLL / 10):
            pass

    def _serve(self, lanes: Iterable[tuple[int, Counted]]) -> bool:
        """Run one round without a step in every lane where a worker needs it. Return whether any round was run.

        Nothing here waits: a worker that waits in one lane may be the one that others need in another.
        """
        served = False
        for index, lane in lanes:
            key = f"{self._epoch}/want/{index}"
            if self._store.check([key]) and lane.k < int(self._store.get(key)):
                served = lane.serve() or served
        return served


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
