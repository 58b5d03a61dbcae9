"""Pools of real workers, started once a session and process, shared by all tests."""

import pytest
from workers import QUICK_NAMES

from gossamer.lab import WorkerPool


class Pools:
    def __init__(self):
        self._made = {}

    def __call__(self, *per_node: int) -> WorkerPool:
        """The pool of that layout: `pools(4)` has four workers on one node, `pools(2, 2)` two nodes of two."""
        if per_node not in self._made:
            self._made[per_node] = WorkerPool(per_node=list(per_node), timeout=300, grace=5.0, env=QUICK_NAMES)
        return self._made[per_node]

    def close(self):
        for pool in self._made.values():
            pool.close()


@pytest.fixture(scope="session")
def pools():
    made = Pools()
    yield made
    made.close()
