"""Emulate slow links between nodes on loopback: sleep until the bytes would have arrived.

`GOSSAMER_PACE` holds JSON: the node of every rank, and rates in bits per second (null: not limited), e.g.
`{"nodes": [0, 0, 1, 1], "link": 5e7, "links": {"0-1": 1e7}}`. The workers of a node share its link. They do not
coordinate here: each has an equal part of the link, which is exact if all of them send the same number of bytes (as in
hierarchical exchanges). A pair of nodes with its own rate is treated the same way. Queues and losses are not emulated.
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
    """One worker's part of the links of its node. `with pace(sends): ...` takes at least as long as the bytes need."""

    def __init__(self, rank: int, nodes: list[int], link: float | None, links: dict[str, float | None]):
        self.node, self.nodes, self.link, self.links = nodes[rank], nodes, link, links
        self.sharers = nodes.count(self.node)
        self._free: dict[str, float] = {}  # link -> when it has sent everything
        self._lock = threading.Lock()

    @classmethod
    def from_environment(cls, rank: int) -> Pace | None:
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        settings: dict[str, Any] = json.loads(text)
        return cls(rank, settings["nodes"], settings["link"], settings["links"])

    @contextmanager
    def __call__(self, sends: Iterable[tuple[int, Tensor]]) -> Iterator[None]:
        until = max((self.reserve(p, m.numel() * m.element_size()) for p, m in sends), default=0.0)
        yield
        sleep_until(until)

    def reserve(self, peer: int, size: float) -> float:
        """The time at which `size` more bytes to `peer` will have been sent."""
        other = self.nodes[peer]
        if other == self.node:
            return 0.0
        pair = f"{min(self.node, other)}-{max(self.node, other)}"
        rate = self.links.get(pair, self.link)
        return self._book(pair if pair in self.links else "link", size, rate, self.sharers)

    def reserve_allreduce(self, size: float) -> float:
        """The time at which a ring all-reduce of `size` bytes ends: one worker of a node sends 2(n-1)/n of them."""
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
    """The pairs of nodes between which a ring in rank order passes."""
    return [(a, b) for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True) if a != b]
