"""Topologies: which workers average with which in every round. Needs neither torch nor a process group."""

from gossamer.topology import families, finite_time  # registers the named topologies, in the order of the list
from gossamer.topology.analysis import Analysis, analyze
from gossamer.topology.core import Layout, Round, Topology
from gossamer.topology.custom import from_graph, from_matrix
from gossamer.topology.registry import build, entries, register
from gossamer.topology.resolve import TopologyLike, from_dict, from_json, resolve, to_dict, to_json

__all__ = [
    "Analysis",
    "Layout",
    "Round",
    "Topology",
    "TopologyLike",
    "analyze",
    "build",
    "entries",
    "families",
    "finite_time",
    "from_dict",
    "from_graph",
    "from_json",
    "from_matrix",
    "register",
    "resolve",
    "to_dict",
    "to_json",
]
