"""Outer steps: what happens to the drift of several local steps when it is exchanged. Policies, without torch.

After `every` local steps a worker at y has drifted by Δ = y − φ from its outer point φ. An exchange of y gives the
correction E = Wy − y towards the neighbors. Every outer step is

    v ← β v + p E + q Δ,    φ ← y + r E + (s − 1) Δ + v

with its own coefficients, and training goes on from φ. With D = E + Δ = Wy − φ:

    Nesterov     u ← βu + D, φ ← φ + α (D + βu)         v = αβu: p = q = αβ, r = s = α
    HeavyBall    δ ← βδ + αD, φ ← φ + δ                 v = δ: p = q = α, r = s = 0
    Accelerated  φ ← y − αΛy + γ (y − y of the last exchange)    v = φ − y: β = γ, p = α, q = γ, r = 0, s = 1
    SlowMo       HeavyBall at exact averages only; between them plain gossip

The rows and columns of W sum to 1, so the mean of E over the workers is 0 and the workers' mean moves by the mean of Δ
alone: it takes exactly the outer step that an all-reduce of Δ would take, whatever the topology.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from gossamer.errors import InputError
from gossamer.topology import Round
from gossamer.topology.momentum import Momentum, growth, stable_momentum
from gossamer.topology.schedule import Schedule

OuterName = Literal["nesterov", "heavy-ball", "accelerated", "slowmo"]
LONGEST = 4096  # rounds of a schedule that are looked at


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of an outer step: `decay` β, of E and Δ in the velocity (p, q), and in the step (r, s)."""

    decay: float
    velocity: tuple[float, float]
    direct: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Outer:
    """What all outer steps have in common."""

    name: ClassVar[OuterName]
    lr: float = 0.7
    """Weight of the averaged drift."""
    momentum: float = 0.5
    """Decay of the outer velocity, at least 0 and less than 1."""

    def __post_init__(self) -> None:
        for name in ("lr", "momentum"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                raise InputError(
                    f"outer {name} must be a finite number, got {value!r}; {type(self).__name__}() has one"
                )
        if self.lr <= 0:
            raise InputError(f"outer lr must be more than 0, got {self.lr:g}; 0.7 is usual, 1 takes the plain average")
        if not 0 <= self.momentum < 1:
            raise InputError(
                f"outer momentum must be at least 0 and less than 1, got {self.momentum:g}: at 1 the velocity never "
                "decays; 0.5 is stable on every named topology"
            )

    @property
    def coefficients(self) -> Coefficients:
        raise NotImplementedError

    def acts(self, average: bool) -> bool:
        """Whether a round has an outer step; `average`: it is one of the schedule's exact averages."""
        return True

    def at_zero_drift(self) -> Momentum:
        """The coefficients that remain if the workers do not drift."""
        own = self.coefficients
        return Momentum(own.decay, own.velocity[0], own.direct[0])


@dataclass(frozen=True, kw_only=True)
class Nesterov(Outer):
    """Nesterov momentum on the averaged drift. With an exact average (the complete topology) this is DiLoCo."""

    name = "nesterov"

    @property
    def coefficients(self) -> Coefficients:
        a, b = self.lr, self.momentum
        return Coefficients(b, (a * b, a * b), (a, a))


@dataclass(frozen=True, kw_only=True)
class HeavyBall(Outer):
    """Heavy-ball momentum on the averaged drift and the distance to the neighbors. Over pairs this is NoLoCo."""

    name = "heavy-ball"

    @property
    def coefficients(self) -> Coefficients:
        return Coefficients(self.momentum, (self.lr, self.lr), (0.0, 0.0))


@dataclass(frozen=True, kw_only=True)
class Accelerated(Outer):
    """Accelerated gossip: a worker keeps all of its own drift, moves by `lr` towards the average of its neighbors, and
    adds `momentum` times the change of its own end point since the last exchange. The workers' mean takes Nesterov
    steps with lr 1."""

    name = "accelerated"

    @property
    def coefficients(self) -> Coefficients:
        return Coefficients(self.momentum, (self.lr, self.momentum), (0.0, 1.0))


@dataclass(frozen=True, kw_only=True)
class SlowMo(Outer):
    """Heavy-ball momentum at the exact averages of `average_every`, plain gossip between them."""

    name = "slowmo"
    lr: float = 1.0

    @property
    def coefficients(self) -> Coefficients:
        return Coefficients(self.momentum, (self.lr, self.lr), (0.0, 0.0))

    def acts(self, average: bool) -> bool:
        return average


OUTER: dict[str, type[Outer]] = {kind.name: kind for kind in (Nesterov, HeavyBall, Accelerated, SlowMo)}


def outer_named(name: str, lr: float | None = None, momentum: float | None = None) -> Outer:
    """The outer step called `name`; None keeps its default. For code that has it as text."""
    if name not in OUTER:
        raise InputError(f"outer must be one of {', '.join(OUTER)}, got {name!r}")
    given = {k: v for k, v in (("lr", lr), ("momentum", momentum)) if v is not None}
    return OUTER[name](**given)


def check_outer(outer: object, every: int, average_every: int) -> None:
    """Refuse an outer step that does not fit the exchanges of its policy."""
    if not isinstance(outer, Outer) or type(outer) is Outer:
        raise InputError(f"outer must be a policy such as gossamer.Nesterov(lr=0.7, momentum=0.5), got {outer!r}")
    if isinstance(outer, SlowMo):
        if average_every < 2:
            raise InputError(
                f"SlowMo steps at exact averages, and average_every={average_every} makes "
                f"{'none' if average_every == 0 else 'every step one'}; pass for example average_every=48"
            )
    elif every == 1:
        raise InputError(
            f"outer={type(outer).__name__}(...) acts on the drift of several local steps, and every=1 exchanges after "
            "each step; pass for example every=16, or leave outer out"
        )


def problem(outer: Outer, schedule: Schedule) -> str | None:
    """Why the workers of a schedule would drift apart, with the nearest stable momentum; None if they do not."""
    n, sequences = schedule.topology.n, _sequences(outer, schedule)
    found = max((growth(rounds, n, outer.at_zero_drift()) for rounds in sequences), key=lambda g: g.per_round)
    if found.stable:
        return None
    momenta = (m / 100 for m in range(math.ceil(100 * outer.momentum)))
    choices = [(m, replace(outer, momentum=m).at_zero_drift()) for m in momenta]
    stable = [stable_momentum(choices, rounds, n) for rounds in sequences]
    best = None if None in stable else min(m for m in stable if m is not None)
    remedy = (
        "no momentum is stable at this lr; use a smaller lr"
        if best is None
        else f"use momentum {best:g} or less at this lr"
    )
    return (
        f"{type(outer).__name__}(lr={outer.lr:g}, momentum={outer.momentum:g}) is unstable on the topology "
        f"{schedule.topology.name!r} of {n}: without any training the distance between the workers grows by "
        f"{'about ' if found.estimated else ''}{found.per_round:.4g} per exchange; {remedy}, or a topology that mixes "
        "faster"
    )


def _sequences(outer: Outer, schedule: Schedule) -> list[tuple[Round, ...]]:
    """One period of the rounds with outer steps, for each phase that a bucket may have.

    Without exact averages the phase does not matter: a cyclic shift of a product keeps its eigenvalues.
    """
    if isinstance(outer, SlowMo):
        return [(schedule.everyone,)]
    period = schedule.topology.period
    length = min(LONGEST, math.lcm(period, schedule.average_every or 1))
    phases = min(period, 8) if schedule.average_every and schedule.stagger else 1
    parts = schedule.fragments
    every = [(b, k) for b in range(0, phases * parts, parts) for k in range(0, length * parts, parts)]
    rounds = [schedule.round(k, b) for b, k in every]
    return [tuple(rounds[at : at + length]) for at in range(0, len(rounds), length)]
