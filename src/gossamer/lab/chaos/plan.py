"""The faults of a chaos run: a sequence that is drawn from a seed before the run begins.

Time is divided into slots with one fault each. A fault ends, and its victims have time to come back, before the next
fault begins, so that every stall belongs to one fault. Kinds of faults:

- kill: SIGKILL to a worker, or to all workers of a node; a replacement starts some seconds later.
- stop: SIGSTOP, for a longer or a shorter time than the hard deadline, then SIGCONT.
- cut: the link of a node is down, or loses every packet, for some seconds.
- join: a worker leaves the job as asked, and a new worker with its rank joins some seconds later.
- slow: a worker computes several times slower for a while, or the link of its node is slow.
- pair: all packets between two nodes are lost, while both reach all other nodes.
- term: a worker gets SIGTERM, leaves the job in good order, and is replaced some seconds later.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from gossamer.errors import InputError

KINDS = ("kill", "stop", "cut", "join", "slow", "pair", "term")
# Used in turn, so that short runs have every kind. The first fault is always the same: DDP is run under it.
DECK = (
    *("kill", "kill rank 0", "stop", "cut", "join", "slow", "pair", "term"),
    *("kill node", "stop rank 0", "cut", "slow"),
)
SLOT = 6.0  # seconds: a shorter slot leaves a victim no time to come back
SHARE = 0.6  # a fault lasts at most this part of its slot
SLOWER = 4.0  # factor on the compute time of a slow worker
SLOW_LINK = 0.1  # factor on the rate of a slow link


@dataclass(frozen=True)
class Fault:
    """A fault that affects the ranks `victims` from `at` to `until`, in seconds after the start of the run."""

    at: float
    kind: str
    victims: tuple[int, ...]
    until: float
    node: int | None = None  # for faults that affect a whole node
    how: str = ""
    other_node: int | None = None  # for faults that affect two nodes

    def describe(self) -> dict[str, Any]:
        return {
            "at": self.at,
            "kind": self.kind,
            "victim": list(self.victims),
            "until": self.until,
            "node": self.node,
            "how": self.how,
            "other_node": self.other_node,
        }

    def __str__(self) -> str:
        whom = f"node {self.node}" if self.node is not None else f"worker {', '.join(map(str, self.victims))}"
        whom += "" if self.other_node is None else f" and node {self.other_node}"
        return f"{self.kind} {whom}" + (f" ({self.how})" if self.how else "")


def make_plan(
    per_node: Sequence[int], seconds: float, faults: int, seed: int, *, links: bool = True
) -> tuple[Fault, ...]:
    """`faults` faults in `seconds`, never of all workers at once. Without `links` no fault affects the network."""
    n = sum(per_node)
    if faults < 0:
        raise InputError(f"the number of faults must be at least 0, got {faults}; pass e.g. 6")
    if faults == 0:
        return ()
    if n < 2:
        raise InputError("a chaos run with faults needs at least 2 workers, got 1; pass e.g. --per-node 2")
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
        if kind == "pair" and len(per_node) < 3:  # two nodes would not reach all others
            kind = "cut"
        if kind in ("cut", "pair") and (not links or len(per_node) < 2):
            kind, whom = "stop", ""
        whole = kind in ("cut", "pair") or (whom == "node" and len(per_node) > 1)
        node = draw.randrange(len(per_node)) if whole else None
        victims = tuple(where[node]) if node is not None else (0 if whom == "rank 0" else draw.randrange(n),)
        at = lead + slot * (index + draw.uniform(0.0, 0.15))
        how, lasts = _details(kind, draw, links and len(per_node) > 1)
        if kind == "slow" and how == "link":
            node = next(m for m, ranks in enumerate(where) if victims[0] in ranks)
            victims = tuple(where[node])
        other = draw.choice([m for m in range(len(per_node)) if m != node]) if kind == "pair" else None
        if other is not None:
            victims = tuple(sorted((*victims, *where[other])))
        until = at + min(lasts, SHARE * slot)
        plan.append(Fault(round(at, 2), kind, victims, round(until, 2), node, how, other))
    return tuple(plan)


def _slots(seconds: float, faults: int) -> tuple[float, float]:
    """The seconds before the first slot, and the length of a slot; some seconds at the end have no fault either."""
    lead, tail = min(10.0, max(3.0, 0.07 * seconds)), min(15.0, max(5.0, 0.1 * seconds))
    return lead, (seconds - lead - tail) / faults


def _ranks(per_node: Sequence[int]) -> list[range]:
    starts = [sum(per_node[:m]) for m in range(len(per_node))]
    return [range(start, start + count) for start, count in zip(starts, per_node, strict=True)]


def _details(kind: str, draw: random.Random, links: bool) -> tuple[str, float]:
    """The variant of a fault, and its length in seconds."""
    if kind in ("kill", "join", "term"):
        return "", draw.uniform(2.0, 4.0)
    if kind == "stop":
        return ("short", draw.uniform(1.0, 3.0)) if draw.random() < 0.3 else ("long", draw.uniform(7.0, 9.0))
    if kind == "pair":
        return "packets lost", draw.uniform(7.0, 10.0)
    if kind == "cut":
        return draw.choice(["link down", "packets lost"]), draw.uniform(5.0, 10.0)
    return ("link" if links and draw.random() < 0.5 else "compute"), draw.uniform(4.0, 8.0)
