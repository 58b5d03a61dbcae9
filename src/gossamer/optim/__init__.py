"""Optimizers for gossip and for small local batches: plain `torch.optim.Optimizer` subclasses."""

from gossamer.optim.accum_adam import AccumAdam, AccumAdamW
from gossamer.optim.gossip_adam import GossipAdam, GossipAdamW

__all__ = ["AccumAdam", "AccumAdamW", "GossipAdam", "GossipAdamW"]
