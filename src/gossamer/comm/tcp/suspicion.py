"""A quorum for suspicion: one observer declares nobody dead.

A worker that finds a neighbor dead posts so in the directory. The neighbor is dropped once two of its neighbors say the
same, or all of those that are alive where there are fewer. So a worker whose own network is bad, or that stood still
itself, only skips its exchanges with the neighbor, and the neighbor stays a member.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from gossamer.comm.process_groups import Store
from gossamer.comm.tcp.directory import DirectoryClient, Unreachable, look
from gossamer.comm.tcp.record import Member, Record


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

    def confirmed(self, record: Record, rank: int) -> bool:
        """Suspect member `rank` of `record`; return whether enough of its observers do. Raise Unreachable if the
        directory does not answer."""
        suspect = record.members[rank].incarnation
        others = {r: record.members[r] for r in self._observers(record, rank) - {self._rank, rank}}
        mine = record.members[self._rank].incarnation

        def ask(store: Store) -> bool:
            store.set(f"suspect/{suspect}/{self._rank}", mine)
            return any(look(store, f"suspect/{suspect}/{r}") == m.incarnation for r, m in others.items())

        self._posted[suspect] = time.monotonic()
        return self._directory.ask(ask) or not any(self._answers(member) for member in others.values())

    def withdraw(self, suspected: Iterable[str]) -> None:
        """Take back the suspicions that have not been renewed, but not those of the processes `suspected`."""
        now, kept = time.monotonic(), set(suspected)
        for process in [p for p, at in self._posted.items() if p not in kept and now - at > self._hold]:
            del self._posted[process]
            with suppress(Unreachable):
                self._directory.ask(lambda store, p=process: store.delete_key(f"suspect/{p}/{self._rank}"))  # type: ignore[misc]
