"""Topologies: who averages with whom in every round. Pure: no torch, no process group."""

from gossamer.topology.core import Layout, Round, Topology
from gossamer.topology.registry import build, entries, register

__all__ = ["Layout", "Round", "Topology", "build", "entries", "register"]
