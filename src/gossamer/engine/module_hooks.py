"""Hooks on the user's module: forward spans for traces, and loaded parameters.

A hook only observes: it never raises, and it never works in a copy of the module or in a file saved from it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from gossamer.comm import clock

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
