"""How much of the workers' gradients is signal that all of them share, measured between the workers.

The squared gradient of a replica is signal plus noise, S + N; the mean of R replicas' gradients has S + N/R. Every
`EVERY` steps, or every round if rounds are rarer, each worker takes the same coordinates of its gradient, some of every
parameter, and their squares. The average of these small vectors over all workers gives S + N/R (the square of the mean)
and S + N (the mean of the squares), and so each parameter's share of the signal, S / (S + N). An optimizer such as
GossipAdam computes with it. Where weight decay is added to the gradient, it is a part of what is sampled, and signal.

Note [Why the signal is measured between workers]
    A worker could compare its gradients of different steps: noise is new in every step, and signal stays. But at the
    learning rates that all-reduce likes, the signal itself changes its direction from step to step, and a worker by
    itself takes it for noise. Its steps are then too large exactly where training is least stable:
    benchmarks/quality_causes.py shows it. See docs/choosing.md, "Where gossip is behind".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.comm import Job, Purpose
from gossamer.engine.policies import Synchronous
from gossamer.engine.protocol import UsesSignal
from gossamer.engine.side_average import SideAverage

if TYPE_CHECKING:
    from gossamer.engine.lane import LaneParts

EVERY = 8  # steps between measurements at most, unless rounds are rarer
SAMPLES = 256  # coordinates of one parameter at most
MEMORY = 0.85  # of the running means, per measurement
POOLED = 16.0  # the ratio of all parameters counts as much as this many coordinates: some parameters have only a few


@runtime_checkable
class CouplesDecay(Protocol):
    """An optimizer that adds weight decay to the gradient before its moments see it, such as `GossipAdam`."""

    def coupled_decay(self) -> Mapping[Tensor, float]:
        """By parameter, the λ of the g + λ x that the moments see; only where it is not 0."""


class SignalMeter:
    """Measures the share of the signal for the parameters of one lane, and tells the optimizer."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        optimizer: UsesSignal,
        average: SideAverage,
        replicas: float,
        *,
        slot: int = 0,
        slots: int = 1,
        pooled: float = POOLED,
    ):
        self.parameters, self.optimizer, self.average, self.replicas = list(parameters), optimizer, average, replicas
        self.slot, self.slots = slot, slots
        self.pooled = pooled  # how much the ratio of all parameters counts
        self.share: float | None = None  # of all parameters together, if the worker has a part of each of them
        sizes = torch.tensor([-(-p.numel() // slots) for p in self.parameters])  # of a shard, if they are sharded
        self._strides = [-(-int(size) // SAMPLES) | 1 for size in sizes]  # odd: not the same columns of every matrix
        self._counts = sizes.clamp(max=SAMPLES)
        self._of = torch.repeat_interleave(torch.arange(len(self.parameters)), self._counts)
        self._scale = sizes / self._counts.clamp(min=1)
        self._sample = torch.zeros(len(self._of))
        self._averaged = self._own = torch.zeros(len(self.parameters))  # running means: S + N/R and S + N
        optimizer.set_signal_shares(dict.fromkeys(self.parameters))

    @classmethod
    def of(cls, parts: LaneParts, wait: Callable[[Job], None]) -> SignalMeter | None:
        """The meter of a lane whose optimizer uses the signal; None for other optimizers."""
        if not isinstance(parts.optimizer, UsesSignal):
            return None
        parameters = [place.parameter for flat in parts.flats for place in flat.places]
        nodes = parts.schedule.inside
        sizes = parts.layout.per_node if nodes is not None else [1] * parts.schedule.topology.n  # of shards: nodes
        replicas = sum(sizes) ** 2 / sum(size**2 for size in sizes)  # of unequal size: as many equal ones
        slot, slots = parts.shard
        policy = parts.settings.algorithm
        apart = policy.every if isinstance(policy, Synchronous) else 1  # steps between rounds
        average = SideAverage.of(parts, Purpose.SIGNAL, max(1, EVERY // apart), wait)
        if apart > 1:
            average.delay = 1  # a round is several steps, which is long enough
        # Other workers of the replica may hold the same parameter beside other parts of the model: its share must be
        # the same there.
        pooled = 0.0 if parts.beside else POOLED
        return cls(parameters, parts.optimizer, average, replicas, slot=slot, slots=slots, pooled=pooled)

    @torch.no_grad()
    def look(self, k: int) -> None:
        """Sample the gradients of the step that was just taken, if they are sent beside round k."""
        if not self.average.due(k):
            return
        decays = self.optimizer.coupled_decay() if isinstance(self.optimizer, CouplesDecay) else {}
        taken = [self._take(at, decays.get(parameter, 0.0)) for at, parameter in enumerate(self.parameters)]
        if taken:
            self._sample = torch.cat(taken).cpu()  # an accelerator is waited for once

    def _take(self, at: int, decay: float) -> Tensor:
        """The sampled coordinates of g + `decay` x; the step that x has made since g was taken does not matter."""
        parameter, stride, count = self.parameters[at], self._strides[at], int(self._counts[at])
        if parameter.grad is None:
            return torch.zeros(count, device=parameter.device)
        sample = _local(parameter.grad).flatten()[::stride][:count].float()
        if decay:
            sample = sample.add(_local(parameter).flatten()[::stride][:count].float(), alpha=decay)
        return pad(sample, (0, count - sample.numel()))

    @torch.no_grad()
    def at_launch(self, k: int) -> None:
        """Call this on every worker before round k is launched."""
        found = self.average.read(k)  # first: there is one vector in flight at a time
        if self.average.due(k):
            vector = torch.zeros(self.slots, len(self._of) + len(self.parameters))
            vector[self.slot] = torch.cat([self._sample, self._sums(self._sample.square())])
            self.average.launch(k, vector.flatten())
        if found is not None:
            # The average is over all workers, but each slot is filled by one worker per node.
            mean = found[1].view(self.slots, -1) * self.slots
            averaged = torch.stack([self._sums(m[: len(self._of)].square()) for m in mean]).sum(0)
            own = mean[:, len(self._of) :].sum(0)
            if averaged.isfinite().all() and own.isfinite().all():  # else some worker's step overflowed
                self._averaged = MEMORY * self._averaged + (1 - MEMORY) * averaged
                self._own = MEMORY * self._own + (1 - MEMORY) * own
                self._tell()

    def state_dict(self) -> dict[str, Any]:
        """The running means, and what is in flight after waiting for it."""
        return {"averaged": self._averaged, "own": self._own, "in_flight": self.average.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._averaged, self._own = state["averaged"], state["own"]
        self.average.load_state_dict(state["in_flight"])
        self._tell()

    def close(self) -> None:
        self.average.close()

    def _sums(self, values: Tensor) -> Tensor:
        """The sum of `values` over the coordinates of each parameter."""
        return torch.zeros(len(self.parameters)).index_add_(0, self._of, values)

    def _tell(self) -> None:
        power = float((self._own * self._scale).sum())
        if power == 0:
            return
        pooled = float((self._averaged * self._scale).sum()) / power
        ratios = self._averaged / self._own.clamp(min=torch.finfo(torch.float32).tiny)
        ratios = (self._counts * ratios + self.pooled * pooled) / (self._counts + self.pooled).clamp(min=1)
        shares = self._share(ratios).tolist()
        self.share = float(self._share(torch.tensor(pooled))) if self.pooled else None
        self.optimizer.set_signal_shares(dict(zip(self.parameters, shares, strict=True)))

    def _share(self, ratio: Tensor) -> Tensor:
        """S / (S + N) where (S + N/R) / (S + N) is `ratio`."""
        return ((ratio - 1 / self.replicas) / (1 - 1 / self.replicas)).clamp(0, 1)


def _local(tensor: Tensor) -> Tensor:
    data = tensor.detach()
    return data.to_local() if hasattr(data, "to_local") else data
