"""The policy of one `decentralize` call, validated where it is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gossamer.comm import wire_named
from gossamer.errors import InputError

SYNCHRONOUS = ("awc", "atc")
ASYNCHRONOUS = ("ad-psgd", "a2cid2")
ALGORITHMS = SYNCHRONOUS + ASYNCHRONOUS


@dataclass(frozen=True, kw_only=True)
class ConsensusGuard:
    """Runs an exact average when the workers drift apart.

    Every `every` rounds the consensus distance is sketched and averaged over all workers; `every // 2` rounds later,
    when the sketch has long arrived everywhere, all workers read the same number, and if the distance relative to
    the parameters' norm is above `max_ratio` they all make the next round an exact average.
    """

    max_ratio: float = 0.05
    every: int = 16

    def __post_init__(self) -> None:
        if not _is_number(self.max_ratio) or not self.max_ratio > 0:
            raise InputError(
                f"ConsensusGuard: max_ratio must be a positive number, got {self.max_ratio!r}; 0.05 is usual, infinity "
                "only measures"
            )
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 2:
            raise InputError(f"ConsensusGuard: every must be an integer of at least 2 rounds, got {self.every!r}")


@dataclass(frozen=True, kw_only=True)
class NeighborGuard:
    """Refuses to mix in what a neighbor sent when it is not finite, or when it would move a bucket of the parameters by
    more than `max_jump` times their norm. Refusals are counted by sender in `stats()["refused_by_peer"]`."""

    max_jump: float = 1.0

    def __post_init__(self) -> None:
        if not _is_number(self.max_jump) or not self.max_jump > 0:
            raise InputError(
                f"NeighborGuard: max_jump must be a positive number, got {self.max_jump!r}; 1 is usual, infinity only "
                "refuses what is not finite"
            )


Guards = ConsensusGuard | NeighborGuard | Sequence[ConsensusGuard | NeighborGuard] | None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that all workers must agree on, besides the model and the topology."""

    algorithm: str = "awc"
    wire: str = "fp32"
    every: int = 1
    staleness: int = 0
    average_every: int = 0
    bucket_mb: float | None = None
    buffers: str = "average"
    timeout: float = 1800.0
    stagger: bool = True
    hierarchical: bool = True
    in_flight: int = 4
    guard: Guards = None
    rate: float = 1.0
    gaps: str = "poisson"
    pairing: str = "auto"
    clock: str = "wall"
    max_staleness: int | None = None
    seed: int = 0
    on_failure: str = "raise"
    soft_deadline: float = 0.5
    hard_deadline: float = 5.0

    @property
    def consensus_guard(self) -> ConsensusGuard | None:
        return next((g for g in _guards(self.guard) if isinstance(g, ConsensusGuard)), None)

    @property
    def max_jump(self) -> float | None:
        """Beyond which a neighbor's values are refused; infinite: only when they are not finite; None: never."""
        found = next((g.max_jump for g in _guards(self.guard) if isinstance(g, NeighborGuard)), None)
        return math.inf if found is None and self.survives else found

    @property
    def survives(self) -> bool:
        return self.on_failure == "continue"

    @property
    def asynchronous(self) -> bool:
        return self.algorithm in ASYNCHRONOUS

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise InputError(f"unknown algorithm {self.algorithm!r}; choose one of {', '.join(ALGORITHMS)}")
        wire_named(self.wire)
        if self.buffers not in ("average", "local"):
            raise InputError(f"buffers must be 'average' or 'local', got {self.buffers!r}")
        self._whole("every", 1)
        self._whole("staleness", 0)
        self._whole("average_every", 0)
        self._whole("in_flight", 1)
        if self.bucket_mb is not None and not (_is_number(self.bucket_mb) and 0 < self.bucket_mb < math.inf):
            raise InputError(
                f"bucket_mb must be a positive number, got {self.bucket_mb!r}; leave it out to have it chosen"
            )
        if not _is_number(self.timeout) or not self.timeout > 0:
            raise InputError(f"timeout must be a positive number of seconds, got {self.timeout!r}; the default is 1800")
        if not all(isinstance(g, ConsensusGuard | NeighborGuard) for g in _guards(self.guard)):
            raise InputError(
                f"guard must be a ConsensusGuard, a NeighborGuard or a list of both, got {self.guard!r}; pass "
                "ConsensusGuard(max_ratio=0.05)"
            )
        if self.algorithm == "atc" and self.staleness:
            raise InputError(
                f"algorithm 'atc' waits for every exchange, so staleness must be 0, got {self.staleness}; use 'awc'"
            )
        if self.average_every % self.every:
            raise InputError(
                f"average_every counts steps and must be a multiple of every={self.every}, got {self.average_every}; "
                f"use {max(1, round(self.average_every / self.every)) * self.every}"
            )
        self._check_asynchronous()
        self._check_failures()

    def _check_failures(self) -> None:
        if self.on_failure not in ("raise", "continue"):
            raise InputError(f"on_failure must be 'raise' or 'continue', got {self.on_failure!r}")
        for name in ("soft_deadline", "hard_deadline"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value < math.inf:
                raise InputError(f"{name} must be a positive number of seconds, got {value!r}")
        if self.soft_deadline > self.hard_deadline:
            raise InputError(
                f"soft_deadline={self.soft_deadline:g} (go on without a late neighbor) must not be longer than "
                f"hard_deadline={self.hard_deadline:g} (a silent one is dead)"
            )
        if self.survives and self.asynchronous:
            raise InputError(
                f"on_failure='continue' re-plans rounds, and {self.algorithm!r} has none; use algorithm='awc' or 'atc'"
            )
        if self.survives and self.consensus_guard is not None:
            raise InputError(
                "a ConsensusGuard averages over all workers at fixed rounds, which a job that loses workers cannot; "
                "leave it out with on_failure='continue', or use average_every="
            )

    def _check_asynchronous(self) -> None:
        for name, choices in (
            ("gaps", ("poisson", "fixed")),
            ("pairing", ("auto", "edges", "rounds")),
            ("clock", ("wall", "virtual")),
        ):
            if getattr(self, name) not in choices:
                raise InputError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if not (isinstance(self.rate, int | float) and 0 < self.rate < float("inf")):
            raise InputError(f"rate must be a positive number of exchanges a gradient, got {self.rate!r}")
        if not self.asynchronous:
            for name, default in (("rate", 1.0), ("max_staleness", None), ("clock", "wall")):
                if getattr(self, name) != default:
                    raise InputError(f"{name} belongs to the asynchronous algorithms, not to {self.algorithm!r}")
            return
        for name, default in (("every", 1), ("staleness", 0), ("average_every", 0), ("guard", None)):
            if getattr(self, name) != default:
                raise InputError(
                    f"{name}={getattr(self, name)!r} needs rounds, and {self.algorithm!r} has none; leave it out or "
                    "use algorithm='awc'"
                )
        if self.max_staleness is not None:
            if self.max_staleness == 0:
                raise InputError(
                    "max_staleness=0 would keep all workers in step, as algorithm='awc' does; use that, or at least 1"
                )
            self._whole("max_staleness", 1)
            if self.clock == "virtual":
                raise InputError(
                    "max_staleness holds back workers that run ahead in wall time; on the virtual clock their pace is "
                    "given, so leave it out"
                )

    def _whole(self, name: str, least: int) -> None:
        value: Any = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(f"{name} must be an integer of at least {least}, got {value!r}")


def _guards(guard: Any) -> tuple[Any, ...]:
    if guard is None:
        return ()
    return tuple(guard) if isinstance(guard, list | tuple) else (guard,)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


Filter = Callable[[str, Any], bool]
