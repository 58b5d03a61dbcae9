"""Topologies: who averages with whom in every round. Pure: no torch, no process group."""

from gossamer.topology import families, finite_time  # registers the named topologies, in the order of the list
from gossamer.topology.core import Layout, Round, Topology
from gossamer.topology.registry import build, entries, register

__all__ = ["Layout", "Round", "Topology", "build", "entries", "families", "finite_time", "register"]
