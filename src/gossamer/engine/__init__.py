"""Gossip on a user's model and optimizer: policies, flat buckets, lanes, the handle, virtual workers."""

from gossamer.comm import PeerError
from gossamer.comm.tcp import HostedDirectory
from gossamer.engine.decentralize import decentralize, node_group
from gossamer.engine.elastic.gossip import ElasticGossip
from gossamer.engine.gossip import Gossip
from gossamer.engine.outer import Accelerated, HeavyBall, Nesterov, SlowMo, outer_named
from gossamer.engine.policies import (
    ADPSGD,
    ATC,
    AWC,
    A2CiD2,
    ConsensusGuard,
    Continue,
    Exchange,
    NeighborGuard,
    algorithm,
)
from gossamer.engine.protocol import GossipHandle, MixedParameters, Participation
from gossamer.engine.virtual import VirtualCluster

__all__ = [
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
]
