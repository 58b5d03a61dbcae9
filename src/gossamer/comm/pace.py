"""Links between nodes where there is no network to shape: sleep until the bytes could have arrived.

`GOSSAMER_PACE` holds JSON: the node of every rank, and rates in bits a second (null is free), e.g.
`{"nodes": [0, 0, 1, 1], "link": 5e7, "links": {"0-1": 1e7}}`. Workers of a node share its link and know nothing of each
other here, so each has an equal part of it, which is exact while all of them send alike (as hierarchical exchanges
do). A pair with a rate of its own is treated the same way. Real links queue, drop and batch; this does not.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

VARIABLE = "GOSSAMER_PACE"


class Pace:
    """One worker's part of its node's links. `with pace(sends): ...` lasts at least as long as the bytes need."""

    def __init__(self, rank: int, nodes: list[int], link: float | None, links: dict[str, float | None]):
        self.node, self.nodes, self.link, self.links = nodes[rank], nodes, link, links
        self.sharers = nodes.count(self.node)
        self._free: dict[str, float] = {}  # when each link is free again
        self._lock = threading.Lock()

    @classmethod
    def from_environment(cls, rank: int) -> Pace | None:
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        told: dict[str, Any] = json.loads(text)
        return cls(rank, told["nodes"], told["link"], told["links"])

    @contextmanager
    def __call__(self, sends: Iterable[tuple[int, Tensor]]) -> Iterator[None]:
        until = max((self.reserve(p, m.numel() * m.element_size()) for p, m in sends), default=0.0)
        yield
        sleep_until(until)

    def reserve(self, peer: int, size: float) -> float:
        """When `size` bytes for `peer` will have gone, after those that are already on their way."""
        other = self.nodes[peer]
        if other == self.node:
            return 0.0
        pair = f"{min(self.node, other)}-{max(self.node, other)}"
        rate = self.links.get(pair, self.link)
        return self._book(pair if pair in self.links else "link", size, rate, self.sharers)

    def reserve_allreduce(self, size: float) -> float:
        """The same for a ring all-reduce of `size` bytes: 2(n-1)/n of them leave every node, by one worker's flow."""
        n = len(self.nodes)
        around = [self.links.get(f"{min(a, b)}-{max(a, b)}", self.link) for a, b in _borders(self.nodes)]
        rates = [rate for rate in around if rate is not None]
        return self._book("ring", 2 * size * (n - 1) / n, min(rates, default=None), 1)

    def _book(self, name: str, size: float, rate: float | None, sharers: int) -> float:
        if rate is None:
            return 0.0
        with self._lock:
            start = max(time.monotonic(), self._free.get(name, 0.0))
            self._free[name] = start + size * 8 * sharers / rate
            return self._free[name]


def sleep_until(moment: float) -> None:
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)


def _borders(nodes: list[int]) -> list[tuple[int, int]]:
    """Where a ring in rank order leaves a node."""
    return [(a, b) for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True) if a != b]
