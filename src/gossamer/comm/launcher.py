"""What a launcher tells a worker by environment variables: its rank, the number of workers, and its node."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.errors import InputError
from gossamer.topology import Layout

# A node's number as launchers count it: torchrun, Ray Train, Slurm. Open MPI's OMPI_COMM_WORLD_NODE_RANK is no such
# number: it counts the processes on one node.
NODE_VARIABLES = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")


@dataclass(frozen=True)
class Launcher:
    """The variables in which a launcher passes a worker's rank and the number of workers."""

    name: str
    rank: str
    size: str


# The first launcher whose rank is set counts. Slurm is the last: mpirun in a Slurm job starts its daemons with srun, so
# its workers inherit Slurm's numbers of those daemons. A batch script has SLURM_PROCID but is no step, so it has no
# SLURM_STEP_NUM_TASKS.
LAUNCHERS = (
    Launcher("torch", "RANK", "WORLD_SIZE"),
    Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    Launcher("MPICH", "PMI_RANK", "PMI_SIZE"),
    Launcher("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


def find_launcher() -> Launcher | None:
    """Return the launcher that started this process, or None if no launcher has set a rank."""
    return next((each for each in LAUNCHERS if os.environ.get(each.rank, "") != ""), None)


def launched() -> bool:
    """Whether a launcher started this process as one of several workers (as any number, if RANK is set)."""
    found = find_launcher()
    if found is None:
        return False
    size = os.environ.get(found.size, "")
    return size != "" if found.rank == "RANK" else size.isdigit() and int(size) > 1


def launched_rank() -> tuple[int, int]:
    """This worker's rank and the number of workers, from the launcher's variables."""
    found = find_launcher()
    if found is None:
        pairs = ", or ".join(f"{each.rank} and {each.size}" for each in LAUNCHERS)
        raise InputError(
            f"no launcher has set this process's rank: none of {pairs} is set; start the job with a launcher, or "
            "set RANK and WORLD_SIZE to this worker's number and to how many workers there are"
        )
    rank, size = os.environ[found.rank], os.environ.get(found.size, "")
    if not (rank.isdigit() and size.isdigit() and int(rank) < int(size)):
        raise InputError(
            f"{found.rank} and {found.size} must be set to this worker's number and to how many workers there are, got "
            f"{rank!r} and {size!r}; start the job with a launcher, or set them"
        )
    return int(rank), int(size)


def node_name() -> str:
    """A name that the workers of a node have in common: GOSSAMER_NODE, or the launcher's node number and the host.

    Both are needed: with one Slurm step per node every node has number 0, and nodes that a test emulates share a host.
    """
    if given := os.environ.get("GOSSAMER_NODE", ""):
        return f"GOSSAMER_NODE={given}"
    host = socket.gethostname()
    for variable in NODE_VARIABLES:
        if os.environ.get(variable, "") != "":
            return f"{variable}={os.environ[variable]} on {host}"
    return f"host {host}"


def layout_of(names: Sequence[str]) -> Layout:
    """The layout in which workers with the same node name share a node. Nodes are numbered by their first worker."""
    order = {name: at for at, name in enumerate(dict.fromkeys(names))}
    return Layout(tuple(order[name] for name in names))


def torn_node(names: Sequence[str]) -> str | None:
    """The first node whose ranks are not consecutive; None if there is none."""
    return next((name for at, name in enumerate(names) if name in names[:at] and name != names[at - 1]), None)


def inside_ray_train() -> bool:
    """Whether this process is a worker of Ray Train, which has imported `ray.train` then."""
    train = sys.modules.get("ray.train")
    if train is None:
        return False
    try:
        return train.get_context().get_world_size() is not None
    except (RuntimeError, DeprecationWarning):  # outside of a training function, or in one of Ray Tune
        return False
