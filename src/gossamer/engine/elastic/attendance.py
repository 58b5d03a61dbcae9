"""Who can be expected at a meeting: every worker says now and then in the directory that it reaches it.

A meeting is agreed on in the directory, so a worker that lost the directory alone cannot come, although its neighbors
hear from it. Whoever waits sees that `present/<rank>` no longer changes, and does not wait longer than `patience`
seconds. A worker that has gone on without a meeting says so in the same place as soon as it can.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from gossamer.comm import Membership, Unreachable, look

BEAT = 1.0  # seconds between two signs, at most
LOOK = 0.5  # seconds between looks at the others' signs, at least


class Attendance:
    """One worker's sign, and its view of the others'."""

    def __init__(self, members: Membership, patience: float):
        self._members, self._patience = members, patience
        self._every = min(BEAT, patience / 4)
        self._skipped = -1  # the last meeting that this worker does not come to
        self._beats = 0
        self._seen: dict[int, tuple[str, float]] = {}  # by rank: its sign, and since when it is that
        self._looked = 0.0
        self._stopped = False
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="gossamer-presence", daemon=True)
        self._thread.start()

    def skip(self, meeting: int) -> None:
        """Nobody shall wait for this worker in `meeting`, or in one before it."""
        self._skipped = meeting
        self._hurry.set()

    def look_anew(self) -> None:
        """Whatever was seen before, nobody has been silent yet."""
        self._seen, self._looked = {}, 0.0

    def absent(self, store: Any, members: Mapping[int, str], meeting: int) -> set[int]:
        """Of these (rank and process), who does not come to `meeting`. For the directory's thread."""
        now, seen = time.monotonic(), self._seen
        if now - self._looked > min(LOOK, self._every):
            self._looked = now
            for rank in members:
                sign = look(store, f"present/{rank}")
                if rank not in seen or seen[rank][0] != sign:
                    seen[rank] = sign, now
        away = set()
        for rank, incarnation in members.items():
            sign, since = seen.get(rank, ("", now))
            process, skipped, _ = json.loads(sign or '["", -1, 0]')
            if now - since > self._patience or (process == incarnation and skipped >= meeting):
                away.add(rank)
        return away

    def close(self) -> None:
        self._stopped = True
        self._hurry.set()
        self._thread.join(timeout=1.0)

    def _beat(self) -> None:
        key = f"present/{self._members.rank}"
        while not self._stopped:
            self._beats += 1
            sign = json.dumps([self._members.me.incarnation, self._skipped, self._beats])
            with suppress(Unreachable):
                self._members.directory.ask(lambda store, sign=sign: store.set(key, sign))  # type: ignore[misc]
            self._hurry.wait(self._every)
            self._hurry.clear()
