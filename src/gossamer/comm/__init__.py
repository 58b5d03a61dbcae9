"""Moving bytes between workers: exchanges, wire formats, transports. The only importer of torch.distributed."""

from gossamer.comm.deadline import Deadline, PeerWait
from gossamer.comm.exchange import (
    Batch,
    Combine,
    ExchangeSteps,
    Mixed,
    Scratch,
    arrived,
    correction,
    exchange,
    reduction,
    room_for,
)
from gossamer.comm.gloo import GlooTransport
from gossamer.comm.guards import inspected
from gossamer.comm.launcher import inside_ray_train, layout_of, node_name
from gossamer.comm.local import Hub, LocalTransport
from gossamer.comm.process_groups import (
    DeviceMesh,
    PrefixStore,
    ProcessGroup,
    Store,
    WorkerGroup,
    ddp_process_group,
    default_store,
    gathered,
    group_ranks,
    is_fully_sharded,
    private_ddp,
    rank_and_size,
    sharded_ranks,
    share_texts,
    subgroup_of,
    worker_group,
)
from gossamer.comm.round_barrier import Counted, RoundBarrier
from gossamer.comm.tcp.rendezvous import Rendezvous
from gossamer.comm.transport import Channel, ChannelId, Job, PeerError, Purpose, Stamp, Transport, clock
from gossamer.comm.wire import Plain, Wire, wire_named

__all__ = [
    "Batch",
    "Channel",
    "ChannelId",
    "Combine",
    "Counted",
    "Deadline",
    "DeviceMesh",
    "ExchangeSteps",
    "GlooTransport",
    "Hub",
    "Job",
    "LocalTransport",
    "Mixed",
    "PeerError",
    "PeerWait",
    "Plain",
    "PrefixStore",
    "ProcessGroup",
    "Purpose",
    "Rendezvous",
    "RoundBarrier",
    "Scratch",
    "Stamp",
    "Store",
    "Transport",
    "Wire",
    "WorkerGroup",
    "arrived",
    "clock",
    "correction",
    "ddp_process_group",
    "default_store",
    "exchange",
    "gathered",
    "group_ranks",
    "inside_ray_train",
    "inspected",
    "is_fully_sharded",
    "layout_of",
    "node_name",
    "private_ddp",
    "rank_and_size",
    "reduction",
    "room_for",
    "sharded_ranks",
    "share_texts",
    "subgroup_of",
    "wire_named",
    "worker_group",
]
