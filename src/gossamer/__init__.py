"""Gossamer: decentralized (gossip) data-parallel training for PyTorch."""

from gossamer.errors import GossamerError, GossamerWarning, InputError

__version__ = "0.1.0"
__all__ = ["GossamerError", "GossamerWarning", "InputError", "__version__"]
