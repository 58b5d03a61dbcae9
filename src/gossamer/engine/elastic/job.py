"""One worker's part in an elastic job: what its lanes and its handle share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from gossamer.comm.tcp import Arrival, Membership, Rendezvous, TcpTransport, digest
from gossamer.engine.coordinator import Coordinator
from gossamer.engine.elastic.lane import ElasticLane, Plans
from gossamer.engine.elastic.meeting import Attendee, Meetings
from gossamer.engine.elastic.state_transfer import Progress, StateTransfer
from gossamer.errors import InputError

if TYPE_CHECKING:
    from gossamer.engine.lane import Lane
    from gossamer.engine.prepared import Prepared


def rendezvous(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], rank: int, size: int, timeout: float
) -> Rendezvous:
    """Connect to the directory and open a port for the other workers."""
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise InputError("on_failure='continue' works on CPU only so far; use on_failure='raise' on other devices")
    return Rendezvous(rank, size, 1 if isinstance(optimizer, Optimizer) else len(optimizer), timeout)


class ElasticJob(Coordinator):
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

    def meet(self, lanes: Sequence[Lane], call: str) -> None:
        """Bring all members that can come to one meeting; from then on exact averages are over them."""
        elastic = [lane for lane in lanes if isinstance(lane, ElasticLane)]
        me = self.members.me

        def here() -> Attendee:
            rounds = [lane.k for lane in elastic]
            return Attendee(self.members.rank, me.incarnation, me.node, rounds, elastic[0].meter.steps)

        def while_parked() -> None:
            for lane in elastic:
                lane.relay()
            elastic[0].run_after_step()

        meeting = self.meetings.gather(call, here, while_parked)
        for lane in elastic:
            lane.convene(meeting)

    def close(self) -> None:
        self.transfer.close()
        self.meetings.close()
