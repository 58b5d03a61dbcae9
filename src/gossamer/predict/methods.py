"""Methods by name. `bench`, `compare`, `simulate` and `advise` compare methods, written `NAME[:TOPOLOGY[:WIRE]]`.

`ddp` is torch's DistributedDataParallel with Adam, the baseline; it has no topology, so its second part is a wire:
`ddp:bf16` is DDP with torch's bf16 communication hook. `diloco` and `localsgd` take local steps between exact averages
in fp32, and have neither topology nor wire. Every other name gossips: `dadam:ring`, `accumadam:aer:bf16`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast

from gossamer.errors import InputError
from gossamer.topology import registry

Algorithm = Literal["ddp", "local", "awc", "ad-psgd", "a2cid2"]
WireName = Literal["fp32", "bf16", "fp16", "int8", "int4"]

# Bytes in flight per fp32 element. int8 and int4 carry one bf16 scale for every block of 128 elements.
WIRES: dict[str, float] = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.0 + 2.0 / 128, "int4": 0.5 + 2.0 / 128}
ANCHORED = ("int8", "int4")  # relative to the last exact average
DDP_WIRES = ("fp32", "bf16", "fp16")  # the wires of torch's communication hooks
DEFAULT_TOPOLOGY = "aer"
LOCAL_STEPS = 8  # of diloco and localsgd between two averages, unless `every` says otherwise
DILOCO_LR, DILOCO_MOMENTUM = 0.7, 0.9  # the usual values of DiLoCo's outer step


@dataclass(frozen=True)
class Family:
    """The meaning of a method's name; `summary` is one line for people."""

    algorithm: Algorithm
    optimizer: str
    summary: str
    package: str = "gossamer"


FAMILIES: dict[str, Family] = {
    "ddp": Family("ddp", "adam", "torch's DDP with Adam: exact gradient averages, the baseline", "torch"),
    "dsgd": Family("awc", "sgd", "gossip while computing, SGD with momentum"),
    "dadam": Family("awc", "adam", "gossip while computing, Adam with local moments"),
    "gossipadam": Family("awc", "gossipadam", "gossip while computing, Adam with the second moment of all replicas"),
    "accumadam": Family("awc", "accumadam", "gossip while computing, Adam with accumulated moments"),
    "diloco": Family("local", "adam", "DiLoCo: local steps, then Nesterov on the exact average", "torchft"),
    "localsgd": Family("local", "adam", "LocalSGD: local steps, then the exact average", "torchft"),
    "ad-psgd": Family("ad-psgd", "sgd", "asynchronous pairwise gossip"),
    "a2cid2": Family("a2cid2", "sgd", "asynchronous pairwise gossip with continuous momentum"),
    "decent-dp": Family("awc", "adam", "the peer package Decent-DP: flat exchanges, no staggering", "decent-dp"),
}


@dataclass(frozen=True)
class Method:
    """One parsed method. `topology` is None where all workers average exactly; `str(method)` is the full form."""

    name: str
    algorithm: Algorithm
    optimizer: str
    topology: str | None
    wire: WireName

    @property
    def package(self) -> str:
        return FAMILIES[self.name].package

    @property
    def asynchronous(self) -> bool:
        return self.algorithm in ("ad-psgd", "a2cid2")

    @property
    def exact(self) -> bool:
        """Whether all workers average exactly, by all-reduces: DDP, DiLoCo and LocalSGD."""
        return self.algorithm in ("ddp", "local")

    def local_steps(self, every: int) -> int:
        """Steps between two exchanges, where `every` are asked for and 1 is the default."""
        if self.algorithm == "local":
            return every if every > 1 else LOCAL_STEPS
        return every if self.algorithm == "awc" and self.package == "gossamer" else 1

    def __str__(self) -> str:
        parts = [self.name, self.topology, self.wire if self.wire != "fp32" else None]
        return ":".join(p for p in parts if p)


def parse(text: str) -> Method:
    """Parse one method; the error for an unknown name suggests a similar one."""
    parts = [p.strip() for p in text.strip().lower().split(":")]
    name, rest = parts[0], parts[1:]
    if name not in FAMILIES:
        raise InputError(
            f"unknown method {text!r}: {name!r} is not one of {', '.join(FAMILIES)}{_near(name, FAMILIES)}"
        )
    family = FAMILIES[name]
    if family.algorithm == "local":
        if rest:
            raise InputError(
                f"method {text!r}: {name} averages over all workers in fp32, so it has neither topology nor wire; "
                f"write {name}"
            )
        return Method(name, "local", family.optimizer, None, "fp32")
    room = 1 if family.algorithm == "ddp" else 2
    if len(rest) > room or not all(rest):
        form = f"{name}[:WIRE]" if room == 1 else f"{name}[:TOPOLOGY[:WIRE]]"
        raise InputError(f"method {text!r} has too many or empty parts; write it as {form}")
    if family.algorithm == "ddp":
        wire = rest[0] if rest else "fp32"
        if wire not in DDP_WIRES:
            near = _near(wire, DDP_WIRES)
            raise InputError(
                f"method {text!r}: DDP has no topology and its wire is one of {', '.join(DDP_WIRES)}{near}"
            )
        return Method(name, "ddp", family.optimizer, None, cast(WireName, wire))
    topology, wire = rest[0] if rest else DEFAULT_TOPOLOGY, rest[1] if len(rest) > 1 else "fp32"
    if topology in WIRES and len(rest) == 1:
        raise InputError(
            f"method {text!r}: {topology!r} is a wire; name the topology first, as in {name}:aer:{topology}"
        )
    options = topology.partition("(")
    topology = registry.entry(options[0]).name + options[1] + options[2]
    if wire not in WIRES:
        raise InputError(
            f"method {text!r}: unknown wire {wire!r}, the wires are {', '.join(WIRES)}{_near(wire, WIRES)}"
        )
    if wire == "int4" and family.algorithm in ("ad-psgd", "a2cid2"):
        raise InputError(
            f"method {text!r}: int4 is relative to exact averages, and {name} makes none; write {name}:{topology}:int8"
        )
    if name == "decent-dp" and wire != "fp32":
        raise InputError(f"method {text!r}: decent-dp sends fp32 only; write decent-dp:{topology}")
    return Method(name, family.algorithm, family.optimizer, topology, cast(WireName, wire))


def parse_list(text: str) -> tuple[Method, ...]:
    """Parse a comma-separated list of methods; commas inside parentheses belong to a topology's options."""
    pieces, depth = [""], 0
    for c in text:
        depth += (c == "(") - (c == ")")
        if c == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += c
    return tuple(parse(p) for p in pieces if p.strip())


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
