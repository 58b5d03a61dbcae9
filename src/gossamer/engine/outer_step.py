"""The state and the update of an outer step on one lane: see gossamer.engine.outer for the equations.

With adapt then combine the exchange happens between two steps, so what was sent is in the parameters still. With
communicate while adapting it has the next `every` steps: training goes on from y, and x += φ − y is applied before the
step that ends them, so that the new drift counts from the new φ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.comm import Mixed
from gossamer.engine.flat import Bucket
from gossamer.engine.outer import Outer
from gossamer.errors import InputError


class OuterStep:
    """The outer points φ and velocities v of a lane's buckets."""

    def __init__(self, policy: Outer, buckets: Sequence[Bucket]):
        self.policy, self._buckets = policy, buckets
        self.acting: frozenset[int] = frozenset()  # buckets that take an outer step at the end of the round in flight
        self._point = [b.x.clone() for b in buckets]
        self._velocity = [torch.zeros_like(b.x) for b in buckets]

    def restart(self) -> None:
        """Continue from the parameters as they are, without velocity."""
        self.acting = frozenset()
        for bucket, point, velocity in zip(self._buckets, self._point, self._velocity, strict=True):
            point.copy_(bucket.x)
            velocity.zero_()

    def apply(self, b: int, sent: Tensor, mixed: Mixed | None) -> None:
        """Take the outer step of bucket b, whose value `sent` was exchanged with the correction `mixed` (None: nobody
        answered, or there is nobody)."""
        x, point, velocity = self._buckets[b].x, self._point[b], self._velocity[b]
        if b not in self.acting:
            if mixed is not None:
                mixed.add_to(x)
            return
        own = self.policy.coefficients
        drift = torch.sub(sent, point)
        velocity.mul_(own.decay).add_(drift, alpha=own.velocity[1])
        change = drift.mul_(own.direct[1] - 1)
        if mixed is not None:
            weight = 1.0 if mixed.weight is None else mixed.weight
            velocity.add_(mixed.out, alpha=own.velocity[0] * weight)
            change.add_(mixed.out, alpha=own.direct[0] * weight)
        change.add_(velocity)
        torch.add(sent, change, out=point)
        if sent.data_ptr() == x.data_ptr():
            x.copy_(point)
        else:
            x.add_(change)

    def state_dict(self) -> dict[str, Any]:
        return {
            "name": self.policy.name,
            "acting": sorted(self.acting),
            "point": [p.clone() for p in self._point],
            "velocity": [v.clone() for v in self._velocity],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.acting = frozenset(state["acting"])
        for mine, saved in ((self._point, state["point"]), (self._velocity, state["velocity"])):
            for to, value in zip(mine, saved, strict=True):
                to.copy_(value)


def check_state(mine: OuterStep | None, state: dict[str, Any], *, combines: bool) -> None:
    """Refuse the state of a lane with another outer step; `combines`: this lane adapts, then combines."""
    saved, here = (state.get("outer") or {}).get("name"), None if mine is None else mine.policy.name
    if saved != here:
        raise InputError(
            f"the state was saved with {_written(saved)} and this run has {_written(here)}; resume with the same, or "
            "load only the model and the optimizer"
        )
    if mine is not None and "arrived" in state and combines:
        raise InputError(
            f"the state of the outer step {here!r} was saved by algorithm 'awc', with an exchange in flight, and this "
            "run has 'atc'; resume with the same, or load only the model and the optimizer"
        )


def _written(name: str | None) -> str:
    return "no outer step" if name is None else f"the outer step {name!r}"
