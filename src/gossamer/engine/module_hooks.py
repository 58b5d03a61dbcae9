"""Hooks on the user's module: a warning about equal first batches, forward spans for traces, and loaded parameters.

A hook only observes: it never raises, and it never works in a copy of the module or in a file saved from it.
"""

from __future__ import annotations

import warnings
import weakref
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gossamer.comm import Store, clock
from gossamer.errors import GossamerWarning

LOOK_AT_STEP = 8  # by then every worker has had a first batch, or is late for other reasons
Undo = Callable[[], None]


class ModuleHook:
    """Calls `observe` for one module only.

    Modules are copied with their hooks (deepcopy, `AveragedModel`, `torch.save`). A copy of this hook is inert, and so
    is the hook itself in a shallow copy of the module.
    """

    def __init__(self, module: nn.Module, observe: Callable[..., None]):
        self._module, self._observe = weakref.ref(module), observe

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if torch.compiler.is_compiling() or module is not self._module():
            return  # a hook must not break the user's graph
        self._observe(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # `nullcontext().__exit__` takes any arguments and does nothing, and a file that refers to it needs no Gossamer.
        return getattr, (nullcontext(), "__exit__")


def watch_first_batch(model: nn.Module, optimizer: Optimizer, store: Store, rank: int, size: int) -> list[Undo]:
    """Warn if all workers train on the same first batch, the usual sign of a forgotten sampler.

    Every worker notes a checksum of its first training batch; worker 0 compares them some steps later, without waiting.
    Returns what removes the hooks. Advice must never stop training, so every error in here is ignored.
    """
    steps = 0

    def note(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not model.training:
            return
        on_forward.remove()
        try:
            digest = _digest([*args, *kwargs.values()])
            if digest is not None:
                store.set(f"first-batch/{rank}", str(digest))
        except Exception:  # inputs that have no plain values (sparse, nested, inside vmap), or a store that is gone
            return

    def compare(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps < LOOK_AT_STEP:
            return
        on_step.remove()
        keys = [f"first-batch/{r}" for r in range(size)]
        try:
            equal = rank == 0 and store.check(keys) and len({store.get(key) for key in keys}) == 1
        except Exception:  # the store is gone
            return
        if equal:
            warnings.warn(
                f"all {size} workers got the same first batch: give each its own part of the data, for example with "
                "torch.utils.data.DistributedSampler",
                GossamerWarning,
                stacklevel=2,
            )

    on_forward = model.register_forward_pre_hook(ModuleHook(model, note), with_kwargs=True)
    on_step = optimizer.register_step_post_hook(compare)
    return [on_forward.remove, on_step.remove]


def watch_forward(model: nn.Module, forwarded: Callable[[float], None]) -> list[Undo]:
    """Call `forwarded(since)` after every training forward pass of `model`. Returns what removes the hooks."""
    began: list[float] = []

    def before(*_: Any) -> None:
        began.append(clock())

    def after(*_: Any) -> None:
        since = began.pop() if began else clock()
        if torch.is_grad_enabled() and model.training:
            forwarded(since)

    hooks = (
        model.register_forward_pre_hook(ModuleHook(model, before)),
        model.register_forward_hook(ModuleHook(model, after)),
    )
    return [hook.remove for hook in hooks]


def watch_loads(model: nn.Module, loaded: Callable[[], None]) -> list[Undo]:
    """Call `loaded()` after every `load_state_dict()` of `model` or of a module in it. Returns what removes the
    hooks."""

    def after(*_: Any) -> None:
        loaded()

    hooks = [
        m.register_load_state_dict_post_hook(ModuleHook(m, after))  # type: ignore[no-untyped-call]
        for m in model.modules()
    ]
    return [hook.remove for hook in hooks]


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
