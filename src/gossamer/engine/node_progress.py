"""How many backward passes the workers of a node have begun: finds workers that ran out of data before the others.

Note [Workers of a node with different numbers of batches]
    With gradients that are averaged inside the node, a backward pass waits for every worker of the node, in torch's
    DDP, which does not say for whom. If one worker has no more data, it is in a collective call, which waits for the
    others: nobody would go on. So every worker counts its backward passes, and a thread posts the count to the store
    when it has not changed for a while; as long as training goes on nothing is posted. Counts only grow. A worker in a
    collective call that reads a larger count than its own knows that the call cannot be completed, and raises an error.
"""

from __future__ import annotations

import json
import threading
import warnings
import weakref
from collections.abc import Sequence

from gossamer.comm import WARN_AFTER, PrefixStore, Store, clock
from gossamer.engine.node_gradients import PrivateDDP
from gossamer.errors import GossamerError, GossamerWarning

LOOK = 0.5  # seconds between looks at this worker's count
STILL = 2.0  # seconds without a new backward pass after which the count is posted

REMEDY = (
    "with gradients that are averaged inside the node (gradients='node', which 'auto' chooses on several nodes) all "
    "workers of a node take the same number of steps; give each of them the same number of batches, or use "
    "gradients='worker'"
)


class NodeProgress:
    """This worker's count of backward passes and those of `others`, the other workers of its node.

    See Note [Workers of a node with different numbers of batches].
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        others: Sequence[int],
        inside: Sequence[PrivateDDP],
        warn_after: float = WARN_AFTER,
    ):
        self._store, self._rank, self._others = PrefixStore("backward-passes", store), rank, others
        self._inside, self._warn_after = inside, warn_after
        self._counts, self._since = [-1], clock()
        self._posted: list[int] = []
        self._warned = False
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=_watch, args=(weakref.ref(self), self._closed), name="gossamer-node-progress", daemon=True
        )
        self._thread.start()

    def verify(self, call: str) -> None:
        """While this worker waits in the collective call `call`: raise an error if a worker of its node cannot come."""
        mine = self._count()
        for other in self._others:
            theirs = self._read(other)
            if theirs is not None and any(t > m for t, m in zip(theirs, mine, strict=True)):
                raise GossamerError(
                    f"worker {self._rank} is in {call} after {max(mine)} backward passes, and worker {other} of the "
                    f"same node waits for it in backward pass {max(theirs)}: {REMEDY}"
                )

    def look(self) -> None:
        """Post the count if it has not changed for a while, and warn, once, if another worker is behind."""
        counts, now = self._count(), clock()
        if counts != self._counts:
            self._counts, self._since = counts, now
        elif now - self._since >= STILL:
            if self._posted != counts:
                self._store.set(str(self._rank), json.dumps(counts))
                self._posted = counts
            if now - self._since >= self._warn_after and not self._warned:
                self._warn_if_behind(counts)

    def _warn_if_behind(self, mine: list[int]) -> None:
        for other in self._others:
            theirs = self._read(other)
            if theirs is not None and any(t < m for t, m in zip(theirs, mine, strict=True)):
                self._warned = True
                warnings.warn(
                    f"worker {self._rank} has waited {self._warn_after:g} s in backward pass {max(mine)} for worker "
                    f"{other} of the same node, which is at {max(theirs)}: {REMEDY}",
                    GossamerWarning,
                    stacklevel=2,
                )
                return

    def _count(self) -> list[int]:
        return [averaged.passes for averaged in self._inside]

    def _read(self, worker: int) -> list[int] | None:
        """The count that `worker` posted last, None if it has posted none."""
        key = str(worker)
        if not self._store.check([key]):
            return None
        found: list[int] = json.loads(self._store.get(key))
        return found

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=STILL)


def _watch(progress: weakref.ref[NodeProgress], closed: threading.Event) -> None:
    while not closed.wait(LOOK):
        watched = progress()
        if watched is None:
            return
        try:
            watched.look()
        except RuntimeError:  # the store is gone, and the job with it
            return
        del watched
