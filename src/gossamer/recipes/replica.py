"""A replica: one copy of the model, its optimizer, and the workers whose batches make its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gossamer
from gossamer.recipes.config import RunConfig
from gossamer.recipes.methods import Method, make_optimizer, make_scheduler
from gossamer.recipes.task import Batches, Task


@dataclass
class Replica:
    model: nn.Module
    forward: nn.Module  # what the loss calls: the model, or DDP around it
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    members: tuple[int, ...]
    streams: list[Batches]  # one per member
    random: list[Tensor]  # the generator state of each member
    workers: int  # of the whole run
    ema: AveragedModel | None
    buffers: list[list[Tensor]] = field(default_factory=list)
    """The buffers of each member, where members gossip as one replica in one process; the model has their mean."""
    gossip: gossamer.Gossip | None = None
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
    """A block in which gradients are accumulated without being averaged among workers."""

    def step(self, clip: float) -> None:
        """Clip the gradient at `clip`, the threshold for all-reduce, and take one optimizer step."""
        if clip and self.gossip is not None:
            self.gossip.clip_grad_norm_(clip)
        elif clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        if self.ema is not None:
            self.ema.update_parameters(self.model)

    def go_to(self, step: int, batches: int) -> None:
        """Move the schedule and the data to where they are after `step` steps, which took `batches` batches."""
        scheduler = self.scheduler
        scheduler.last_epoch = step
        for group, base, factor in zip(
            self.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(step)
        scheduler._last_lr = [group["lr"] for group in self.optimizer.param_groups]
        for stream in self.streams:
            stream.load_state_dict({"position": batches})

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides model, optimizer and gossip."""
        return {
            "workers": self.workers,
            "members": list(self.members),
            "scheduler": self.scheduler.state_dict(),
            "streams": [s.state_dict() for s in self.streams],
            "random": list(self.random),
            "buffers": self.buffers,
            "ema": None if self.ema is None else self.ema.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state.

        With another number of workers the data continues where all workers together were, and random numbers start
        anew.
        """
        self.scheduler.load_state_dict(state["scheduler"])
        held = {worker: place for place, worker in enumerate(state["members"])}
        for place, worker in enumerate(self.members):
            if state["workers"] == self.workers and worker in held:
                self.streams[place].load_state_dict(state["streams"][held[worker]])
                self.random[place] = state["random"][held[worker]]
            else:
                position = state["streams"][0]["position"]
                self.streams[place].load_state_dict({"position": round(position * state["workers"] / self.workers)})
                self.random[place] = _random(int(self.random[place].sum()) + position)
        same = state["workers"] == self.workers and state["members"] == list(self.members)
        self.buffers = state["buffers"] if same else []  # else all members begin with the model's
        if self.ema is not None and state["ema"] is not None:
            self.ema.load_state_dict(state["ema"])


def make_replica(task: Task, method: Method, config: RunConfig, members: Sequence[int]) -> Replica:
    """Make the replica of `members`: the same model on every worker, with data and random numbers of each member."""
    model = task.model(config.seed).train()
    optimizer = make_optimizer(method, model.parameters(), config)
    random = []
    for worker in members:
        random.append(_random(1_000_003 * (config.seed + 1) + worker))
    return Replica(
        model=model,
        forward=model,
        optimizer=optimizer,
        scheduler=make_scheduler(optimizer, config),
        members=tuple(members),
        streams=[task.batches(w, config.workers, seed=config.seed) for w in members],
        random=random,
        workers=config.workers,
        ema=_moving_average(model, config.ema) if config.ema else None,
    )


def _random(seed: int) -> Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def _moving_average(model: nn.Module, decay: float) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]
