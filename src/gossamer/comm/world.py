"""Joining the job that a launcher started: torchrun, Slurm's srun, or Gossamer's own local workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from gossamer.comm.dist import node_name
from gossamer.errors import InputError


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
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def leave_world() -> None:
    dist.destroy_process_group()


def wait_for_all() -> None:
    dist.barrier()


def workers_per_node() -> tuple[int, ...]:
    """How many workers each node has, as the launcher placed them. Collective."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, node_name())
    counts: dict[str, int] = {}
    for at, name in enumerate(names):
        if name in counts and names[at - 1] != name:
            raise InputError(f"the ranks of node {name!r} are not consecutive; let the launcher place them by block")
        counts[name] = counts.get(name, 0) + 1
    return tuple(counts.values())


def ddp_hook(wire: str) -> Callable[..., Any] | None:
    """Torch's communication hook that makes DDP send gradients as `wire`; None for fp32."""
    hooks = {"fp32": None, "bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
    return hooks[wire]
