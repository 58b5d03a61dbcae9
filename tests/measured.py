"""GossipAdam as `decentralize` sets it in a static job, where the signal is measured between the workers."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

from gossamer.optim import GossipAdam

MIXED = (0.3, None, 0.0, 1.0)


def measured(cls: type[GossipAdam], *args: Any, shares: Sequence[float | None] = MIXED, **settings: Any) -> GossipAdam:
    """An optimizer whose parameters have these shares of the signal in turn; None is one that is not yet known."""
    optimizer = cls(*args, **settings)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.set_signal_shares(dict(zip(params, cycle(shares), strict=False)))
    return optimizer
