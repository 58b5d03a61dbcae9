"""One worker's part in an elastic job: what its lanes and its handle share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from gossamer.comm import layout_of
from gossamer.comm.tcp import Arrival, Membership, Record, Rendezvous, TcpTransport, digest
from gossamer.engine.elastic.meeting import Meetings
from gossamer.engine.elastic.state_transfer import Progress, StateTransfer
from gossamer.errors import InputError
from gossamer.topology.replan import replanned
from gossamer.topology.schedule import Schedule

if TYPE_CHECKING:
    from gossamer.engine.build import Prepared


class Plans:
    """The schedule for the members of each epoch.

    Args:
        spec: The topology as the user gave it.
        founding: The schedule for all workers.
        description: Stands for everything that the workers agreed on at the start.
    """

    def __init__(self, spec: Any, founding: Schedule, description: bytes):
        self._spec, self._founding, self.description = spec, founding, description
        self._made: dict[tuple[tuple[int, ...], tuple[str, ...]], Schedule] = {}

    def schedule(self, record: Record) -> Schedule:
        ranks = record.ranks
        nodes = tuple(record.members[r].node for r in ranks)
        if (ranks, nodes) not in self._made:
            topology = replanned(self._spec, self._founding.topology, ranks, layout_of(nodes))
            self._made[ranks, nodes] = replace(self._founding, topology=topology, ranks=ranks)
        return self._made[ranks, nodes]


def rendezvous(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], rank: int, size: int, timeout: float
) -> Rendezvous:
    """Connect to the directory and open a port for the other workers."""
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise InputError("on_failure='continue' works on CPU only so far; use on_failure='raise' on other devices")
    return Rendezvous(rank, size, 1 if isinstance(optimizer, Optimizer) else len(optimizer), timeout)


class ElasticJob:
    """A worker that has founded or joined an elastic job, with the parameters from which it starts.

    Args:
        arrival: How this worker found the job.
        prepared: The model, its optimizers and the settings.
        spec: The topology as the user gave it.
        broadcast: Whether founders start from the first worker's parameters and buffers.
    """

    def __init__(self, arrival: Arrival, prepared: Prepared, spec: Any, *, broadcast: bool):
        settings = prepared.settings
        assert settings.elastic is not None
        self.soft_deadline, self.hard_deadline = settings.elastic.soft, settings.elastic.hard
        self.plans = Plans(spec, prepared.schedule, digest(arrival.foundation.description))
        self.transfer = StateTransfer(prepared.model, prepared.optimizers, arrival.foundation.run, settings.timeout)
        parameters = sum(p.numel() * max(8, p.element_size()) for p in prepared.model.parameters())
        self.members = Membership(arrival, 2**20 + 2 * parameters, self.hard_deadline, self.transfer.serve)
        self.transport = TcpTransport(self.members, settings.timeout)
        self.donated: Progress | None = None  # the progress of the member whose state this worker took
        try:
            if arrival.joining:
                self.donated = self.transfer.fetch(self.members)
                self.members.admit(self.donated.rounds)
            elif broadcast:
                self.donated = self.transfer.broadcast(self.members, arrival.record)
            self.meetings = Meetings(self.members, settings.timeout, self.hard_deadline)
        except BaseException:
            self.transport.close()
            raise

    def close(self) -> None:
        self.transfer.close()
        self.meetings.close()
