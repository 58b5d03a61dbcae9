"""Measures the compute time of a user's own training step from the optimizer's hooks."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.optim import Optimizer

from gossamer.comm import clock
from gossamer.errors import InputError


class probe:
    """Measure the steps of a training loop on one worker: `with gossamer.probe(optimizer, "compute.json"): ...`.

    Records the time between two `optimizer.step()` calls (data, forward, backward), the time of the call itself, which
    no exchange overlaps, and the size of the optimizer's parameters. Run it without DDP, whose all-reduce is part of
    the backward pass. `gossamer probe --compute compute.json` puts the samples into a cluster file.
    """

    def __init__(self, optimizer: Optimizer, path: str | os.PathLike[str], *, warm_up: int = 2):
        self._optimizer, self._path, self._warm_up = optimizer, Path(path), warm_up
        self.samples: list[float] = []
        self.updates: list[float] = []
        self._since: float | None = None
        self._begun: float | None = None
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        def before(*_: Any) -> None:
            self._begun = self._now()
            if self._since is not None:
                self.samples.append(self._begun - self._since)
                self._since = None

        def after(*_: Any) -> None:
            self._since = self._now()
            if self._begun is not None:
                self.updates.append(self._since - self._begun)

        self._hooks = [self._optimizer.register_step_pre_hook(before), self._optimizer.register_step_post_hook(after)]
        return self

    def _now(self) -> float:
        """The time after all work on the GPU is done; otherwise it would be charged to the next call that waits."""
        if any(p.is_cuda for g in self._optimizer.param_groups for p in g["params"]):
            torch.cuda.synchronize()
        return clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        if kind is not None:
            return
        kept = self.samples[self._warm_up :]
        if not kept:
            raise InputError(
                f"the probe saw {len(self.samples)} step(s) and leaves out the first {self._warm_up}; train for more"
            )
        update = statistics.mean(self.updates[self._warm_up :])
        parameters = [p for g in self._optimizer.param_groups for p in g["params"]]
        size = sum(p.numel() * p.element_size() for p in parameters)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"samples": kept, "update_seconds": update, "model_mb": size / 1e6}) + "\n")
