"""Process groups and stores of torch.distributed, and joining the job that a launcher started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from gossamer.comm.deadline import LET_READ, Deadline
from gossamer.comm.launcher import launched_rank, layout_of, node_name, torn_node
from gossamer.comm.transport import PeerError
from gossamer.errors import InputError

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

    @property
    def name(self) -> str:
        """The group's name in torch, the same on all of its workers."""
        group = dist.group.WORLD if self.group is None else self.group
        assert group is not None
        return str(group.group_name)


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
    """This worker's rank and the number of workers, from the default process group.

    With `without_group`, the launcher's variables are used if there is no process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        if without_group:
            return launched_rank()
        raise InputError(
            "decentralize() needs a process group, and none is initialized; call "
            "torch.distributed.init_process_group() first, in a job that a launcher such as torchrun started"
        )
    return dist.get_rank(), dist.get_world_size()


def default_store() -> Store:
    """The store that the default process group was made with.

    torchrun's static rendezvous has one store for all its restarts, so every restart has keys of its own.
    """
    store = dist.distributed_c10d._get_default_store()
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return store if restarts == "0" else PrefixStore(f"gossamer/restart-{restarts}", store)


@lru_cache(maxsize=1)
def gloo_device() -> Any:
    """One device (socket listener and its loop) for all edges; GLOO_SOCKET_IFNAME chooses the interface."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return ProcessGroupGloo.create_device(interface=interface)
    return ProcessGroupGloo.create_default_device()


def broadcast_from_first(tensors: list[Tensor], group: Any = None) -> None:
    """Copy the values of the group's first worker to all; through the host where the group knows no such device."""
    for tensor in tensors:
        if tensor.numel():
            whole = tensor.contiguous() if tensor.device.type in averaged_devices(group) else tensor.cpu().contiguous()
            dist.broadcast(whole, group=group, group_src=0)
            if whole is not tensor:
                tensor.copy_(whole)


def ddp_process_group(model: torch.nn.Module) -> Any | None:
    """The process group of a model wrapped in torch's DDP, None for any other module."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return model.process_group
    return None


def ddp_inside(model: torch.nn.Module) -> tuple[str, list[int]] | None:
    """The name and the ranks of a DDP module that is inside `model` and is not `model` itself; None if there is none
    that averages over several workers."""
    for name, module in model.named_modules():
        if name and isinstance(module, torch.nn.parallel.DistributedDataParallel):
            ranks = group_ranks(module.process_group)
            if len(ranks) > 1:
                return name, ranks
    return None


def private_ddp(
    model: torch.nn.Module, parameters: Sequence[torch.nn.Parameter], group: ProcessGroup, *, broadcast: bool
) -> torch.nn.parallel.DistributedDataParallel:
    """torch's DDP of some parameters of `model`, which stays as it is, without a forward pass of its own.

    `broadcast` starts from the parameters of the group's first worker. Collective among the workers of `group`.
    """
    chosen = set(parameters)
    sparse = {m.weight: m for m in sparse_embeddings(model) if m.weight in chosen}
    holder = torch.nn.Module()  # has no buffers, so DDP broadcasts none
    holder.dense = torch.nn.ParameterList([p for p in parameters if p not in sparse])
    holder.sparse = torch.nn.ModuleList(sparse.values())
    return torch.nn.parallel.DistributedDataParallel(holder, process_group=group, init_sync=broadcast)


def sparse_embeddings(model: torch.nn.Module) -> list[torch.nn.Embedding | torch.nn.EmbeddingBag]:
    """The modules by which DDP recognizes parameters with sparse gradients."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return [m for m in model.modules() if isinstance(m, kinds) and m.sparse]


def averaged_devices(group: Any = None) -> set[str]:
    """The types of the devices, such as "cuda", whose tensors a process group (default: of all workers) can average."""
    return {entry.partition(":")[0] for entry in dist.get_backend_config(group).split(",")}


def gathered(value: Tensor, group: ProcessGroup) -> list[Tensor]:
    """`value` of every worker of `group`. Collective."""
    values = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(values, value, group=group)
    return values


def group_ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)


def is_fully_sharded(model: torch.nn.Module) -> bool:
    """Whether FSDP2's `fully_shard` was applied to the model or to a part of it."""
    from torch.distributed.fsdp import FSDPModule  # takes a second to import

    return any(isinstance(module, FSDPModule) for module in model.modules())


def hybrid_dimensions(parameter: Tensor) -> tuple[str, str] | None:
    """How users name the two dimensions of a mesh on which FSDP2 replicates and shards a parameter (HSDP), replicas
    first; None if FSDP2 does not replicate it."""
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    placements: Any = parameter.placements  # type: ignore[attr-defined]
    if mesh.ndim < 2 or not placements[0].is_replicate():
        return None
    names = mesh.mesh_dim_names or ("replicate", "shard")
    return str(names[0]), str(names[1])


def sharded_ranks(parameter: Tensor) -> list[int]:
    """The ranks over which a DTensor is sharded."""
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    return [int(r) for r in mesh.mesh.flatten().tolist()]


_subgroups: dict[tuple[tuple[tuple[int, ...], ...], timedelta | None], tuple[Any, Any]] = {}


def subgroup_of(members: tuple[tuple[int, ...], ...], timeout: timedelta | None = None) -> Any:
    """This worker's group of a partition of some workers into groups, such as the nodes, with torch's usual timeout or
    `timeout`. Made once per default process group. Collective among the workers of `members`."""
    world, key = dist.group.WORLD, (members, timeout)
    if key not in _subgroups or _subgroups[key][0] is not world:
        if sum(map(len, members)) == dist.get_world_size():
            every = [list(m) for m in members]
            made, _ = dist.new_subgroups_by_enumeration(every, timeout=timeout)  # type: ignore[no-untyped-call]
        else:  # the others do not call this
            mine = next(m for m in members if dist.get_rank() in m)
            made = dist.new_group(list(mine), timeout=timeout, use_local_synchronization=True)
        _subgroups[key] = (world, made)
    return _subgroups[key][1]


def share_texts(store: Store, workers: WorkerGroup, timeout: float, name: str, text: str) -> list[str]:
    """All workers' `text` for `name`, by rank. Collective."""
    store.set(f"{name}/{workers.rank}", text)
    keys = [f"{name}/{r}" for r in range(workers.size)]
    for rank, key in enumerate(keys):
        try:
            store.wait([key], timedelta(seconds=timeout))
        except Exception as error:
            raise PeerError(
                f"worker {rank} did not take part in sharing {name!r} within {timeout:g} s; check that every worker is "
                "alive and makes the same calls"
            ) from error
    texts = [store.get(key).decode() for key in keys]
    # The store may live in worker 0's process, which must not raise and leave before the others have read.
    read, deadline = f"{name}/read", Deadline(LET_READ)
    store.add(read, 1)
    while workers.rank == 0 and store.add(read, 0) < workers.size and deadline.sleep(0.002):
        pass
    return texts


# Joining the job that a launcher started, and leaving it.

_left: list[Any] = []  # process groups, kept until the process ends; see `_destroy`


def join_world(timeout: timedelta | None = None) -> tuple[int, int]:
    """Make the default process group from the launcher's environment. Return the rank and the number of workers.

    `timeout` limits the wait for the other workers; default: that of torch.
    """
    os.environ["RANK"], os.environ["WORLD_SIZE"] = map(str, launched_rank())
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(
            f"{' and '.join(missing)} must be set to the first worker's host and a free port there; export them in the "
            "job script, or start the job with torchrun"
        )
    if dist.is_initialized():  # left behind by a run that failed
        _destroy()
    dist.init_process_group("gloo", timeout=timeout)
    return dist.get_rank(), dist.get_world_size()


def leave_world() -> None:
    """Destroy the process groups once all workers have called this. Collective."""
    dist.barrier()
    _destroy()


def _destroy() -> None:
    """Destroy all groups, but keep their objects until the process ends.

    The last reference is usually dropped with the interpreter's lock held (by a DDP model, say), and the destructor
    waits for the group's threads. One of them may wait for that lock, to release a tensor or to return from a hook.
    """
    _left.extend(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()


def initialized() -> bool:
    """Whether the default process group exists."""
    return dist.is_available() and dist.is_initialized()


def wait_for_all() -> None:
    dist.barrier()


def largest(value: float) -> float:
    """The largest over all workers. Collective."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def said_by_first(text: str = "") -> str:
    """Worker 0's `text`, on every worker. Collective; may be called once per process group."""
    store = PrefixStore("gossamer/world", default_store())
    if dist.get_rank() == 0:
        store.set("first", text)
    return str(store.get("first").decode())


def workers_per_node() -> tuple[int, ...]:
    """The number of workers on each node, as the launcher placed them. Collective."""
    names = share_in_world("node", node_name())
    if (torn := torn_node(names)) is not None:
        raise InputError(f"the ranks of node {torn!r} are not consecutive; let the launcher place them by block")
    return layout_of(names).per_node


def share_in_world(name: str, text: str, timeout: float = 300.0) -> list[str]:
    """The `text` of all workers of the default process group, by rank. Collective; once per `name`."""
    return share_texts(PrefixStore("gossamer/world", default_store()), worker_group(None), timeout, name, text)


def available_backends() -> dict[str, bool]:
    """The process-group backends that this build of torch has, as `{"gloo": True, "nccl": False, ...}`."""
    if not dist.is_available():
        return dict.fromkeys(("gloo", "nccl", "mpi"), False)
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
