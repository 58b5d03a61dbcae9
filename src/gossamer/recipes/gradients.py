"""The gradients of the replicas in this process, by one backward pass per batch or by one vectorized pass."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from gossamer.recipes.config import RunConfig
from gossamer.recipes.replica import Replica
from gossamer.recipes.task import Task

BatchesOf = Sequence[Sequence[Sequence[Any]]]  # by replica, member, micro-batch


class Gradients(Protocol):
    """Set the gradient of every replica to the mean over its batches; returns the mean loss of each replica."""

    def __call__(self, replicas: Sequence[Replica], batches: BatchesOf) -> list[float]: ...


def precision(config: RunConfig) -> AbstractContextManager[Any]:
    """Return the context of forward passes: bfloat16 with `amp`."""
    return torch.autocast("cpu", torch.bfloat16) if config.amp else contextlib.nullcontext()


class Looped:
    """One forward and one backward pass per batch; each worker has its own random numbers.

    The gradients of workers that share a replica are averaged. Under DDP they also share the buffers of the first
    worker; in gossip each worker has its own, and the model between steps has their mean.
    """

    def __init__(self, task: Task, config: RunConfig):
        self.task, self.config = task, config

    def __call__(self, replicas: Sequence[Replica], batches: BatchesOf) -> list[float]:
        return [self._replica(r, b) for r, b in zip(replicas, batches, strict=True)]

    def _replica(self, replica: Replica, batches: Sequence[Sequence[Any]]) -> float:
        buffers = list(replica.model.buffers()) if len(replica.members) > 1 else []
        before = replica.buffers or [_copies(buffers)] * len(batches)
        after = []
        total = 0.0
        for place, own in enumerate(batches):
            _write(buffers, before[place])
            torch.set_rng_state(replica.random[place])
            for at, batch in enumerate(own):
                with replica.no_sync() if at < len(own) - 1 else contextlib.nullcontext():
                    with precision(self.config):
                        loss = self.task.loss(replica.forward, batch)
                    torch.autograd.backward(loss / (len(own) * len(batches)))
                total += float(loss.detach()) / (len(own) * len(batches))
            replica.random[place] = torch.get_rng_state()
            after.append(_copies(buffers))
        if replica.gossip is None:
            _write(buffers, after[0])
        elif buffers:
            replica.buffers = after
            _write(buffers, [_together(same) for same in zip(*after, strict=True)])
        return total


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.clone() for t in tensors]


def _write(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _together(values: Sequence[Tensor]) -> Tensor:
    """Return one buffer for several workers, as `gossip.averaged()` does: the mean, or the maximum of integers."""
    if all(torch.equal(value, values[0]) for value in values):
        return values[0]
    stacked = torch.stack(tuple(values))
    return stacked.mean(0) if stacked.is_floating_point() or stacked.is_complex() else stacked.amax(0)


class _Loss(nn.Module):
    """The task's loss as a module, so that `functional_call` can replace the model's parameters."""

    def __init__(self, task: Task, model: nn.Module):
        super().__init__()
        self.task, self.model = task, model

    def forward(self, batch: Any) -> Tensor:
        return self.task.loss(self.model, batch)


class Batched:
    """The gradients of all replicas by `vmap` over stacked parameters. Not for models whose buffers change.

    A step whose batches differ in shape is looped. Dropout differs between workers, with other random numbers than in
    `Looped`.
    """

    def __init__(self, task: Task, config: RunConfig):
        self.task, self.config, self._looped = task, config, Looped(task, config)

    def __call__(self, replicas: Sequence[Replica], batches: BatchesOf) -> list[float]:
        flat = [[batch for own in replica for batch in own] for replica in batches]
        try:
            inputs = [_stack(own) for own in flat]
            together = inputs[0] if len(inputs) == 1 else _stack(inputs)
        except _Unequal:
            return self._looped(replicas, batches)
        return self._vectorized(replicas, together)

    def _vectorized(self, replicas: Sequence[Replica], inputs: Any) -> list[float]:
        loss = _Loss(self.task, replicas[0].model)
        names = [f"model.{name}" for name, _ in replicas[0].model.named_parameters()]
        parameters = [list(r.model.parameters()) for r in replicas]

        def mean_loss(values: list[Tensor], own: Any) -> Tensor:
            def one(batch: Any) -> Tensor:
                with precision(self.config):
                    made: Tensor = functional_call(loss, dict(zip(names, values, strict=True)), (batch,))
                return made

            return vmap(one, randomness="different")(own).float().mean()

        torch.set_rng_state(replicas[0].random[0])
        gradient = grad_and_value(mean_loss)
        with sdpa_kernel(SDPBackend.MATH):  # vmap knows its operations, and would loop over a fused attention
            if len(replicas) == 1:
                gradients, losses = gradient([p.detach() for p in parameters[0]], inputs)
                gradients, losses = [g[None] for g in gradients], losses[None]
            else:
                stacked = [torch.stack([p.detach() for p in same]) for same in zip(*parameters, strict=True)]
                gradients, losses = vmap(gradient, randomness="different")(stacked, inputs)
        replicas[0].random[0] = torch.get_rng_state()
        for place, own in enumerate(parameters):
            for parameter, value in zip(own, gradients, strict=True):
                parameter.grad = value[place]
        return [float(v) for v in losses]


class _Unequal(Exception):
    """Batches that cannot be stacked."""


def _stack(batches: Sequence[Any]) -> Any:
    """Stack structures of tensors along a new first dimension."""
    leaves, specs = zip(*(pytree.tree_flatten(b) for b in batches), strict=True)
    if any(s != specs[0] for s in specs):
        raise _Unequal
    made = []
    for same in zip(*leaves, strict=True):
        if not all(isinstance(x, Tensor) and x.shape == same[0].shape for x in same):
            raise _Unequal
        made.append(torch.stack(same))
    return pytree.tree_unflatten(made, specs[0])


def choose(task: Task, config: RunConfig, replicas: Sequence[Replica]) -> tuple[Gradients, str]:
    """Choose how to compute gradients; returns it with its name in the configuration, `on` or `off`.

    `auto` tries both on a first batch and keeps the faster one; streams, random numbers and gradients are restored.
    """
    looped = Looped(task, config)
    if config.batched == "off" or sum(len(r.members) for r in replicas) == 1 or _changes(replicas[0].model):
        return looped, "off"
    batched = Batched(task, config)
    if config.batched == "on":
        return batched, "on"
    places = [[s.state_dict() for s in r.streams] for r in replicas]
    random = [list(r.random) for r in replicas]
    batches = [[[next(s)] for s in r.streams] for r in replicas]
    seconds: dict[str, float] = {}
    for name, way in (("on", batched), ("off", looped)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # vmap warns where it falls back to a loop; the measured time decides
                way(replicas, batches)
                began = time.perf_counter()
                way(replicas, batches)
                seconds[name] = time.perf_counter() - began
        except (RuntimeError, ValueError, TypeError):  # what vmap raises for an operation that it does not support
            if name == "off":
                raise
    for replica, at, state in zip(replicas, places, random, strict=True):
        replica.optimizer.zero_grad()
        replica.random[:] = state
        for stream, position in zip(replica.streams, at, strict=True):
            stream.load_state_dict(position)
    best = min(seconds, key=seconds.__getitem__)
    return (batched if best == "on" else looped), best


def _changes(model: nn.Module) -> bool:
    """Return whether training changes buffers (running statistics), which a vectorized pass cannot do."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats for m in model.modules())
