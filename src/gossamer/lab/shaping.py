"""Parse and format link rates, and make the `tc` commands that limit a network device to such a rate.

Queues are deep, because a shallow queue drops packets and TCP then reaches half of the rate. A pair of nodes may have
its own rate. If the pair is slower than the link of the node, its bytes count against both; if it is faster, it is a
separate cable beside the link.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gossamer.errors import InputError

QUEUE_BYTES = 256 << 20  # never reached: the buffers of TCP are smaller
BURST_SECONDS = 0.005  # the burst after a pause; with a smaller one the kernel's timer costs throughput
MIN_BURST = 16 << 10
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
RATE = re.compile(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmgt]?)(bit)?(?:/s)?", re.IGNORECASE)
NETWORK = "10.77.0.0/24"  # the addresses of the lab
HUB_ADDRESS = "10.77.0.254"  # the bridge: processes that belong to no node listen there
FREE = 1e12  # bits per second; "no limit" where tc needs a number


def parse_rate(rate: str | float | None) -> float | None:
    """Bits per second from "50mbit", "2.5Gbit/s" or a number; None (no limit) from None or "none"."""
    if rate is None or rate == "none":
        return None
    match = RATE.fullmatch(rate.strip()) if isinstance(rate, str) else None
    if isinstance(rate, str) and (match is None or (match[2] and not match[3])):
        raise InputError(f"a link rate is a number with kbit, mbit or gbit, got {rate!r}; write e.g. 50mbit, or none")
    bits = float(match[1]) * UNITS[match[2].lower()] if match else float(rate)
    if isinstance(rate, bool) or not (1e3 <= bits < FREE and math.isfinite(bits)):
        raise InputError(f"a link rate must be from 1kbit to below 1000gbit, got {rate!r}; write e.g. 50mbit")
    return bits


def format_rate(bits: float | None) -> str:
    """A rate as `parse_rate` reads it, e.g. 50mbit."""
    if bits is None:
        return "none"
    unit = next(u for u in ("g", "m", "k") if bits >= UNITS[u] or u == "k")
    return f"{bits / UNITS[unit]:.4g}{unit}bit"


@dataclass(frozen=True)
class LinkRates:
    """The rate of every node's link, and of pairs (a < b) that differ, in bits per second; None is no limit."""

    default: float | None
    pairs: Mapping[tuple[int, int], float | None]

    @classmethod
    def parse(
        cls, nodes: int, link: str | float | None, links: Mapping[tuple[int, int], str | float | None] | None
    ) -> LinkRates:
        pairs: dict[tuple[int, int], float | None] = {}
        for pair, rate in (links or {}).items():
            good = isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(m, int) for m in pair)
            if not good or pair[0] == pair[1] or not all(0 <= m < nodes for m in pair):
                raise InputError(f"links are between two different nodes of 0 to {nodes - 1}, got {pair}")
            key = (min(pair), max(pair))
            if key in pairs and pairs[key] != parse_rate(rate):
                raise InputError(f"the link {key} has two rates; give one rate, which holds in both directions")
            pairs[key] = parse_rate(rate)
        return cls(parse_rate(link), pairs)

    def rate(self, a: int, b: int) -> float | None:
        """The rate that one transfer between nodes a and b reaches if there is no other traffic."""
        return self.pairs.get((min(a, b), max(a, b)), self.default)

    def of(self, node: int) -> dict[int, float | None]:
        """The pairs of a node that differ: peer -> rate."""
        return {a + b - node: rate for (a, b), rate in self.pairs.items() if node in (a, b)}


def shape(device: str, link: float | None, peers: Mapping[int, float | None], side: str) -> list[str]:
    """`tc` batch lines that shape what leaves `device`, by the address of the peer.

    `side` is `dst` in a node (packets to the peer) and `src` on its port of the bridge (packets from the peer).
    """
    if not peers:
        return [] if link is None else [f"qdisc add dev {device} root {_tbf(link)}"]
    whole = FREE if link is None else link
    nested = [m for m, rate in peers.items() if rate is not None and rate <= whole]
    lines = [
        f"qdisc add dev {device} root handle 1: htb default 2",
        f"class add dev {device} parent 1: classid 1:1 {_htb(whole, whole)}",
        # Guaranteed rates must not add up to more than the link, or htb lets the sum exceed it.
        f"class add dev {device} parent 1:1 classid 1:2 {_htb(whole / 2, whole)}",
        f"qdisc add dev {device} parent 1:2 {_fifo()}",
    ]
    for peer, rate in peers.items():
        top = FREE if rate is None else rate
        floor = min(top, whole / 2 / len(nested)) if peer in nested else top
        parent = "1:1" if peer in nested else "1:"
        lines += [
            f"class add dev {device} parent {parent} classid 1:{peer + 16:x} {_htb(floor, top)}",
            f"qdisc add dev {device} parent 1:{peer + 16:x} {_fifo()}",
            f"filter add dev {device} parent 1: protocol ip prio 1 u32 "
            f"match ip {side} {address(peer)}/32 flowid 1:{peer + 16:x}",
        ]
    return lines


def reshape(device: str, rate: float | None, plain: list[str]) -> list[str]:
    """`tc` batch lines that limit a device to one rate; None restores the lines `plain` that it was made with."""
    if rate is not None:
        return [f"qdisc replace dev {device} root {_tbf(rate)}"]
    return [f"qdisc del dev {device} root", *plain]


def address(node: int) -> str:
    """The address of a node, which exists only inside the namespaces of the lab."""
    return f"10.77.0.{node + 1}"


def burst(rate: float) -> int:
    return max(MIN_BURST, int(rate / 8 * BURST_SECONDS))


def _tbf(rate: float) -> str:
    return f"tbf rate {rate:.0f}bit burst {burst(rate)} limit {QUEUE_BYTES}"


def _htb(rate: float, ceil: float) -> str:
    return f"htb rate {max(rate, 8):.0f}bit ceil {ceil:.0f}bit burst {burst(rate)} cburst {burst(ceil)} quantum 60000"


def _fifo() -> str:
    return f"bfifo limit {QUEUE_BYTES}"
