"""From a user's model, optimizers and arguments to the parts of a handle, on one worker."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn
from torch.optim import LBFGS, Optimizer

from gossamer.comm import (
    Transport,
    averaged_devices,
    ddp_inside,
    ddp_process_group,
    group_ranks,
    hybrid_dimensions,
    is_fully_sharded,
    sharded_ranks,
)
from gossamer.engine.asynchronous import AsyncLane
from gossamer.engine.coordinator import Coordinator
from gossamer.engine.flat import Bucket, Flat, cut, flatten, is_sharded, refuse_overlaps
from gossamer.engine.gossip import Gossip, refuse_in_use
from gossamer.engine.lane import Lane, LaneParts
from gossamer.engine.node_gradients import NodeGradients
from gossamer.engine.outer import problem
from gossamer.engine.policies import Exchange, Filter, Settings, Synchronous
from gossamer.engine.prepared import Prepared
from gossamer.engine.protocol import KnowsLocalParameters, ScalesWithReplicas
from gossamer.engine.synchronous import SyncLane
from gossamer.engine.unwrap import unwrapped
from gossamer.errors import GossamerWarning, InputError
from gossamer.topology import Layout, Topology, resolve
from gossamer.topology.schedule import Schedule
from gossamer.trace import TraceWriter

L = TypeVar("L", bound=Lane)


def prepare(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    topology: Any,
    settings: Settings,
    parameters: Filter | None,
    layout: Layout,
    rank: int,
    ranks: Sequence[int],
) -> Prepared:
    """Validate, choose the topology for what the workers hold, lay out the parameters. Local. `ranks` are the workers'
    ranks in the default process group."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"decentralize() takes a model and its optimizer, got {type(model).__name__} as the model; pass a module"
        )
    optimizers = [unwrapped(o) for o in (optimizer if isinstance(optimizer, Sequence) else [optimizer])]
    for o in optimizers:
        if not isinstance(o, Optimizer):
            raise InputError(f"decentralize() takes a torch optimizer or a list of them, got {type(o).__name__}")
        _refuse_unfit(o)
    if not optimizers:
        raise InputError("decentralize() needs at least one optimizer, got an empty list")
    schedule, bare = _schedule(model, topology, settings, layout, rank, ranks, whole=parameters is None)
    if isinstance(settings.algorithm, Synchronous):
        refuse_unstable(settings.algorithm, schedule)
    lanes = _lanes(bare, optimizers, parameters)
    refuse_in_use(bare)
    refuse_overlaps(bare.named_parameters())
    flats = [flatten(named) for named in lanes]
    mib = settings.exchange.bucket_mib
    size = None if mib is None else max(1, round(mib * 2**20))
    buckets = [cut(f, size, schedule.topology.period, schedule.fragments) for f in flats]
    if size is not None and rank == 0:
        _say_buckets(buckets, flats, settings.exchange, schedule.fragments)
    return Prepared(bare, optimizers, flats, buckets, schedule, settings, layout, rank)


def _say_buckets(buckets: list[list[Bucket]], flats: list[list[Flat]], exchange: Exchange, fragments: int) -> None:
    """Warn if there are other buckets than `bucket_mib` asks for, because every fragment needs equally many."""
    assert exchange.bucket_mib is not None
    size = exchange.bucket_mib * 2**20
    asked = sum(math.ceil(f.buffer.numel() * f.buffer.element_size() / size) for lane in flats for f in lane)
    made = sum(map(len, buckets))
    if fragments > 1 and made != asked:
        warnings.warn(
            f"bucket_mib={exchange.bucket_mib:g} would make {asked} bucket(s), but each of the {fragments} fragments "
            f"needs equally many, so the model is cut into {made}; leave bucket_mib out to have it chosen",
            GossamerWarning,
            stacklevel=5,
        )


def refuse_unstable(policy: Synchronous, schedule: Schedule) -> None:
    """Refuse an outer step whose momentum would drive the workers of the schedule apart."""
    if policy.outer is not None and (why := problem(policy.outer, schedule)) is not None:
        raise InputError(why)


def _refuse_unfit(optimizer: Optimizer) -> None:
    """Refuse optimizers whose result would be wrong with gossip."""
    names = [c.__name__ for c in type(optimizer).__mro__]
    name = names[0]
    if isinstance(optimizer, LBFGS):
        raise InputError(
            "LBFGS evaluates its closure several times per step and cannot be mixed; use another optimizer"
        )
    if "ZeroRedundancyOptimizer" in names:
        raise InputError(
            "ZeroRedundancyOptimizer updates a shard of the parameters on every worker and broadcasts it, but gossip "
            "workers hold different parameters; pass a plain torch optimizer, or shard the model inside the node by "
            "FSDP2"
        )
    if any("ScheduleFree" in n for n in names):
        raise InputError(
            f"{name} keeps the sequence that it optimizes in its state, where gossip does not average it, so the "
            "workers would drift apart; use an optimizer with a learning-rate schedule"
        )
    if hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"):
        raise InputError(
            f"{name} (sharpness-aware minimization) steps by first_step() and second_step(), which run no step hooks, "
            "so nothing would be exchanged; pass its base_optimizer to decentralize(), with algorithm='atc', which has "
            "no exchange in flight while the parameters are perturbed"
        )


def _schedule(
    model: nn.Module,
    topology: Any,
    settings: Settings,
    layout: Layout,
    rank: int,
    ranks: Sequence[int],
    *,
    whole: bool,
) -> tuple[Schedule, nn.Module]:
    """The topology over workers; or over nodes when a node's workers hold one replica (`gradients="node"`, or DDP) or
    its shards (FSDP2)."""
    policy: dict[str, Any] = {
        "stagger": settings.exchange.stagger,
        "hierarchical": settings.exchange.hierarchical,
    }
    if isinstance(settings.algorithm, Synchronous):
        policy["average_every"] = settings.algorithm.average_every // settings.algorithm.every
        policy["fragments"] = settings.algorithm.fragments
    _refuse_ddp_inside(model)
    group = ddp_process_group(model)
    sharded = [p for p in model.parameters() if is_sharded(p)]
    if group is None and not sharded:
        between = _between_nodes(model, topology, settings, layout, whole)
        if between is None:
            return Schedule(resolve(topology, layout), **policy), model
        return Schedule(between, inside=layout, **policy), model
    meshes = [group_ranks(group)] if group is not None else [sharded_ranks(p) for p in sharded]
    spread = max(meshes, key=lambda mesh: len(set(mesh) & set(ranks)))
    shared = sorted(ranks.index(r) for r in spread if r in ranks)
    fully = group is None and is_fully_sharded(model)
    if group is None and shared == [rank] and not (fully and len(spread) == 1):  # beside gossip: shards match
        if settings.gradients == "node" and layout.nodes < layout.n:
            raise InputError(
                "gradients='node' cannot average the gradients of DTensors, and the parameters are sharded over "
                f"workers {sorted(spread)}; use gradients='worker'"
            )
        return Schedule(resolve(topology, layout), **policy), model
    if group is None and not fully:
        raise InputError(
            f"the parameters are DTensors over workers {sorted(spread)}, which would gossip with each other; pass the "
            "workers that hold equal shards as process_group=, such as the data-parallel dimension of the mesh"
        )
    if settings.elastic is not None:
        raise InputError(
            "on_failure='continue' needs every worker to have a replica of its own, but the model is wrapped in DDP or "
            "sharded by FSDP2, which do not survive a dead worker; pass the bare model, or use on_failure='raise'"
        )
    if settings.asynchronous:
        raise InputError(
            f"algorithm {settings.algorithm.name!r} needs every worker to have a replica of its own, but the model is "
            "wrapped in DDP or sharded by FSDP2; use algorithm='awc'"
        )
    mine = list(layout.members[layout.node[rank]])
    hybrid = hybrid_dimensions(sharded[0]) if fully else None
    if hybrid is not None and shared != mine:
        outer, inner = hybrid
        raise InputError(
            f"FSDP2 shards the model over the dimension {inner!r} of its mesh and averages gradients over the "
            f"dimension {outer!r} in every step (HSDP), so nothing is left to gossip; gossip over {outer!r} instead: "
            f"fully_shard(model, mesh=mesh[{inner!r}]) and decentralize(..., process_group=mesh[{outer!r}])"
        )
    kind = "wrapped in DDP" if group is not None else "sharded by FSDP2"
    if shared != mine or len(spread) != len(shared):
        raise InputError(
            f"the model is {kind} over workers {sorted(spread)}, but this node's workers are {mine}; use "
            "gossamer.node_group() so that gradients are averaged inside the node and parameters gossip between nodes"
        )
    if settings.gradients == "worker" and len(mine) > 1:
        raise InputError(
            f"gradients='worker' lets every worker step on its own gradient, but the model is {kind}, which averages "
            "gradients inside the node; pass the bare model, or use gradients='node'"
        )
    between = resolve(topology, Layout.of([1] * layout.nodes))
    if group is not None:
        assert isinstance(model.module, nn.Module)
        return Schedule(between, inside=layout, **policy), model.module
    if len(set(layout.per_node)) != 1:
        raise InputError(
            f"FSDP2 needs the same number of workers on every node, got {list(layout.per_node)}: shards must match"
        )
    if len(sharded) != len(list(model.parameters())):
        raise InputError("some parameters are sharded by FSDP2 and some are not; apply fully_shard to the whole model")
    place = mine.index(rank)
    return Schedule(between, ranks=tuple(m[place] for m in layout.members), **policy), model


def _refuse_ddp_inside(model: nn.Module) -> None:
    found = ddp_inside(model)
    if found is not None:
        name, ranks = found
        raise InputError(
            f"the model contains DistributedDataParallel at {name!r}, which averages the gradients of workers {ranks}, "
            "so they would hold equal models; pass the bare model before a framework wraps it (Fabric, Lightning: a "
            "strategy other than 'ddp'), or, with gossamer.node_group() as its process group, the "
            "DistributedDataParallel module itself"
        )


def _between_nodes(model: nn.Module, topology: Any, settings: Settings, layout: Layout, whole: bool) -> Topology | None:
    """The topology over nodes, if the gradients of a model without DDP or FSDP2 are averaged inside each node; None if
    every worker steps on its own. `gradients="auto"` is decided here: not if the user selects parameters to mix (the
    model is not mixed as a `whole`), because the others are to stay local."""
    if settings.gradients == "worker" or layout.nodes == layout.n:  # a single worker's gradient is its node's
        return None
    if settings.gradients == "node":
        return resolve(topology, Layout.of([1] * layout.nodes))
    between = auto_between_nodes(topology, settings, layout)
    if between is None or not whole:
        return None
    devices = {p.device.type for p in model.parameters()}
    return between if len(devices) < 2 and devices <= averaged_devices() else None  # else DDP would refuse the model


def auto_between_nodes(topology: Any, settings: Settings, layout: Layout) -> Topology | None:
    """The topology over nodes, if `gradients="auto"` averages the gradients of any model inside each node.

    It does on several equal nodes of several workers, in synchronous jobs whose workers are fixed, with a topology that
    fits the nodes; else None.
    """
    several = layout.nodes > 1 and layout.per_node[0] > 1 and len(set(layout.per_node)) == 1
    if not several or settings.elastic is not None or settings.asynchronous:
        return None
    try:
        return resolve(topology, Layout.of([1] * layout.nodes))
    except InputError:  # a topology of a given size, over workers
        return None


def _lanes(
    model: nn.Module, optimizers: Sequence[Optimizer], parameters: Filter | None
) -> list[list[tuple[str, nn.Parameter]]]:
    """Each optimizer's mixed parameters with their names, in the optimizer's order."""
    names = {p: name for name, p in model.named_parameters()}  # a tied weight has one object and its first name
    held: dict[nn.Parameter, int] = {}
    lanes = []
    for index, optimizer in enumerate(optimizers):
        named = []
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p not in names:
                    raise InputError(
                        f"optimizer {index} ({type(optimizer).__name__}) holds a parameter of shape {tuple(p.shape)} "
                        "that is not the model's; pass the model whose parameters the optimizer was made from"
                    )
                if p in held:
                    raise InputError(
                        f"parameter {names[p]!r} is held by optimizers {held[p]} and {index}; give it to one"
                    )
                held[p] = index
                if p.requires_grad and (parameters is None or parameters(names[p], p)):
                    named.append((names[p], p))
        if not named:
            raise InputError(
                f"optimizer {index} ({type(optimizer).__name__}) has no parameter to mix; check parameters= and "
                "requires_grad"
            )
        lanes.append(named)
    return lanes


def open_lanes(
    prepared: Prepared,
    kind: Callable[[LaneParts], L],
    transport: Transport,
    coordinator: Coordinator,
    writer: TraceWriter | None,
) -> list[L]:
    """Open one lane per optimizer, attach its hooks, and tell the optimizer what is replicated how often."""
    p = prepared
    lanes: list[L] = []
    for index, optimizer in enumerate(p.optimizers):
        if isinstance(optimizer, ScalesWithReplicas):
            optimizer.set_replicas(p.schedule.topology.n)
        if isinstance(optimizer, KnowsLocalParameters):
            mixed = {place.parameter for flat in p.flats[index] for place in flat.places}
            held = (q for group in optimizer.param_groups for q in group["params"])
            optimizer.set_local_parameters([q for q in held if q not in mixed])
        parts = LaneParts(
            index=index,
            rank=p.rank,
            optimizer=optimizer,
            flats=p.flats[index],
            buckets=p.buckets[index],
            schedule=p.schedule,
            settings=p.settings,
            layout=p.layout,
            transport=transport,
            coordinator=coordinator,
            writer=writer,
            siblings=lanes,
            common=p.common,
            shard=p.shard,
            beside=p.beside,
        )
        lanes.append(kind(parts))
    return lanes


def open_gossip(
    prepared: Prepared,
    transport: Transport,
    coordinator: Coordinator,
    writer: TraceWriter | None = None,
    inside: Sequence[NodeGradients] = (),
) -> Gossip:
    """Open the lanes and the handle of a job whose workers are fixed. `inside`: gradients averaged inside the node."""
    p = prepared
    kind = AsyncLane if p.settings.asynchronous else SyncLane
    lanes = open_lanes(p, kind, transport, coordinator, writer)
    return Gossip(p, lanes, transport, coordinator, writer, inside)
