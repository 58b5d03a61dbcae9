"""Measures a user's own training step: compute, the optimizer's update, cores in use, when gradients become ready."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gossamer.comm import clock
from gossamer.errors import InputError

WARM_UP = 3


def measure_step(model: nn.Module, optimizer: Optimizer, step: Callable[[], Any], steps: int = 20) -> dict[str, Any]:
    """Call `step` a few times and return its times; model, optimizer and random numbers are restored afterwards.

    `step` computes the loss, calls `backward()` and `optimizer.step()`. Measure the bare model: DDP's all-reduce would
    be a part of the backward pass.

    Returns:
        `samples`: seconds of each step outside of `optimizer.step()`. `update_seconds`: the mean of that call.
        `cores`: cores in use while computing. `backward_share`: the share of a step from the first gradient on (None on
        a GPU). `model_mb`: the size of the optimizer's parameters.
    """
    if steps < 1:
        raise InputError(f"a step must be measured at least once, got steps={steps}; pass e.g. steps=20")
    if not callable(step):
        raise InputError(
            f"step must be a function that trains for one step, got {type(step).__name__}; pass lambda: ..."
        )
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
    watch = _Watch(model, optimizer)
    try:
        for _ in range(WARM_UP + steps):
            watch.call(step)
    finally:
        watch.close()
        optimizer.zero_grad()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        torch.set_rng_state(saved[2])
    return watch.result()


class _Watch:
    """Times of the calls of one step function."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._parameters = [p for g in optimizer.param_groups for p in g["params"]]
        self._gpu = any(p.is_cuda for p in self._parameters)
        self._begun = self._first = self._update = 0.0
        self.computes: list[float] = []
        self.updates: list[float] = []
        self.cores: list[float] = []
        self.shares: list[float] = []
        self._hooks = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]
        self._hooks += [
            p.register_post_accumulate_grad_hook(self._gradient)  # type: ignore[no-untyped-call]
            for p in model.parameters()
            if p.requires_grad
        ]

    def _now(self) -> float:
        """The time after all work on the GPU is done; otherwise it would be charged to the next call that waits."""
        if self._gpu:
            torch.cuda.synchronize()
        return clock()

    def _gradient(self, _: Any) -> None:
        self._first = self._first or clock()

    def _before(self, *_: Any) -> None:
        now = self._now()
        if self._first:
            self.shares.append((now - self._first) / max(1e-9, now - self._begun))
        self._update -= now

    def _after(self, *_: Any) -> None:
        self._update += self._now()

    def call(self, step: Callable[[], Any]) -> None:
        calls = len(self.shares)
        self._begun, self._first, self._update = self._now(), 0.0, 0.0
        cpu = time.process_time()
        step()
        took = self._now() - self._begun
        cpu = time.process_time() - cpu
        if self._update <= 0 or len(self.shares) == calls:
            raise InputError(
                "step() did not call backward() and optimizer.step() of the model and optimizer that were passed; pass "
                "a function that trains for one step"
            )
        self.computes.append(max(1e-9, took - self._update))
        self.updates.append(self._update)
        self.cores.append(0.0 if self._gpu else cpu / took)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def result(self) -> dict[str, Any]:
        size = sum(p.numel() * p.element_size() for p in self._parameters)
        return {
            "samples": self.computes[WARM_UP:],
            "update_seconds": statistics.mean(self.updates[WARM_UP:]),
            "cores": statistics.median(self.cores[WARM_UP:]),
            "backward_share": None if self._gpu else min(1.0, statistics.median(self.shares[WARM_UP:])),
            "model_mb": size / 1e6,
        }
