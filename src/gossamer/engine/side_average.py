"""The exact average of a small vector over all workers, beside the rounds of a lane.

It is launched beside round k if k is a multiple of `every`, and read at round k + every // 2, so that no worker waits
for it unless another one is that many rounds behind, and all workers see the same numbers at the same round.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gossamer.comm import Channel, ChannelId, Job, Mixed, Plain, Purpose, arrived, clock, exchange, room_for
from gossamer.topology import build
from gossamer.topology.schedule import Schedule

if TYPE_CHECKING:
    from gossamer.engine.lane import LaneParts


class SideAverage:
    """One vector at a time: launched, then read."""

    def __init__(self, every: int, rank: int, schedule: Schedule, channel: Channel, wait: Callable[[Job], None]):
        self.every, self.delay = every, every // 2
        self.rank, self.schedule, self.channel, self.wait = rank, schedule, channel, wait
        self._job: Job | None = None

    @classmethod
    def of(cls, parts: LaneParts, purpose: Purpose, every: int, wait: Callable[[Job], None]) -> SideAverage:
        """The average over all workers of the lane with these parts."""
        return cls(
            every,
            parts.rank,
            Schedule(build("complete", parts.layout), stagger=False),
            parts.transport.channel(ChannelId(parts.index, purpose), 1, parts.settings.timeout),
            wait,
        )

    def due(self, k: int) -> bool:
        """Return whether a vector is launched beside round k."""
        return k % self.every == 0 and (self._job is None or self._job.round != k)

    def launch(self, k: int, vector: Tensor) -> None:
        out = vector.new_empty(room_for(vector.numel(), max(self.schedule.topology.layout.per_node)))
        program = self.schedule.program(k, 0, self.rank, vector.numel(), average=True)
        self._job = Job(k, 0, partial(exchange, program, vector, out, Plain(), lazy=False))
        self.channel.launch(self._job)

    def read(self, k: int) -> tuple[int, Tensor] | None:
        """Return (round of the launch, average) if it is read at round k."""
        job = self._job
        if job is None or k != job.round + self.delay:
            return None
        self.wait(job)
        self._job = None
        return None if job.result is None else (job.round, job.result.out)

    def state_dict(self) -> tuple[int, Tensor] | None:
        """What is in flight, after waiting for it."""
        if self._job is None:
            return None
        self.wait(self._job)
        assert self._job.result is not None
        return self._job.round, self._job.result.out.clone()

    def load_state_dict(self, state: Any) -> None:
        self._job = None
        if state is not None:
            self._job = Job(state[0], 0, arrived, result=Mixed(state[1]), finished=clock())

    def close(self) -> None:
        self.channel.close(drain=1.0)
