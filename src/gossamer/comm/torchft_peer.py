"""torchft's own LocalSGD and DiLoCo, the peers that Gossamer's local steps are compared with, on gloo.

Both classes ask a torchft `Manager` for all-reduces. The manager finds the members of every average by a vote over a
coordinator (the lighthouse) and lets a job continue without dead workers. A comparison has a fixed set of workers, so
`FixedMembers` stands in for it: it offers the calls that both classes make, averages over torch's default process
group, and commits every average. The algorithms, their state and their hooks are torchft's; the votes are left out, so
measured times are at most those of a complete torchft job.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from gossamer.comm.pace import Pace, sleep_until
from gossamer.errors import InputError

PeerName = Literal["diloco", "localsgd"]
Sent = Callable[[float, float, int], None]  # start, end (perf_counter), bytes: one all-reduce


def missing() -> str | None:
    """Why torchft cannot be used here, as a sentence; None if it can."""
    if importlib.util.find_spec("torchft") is None:
        return "torchft is not installed; pip install torchft==0.2.0"
    return None


class _Average:
    """An all-reduce in flight that ends as the mean."""

    def __init__(self, members: FixedMembers, tensor: Tensor, work: Any, until: float):
        self._members, self._tensor, self._work, self._until = members, tensor, work, until
        self._begin = time.perf_counter()

    def wait(self, timeout: Any = None) -> bool:
        begin = time.perf_counter()
        self._work.wait()
        sleep_until(self._until)
        self._tensor.div_(self._members.size)
        end = time.perf_counter()
        self._members.seconds_waited += end - begin
        if self._members.sent is not None:
            self._members.sent(self._begin, end, self._tensor.numel() * self._tensor.element_size())
        return True


class FixedMembers:
    """The part of torchft's `Manager` that LocalSGD and DiLoCo use, for a set of workers that does not change."""

    _use_async_quorum = False

    def __init__(self, sent: Sent | None = None):
        self.size, self.sent = dist.get_world_size(), sent
        self.seconds_waited = 0.0
        self.bytes_sent = 0.0
        self._pace = Pace.from_environment(dist.get_rank())
        self._committed = 0

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> _Average:
        size = tensor.numel() * tensor.element_size()
        self.bytes_sent += 2 * (self.size - 1) / self.size * size
        until = self._pace.reserve_allreduce(size) if self._pace is not None else 0.0
        return _Average(self, tensor, dist.all_reduce(tensor, async_op=True), until)

    def should_commit(self) -> bool:
        self._committed += 1
        return True

    def current_step(self) -> int:
        return self._committed

    def start_quorum(self) -> None:
        """Nothing to agree on: the members are fixed."""

    def allow_state_dict_read(self) -> None:
        """Nobody takes this worker's state: no worker joins."""

    def disallow_state_dict_read(self) -> None:
        """See `allow_state_dict_read`."""

    def register_state_dict_fn(self, key: str, load_state_dict: Any, state_dict: Any) -> None:
        """See `allow_state_dict_read`."""


class TorchftPeer:
    """A model that torchft's LocalSGD or DiLoCo trains, from worker 0's values; collective, like `averaged()`.

    Args:
        name: "localsgd" averages the parameters every `every` steps; "diloco" takes an outer Nesterov step by `lr` and
            `momentum` on the averaged drift.
        sent: Called for every all-reduce.
    """

    def __init__(
        self,
        name: PeerName,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        every: int,
        lr: float = 0.7,
        momentum: float = 0.9,
        sent: Sent | None = None,
    ):
        why = missing()
        if why is not None:
            raise InputError(why)
        from torchft.local_sgd import DiLoCo, LocalSGD

        self._model = model
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)
        self.members = FixedMembers(sent)
        if name == "diloco":
            outer = SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)
            self._training = DiLoCo(self.members, [model], optimizer, outer, every)
        else:
            self._training = LocalSGD(self.members, model, optimizer, every)
        self._training.__enter__()

    @property
    def seconds_waited(self) -> float:
        return self.members.seconds_waited

    @property
    def bytes_sent(self) -> float:
        """What ring all-reduces send."""
        return self.members.bytes_sent

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Hold the mean of all workers' parameters and floating-point buffers inside the block. Collective."""
        with torch.no_grad():
            held = [t for t in (*self._model.parameters(), *self._model.buffers()) if t.is_floating_point()]
            own = [t.detach().clone() for t in held]
            for tensor in held:
                dist.all_reduce(tensor.detach())
                tensor.detach().div_(dist.get_world_size())
        try:
            yield self._model
        finally:
            with torch.no_grad():
                for tensor, value in zip(held, own, strict=True):
                    tensor.detach().copy_(value)

    def close(self) -> None:
        """Stop averaging."""
        self._training.__exit__(None, None, None)
