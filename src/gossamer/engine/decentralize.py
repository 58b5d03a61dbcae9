"""`decentralize`: the one line instead of `DDP(model)`."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.comm import (
    Accelerator,
    DeviceMesh,
    GlooTransport,
    PrefixStore,
    ProcessGroup,
    Rendezvous,
    RoundBarrier,
    Transport,
    WorkerGroup,
    accelerator_of,
    choose_transport,
    ddp_process_group,
    default_store,
    inside_ray_train,
    layout_of,
    node_name,
    rank_and_size,
    share_texts,
    subgroup_of,
    wire_named,
    worker_group,
)
from gossamer.engine.auto_topology import asks, choose_topology, refuse_elastic
from gossamer.engine.build import open_gossip, open_lanes, prepare
from gossamer.engine.consistency import agree, describe
from gossamer.engine.coordinator import StaticCoordinator
from gossamer.engine.elastic import ElasticAsyncLane, ElasticCoordinator, ElasticGossip, ElasticLane
from gossamer.engine.elastic.member_lane import MemberLane
from gossamer.engine.first_step import watch_first_step
from gossamer.engine.flat import is_sharded, longest_message
from gossamer.engine.gossip import Gossip
from gossamer.engine.node_gradients import NodeGradients, PrivateDDP, node_gradients
from gossamer.engine.node_progress import NodeProgress
from gossamer.engine.policies import (
    Algorithm,
    AlgorithmName,
    Asynchronous,
    Buffers,
    Continue,
    Exchange,
    Filter,
    Gradients,
    Guards,
    Seconds,
    Settings,
    Synchronous,
    WireName,
)
from gossamer.engine.prepared import Prepared
from gossamer.errors import GossamerError, GossamerWarning, InputError
from gossamer.topology import Layout, TopologyLike
from gossamer.trace import TraceWriter

DEFAULT_TIMEOUT = timedelta(minutes=30)
_calls: Counter[tuple[int, ...]] = Counter()  # of `decentralize`, by the ranks that gossip


def decentralize(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    topology: TopologyLike = "aer",
    algorithm: AlgorithmName | Algorithm = "awc",
    wire: WireName = "fp32",
    process_group: ProcessGroup | DeviceMesh | None = None,
    on_failure: Literal["raise", "continue"] | Continue = "raise",
    exchange: Exchange | None = None,
    parameters: Filter | None = None,
    buffers: Buffers = "average",
    gradients: Gradients = "auto",
    guard: Guards = None,
    broadcast: bool = True,
    timeout: Seconds = DEFAULT_TIMEOUT,
    trace: str | os.PathLike[str] | None = None,
) -> Gossip:
    """Train `model` by gossip: every worker averages its parameters with a few neighbors while it computes.

    The model stays yours: no wrapper, unchanged `state_dict` keys. All communication happens in `optimizer.step()`.

    Args:
        model: The module to train, on every worker; it may be sharded by FSDP2 over the node.
        optimizer: The torch optimizer of its parameters, or a list of several. A wrapper of Accelerate, Lightning or
            Fabric stands for the optimizer inside it.
        topology: Which workers average in which round: a name (`gossamer topology list`), a `Topology`, a networkx
            graph, a weight matrix or a JSON file. "auto" measures the links for some seconds and chooses as `gossamer
            advise` would; "auto:cluster.toml" takes them from a file, which is written if it does not exist.
        algorithm: "awc" communicates while adapting and overlaps forward and backward; "atc" adapts, then combines.
            "ad-psgd" and "a2cid2" are asynchronous: every worker steps at its own pace. Pass a policy to change its
            settings: `AWC(staleness=1)`, `ATC(every=2)`, `ADPSGD(rate=2)`, `A2CiD2(max_staleness=8)`.
        wire: Format of parameters between nodes: "fp32" (unchanged), "bf16", "fp16", "int8" or "int4". Every wire
            conserves the mean of the workers. "int8" and "int4" are relative to the last exact average: use them with
            `average_every`.
        process_group: The workers that gossip: a process group, or a one-dimensional `DeviceMesh` such as the
            data-parallel dimension beside tensor parallelism. Default: all workers.
        on_failure: "raise" ends the job with an error that names the dead peer. "continue", or `Continue(...)` to set
            its deadlines, makes the job elastic: it continues without dead workers and admits replacements.
        exchange: Bucket size, buckets in flight, transport, and other settings of the exchange; see `Exchange`.
        parameters: `f(name, parameter) -> bool` selects the parameters to mix; the others stay local.
        buffers: What `averaged()` does with module buffers: "average" or "local".
        gradients: "worker": every worker steps on its own gradient. "node": gradients are averaged exactly among the
            workers of a node, inside the backward pass, and parameters gossip between nodes. "auto" is "node" on two or
            more nodes with the same number of workers, at least two, if `algorithm` is synchronous, `on_failure` is
            "raise" and `parameters` is None, and for a model that is wrapped in DDP on `gossamer.node_group()` or
            sharded by FSDP2 over the node; else "worker". `gossip.gradients` says what was chosen.
        guard: `ConsensusGuard(...)` averages exactly when the workers drift apart; `NeighborGuard(...)` refuses values
            that are not finite or that jump. Or a list of both.
        broadcast: Start from worker 0's parameters and buffers. Pass False if every worker loaded its own checkpoint.
        timeout: How long a wait for a peer may take before it raises an error that names the peer.
        trace: A directory for this worker's timeline, which `gossamer trace` reads.

    Returns:
        A `Gossip` handle (`ElasticGossip` for an elastic job): `averaged()`, `consensus_distance()`, `state_dict()`,
        `stats()`, `close()`.

    Example::

        gossip = gossamer.decentralize(model, optimizer, topology="aer", wire="bf16")
        for batch in loader:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        with gossip.averaged():
            evaluate(model)
        gossip.close()
    """
    worker = _Worker(model, optimizer, topology, parameters, trace)
    try:
        worker.settings = Settings.of(
            algorithm=algorithm,
            wire=wire,
            exchange=exchange,
            on_failure=on_failure,
            guard=guard,
            buffers=buffers,
            timeout=timeout,
            gradients=gradients,
        )
    except Exception as error:  # the other workers must hear of it before it is raised
        worker.error = error
    worker.choose_transport()
    if on_failure == "continue" or isinstance(on_failure, Continue):
        if process_group is not None:
            raise InputError(
                "on_failure='continue' needs no process group, so process_group= cannot choose its workers; leave it "
                "out, or use on_failure='raise'"
            )
        return _elastic(worker, broadcast)
    return _static(worker, process_group, broadcast)


class _Worker:
    """This worker's arguments, and the first error in them, which all workers raise together."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        topology: TopologyLike,
        parameters: Filter | None,
        trace: str | os.PathLike[str] | None,
    ):
        self.model, self.optimizer, self.topology = model, optimizer, topology
        self._parameters, self._trace = parameters, trace
        self.settings: Settings | None = None
        self.error: Exception | None = None
        self.prepared: Prepared | None = None
        self.writer: TraceWriter | None = None
        self.accelerator: Accelerator | None = None
        self.transport: Literal["gloo", "tcp", "nccl", "host"] | None = None

    def choose_transport(self) -> None:
        """Choose what carries the parameters. An error is kept for the comparison with the other workers."""
        if self.settings is None or not isinstance(self.model, nn.Module):
            return
        policy = self.settings.algorithm
        try:
            self.accelerator = accelerator_of(self.model.parameters())
            self.transport = choose_transport(
                self.settings.exchange.transport,
                self.accelerator,
                policy.name,
                elastic=self.settings.elastic is not None,
                asynchronous=self.settings.asynchronous,
                guarded=self.settings.max_jump is not None,
            )
        except InputError as error:
            self.error = error

    @property
    def timeout(self) -> float:
        return DEFAULT_TIMEOUT.total_seconds() if self.settings is None else self.settings.timeout

    def describe(self, layout: Layout, rank: int, ranks: Sequence[int], **further: object) -> str:
        """Prepare this worker and describe it, or its error, for the comparison with the other workers."""
        try:
            if self.settings is not None and self.error is None:
                self.prepared = prepare(
                    self.model, self.optimizer, self.topology, self.settings, self._parameters, layout, rank, ranks
                )
                if self._trace is not None:
                    self.writer = TraceWriter(Path(self._trace), rank, layout.node)
                return json.dumps(describe(self.prepared) | {"transport": self.transport} | further)
        except Exception as error:  # the other workers must hear of it, whatever it is
            self.error = error
        known = isinstance(self.error, GossamerError)
        return json.dumps({"error": str(self.error) if known else f"{type(self.error).__name__}: {self.error}"})


def _static(worker: _Worker, process_group: ProcessGroup | DeviceMesh | None, broadcast: bool) -> Gossip:
    """Start a job whose workers are fixed."""
    try:
        workers = worker_group(process_group)
    except InputError as error:
        raise worker.error or error from None
    store = PrefixStore(_prefix(workers.ranks), default_store())
    transport = _transport(worker, store, workers)
    with ExitStack() as on_error:
        on_error.callback(transport.close)
        said = [json.loads(t) for t in transport.share("node", json.dumps([node_name(), asks(worker.topology)]))]
        layout = layout_of([name for name, _ in said])
        _choose_topology(worker, layout, transport, [auto for _, auto in said])
        text = worker.describe(layout, workers.rank, workers.ranks, process_group=workers.name, broadcast=broadcast)
        if worker.writer is not None:
            on_error.callback(worker.writer.close)
        agree(transport.share("description", text), worker.error)
        prepared = worker.prepared
        assert prepared is not None
        prepared.common, prepared.beside = broadcast, process_group is not None
        _warn_if_single(prepared, worker.model, workers)
        warn_if_anchor_stays(prepared)
        if broadcast and workers.size > 1:
            _broadcast(prepared, transport)
        policy = prepared.settings.algorithm
        events = isinstance(policy, Asynchronous) and policy.clock == "wall"
        inside = _node_gradients(prepared, worker.model, workers.ranks, broadcast=not broadcast)
        for averaged in inside:
            on_error.callback(averaged.close)
        progress = _node_progress(prepared, inside, store)
        if progress is not None:
            on_error.callback(progress.close)
        verify = None if progress is None else progress.verify
        barrier = RoundBarrier(store, transport, prepared.settings.timeout, verify=verify)
        gossip = open_gossip(prepared, transport, StaticCoordinator(barrier, events=events), worker.writer, inside)
        if progress is not None:
            gossip.on_stop(progress.close)
        on_error.pop_all()
    if workers.size > 1:
        for undo in watch_first_step(
            worker.model, prepared.optimizers[0], store, workers.rank, workers.size, replicas=gossip.replicas
        ):
            gossip.on_stop(undo)
    return gossip


def _choose_topology(worker: _Worker, layout: Layout, transport: Transport, auto: list[bool]) -> None:
    """Replace "auto" by a name. Collective; what is wrong is raised by all workers, later and together."""
    if not any(auto):
        return
    if not all(auto):
        other = auto.index(False)
        worker.error = worker.error or InputError(
            f"worker {auto.index(True)} asks for topology='auto' and worker {other} does not; pass the same to all"
        )
        return
    wrong = worker.error is not None or not isinstance(worker.model, nn.Module)
    if any(json.loads(t) for t in transport.share("auto-error", json.dumps(wrong))):
        worker.topology = "aer"  # the comparison of all workers reports what is wrong
        return
    assert worker.settings is not None
    if layout.n == 1:
        worker.topology = "aer"
        return
    try:
        worker.topology = choose_topology(str(worker.topology), worker.model, worker.settings, layout, transport)
    except InputError as error:
        worker.error = error


def _warn_if_single(prepared: Prepared, model: nn.Module, workers: WorkerGroup) -> None:
    """Warn, on worker 0, if several workers are one replica."""
    if prepared.schedule.topology.n > 1 or workers.size == 1 or workers.rank != 0:
        return
    if ddp_process_group(model) is not None:
        by, instead = "DDP", "the bare model"
    elif prepared.sharded:
        by, instead = "FSDP2", "a model that is sharded over fewer workers"
    else:
        by, instead = "gradients='node'", "gradients='worker'"
    warnings.warn(
        f"all {workers.size} workers are on one node, where {by} averages their gradients, so they are one replica and "
        f"there is nothing to gossip; pass {instead} to gossip between these workers, or start workers on several "
        "nodes",
        GossamerWarning,
        stacklevel=4,
    )


def warn_if_anchor_stays(prepared: Prepared, *, stacklevel: int = 4) -> None:
    """Warn, on worker 0, if nothing makes exact averages, which a quantized wire needs as anchors."""
    settings, policy = prepared.settings, prepared.settings.algorithm
    if prepared.rank != 0 or prepared.schedule.topology.n == 1 or not wire_named(settings.wire).anchored:
        return
    guard = settings.consensus_guard
    guarded = guard is not None and math.isfinite(guard.max_ratio)
    if not isinstance(policy, Synchronous) or policy.average_every or guarded:
        return
    turn = policy.every * policy.fragments
    warnings.warn(
        f"wire={settings.wire!r} sends parameters relative to the last exact average, and these settings make none: "
        "they are relative to the start of training, and are rounded more coarsely the further training moves away "
        f"from it; pass average_every, for example {type(policy).__name__}(average_every={turn * -(-64 // turn)})",
        GossamerWarning,
        stacklevel=stacklevel,
    )


def _elastic(worker: _Worker, broadcast: bool) -> ElasticGossip:
    """Found an elastic job together with the other workers, or join it while they train."""
    if inside_ray_train():
        raise InputError(
            "on_failure='continue' cannot be used inside Ray Train, which ends all workers when one of them dies; "
            "start the workers with gossamer.integrations.ray.run_elastic, or use on_failure='raise'"
        )
    try:
        refuse_elastic(worker.topology)
    except InputError as error:
        worker.error = worker.error or error
    rank, size = rank_and_size(without_group=True)
    lanes = len(worker.optimizer) if isinstance(worker.optimizer, Sequence) else 1
    start = Rendezvous(rank, size, lanes, worker.timeout)
    try:
        layout = layout_of(start.share("node", node_name()))
        text = worker.describe(layout, rank, range(size))
        arrival = start.found_or_join(text, lambda texts: agree(texts, worker.error))
    except BaseException:
        start.close()
        raise
    prepared = worker.prepared
    assert prepared is not None
    prepared.common = broadcast
    coordinator = ElasticCoordinator(
        arrival, prepared, worker.topology, broadcast=broadcast, accelerator=worker.accelerator
    )
    try:
        warn_if_anchor_stays(prepared)
        kind: type[MemberLane] = ElasticAsyncLane if prepared.settings.asynchronous else ElasticLane
        opened = open_lanes(prepared, kind, coordinator.transport, coordinator, worker.writer)
        return ElasticGossip(prepared, opened, coordinator, worker.writer)
    except BaseException:
        coordinator.close()
        coordinator.transport.close()
        raise


def _node_gradients(
    prepared: Prepared, model: nn.Module, ranks: tuple[int, ...], *, broadcast: bool
) -> list[NodeGradients]:
    """The gradients that are averaged inside this worker's node: of each optimizer, or none. Collective."""
    layout = prepared.layout
    if prepared.schedule.inside is None or layout.nodes == layout.n:
        return []
    group = ddp_process_group(model)
    if group is None:
        nodes = tuple(tuple(ranks[w] for w in members) for members in layout.members)
        group = subgroup_of(nodes, timedelta(seconds=prepared.settings.timeout))
    if layout.per_node[layout.node[prepared.rank]] == 1:
        return []
    return node_gradients(prepared, model, group, broadcast=broadcast)


def _node_progress(prepared: Prepared, inside: Sequence[NodeGradients], store: PrefixStore) -> NodeProgress | None:
    """The count of this node's backward passes, where Gossamer averages their gradients."""
    own = [averaged for averaged in inside if isinstance(averaged, PrivateDDP)]
    if not own:
        return None
    mates = prepared.layout.members[prepared.layout.node[prepared.rank]]
    return NodeProgress(store, prepared.rank, [w for w in mates if w != prepared.rank], own)


@torch.no_grad()
def _broadcast(prepared: Prepared, transport: Transport) -> None:
    values = starting_values(prepared)
    if prepared.sharded:  # a shard comes from the worker of the first node that holds the same shard
        count = len(values) - len(list(prepared.model.buffers()))
        transport.broadcast(values[:count], tuple(zip(*prepared.layout.members, strict=True)))
        transport.broadcast(values[count:])
    else:
        transport.broadcast(values)
    for flat in itertools.chain.from_iterable(prepared.flats):
        flat.unpack()


def starting_values(prepared: Prepared) -> list[Tensor]:
    """All tensors that must be equal at the start: mixed parameters, frozen or local parameters, buffers."""
    flats = [f.buffer for f in itertools.chain.from_iterable(prepared.flats)]
    mixed = {id(p.parameter) for f in itertools.chain.from_iterable(prepared.flats) for p in f.places}
    others = [p.detach() for p in prepared.model.parameters() if id(p) not in mixed]
    rest = [p.to_local() if is_sharded(p) else p for p in others]  # type: ignore[attr-defined]
    return [*flats, *rest, *(b.detach() for b in prepared.model.buffers())]


def node_group() -> ProcessGroup:
    """The process group of this worker's node, for DDP or FSDP2 inside it. Collective: call it on every worker."""
    workers = worker_group(None)
    store = PrefixStore(f"{_prefix(workers.ranks)}/node-group", default_store())
    names = share_texts(store, workers, 300.0, "node", node_name())
    group: ProcessGroup = subgroup_of(layout_of(names).members)
    return group


def _prefix(ranks: tuple[int, ...]) -> str:
    """Keys of this call in the store. Workers outside of `ranks` may have made more calls or fewer."""
    _calls[ranks] += 1
    name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:12]
    return f"gossamer/{name}/{_calls[ranks]}"


def _transport(worker: _Worker, store: Any, workers: WorkerGroup) -> Transport:
    """The transport that was chosen; gloo, to tell the other workers, if there was an error."""
    if worker.transport == "nccl":
        from gossamer.comm.nccl import NcclTransport

        assert worker.accelerator is not None
        return NcclTransport(store, workers, worker.timeout, worker.accelerator)
    if worker.transport == "tcp":
        from gossamer.comm.tcp.static import StaticTcpTransport

        longest = longest_message(worker.model)
        return StaticTcpTransport(store, workers, worker.timeout, worker.accelerator, longest=longest)
    return GlooTransport(store, workers, worker.timeout, worker.accelerator)
