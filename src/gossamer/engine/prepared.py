"""A worker before anything was sent: what `prepare` makes, workers compare, and a handle is built of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from gossamer.engine.flat import Bucket, Flat
from gossamer.engine.policies import Settings
from gossamer.topology import Layout
from gossamer.topology.schedule import Schedule


@dataclass
class Prepared:
    """A worker ready to be compared with the others: nothing has been sent yet, no hook is in place."""

    model: nn.Module  # without a DDP wrapper
    optimizers: list[Optimizer]
    flats: list[list[Flat]]
    buckets: list[list[Bucket]]
    schedule: Schedule
    settings: Settings
    layout: Layout
    rank: int
    common: bool = True  # all workers start from the parameters of the first one
    beside: bool = False  # the workers are one dimension of a job: others may hold other parts of the same replica

    @property
    def sharded(self) -> bool:
        """Whether a worker holds a shard of its node's replica (FSDP2), so that equal shards gossip between nodes."""
        return self.schedule.ranks is not None

    @property
    def gradients(self) -> Literal["node", "worker"]:
        """Among whom gradients are averaged before a step: the workers of a node, or nobody."""
        return "node" if self.sharded or self.schedule.inside is not None else "worker"

    @property
    def shard(self) -> tuple[int, int]:
        """(i, m): this worker holds shard i of m of its node's replica; (0, 1): all of it."""
        if not self.sharded:
            return 0, 1
        return self.layout.members[self.layout.node[self.rank]].index(self.rank), self.layout.per_node[0]
