"""A warning for the commonest mistake: every worker reads the same data because the sampler was forgotten."""

from __future__ import annotations

import warnings
import zlib
from typing import Any

import torch
from torch import nn

from gossamer.comm import Store
from gossamer.engine.gossip import Gossip
from gossamer.errors import GossamerWarning

LOOK_AT_STEP = 8  # by then everybody has had a first batch, or is late for other reasons


def watch_first_batch(gossip: Gossip, model: nn.Module, store: Store, rank: int, size: int) -> None:
    """Note a digest of the first training batch; worker 0 compares them some steps later, without waiting."""

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return  # the hook must not break the user's graph
        if module.training:
            digest = _digest([*args, *kwargs.values()])
            if digest is not None:
                store.set(f"first-batch/{rank}", str(digest))
            on_forward.remove()

    def compare(*_: Any) -> None:
        if gossip.lanes[0].meter.steps < LOOK_AT_STEP:
            return
        on_step.remove()
        keys = [f"first-batch/{r}" for r in range(size)]
        if rank == 0 and store.check(keys) and len({store.get(key) for key in keys}) == 1:
            warnings.warn(
                f"all {size} workers got the same first batch: give each its own part of the data, for example with "
                "torch.utils.data.DistributedSampler",
                GossamerWarning,
                stacklevel=2,
            )

    on_forward = model.register_forward_pre_hook(note, with_kwargs=True)
    on_step = gossip.lanes[0].optimizer.register_step_post_hook(compare)
    gossip.on_stop(on_forward.remove)
    gossip.on_stop(on_step.remove)


def _digest(values: list[Any]) -> int | None:
    """A checksum of the first tensor's first values; None when there is no tensor to look at."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            head = value.detach().flatten()[:4096].to("cpu", torch.float64)
            return zlib.crc32(head.numpy().tobytes())
        if isinstance(value, dict | list | tuple):
            found = _digest(list(value.values()) if isinstance(value, dict) else list(value))
            if found is not None:
                return found
    return None
