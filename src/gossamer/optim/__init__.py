"""Optimizers for small local batches: plain `torch.optim.Optimizer` subclasses."""

from gossamer.optim.accum_adam import AccumAdam
from gossamer.optim.accum_adamw import AccumAdamW

__all__ = ["AccumAdam", "AccumAdamW"]
