"""Moving bytes between workers: exchanges, wire formats, transports. The only importer of torch.distributed."""

from gossamer.comm.catchup import CatchUp, Counted
from gossamer.comm.directory import Unreachable, look
from gossamer.comm.dist import (
    PrefixStore,
    Store,
    ddp_process_group,
    default_store,
    group_ranks,
    layout_of,
    node_name,
    rank_and_size,
    sharded_ranks,
    subgroup_of,
)
from gossamer.comm.exchange import Batch, Exchange, Mixed, Scratch, arrived, correction, exchange, room_for
from gossamer.comm.frames import Refused
from gossamer.comm.gloo import GlooTransport
from gossamer.comm.inspect import inspected
from gossamer.comm.links import send_state
from gossamer.comm.local import Hub, LocalTransport
from gossamer.comm.membership import Membership, Record
from gossamer.comm.tcp import TcpChannel, TcpTransport
from gossamer.comm.transport import Channel, Job, PeerError, Stamp, Transport, clock
from gossamer.comm.wire import Plain, Wire, wire_named

__all__ = [
    "Batch",
    "CatchUp",
    "Channel",
    "Counted",
    "Exchange",
    "GlooTransport",
    "Hub",
    "Job",
    "LocalTransport",
    "Membership",
    "Mixed",
    "PeerError",
    "Plain",
    "PrefixStore",
    "Record",
    "Refused",
    "Scratch",
    "Stamp",
    "Store",
    "TcpChannel",
    "TcpTransport",
    "Transport",
    "Unreachable",
    "Wire",
    "arrived",
    "clock",
    "correction",
    "ddp_process_group",
    "default_store",
    "exchange",
    "group_ranks",
    "inspected",
    "layout_of",
    "look",
    "node_name",
    "rank_and_size",
    "room_for",
    "send_state",
    "sharded_ranks",
    "subgroup_of",
    "wire_named",
]
