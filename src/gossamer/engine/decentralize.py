"""`decentralize`: the one line instead of `DDP(model)`."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.comm import (
    GlooTransport,
    PrefixStore,
    RoundBarrier,
    TcpTransport,
    Transport,
    default_store,
    layout_of,
    node_name,
    rank_and_size,
    subgroup_of,
)
from gossamer.engine.build import Prepared, assemble, prepare
from gossamer.engine.consistency import agree, describe
from gossamer.engine.elastic.join import elastic_transport, enter
from gossamer.engine.first_batch import watch_first_batch
from gossamer.engine.flat import is_sharded
from gossamer.engine.gossip import Gossip
from gossamer.engine.policies import Filter, Guards, Settings
from gossamer.errors import GossamerError
from gossamer.topology import Layout
from gossamer.trace import TraceWriter

_calls = itertools.count()


def decentralize(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    topology: Any = "aer",
    algorithm: str = "awc",
    wire: str = "fp32",
    every: int = 1,
    staleness: int = 0,
    average_every: int = 0,
    parameters: Filter | None = None,
    bucket_mb: float | None = None,
    buffers: str = "average",
    timeout: float = 1800.0,
    trace: str | os.PathLike[str] | None = None,
    guard: Guards = None,
    stagger: bool = True,
    hierarchical: bool = True,
    in_flight: int = 4,
    rate: float = 1.0,
    max_staleness: int | None = None,
    gaps: str = "poisson",
    pairing: str = "auto",
    clock: str = "wall",
    seed: int = 0,
    broadcast: bool = True,
    on_failure: str = "raise",
    soft_deadline: float = 0.5,
    hard_deadline: float = 5.0,
) -> Gossip:
    """Train `model` by gossip: every worker averages its parameters with a few neighbors while it computes.

    The model stays yours: no wrapper, unchanged `state_dict` keys. Everything happens in `optimizer.step()`.

    Args:
        model: the module to train, on every worker; or one wrapped in DDP on `gossamer.node_group()`, or sharded by
            FSDP2 over the node: then gradients are exact inside a node and parameters gossip between nodes.
        optimizer: the torch optimizer of its parameters, or a list of several.
        topology: who averages with whom: a name (`gossamer topology list`), a `Topology`, a networkx graph, a weight
            matrix or a JSON file.
        algorithm: "awc" communicates while adapting (overlaps forward and backward); "atc" adapts, then combines.
            "ad-psgd" and "a2cid2" are asynchronous: every worker steps at its own pace and averages pairwise with its
            neighbors in the topology's union graph, the latter with a continuous momentum.
        wire: format between nodes: "fp32" (as it is), "bf16", "fp16", "int8". The mean is conserved for each.
        every: mix every k steps.
        staleness: how many steps may be taken without mixing while a late exchange is on its way.
        average_every: make the exchange an exact global average every k steps (0: never).
        parameters: `f(name, parameter) -> bool`: which parameters are mixed; the others stay local.
        bucket_mb: size of a bucket; chosen from model and topology when left out.
        buffers: what `averaged()` does to module buffers: "average" or "local".
        timeout: seconds before a wait for a peer gives up with an error that names it.
        trace: a directory for this worker's timeline (`gossamer trace` reads it).
        guard: `ConsensusGuard(...)`: sketch the consensus distance online and average exactly when it drifts.
            `NeighborGuard(...)`: do not mix in values that are not finite or that jump. Or a list of both.
        stagger: bucket b follows the schedule at phase k + b, which spreads the load on the network evenly.
        hierarchical: average groups that span nodes by way of the nodes' fast links.
        in_flight: how many buckets are exchanged at once.
        rate: asynchronous: exchanges a worker takes part in per gradient (below 1: local steps in between).
        max_staleness: asynchronous: how many steps a worker may be ahead of the slowest.
        gaps: asynchronous: "poisson" or "fixed" times between exchanges.
        pairing: asynchronous: "edges" one at a time, "rounds" a matching at a time, "auto": rounds if exchanges last.
        clock: asynchronous: "wall", or "virtual" (a gradient takes one unit: bit-reproducible).
        seed: asynchronous: of the shared event sequence.
        broadcast: start from worker 0's parameters and buffers; False when every worker loaded its own checkpoint.
        on_failure: "raise" ends the job with an error that names the dead peer; "continue" (on CPU) goes on with those
            who are left, and takes in replacements (docs/reliability.md).
        soft_deadline: with "continue": seconds a worker waits for a late neighbor in a step before it goes on without.
        hard_deadline: with "continue": seconds of silence after which a worker counts as dead.
    """
    survives = on_failure == "continue"
    rank, size = rank_and_size(survives)
    transport: Transport
    if survives:
        transport = elastic_transport(model, optimizer, rank, size, timeout, hard_deadline)
    else:
        store = PrefixStore(f"gossamer/{next(_calls)}", default_store())
        transport = _transport(model, store, rank, size, timeout)
    layout = layout_of(transport.share("node", node_name()))
    prepared: Prepared | None = None
    writer: TraceWriter | None = None
    cause: Exception | None = None
    try:
        settings = Settings(
            algorithm=algorithm,
            wire=wire,
            every=every,
            staleness=staleness,
            average_every=average_every,
            bucket_mb=bucket_mb,
            buffers=buffers,
            timeout=timeout,
            stagger=stagger,
            hierarchical=hierarchical,
            in_flight=in_flight,
            guard=guard,
            rate=rate,
            max_staleness=max_staleness,
            gaps=gaps,
            pairing=pairing,
            clock=clock,
            seed=seed,
            on_failure=on_failure,
            soft_deadline=soft_deadline,
            hard_deadline=hard_deadline,
        )
        prepared = prepare(model, optimizer, topology, settings, parameters, layout, rank)
        writer = _writer(trace, rank, layout)
        said = describe(prepared)
    except Exception as error:  # the others must hear of it, whatever it is
        said = {"error": str(error) if isinstance(error, GossamerError) else f"{type(error).__name__}: {error}"}
        cause = error
    if isinstance(transport, TcpTransport):
        return enter(prepared, transport, topology, json.dumps(said), cause, writer)
    agree(transport.share("description", json.dumps(said)), cause)
    assert prepared is not None
    if broadcast and size > 1:
        _broadcast(prepared, transport)
    catch_up = RoundBarrier(store, rank, size, timeout)
    meet: Any = catch_up.meet_events if settings.asynchronous and clock == "wall" else catch_up.meet
    gossip = assemble(prepared, transport, meet, catch_up.nudge, writer)
    if len(gossip.lanes) > 1 and size > 1:
        for lane in gossip.lanes:
            lane.assist = partial(catch_up.assist, gossip.lanes, lane.index)
    if size > 1:
        watch_first_batch(gossip, model, store, rank, size)
    return gossip


@torch.no_grad()
def _broadcast(prepared: Prepared, transport: Transport) -> None:
    values = starting_values(prepared)
    if prepared.schedule.ranks is None:
        transport.broadcast(values)
        return
    # Shards come from the worker of the first node that holds the same shard.
    count = len(values) - len(list(prepared.model.buffers()))
    transport.broadcast(values[:count], tuple(zip(*prepared.layout.members, strict=True)))
    transport.broadcast(values[count:])
    for flat in itertools.chain.from_iterable(prepared.flats):
        flat.unpack()


def starting_values(prepared: Prepared) -> list[Tensor]:
    """All that must be equal at the start: mixed parameters, frozen or local parameters, buffers."""
    flats = [f.buffer for f in itertools.chain.from_iterable(prepared.flats)]
    mixed = {id(p.parameter) for f in itertools.chain.from_iterable(prepared.flats) for p in f.places}
    others = [p.detach() for p in prepared.model.parameters() if id(p) not in mixed]
    rest = [p.to_local() if is_sharded(p) else p for p in others]  # type: ignore[attr-defined]
    return [*flats, *rest, *(b.detach() for b in prepared.model.buffers())]


def node_group() -> Any:
    """The process group of this worker's node, for DDP or FSDP2 inside it. Collective: call it on every worker."""
    rank, size = rank_and_size()
    store = PrefixStore(f"gossamer/node-group/{next(_calls)}", default_store())
    names = GlooTransport(store, rank, size, 300.0).share("node", node_name())
    return subgroup_of(layout_of(names).members)


def _transport(model: nn.Module, store: Any, rank: int, size: int, timeout: float) -> Transport:
    if any(p.device.type == "cuda" for p in model.parameters()):
        from gossamer.comm.nccl import NcclTransport

        return NcclTransport(store, rank, size, timeout)
    return GlooTransport(store, rank, size, timeout)


def _writer(trace: str | os.PathLike[str] | None, rank: int, layout: Layout) -> TraceWriter | None:
    if trace is None:
        return None
    return TraceWriter(Path(trace), rank, layout.node)
