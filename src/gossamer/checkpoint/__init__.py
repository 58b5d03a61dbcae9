"""Checkpoints of all workers: plain files and a manifest, complete or invisible."""

from gossamer.checkpoint.export import consensus
from gossamer.checkpoint.store import Checkpoints, Loaded

__all__ = ["Checkpoints", "Loaded", "consensus"]
