"""How often a worker that was dropped tries to join again, and what it does if nobody is left to join."""

from __future__ import annotations

from collections.abc import Callable

from gossamer.comm import Deadline
from gossamer.comm.tcp import Membership
from gossamer.engine.elastic.meetings import Meetings

FIRST, LONGEST = 1.0, 30.0  # seconds between two attempts


class Attempts:
    """Pauses between attempts that fail: the worker trains on meanwhile, and an attempt costs it time.

    Args:
        hopes: Returns a value that changes when a pause should end: the network may work again.
    """

    def __init__(self, hopes: Callable[[], object]):
        self._hopes = hopes
        self._next, self._pause, self._before = Deadline(0.0), FIRST, hopes()

    @property
    def due(self) -> bool:
        return self._next.expired or self._hopes() != self._before

    def failed(self) -> None:
        """Pause, each time for twice as long."""
        self._next, self._pause, self._before = Deadline(self._pause), min(LONGEST, 2 * self._pause), self._hopes()

    def succeeded(self) -> None:
        self._next, self._pause = Deadline(0.0), FIRST


def continue_alone(members: Membership, meetings: Meetings) -> None:
    """Go on as the only member if no member has sent its state because all of them have left or died: then none gives
    signs in the directory any more. Raise Unreachable if the directory does not answer."""
    record = members.current()
    processes = {rank: member.incarnation for rank, member in record.members.items()}
    if members.rank not in processes and processes.keys() <= meetings.silent(processes):
        members.admit_alone(record)
