"""All that Gossamer takes from torch.distributed, in one place."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from gossamer.errors import InputError
from gossamer.topology import Layout

__all__ = ["PrefixStore", "ProcessGroupGloo", "Store"]


def rank_and_size(without_group: bool = False) -> tuple[int, int]:
    """This worker's rank and how many there are, from the default process group.

    `without_group`: RANK and WORLD_SIZE in the environment will do.
    """
    if not dist.is_available() or not dist.is_initialized():
        if without_group:
            return _from_environment()
        raise InputError(
            "decentralize() needs a process group, and none is initialized; call "
            "torch.distributed.init_process_group() first, in a job started by torchrun or Slurm"
        )
    return dist.get_rank(), dist.get_world_size()


def _from_environment() -> tuple[int, int]:
    names = ("RANK", "WORLD_SIZE") if "RANK" in os.environ else ("SLURM_PROCID", "SLURM_NTASKS")
    texts = [os.environ.get(name, "") for name in names]
    if not all(text.isdigit() for text in texts) or int(texts[0]) >= int(texts[1]):
        raise InputError(
            f"{names[0]} and {names[1]} must be set to this worker's number and how many there are, got "
            f"{texts[0]!r} and {texts[1]!r}; start the job with a launcher, or set them"
        )
    return int(texts[0]), int(texts[1])


def default_store() -> Store:
    """The store that the default process group was made with."""
    return dist.distributed_c10d._get_default_store()


@lru_cache(maxsize=1)
def gloo_device() -> Any:
    """One device (socket listener and its loop) for all edges; GLOO_SOCKET_IFNAME chooses the interface."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return ProcessGroupGloo.create_device(interface=interface)
    return ProcessGroupGloo.create_default_device()


def broadcast_from_first(tensors: list[Tensor], group: Any = None) -> None:
    for tensor in tensors:
        if tensor.numel():
            whole = tensor.contiguous()
            dist.broadcast(whole, group=group, group_src=0)
            if whole is not tensor:
                tensor.copy_(whole)


def node_name() -> str:
    """What tells this worker's node from others: the launcher's node rank, else the host's name."""
    for variable in ("GOSSAMER_NODE", "GROUP_RANK", "SLURM_NODEID"):
        if os.environ.get(variable, "") != "":
            return f"{variable}={os.environ[variable]}"
    return f"host={socket.gethostname()}"


def layout_of(names: Sequence[str]) -> Layout:
    """Workers with the same node name share a node; nodes are numbered by their first worker."""
    order = {name: at for at, name in enumerate(dict.fromkeys(names))}
    return Layout(tuple(order[name] for name in names))


def ddp_process_group(model: torch.nn.Module) -> Any | None:
    """The process group of a model wrapped in torch's DDP, None for any other module."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return model.process_group
    return None


def group_ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)


def sharded_ranks(parameter: Tensor) -> list[int]:
    """The ranks over which a DTensor is sharded."""
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    return [int(r) for r in mesh.mesh.flatten().tolist()]


_subgroups: dict[tuple[tuple[int, ...], ...], tuple[Any, Any]] = {}


def subgroup_of(members: tuple[tuple[int, ...], ...]) -> Any:
    """This worker's group of a partition into groups, such as the nodes; made once a process group, collectively."""
    world = dist.group.WORLD
    if members not in _subgroups or _subgroups[members][0] is not world:
        mine, _ = dist.new_subgroups_by_enumeration([list(m) for m in members])  # type: ignore[no-untyped-call]
        _subgroups[members] = (world, mine)
    return _subgroups[members][1]
