"""Gossamer: decentralized (gossip) data-parallel training for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gossamer.errors import GossamerError, GossamerWarning, InputError

if TYPE_CHECKING:
    from gossamer.checkpoint import Checkpoints
    from gossamer.engine import (
        ADPSGD,
        ATC,
        AWC,
        A2CiD2,
        Accelerated,
        ConsensusGuard,
        Continue,
        ElasticGossip,
        Exchange,
        Gossip,
        GossipHandle,
        HeavyBall,
        HostedDirectory,
        MixedParameters,
        NeighborGuard,
        Nesterov,
        Participation,
        PeerError,
        SlowMo,
        VirtualCluster,
        algorithm,
        decentralize,
        node_group,
        outer_named,
    )
    from gossamer.jobs.probe import probe
    from gossamer.optim import AccumAdam, AccumAdamW, GossipAdam, GossipAdamW
    from gossamer.topology import Layout, Topology

__version__ = "0.1.0"

# Imported when first used: topologies and predictions work on a machine without torch.
_HOMES = {
    "gossamer.checkpoint": ("Checkpoints",),
    "gossamer.engine": (
        "ADPSGD",
        "ATC",
        "AWC",
        "A2CiD2",
        "Accelerated",
        "ConsensusGuard",
        "Continue",
        "ElasticGossip",
        "Exchange",
        "Gossip",
        "GossipHandle",
        "HeavyBall",
        "HostedDirectory",
        "MixedParameters",
        "NeighborGuard",
        "Nesterov",
        "Participation",
        "PeerError",
        "SlowMo",
        "VirtualCluster",
        "algorithm",
        "decentralize",
        "node_group",
        "outer_named",
    ),
    "gossamer.jobs.probe": ("probe",),
    "gossamer.optim": ("AccumAdam", "AccumAdamW", "GossipAdam", "GossipAdamW"),
    "gossamer.topology": ("Layout", "Topology"),
}

__all__ = [
    "ADPSGD",
    "ATC",
    "AWC",
    "A2CiD2",
    "Accelerated",
    "AccumAdam",
    "AccumAdamW",
    "Checkpoints",
    "ConsensusGuard",
    "Continue",
    "ElasticGossip",
    "Exchange",
    "GossamerError",
    "GossamerWarning",
    "Gossip",
    "GossipAdam",
    "GossipAdamW",
    "GossipHandle",
    "HeavyBall",
    "HostedDirectory",
    "InputError",
    "Layout",
    "MixedParameters",
    "NeighborGuard",
    "Nesterov",
    "Participation",
    "PeerError",
    "SlowMo",
    "Topology",
    "VirtualCluster",
    "__version__",
    "algorithm",
    "decentralize",
    "node_group",
    "outer_named",
    "probe",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'gossamer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
