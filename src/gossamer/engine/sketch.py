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
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gossamer.comm import Channel, ChannelId, Job, Mixed, Plain, Purpose, arrived, clock, exchange, room_for
from gossamer.engine.flat import Bucket
from gossamer.errors import GossamerError
from gossamer.topology import build
from gossamer.topology.schedule import Schedule

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

    def __init__(
        self,
        every: int,
        max_ratio: float | None,
        rank: int,
        schedule: Schedule,
        channel: Channel,
        wait: Callable[[Job], None],
        *,
        seed: int,
        slot: int = 0,
        slots: int = 1,
    ):
        self.every, self.delay, self.max_ratio = every, every // 2, max_ratio
        self.rank, self.schedule, self.channel, self.wait = rank, schedule, channel, wait
        self.seed, self.slot, self.slots = seed, slot, slots
        self.latest: Sketch | None = None
        self._job: Job | None = None
        self._scale = 1.0

    @classmethod
    def of(cls, parts: LaneParts, wait: Callable[[Job], None]) -> Sketcher | None:
        """The sketcher of a lane with a `ConsensusGuard`; None without one."""
        guard = parts.settings.consensus_guard
        if guard is None:
            return None
        slot, slots = parts.shard
        return cls(
            guard.every,
            guard.max_ratio if math.isfinite(guard.max_ratio) else None,
            parts.rank,
            Schedule(build("complete", parts.layout), stagger=False),
            parts.transport.channel(ChannelId(parts.index, Purpose.SKETCH), 1, parts.settings.timeout),
            wait,
            seed=parts.index,
            slot=slot,
            slots=slots,
        )

    def at_launch(self, k: int, buckets: list[Bucket]) -> bool:
        """Call this on every worker before round k is launched. Return whether round k must be an exact average."""
        if k % self.every == 0 and (self._job is None or self._job.round != k):
            self._start(k, buckets)
        if self._job is not None and k == self._job.round + self.delay:
            self._read()
            assert self.latest is not None
            if not math.isfinite(self.latest.norm):
                raise GossamerError(
                    f"the parameters of at least one worker were not finite (NaN or infinity) in round "
                    f"{self.latest.round}; lower the learning rate or clip gradients, and restart from a checkpoint"
                )
            return self.max_ratio is not None and self.latest.ratio > self.max_ratio
        return False

    def state_dict(self) -> dict[str, Any]:
        """The latest estimate, and the one in flight after waiting for it."""
        latest = self.latest
        state: dict[str, Any] = {"latest": None if latest is None else (latest.round, latest.distance, latest.norm)}
        if self._job is not None:
            self.wait(self._job)
            assert self._job.result is not None
            state["arrived"] = (self._job.round, self._job.result.out.clone(), self._scale)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.latest = None if state["latest"] is None else Sketch(*state["latest"])
        self._job = None
        if "arrived" in state:
            k, out, self._scale = state["arrived"]
            self._job = Job(k, 0, arrived, result=Mixed(out), finished=clock())

    def _start(self, k: int, buckets: list[Bucket]) -> None:
        total = sum(b.x.numel() for b in buckets)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + k)
        values, norm = [], 0.0
        self._scale = total / SAMPLES
        picks = torch.randint(total, (SAMPLES,), generator=generator)
        start = 0
        for b in buckets:
            here = picks[(picks >= start) & (picks < start + b.x.numel())] - start
            values.append(b.x[here.to(b.x.device)].double().cpu())
            norm += float(torch.linalg.vector_norm(b.x, dtype=torch.float64)) ** 2
            start += b.x.numel()
        sample = torch.cat(values)
        vector = torch.zeros(self.slots, SAMPLES + 2, dtype=torch.float64)
        vector[self.slot, :SAMPLES] = sample
        vector[self.slot, SAMPLES] = sample.square().sum()
        vector[self.slot, SAMPLES + 1] = norm
        flat = vector.flatten()
        layout = self.schedule.topology.layout
        out = torch.empty(room_for(flat.numel(), max(layout.per_node)), dtype=torch.float64)
        program = self.schedule.program(k, 0, self.rank, flat.numel(), average=True)
        self._job = Job(k, 0, partial(exchange, program, flat, out, Plain(), lazy=False))
        self.channel.launch(self._job)

    def _read(self) -> None:
        job = self._job
        assert job is not None
        self.wait(job)
        self._job = None
        if job.result is None:  # a single worker
            return
        # The average is over all workers, but each slot is filled by one worker per node.
        mean = job.result.out.view(self.slots, SAMPLES + 2) * self.slots
        spread = (mean[:, SAMPLES] - mean[:, :SAMPLES].square().sum(dim=1)).clamp_min(0).sum()
        squared_norm = mean[:, SAMPLES + 1].sum()
        distance = math.sqrt(float(spread) * self._scale) if torch.isfinite(spread) else math.nan
        norm = math.sqrt(float(squared_norm)) if torch.isfinite(squared_norm) else math.nan
        self.latest = Sketch(job.round, distance, norm)

    def close(self) -> None:
        self.channel.close(drain=1.0)
