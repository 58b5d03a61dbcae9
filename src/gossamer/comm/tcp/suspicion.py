"""A quorum for suspicion: one observer declares nobody dead.

A worker that finds a neighbor dead posts so in the directory. The neighbor is dropped once two of its neighbors say the
same, or all of those that are alive where there are fewer; an observer is alive if it answers this worker or renews
its sign of life in the directory. So a worker whose own network is bad, or that stood still itself, only skips its
exchanges with the neighbor, and the neighbor stays a member.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from gossamer.comm.process_groups import Store
from gossamer.comm.tcp.directory import DirectoryClient, Unreachable, look
from gossamer.comm.tcp.record import Member, Record

RENEWED = 3.0  # seconds for which an unchanged sign counts; workers renew theirs every second


class Suspicions:
    """This worker's suspicions, and those of the other observers of a member.

    Args:
        rank: This worker's rank.
        directory: Where suspicions are posted.
        observers: Returns the ranks of a record that watch a given rank.
        answers: Returns whether a member answers this worker now.
        hold: Seconds for which a suspicion stands after this worker has last found the member dead: the observers of
            one member need not find it dead at the same moment.
    """

    def __init__(
        self,
        rank: int,
        directory: DirectoryClient,
        observers: Callable[[Record, int], set[int]],
        answers: Callable[[Member], bool],
        hold: float,
    ):
        self._hold = hold
        self._rank, self._directory, self._observers, self._answers = rank, directory, observers, answers
        self._posted: dict[str, float] = {}  # processes that this worker suspects, and when it last did
        self._signs: dict[int, tuple[str, float]] = {}  # of other observers, and since when they are the same

    def confirmed(self, record: Record, rank: int) -> bool:
        """Suspect member `rank` of `record`; return whether enough of its observers do. Raise Unreachable if the
        directory does not answer."""
        suspect = record.members[rank].incarnation
        others = {r: record.members[r] for r in self._observers(record, rank) - {self._rank, rank}}
        mine = record.members[self._rank].incarnation

        def ask(store: Store) -> tuple[bool, dict[int, str]]:
            store.set(f"suspect/{suspect}/{self._rank}", mine)
            agreed = any(look(store, f"suspect/{suspect}/{r}") == m.incarnation for r, m in others.items())
            return agreed, {r: look(store, f"present/{r}") for r in others}

        self._posted[suspect] = time.monotonic()
        agreed, signs = self._directory.ask(ask)
        living = [self._gives_signs(r, signs[r], member) for r, member in others.items()]
        return agreed or not (any(living) or any(self._answers(member) for member in others.values()))

    def _gives_signs(self, rank: int, sign: str, member: Member) -> bool:
        """Whether an observer renews its sign in the directory: it lives, even if it does not answer this worker."""
        seen, since = self._signs.get(rank, ("", 0.0))
        if sign != seen:
            since = time.monotonic()
            self._signs[rank] = sign, since
        return member.incarnation in sign and time.monotonic() - since < RENEWED

    def withdraw(self, suspected: Iterable[str]) -> None:
        """Take back the suspicions that have not been renewed, but not those of the processes `suspected`."""
        now, kept = time.monotonic(), set(suspected)
        for process in [p for p, at in self._posted.items() if p not in kept and now - at > self._hold]:
            del self._posted[process]
            with suppress(Unreachable):
                self._directory.ask(lambda store, p=process: store.delete_key(f"suspect/{p}/{self._rank}"))  # type: ignore[misc]
