"""What goes wrong in a chaos run, and when: a sequence drawn from a seed, before the run begins.

Time is cut into slots, a fault each; a fault ends, and its victims have time to come back, before the next begins, so
a stall can be told to belong to one of them. Kinds of faults:

- kill: kill -9 of a worker, or of all workers of a node; a replacement starts some seconds later.
- stop: SIGSTOP, for longer or for shorter than the hard deadline, then SIGCONT.
- cut: a node's link is down, or loses every packet, then it is whole again.
- join: a worker leaves in good order, and a new one takes its place some seconds later.
- slow: a worker computes several times slower for a while, or its node's link is slow.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from gossamer.errors import InputError

KINDS = ("kill", "stop", "cut", "join", "slow")
# Dealt in turn, so that short runs see every kind; the first stays the first: it is what DDP is tried with.
DECK = ("kill", "kill rank 0", "stop", "cut", "join", "slow", "kill node", "stop rank 0", "cut", "slow")
SLOT = 6.0  # seconds: the shortest that leaves a victim time to come back
SHARE = 0.6  # of a slot that a fault may last
SLOWER = 4.0  # times, of a worker's compute
SLOW_LINK = 0.1  # of the link's rate


@dataclass(frozen=True)
class Fault:
    """From `at` to `until` (seconds after the start of the run) `victims` suffer; then it is undone."""

    at: float
    kind: str
    victims: tuple[int, ...]
    until: float
    node: int | None = None  # for faults of a whole node
    how: str = ""

    def describe(self) -> dict[str, Any]:
        return {
            "at": self.at,
            "kind": self.kind,
            "victim": list(self.victims),
            "until": self.until,
            "node": self.node,
            "how": self.how,
        }

    def __str__(self) -> str:
        whom = f"node {self.node}" if self.node is not None else f"worker {', '.join(map(str, self.victims))}"
        return f"{self.kind} {whom}" + (f" ({self.how})" if self.how else "")


def make_plan(
    per_node: Sequence[int], seconds: float, faults: int, seed: int, *, links: bool = True
) -> tuple[Fault, ...]:
    """`faults` faults in `seconds`; never all workers at once. Without `links` none concerns the network."""
    n = sum(per_node)
    if faults < 0:
        raise InputError(f"the number of faults must be at least 0, got {faults}; pass e.g. 6")
    if faults == 0:
        return ()
    if n < 2:
        raise InputError("somebody must survive: chaos needs at least 2 workers, got 1; pass e.g. --per-node 2")
    lead, slot = _slots(seconds, faults)
    if slot < SLOT:
        need = next(s for s in range(1, 1 << 20) if _slots(s, faults)[1] >= SLOT)
        raise InputError(
            f"{faults} faults do not fit into {seconds:g} seconds; pass --seconds {need} or more, or fewer faults"
        )
    draw = random.Random(seed)
    cards = list(islice(cycle(DECK), faults))
    rest = cards[1:]
    draw.shuffle(rest)
    where = _ranks(per_node)
    plan = []
    for index, card in enumerate([cards[0], *rest]):
        kind, _, whom = card.partition(" ")
        if kind == "cut" and (not links or len(per_node) < 2):
            kind, whom = "stop", ""
        whole = kind == "cut" or (whom == "node" and len(per_node) > 1)
        node = draw.randrange(len(per_node)) if whole else None
        victims = tuple(where[node]) if node is not None else (0 if whom == "rank 0" else draw.randrange(n),)
        at = lead + slot * (index + draw.uniform(0.0, 0.15))
        how, lasts = _details(kind, draw, links and len(per_node) > 1)
        if kind == "slow" and how == "link":
            node = next(m for m, ranks in enumerate(where) if victims[0] in ranks)
            victims = tuple(where[node])
        until = at + min(lasts, SHARE * slot)
        plan.append(Fault(round(at, 2), kind, victims, round(until, 2), node, how))
    return tuple(plan)


def _slots(seconds: float, faults: int) -> tuple[float, float]:
    """The quiet beginning, and the length of a slot; at the end it is quiet as well."""
    lead, tail = min(10.0, max(3.0, 0.07 * seconds)), min(15.0, max(5.0, 0.1 * seconds))
    return lead, (seconds - lead - tail) / faults


def _ranks(per_node: Sequence[int]) -> list[range]:
    starts = [sum(per_node[:m]) for m in range(len(per_node))]
    return [range(start, start + count) for start, count in zip(starts, per_node, strict=True)]


def _details(kind: str, draw: random.Random, links: bool) -> tuple[str, float]:
    """How, and for how many seconds."""
    if kind in ("kill", "join"):
        return "", draw.uniform(2.0, 4.0)
    if kind == "stop":
        return ("short", draw.uniform(1.0, 3.0)) if draw.random() < 0.3 else ("long", draw.uniform(7.0, 9.0))
    if kind == "cut":
        return draw.choice(["link down", "packets lost"]), draw.uniform(5.0, 10.0)
    return ("link" if links and draw.random() < 0.5 else "compute"), draw.uniform(4.0, 8.0)
