"""A cheap online estimate of the consensus distance, and the guard's decision.

Every `every` rounds each worker takes the same random coordinates of its parameters, the sum of their squares and the
squared norm of all parameters. The average of these small vectors over all workers gives
    distance^2 = (N / m) sum_c [ mean_i x_ic^2 - (mean_i x_ic)^2 ]
on m of N coordinates. The average is launched beside round k and read by all workers at round k + every // 2, so all
workers see the same number at the same round and make the same decision. It is computed in double precision, so that
the difference of squares resolves distances down to 1e-8 of the norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer.comm import Job, Purpose, widest_float
from gossamer.engine.flat import Bucket
from gossamer.engine.side_average import SideAverage
from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from gossamer.engine.lane import LaneParts

SAMPLES = 1024


@dataclass(frozen=True)
class Sketch:
    """The estimate of round `round`: RMS distance of the workers to their mean, and RMS norm of the workers."""

    round: int
    distance: float
    norm: float

    @property
    def ratio(self) -> float:
        return self.distance / self.norm if self.norm else 0.0


class Sketcher:
    """Makes sketches of one lane. `slots` is 1, or the number of workers of a node if each holds shard `slot`."""

    def __init__(self, average: SideAverage, max_ratio: float | None, *, seed: int, slot: int = 0, slots: int = 1):
        self.average, self.max_ratio = average, max_ratio
        self.seed, self.slot, self.slots = seed, slot, slots
        self.latest: Sketch | None = None

    @classmethod
    def of(cls, parts: LaneParts, wait: Callable[[Job], None]) -> Sketcher | None:
        """The sketcher of a lane with a `ConsensusGuard`; None without one."""
        guard = parts.settings.consensus_guard
        if guard is None:
            return None
        slot, slots = parts.shard
        average = SideAverage.of(parts, Purpose.SKETCH, guard.every, wait)
        limit = guard.max_ratio if math.isfinite(guard.max_ratio) else None
        return cls(average, limit, seed=parts.index, slot=slot, slots=slots)

    def at_launch(self, k: int, buckets: list[Bucket]) -> bool:
        """Call this on every worker before round k is launched. Return whether round k must be an exact average."""
        if self.average.due(k):
            self.average.launch(k, self._vector(k, buckets))
        found = self.average.read(k)
        if found is not None:
            self.latest = self._estimate(*found, sum(b.x.numel() for b in buckets))
            if not math.isfinite(self.latest.norm):
                raise GossamerError(
                    f"the parameters of at least one worker were not finite (NaN or infinity) in round "
                    f"{self.latest.round}; lower the learning rate or clip gradients, and restart from a checkpoint"
                )
            return self.max_ratio is not None and self.latest.ratio > self.max_ratio
        return False

    def state_dict(self) -> dict[str, Any]:
        """The latest estimate, and the one in flight after waiting for it."""
        latest = None if self.latest is None else (self.latest.round, self.latest.distance, self.latest.norm)
        return {"latest": latest, "in_flight": self.average.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.latest = None if state["latest"] is None else Sketch(*state["latest"])
        self.average.load_state_dict(state["in_flight"])

    def _vector(self, k: int, buckets: list[Bucket]) -> Tensor:
        total = sum(b.x.numel() for b in buckets)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + k)
        values, norm = [], 0.0
        picks = torch.randint(total, (SAMPLES,), generator=generator)
        start = 0
        for b in buckets:
            here = picks[(picks >= start) & (picks < start + b.x.numel())] - start
            values.append(b.x[here.to(b.x.device)].cpu().double())
            norm += float(torch.linalg.vector_norm(b.x, dtype=widest_float(b.x))) ** 2
            start += b.x.numel()
        sample = torch.cat(values)
        vector = torch.zeros(self.slots, SAMPLES + 2, dtype=torch.float64)
        vector[self.slot, :SAMPLES] = sample
        vector[self.slot, SAMPLES] = sample.square().sum()
        vector[self.slot, SAMPLES + 1] = norm
        return vector.flatten()

    def _estimate(self, k: int, average: Tensor, elements: int) -> Sketch:
        # The average is over all workers, but each slot is filled by one worker per node.
        mean = average.view(self.slots, SAMPLES + 2) * self.slots
        spread = (mean[:, SAMPLES] - mean[:, :SAMPLES].square().sum(dim=1)).clamp_min(0).sum()
        squared_norm = mean[:, SAMPLES + 1].sum()
        distance = math.sqrt(float(spread) * elements / SAMPLES) if torch.isfinite(spread) else math.nan
        norm = math.sqrt(float(squared_norm)) if torch.isfinite(squared_norm) else math.nan
        return Sketch(k, distance, norm)

    def close(self) -> None:
        self.average.close()
