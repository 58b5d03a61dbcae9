"""Optimizers as frameworks hand them out: the torch optimizer inside a wrapper, without importing the framework."""

from __future__ import annotations

from typing import Any

# Wrappers of Accelerate, Lightning and Fabric. Their step() ends in a step() of the torch optimizer in `.optimizer`,
# which runs that optimizer's hooks; hooks on the wrapper itself would not run, or would run where no step is taken.
WRAPPERS = {"AcceleratedOptimizer", "LightningOptimizer", "_FabricOptimizer"}


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside a framework's wrapper, or `optimizer` itself if there is none."""
    while WRAPPERS & {kind.__name__ for kind in type(optimizer).__mro__}:
        optimizer = optimizer.optimizer
    return optimizer
