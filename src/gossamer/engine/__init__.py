"""Gossip on a user's model and optimizer: flat buckets, lanes, the handle, virtual workers."""

from gossamer.comm import PeerError
from gossamer.engine.decentralize import decentralize, node_group
from gossamer.engine.gossip import Gossip
from gossamer.engine.policies import ConsensusGuard, NeighborGuard
from gossamer.engine.step_timer import probe
from gossamer.engine.virtual import VirtualCluster

__all__ = [
    "ConsensusGuard",
    "Gossip",
    "NeighborGuard",
    "PeerError",
    "VirtualCluster",
    "decentralize",
    "node_group",
    "probe",
]
