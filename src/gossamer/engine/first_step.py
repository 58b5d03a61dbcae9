"""Warnings about the first training step: all workers see the same batch, or something else averages the gradients."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.comm import Store
from gossamer.engine.module_hooks import ModuleHook, Undo
from gossamer.errors import GossamerWarning

LOOK_AT_STEP = 8  # by then every worker has taken its first step, or is late for other reasons
SAMPLES = 64  # values of each gradient that are compared


def watch_first_step(
    model: nn.Module, optimizer: Optimizer, store: Store, rank: int, size: int, *, replicas: int
) -> list[Undo]:
    """Warn if all workers train on the same first batch, the usual sign of a forgotten sampler, or if their first
    gradients are equal, the usual sign of a framework that averages gradients over all workers already.

    Every worker notes checksums of its first training batch and of its first gradients; worker 0 compares them some
    steps later, without waiting. A batch is only seen if the model is called, a gradient always. Returns what removes
    the hooks. Advice must never stop training, so every error in here is ignored.
    """
    steps = 0

    def note(what: str, checksum: Callable[[], int | None]) -> None:
        try:
            found = checksum()
            if found is not None:
                store.set(f"{what}/{rank}", str(found))
        except Exception:  # values that cannot be read (sparse, nested, inside vmap), or a store that is gone
            return

    def equal(what: str) -> bool:
        keys = [f"{what}/{r}" for r in range(size)]
        return store.check(keys) and len({store.get(key) for key in keys}) == 1

    def batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.training:
            on_forward.remove()
            note("first-batch", lambda: _checksum_of_inputs([*args, *kwargs.values()]))

    def stepped(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 1 and replicas > 1:
            note("first-gradient", lambda: _checksum_of_gradients(optimizer))
        if steps < LOOK_AT_STEP:
            return
        on_step.remove()
        if rank != 0:
            return
        try:
            same_batch, same_gradient = equal("first-batch"), equal("first-gradient")
        except Exception:  # the store is gone
            return
        if same_batch:
            _warn(
                f"all {size} workers got the same first batch: give each its own part of the data, for example with "
                "torch.utils.data.DistributedSampler"
            )
        elif same_gradient:
            _warn(
                f"all {size} workers had the same gradient in their first step, so gossip averages equal models: "
                "something else averages the gradients already (DDP, strategy='ddp' of a framework), which is to be "
                "switched off, or all workers read the same data"
            )

    on_forward = model.register_forward_pre_hook(ModuleHook(model, batch), with_kwargs=True)
    on_step = optimizer.register_step_post_hook(stepped)
    return [on_forward.remove, on_step.remove]


def _warn(text: str) -> None:
    warnings.warn(text, GossamerWarning, stacklevel=3)


def _checksum_of_inputs(values: list[Any]) -> int | None:
    """A checksum of the first tensor's first values; None when there is no tensor to look at."""
    for value in values:
        if isinstance(value, Tensor) and value.numel() > 1:
            return _checksum(value.detach().flatten()[:4096])
        if isinstance(value, dict | list | tuple):
            found = _checksum_of_inputs(list(value.values()) if isinstance(value, dict) else list(value))
            if found is not None:
                return found
    return None


def _checksum_of_gradients(optimizer: Optimizer) -> int | None:
    """A checksum of some values of every gradient; None if all are zero or one is not finite, which says nothing."""
    gradients = [p.grad.detach() for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    local = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    spread = [g.flatten()[:: max(1, g.numel() // SAMPLES)].double() for g in local if g.numel()]
    values = torch.cat(spread) if spread else torch.zeros(0)
    return _checksum(values) if values.any() and values.isfinite().all() else None


def _checksum(values: Tensor) -> int:
    return zlib.crc32(values.to("cpu", torch.float64).numpy().tobytes())
