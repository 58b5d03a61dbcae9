"""Signs of attendance in the directory: which members can come to a meeting.

A worker that has lost the directory cannot come to a meeting, although its neighbors hear its heartbeats. Therefore
every worker renews a sign in the directory; a worker whose sign has not changed for `hard_deadline` seconds is not
waited for. A worker that had to continue without a meeting writes that meeting's number beside its sign.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from gossamer.comm import Store
from gossamer.comm.tcp import Membership, Unreachable, look, read_json

SIGN = 1.0  # seconds between two signs of attendance, at most
LOOK = 0.5  # seconds between reads of the others' signs, at least


class Attendance:
    """This worker's sign in the directory, and its view of the others' signs."""

    def __init__(self, members: Membership, hard_deadline: float):
        self._members, self._hard = members, hard_deadline
        self._every = min(SIGN, hard_deadline / 4)
        self._skipped = -1  # the last meeting that this worker does not come to
        self._count = 0
        self._seen: dict[int, tuple[str, float]] = {}  # by rank: its sign, and since when it has not changed
        self._looked = 0.0
        self._stopped = False
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gossamer-attendance", daemon=True)
        self._thread.start()

    def skip(self, meeting: int) -> None:
        """Announce that this worker does not come to `meeting` or to an earlier one."""
        self._skipped = meeting
        self._hurry.set()

    def restart(self) -> None:
        """Measure from now how long signs have not changed."""
        self._seen, self._looked = {}, 0.0

    def absent(self, store: Store, expected: Mapping[int, str], meeting: int) -> set[int]:
        """Return the ranks of `expected` (incarnation by rank) that do not come to `meeting`. Runs on the directory's
        thread."""
        now, seen = time.monotonic(), self._seen
        if now - self._looked > min(LOOK, self._every):
            self._looked = now
            for rank in expected:
                sign = look(store, f"present/{rank}")
                if rank not in seen or seen[rank][0] != sign:
                    seen[rank] = sign, now
        away = set()
        for rank, incarnation in expected.items():
            sign, since = seen.get(rank, ("", now))
            process, skipped = self._read(sign)
            if now - since > self._hard or (process == incarnation and skipped >= meeting):
                away.add(rank)
        return away

    def _read(self, sign: str) -> tuple[str, int]:
        """The process that gave `sign`, and the last meeting that it does not come to."""
        try:
            process, skipped, _ = read_json(sign or '["", -1, 0]')
            return str(process), int(skipped)
        except (ValueError, TypeError, OverflowError) as error:  # its worker will give another one
            self._members.directory.refuse(f"a sign of attendance cannot be read: {error}")
            return "", -1

    def close(self) -> None:
        self._stopped = True
        self._hurry.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        key = f"present/{self._members.rank}"
        while not self._stopped:
            self._count += 1
            sign = json.dumps([self._members.me.incarnation, self._skipped, self._count])
            with suppress(Unreachable):
                self._members.directory.ask(lambda store, sign=sign: store.set(key, sign))  # type: ignore[misc]
            self._hurry.wait(self._every)
            self._hurry.clear()
