"""Entering a job that outlives its workers: founding it together, or joining it while the others train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gossamer.comm import Membership, TcpTransport
from gossamer.comm.tcp.frame import digest
from gossamer.engine.build import Prepared, assemble
from gossamer.engine.consistency import agree
from gossamer.engine.elastic.gossip import ElasticGossip
from gossamer.engine.elastic.lane import Plans
from gossamer.engine.elastic.state_transfer import StateTransfer
from gossamer.engine.gossip import Gossip
from gossamer.errors import InputError
from gossamer.trace import TraceWriter


def elastic_transport(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], rank: int, size: int, timeout: float, hard: float
) -> TcpTransport:
    """Meet the directory and open a port for the others."""
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise InputError("on_failure='continue' works on CPU only so far; use on_failure='raise' on other devices")
    lanes = 1 if isinstance(optimizer, Optimizer) else len(optimizer)
    most = 2**20 + 2 * sum(p.numel() * max(8, p.element_size()) for p in model.parameters())
    return TcpTransport(Membership(rank, size, lanes, most, timeout, hard))


def enter(
    prepared: Prepared | None,
    transport: TcpTransport,
    topology: Any,
    description: str,
    cause: Exception | None,
    writer: TraceWriter | None,
) -> Gossip:
    """Found the job or join it, with everybody's descriptions compared first."""
    members = transport.membership
    try:
        handover = StateTransfer(members)  # those who are quicker may ask already
        joins = members.enter(description, lambda texts: agree(texts, cause))
        assert prepared is not None
        gossip = assemble(prepared, transport, lambda lanes, call: None, lambda lane, k: None, writer)
        assert isinstance(gossip, ElasticGossip)
        gossip.begin(members, handover, Plans(topology, prepared.schedule, digest(description)), joins)
        return gossip
    except BaseException:
        transport.close()
        raise
