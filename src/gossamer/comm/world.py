"""Joining the job that a launcher started, and leaving it: torchrun, Slurm's srun, or Gossamer's own local workers."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from gossamer.comm.gloo import GlooTransport
from gossamer.comm.process_groups import PrefixStore, default_store, layout_of, node_name, worker_group
from gossamer.errors import InputError

_left: list[Any] = []  # process groups, until the process ends; see `leave_world`


def launched() -> bool:
    """Whether a launcher started this process as one of several workers."""
    torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return torchrun or int(os.environ.get("SLURM_STEP_NUM_TASKS", 0)) > 1


def join_world() -> tuple[int, int]:
    """Make the default process group from the launcher's environment; this worker's rank and how many there are."""
    if "RANK" not in os.environ:
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_STEP_NUM_TASKS"]
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(
            f"{' and '.join(missing)} must be set to the first worker's host and a free port there; export them in the "
            "job script, or start the job with torchrun"
        )
    if dist.is_initialized():  # left behind by a run that failed
        _destroy()
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def leave_world() -> None:
    """Leave, after all workers have come here."""
    dist.barrier()
    _destroy()


def _destroy() -> None:
    """Destroy all groups, but keep their objects until the process ends.

    The last reference is usually dropped with the interpreter's lock held (by a DDP model, say), and the destructor
    waits for the group's threads. One of them may wait for that lock, to release a tensor or to return from a hook.
    """
    _left.extend(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()


def wait_for_all() -> None:
    dist.barrier()


def largest(value: float) -> float:
    """The largest over all workers. Collective."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def said_by_first(text: str = "") -> str:
    """Worker 0's `text`, on every worker. Collective, once a process group."""
    store = PrefixStore("gossamer/world", default_store())
    if dist.get_rank() == 0:
        store.set("first", text)
    return str(store.get("first").decode())


def workers_per_node() -> tuple[int, ...]:
    """How many workers each node has, as the launcher placed them. Collective."""
    store = PrefixStore("gossamer/world", default_store())
    names = GlooTransport(store, worker_group(None), 300.0).share("node", node_name())
    for at, name in enumerate(names[1:], start=1):
        if name != names[at - 1] and name in names[:at]:
            raise InputError(f"the ranks of node {name!r} are not consecutive; let the launcher place them by block")
    return layout_of(names).per_node
