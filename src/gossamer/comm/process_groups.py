"""All that Gossamer takes from torch.distributed, in one place."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from gossamer.errors import InputError
from gossamer.topology import Layout

__all__ = ["DeviceMesh", "PrefixStore", "ProcessGroup", "ProcessGroupGloo", "Store"]


@dataclass(frozen=True)
class WorkerGroup:
    """The workers that gossip with each other, seen from one of them: `rank` is its number among `ranks`."""

    rank: int
    ranks: tuple[int, ...]  # their ranks in the default process group
    group: ProcessGroup | None  # None: the default process group

    @property
    def size(self) -> int:
        return len(self.ranks)


def worker_group(given: ProcessGroup | DeviceMesh | None) -> WorkerGroup:
    """The workers of a process group or of a one-dimensional mesh; of the default process group if there is none."""
    rank, size = rank_and_size()
    if given is None:
        return WorkerGroup(rank, tuple(range(size)), None)
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise InputError(
                f"process_group takes a one-dimensional DeviceMesh, got one of shape {tuple(given.shape)}; pass the "
                "dimension over which the model is replicated, such as mesh['dp']"
            )
        given = given.get_group()
    if isinstance(given, int):  # torch's GroupMember.NON_GROUP_MEMBER
        raise InputError(f"worker {rank} is not in the process group that it passed; every worker passes its own group")
    if not isinstance(given, ProcessGroup):
        raise InputError(f"process_group takes a ProcessGroup or a DeviceMesh, got {type(given).__name__}")
    ranks = tuple(dist.get_process_group_ranks(given))
    return WorkerGroup(ranks.index(rank), ranks, given)


StoreError = dist.DistError  # a store that cannot be reached any more, among others


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


def is_fully_sharded(model: torch.nn.Module) -> bool:
    """Whether FSDP2's `fully_shard` was applied to the model or to a part of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def sharded_ranks(parameter: Tensor) -> list[int]:
    """The ranks over which a DTensor is sharded."""
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    return [int(r) for r in mesh.mesh.flatten().tolist()]


_subgroups: dict[tuple[tuple[int, ...], ...], tuple[Any, Any]] = {}


def subgroup_of(members: tuple[tuple[int, ...], ...]) -> Any:
    """This worker's group of a partition of some workers into groups, such as the nodes. Made once per default process
    group. Collective among the workers of `members`."""
    world = dist.group.WORLD
    if members not in _subgroups or _subgroups[members][0] is not world:
        if sum(map(len, members)) == dist.get_world_size():
            made, _ = dist.new_subgroups_by_enumeration([list(m) for m in members])  # type: ignore[no-untyped-call]
        else:  # the others do not call this
            mine = next(m for m in members if dist.get_rank() in m)
            made = dist.new_group(list(mine), use_local_synchronization=True)
        _subgroups[members] = (world, made)
    return _subgroups[members][1]
