"""The policies of a `decentralize` call: settings that belong together, in frozen dataclasses that validate themselves.

Strings are shorthands for a policy with its defaults: `algorithm="awc"` is `algorithm=AWC()`. A combination that makes
no sense cannot be written: `ATC` has no `staleness`, and only the asynchronous algorithms have a `rate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import ClassVar, Literal, get_args

from torch import nn

from gossamer.comm import TransportName, wire_named
from gossamer.engine.outer import Outer, SlowMo, check_outer
from gossamer.errors import InputError

AlgorithmName = Literal["awc", "atc", "ad-psgd", "a2cid2"]
WireName = Literal["fp32", "bf16", "fp16", "int8", "int4"]
Buffers = Literal["average", "local"]
Gradients = Literal["auto", "node", "worker"]
Gaps = Literal["poisson", "fixed"]
Pairing = Literal["auto", "edges", "rounds"]
ClockName = Literal["wall", "virtual"]
Filter = Callable[[str, nn.Parameter], bool]
"""`f(name, parameter)`: whether the parameter is mixed."""
Seconds = timedelta | float
"""A duration: a `timedelta`, or a number of seconds."""
MOST_FRAGMENTS = 64
LONGEST = timedelta(days=3650).total_seconds()  # torch's waits end at once if their nanoseconds overflow 64 bits


@dataclass(frozen=True, kw_only=True)
class Synchronous:
    """What `AWC` and `ATC` have in common: gossip in rounds."""

    name: ClassVar[str]
    every: int = 1
    """Mix every `every` steps."""
    average_every: int = 0
    """Make the exchange an exact global average every `average_every` steps (0: never)."""
    fragments: int = 1
    """Exchange one of `fragments` parts of the model at a time, in turn."""
    outer: Outer | None = None
    """An outer step on the drift of `every` local steps: `Nesterov`, `HeavyBall`, `Accelerated` or `SlowMo`."""

    def __post_init__(self) -> None:
        _check_whole(self, "every", 1)
        _check_whole(self, "average_every", 0)
        _check_whole(self, "fragments", 1)
        if self.fragments > MOST_FRAGMENTS:
            raise InputError(
                f"fragments must be at most {MOST_FRAGMENTS}, got {self.fragments}: a bucket that is exchanged so "
                "rarely hardly mixes; use every= for local steps between exchanges"
            )
        if self.average_every % self.every:
            raise InputError(
                f"average_every counts steps and must be a multiple of every={self.every}, got {self.average_every}; "
                f"use {max(1, round(self.average_every / self.every)) * self.every}"
            )
        least = self.every * self.fragments
        if 0 < self.average_every < least:
            raise InputError(
                f"average_every={self.average_every} steps are too few for an exchange of all {self.fragments} "
                f"fragments, which takes {least}; use at least {least}"
            )
        if self.outer is not None:
            check_outer(self.outer, self.every, self.average_every)


@dataclass(frozen=True, kw_only=True)
class AWC(Synchronous):
    """Communicate while adapting: the exchange of step t runs during the forward and backward of step t + 1.

    x_i(t+1) = d_i(∇f(x_i(t))) + Σ_j w_ij(t) x_j(t), with the gradient taken at the un-mixed point.
    """

    name = "awc"
    staleness: int = 0
    """How many steps a worker may take without mixing while a late exchange is still in flight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_whole(self, "staleness", 0)
        if self.staleness and self.outer is not None:
            raise InputError(
                f"staleness={self.staleness} cannot be combined with outer=: the exchange of an outer step has all of "
                f"the next every={self.every} steps; leave staleness out"
            )


@dataclass(frozen=True, kw_only=True)
class ATC(Synchronous):
    """Adapt, then combine: every step waits for its own exchange, without overlap. With the complete topology and SGD
    it equals DDP."""

    name = "atc"


@dataclass(frozen=True, kw_only=True)
class Asynchronous:
    """What `ADPSGD` and `A2CiD2` have in common: every worker steps at its own pace and averages pairwise with its
    neighbors in the topology's union graph."""

    name: ClassVar[str]
    rate: float = 1.0
    """Exchanges per gradient that a worker takes part in. Below 1 there are local steps in between."""
    max_staleness: int | None = None
    """How many steps a worker may be ahead of the slowest one (None: no bound)."""
    gaps: Gaps = "poisson"
    """Times between exchanges: "poisson" or "fixed"."""
    pairing: Pairing = "auto"
    """"edges": one pair at a time; "rounds": a matching at a time; "auto": "rounds" where exchanges take long."""
    clock: ClockName = "wall"
    """"wall", or "virtual": a gradient takes one time unit, and runs are bit-reproducible."""
    seed: int = 0
    """Seed of the event sequence that all workers share."""

    def __post_init__(self) -> None:
        for name, choices in (("gaps", Gaps), ("pairing", Pairing), ("clock", ClockName)):
            _check_choice(name, getattr(self, name), get_args(choices))
        if not _is_number(self.rate) or not 0 < self.rate < math.inf:
            raise InputError(f"rate must be a positive number of exchanges per gradient, got {self.rate!r}")
        _check_whole(self, "seed", 0)
        if self.max_staleness is None:
            return
        if self.max_staleness == 0:
            raise InputError(
                "max_staleness=0 would keep all workers in step, as algorithm='awc' does; use that, or at least 1"
            )
        _check_whole(self, "max_staleness", 1)
        if self.clock == "virtual":
            raise InputError(
                "max_staleness holds back workers that run ahead in wall time; the virtual clock fixes their pace, so "
                "leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class ADPSGD(Asynchronous):
    """AD-PSGD: asynchronous pairwise averaging without momentum."""

    name = "ad-psgd"


@dataclass(frozen=True, kw_only=True)
class A2CiD2(Asynchronous):
    """A2CiD2: asynchronous pairwise averaging with a continuous momentum, which mixes faster on large sparse graphs."""

    name = "a2cid2"


Algorithm = AWC | ATC | ADPSGD | A2CiD2
ALGORITHMS: dict[str, type[Algorithm]] = {kind.name: kind for kind in (AWC, ATC, ADPSGD, A2CiD2)}


def algorithm(name: str, **settings: object) -> Algorithm:
    """The policy of the algorithm called `name`, e.g. `algorithm("awc", staleness=1)`, for code that has it as text."""
    _check_choice("algorithm", name, ALGORITHMS)
    kind = ALGORITHMS[name]
    known = [field.name for field in fields(kind)]
    for setting in settings:
        if issubclass(kind, Asynchronous) and setting in ("every", "outer"):
            raise InputError(
                f"algorithm {name!r} exchanges at random times and has no rounds, so {setting} does not apply; for "
                "local steps between exchanges use a rate below 1, or algorithm 'awc'"
            )
        if setting not in known:
            raise InputError(f"algorithm {name!r} has no setting {setting!r}; it takes {', '.join(known)}")
    return kind(**settings)  # type: ignore[arg-type]  # validated by the policy itself


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """How parameters are cut and sent. The defaults are right for nearly every job."""

    bucket_mib: float | None = None
    """Size of a bucket in MiB; None chooses it from the model and the topology."""
    in_flight: int = 4
    """How many buckets are exchanged at the same time."""
    stagger: bool = True
    """Bucket b follows the schedule at phase k + b, which spreads the load on the network evenly."""
    hierarchical: bool = True
    """Groups that span nodes average over the fast links inside each node first."""
    transport: TransportName = "auto"
    """What carries the parameters. "gloo" and "tcp" send from the CPU's memory ("gloo": static jobs only), "nccl" from
    GPU to GPU, and "host" copies the parameters of any accelerator through the host. "auto" is "gloo" on the CPU and
    "tcp" in elastic jobs; on an accelerator it is "nccl" where that is available, the algorithm is synchronous and the
    job is not elastic, else "host"."""

    def __post_init__(self) -> None:
        _check_choice("transport", self.transport, get_args(TransportName))
        if self.bucket_mib is not None and not (_is_number(self.bucket_mib) and 0 < self.bucket_mib < math.inf):
            raise InputError(
                f"bucket_mib must be a positive number of MiB, got {self.bucket_mib!r}; leave it out to have it chosen"
            )
        _check_whole(self, "in_flight", 1)


@dataclass(frozen=True, kw_only=True)
class Continue:
    """Elastic job: continue without dead, stopped or unreachable workers, and admit replacements."""

    soft_deadline: Seconds | None = None
    """How long a step waits for a late neighbor before it continues without that neighbor. None: learned per neighbor
    from the last arrivals, so that steps of 30 ms and of 30 s need no setting."""
    hard_deadline: Seconds | None = None
    """How long a worker may be silent before the others treat it as dead. None: learned from its heartbeats, at least
    5 s."""

    def __post_init__(self) -> None:
        soft, hard = self.soft, self.hard
        if soft is not None and hard is not None and soft > hard:
            raise InputError(
                f"soft_deadline={soft:g} (continue without a late neighbor) must not be longer than "
                f"hard_deadline={hard:g} (treat a silent worker as dead)"
            )

    @property
    def soft(self) -> float | None:
        """`soft_deadline` in seconds; None: learned."""
        return None if self.soft_deadline is None else seconds("soft_deadline", self.soft_deadline)

    @property
    def hard(self) -> float | None:
        """`hard_deadline` in seconds; None: learned."""
        return None if self.hard_deadline is None else seconds("hard_deadline", self.hard_deadline)


@dataclass(frozen=True, kw_only=True)
class ConsensusGuard:
    """Runs an exact average when the workers drift apart.

    Every `every` rounds the consensus distance is sketched and averaged over all workers. `every // 2` rounds later all
    workers read the same number, and if the distance relative to the parameters' norm is above `max_ratio`, the next
    round is an exact average.
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
    """Refuses values of a neighbor that are not finite, or that would move a bucket of the parameters by more than
    `max_jump` times its norm. `stats()["refused_by_peer"]` counts refusals by sender."""

    max_jump: float = 1.0

    def __post_init__(self) -> None:
        if not _is_number(self.max_jump) or not self.max_jump > 0:
            raise InputError(
                f"NeighborGuard: max_jump must be a positive number, got {self.max_jump!r}; 1 is usual, infinity only "
                "refuses what is not finite"
            )


Guard = ConsensusGuard | NeighborGuard
Guards = Guard | Sequence[Guard] | None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that all workers must agree on, besides the model and the topology."""

    algorithm: Algorithm
    wire: WireName
    exchange: Exchange
    elastic: Continue | None
    """The deadlines of an elastic job; None: a dead peer is an error."""
    guards: tuple[Guard, ...]
    buffers: Buffers
    timeout: float
    gradients: Gradients = "auto"

    @classmethod
    def of(
        cls,
        *,
        algorithm: AlgorithmName | Algorithm = "awc",
        wire: WireName = "fp32",
        exchange: Exchange | None = None,
        on_failure: Literal["raise", "continue"] | Continue = "raise",
        guard: Guards = None,
        buffers: Buffers = "average",
        timeout: Seconds = timedelta(minutes=30),
        gradients: Gradients = "auto",
    ) -> Settings:
        """Validate the arguments of `decentralize` and replace shorthands by policies."""
        wire_named(wire)
        _check_choice("buffers", buffers, get_args(Buffers))
        _check_choice("gradients", gradients, get_args(Gradients))
        exchange = Exchange() if exchange is None else exchange
        if not isinstance(exchange, Exchange):
            raise InputError(f"exchange must be a gossamer.Exchange, got {exchange!r}; pass Exchange(bucket_mib=4)")
        return cls(
            algorithm=_algorithm(algorithm),
            wire=wire,
            exchange=exchange,
            elastic=_elastic(on_failure),
            guards=_guards(guard),
            buffers=buffers,
            timeout=seconds("timeout", timeout),
            gradients=gradients,
        )

    def __post_init__(self) -> None:
        if isinstance(self.algorithm, Asynchronous):
            if self.wire == "int4":
                raise InputError(
                    f"wire='int4' rounds the distance to the last exact average, and {self.algorithm.name!r} makes "
                    "none, so four bits would have to hold the parameters themselves; use wire='int8' or 'bf16', or "
                    "algorithm='awc'"
                )
            if self.guards:
                raise InputError(
                    f"guard={self.guards[0]!r} needs rounds, and {self.algorithm.name!r} has none; leave it out or use "
                    "algorithm='awc'"
                )
            if self.elastic is not None and self.algorithm.clock == "virtual":
                raise InputError(
                    "clock='virtual' lets workers wait for each other's events, and on_failure='continue' lets nobody "
                    "wait for a dead one; use clock='wall'"
                )
        if self.gradients == "node" and (self.elastic is not None or self.asynchronous):
            other = "on_failure='continue'" if self.elastic is not None else f"algorithm {self.algorithm.name!r}"
            raise InputError(
                f"gradients='node' averages gradients among the workers of a node in every backward pass, and {other} "
                "needs workers that do not wait for each other; use gradients='worker', or a job with "
                "on_failure='raise' and algorithm='awc'"
            )
        outer = None if isinstance(self.algorithm, Asynchronous) else self.algorithm.outer
        if outer is not None and not isinstance(outer, SlowMo) and self.consensus_guard is not None:
            raise InputError(
                f"a ConsensusGuard brings the workers together by an exact average, but {type(outer).__name__} steps "
                "only by a part of the way to it; leave the guard out, or use SlowMo"
            )
        if self.elastic is not None and self.consensus_guard is not None:
            raise InputError(
                "a ConsensusGuard averages over all workers at fixed rounds, which an elastic job cannot; leave it out "
                "with on_failure='continue', or use AWC(average_every=...)"
            )

    @property
    def asynchronous(self) -> bool:
        return isinstance(self.algorithm, Asynchronous)

    @property
    def consensus_guard(self) -> ConsensusGuard | None:
        return next((g for g in self.guards if isinstance(g, ConsensusGuard)), None)

    @property
    def max_jump(self) -> float | None:
        """Bound on the change by one exchange, relative to the norm. Infinity refuses only non-finite values; None
        refuses nothing. Elastic jobs always refuse non-finite values."""
        found = next((g.max_jump for g in self.guards if isinstance(g, NeighborGuard)), None)
        return math.inf if found is None and self.elastic is not None else found


def seconds(name: str, value: Seconds) -> float:
    """A duration in seconds, at most `LONGEST`; `InputError` unless it is positive and finite."""
    amount = value.total_seconds() if isinstance(value, timedelta) else value
    if not _is_number(amount) or not 0 < amount < math.inf:
        raise InputError(f"{name} must be a positive duration (seconds or a timedelta), got {value!r}")
    return min(float(amount), LONGEST)


def _algorithm(given: AlgorithmName | Algorithm) -> Algorithm:
    if isinstance(given, str):
        return algorithm(given)
    if not isinstance(given, Algorithm):
        raise InputError(
            f"algorithm must be one of {', '.join(ALGORITHMS)} or a policy such as gossamer.AWC(staleness=1), got "
            f"{given!r}"
        )
    return given


def _elastic(given: Literal["raise", "continue"] | Continue) -> Continue | None:
    if isinstance(given, Continue):
        return given
    _check_choice("on_failure", given, ("raise", "continue"))
    return Continue() if given == "continue" else None


def _guards(given: Guards) -> tuple[Guard, ...]:
    guards = tuple(given) if isinstance(given, list | tuple) else () if given is None else (given,)
    if not all(isinstance(g, Guard) for g in guards):
        raise InputError(
            f"guard must be a ConsensusGuard, a NeighborGuard or a list of both, got {given!r}; pass "
            "ConsensusGuard(max_ratio=0.05)"
        )
    if len({type(g) for g in guards}) < len(guards):
        raise InputError(f"guard has two policies of one kind, of which one would be ignored: {given!r}; pass one")
    return guards


def _check_choice(name: str, value: object, choices: Sequence[str] | dict[str, type[Algorithm]]) -> None:
    if value not in choices:
        raise InputError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _check_whole(owner: object, name: str, least: int) -> None:
    value = getattr(owner, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} must be an integer of at least {least}, got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
