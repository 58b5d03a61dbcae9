"""The optimizer, the learning-rate schedule and the gossip of a method."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import gossamer
from gossamer import InputError
from gossamer.recipes.config import RunConfig

DEFAULT_LR = {"adam": 2e-3, "gossipadam": 2e-3, "accumadam": 2e-3, "sgd": 0.05}


class Method(Protocol):
    """A parsed `NAME[:TOPOLOGY[:WIRE]]`."""

    def local_steps(self, every: int) -> int: ...

    @property
    def name(self) -> str: ...
    @property
    def algorithm(self) -> str: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def topology(self) -> str | None: ...
    @property
    def wire(self) -> str: ...
    @property
    def exact(self) -> bool: ...


def optimizer_name(method: Method, config: RunConfig) -> str:
    """Return the optimizer of the run: the configured one, or the method's own."""
    return config.optimizer or method.optimizer


def learning_rate(method: Method, config: RunConfig) -> float:
    """Return the peak learning rate of the run."""
    return DEFAULT_LR[optimizer_name(method, config)] if config.lr is None else config.lr


def make_optimizer(method: Method, parameters: Iterable[nn.Parameter], config: RunConfig) -> torch.optim.Optimizer:
    """Make the optimizer of a method."""
    name = optimizer_name(method, config)
    lr, decay = learning_rate(method, config), config.weight_decay
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=config.momentum, weight_decay=decay)
    settings: dict[str, Any] = {"lr": lr, "betas": config.betas, "eps": config.eps, "weight_decay": decay}
    if name == "adam":
        return (torch.optim.AdamW if decay else torch.optim.Adam)(parameters, **settings)
    if name == "gossipadam":
        corrected = gossamer.GossipAdamW if decay else gossamer.GossipAdam
        return corrected(parameters, discount=config.discount, **settings)
    kind = gossamer.AccumAdamW if decay else gossamer.AccumAdam
    return kind(parameters, accumulate=config.accumulate, betas_per=config.betas_per, **settings)


def refuse_unfit(method: Method, config: RunConfig) -> None:
    """Refuse settings that all-reduce does not support; settings of gossip are checked where they are built."""
    if not method.exact:
        return
    if method.algorithm == "local" and not config.virtual:
        refused = {"exact_inside": config.exact_inside, "trace": config.trace}
        unfit = next((name for name, given in refused.items() if given), None)
        if unfit is not None:
            raise InputError(f"{method.name} is torchft's own code on processes, without {unfit}; leave it out")
    if config.on_failure == "continue":
        raise InputError(
            f"on_failure 'continue' needs gossip, and {method.name} ends when a worker dies; leave it out, or "
            "choose another method, e.g. dadam:aer"
        )
    if config.virtual and method.wire != "fp32":
        raise InputError(
            f"virtual workers average gradients exactly, so {method.name}:{method.wire} would train as {method.name}; "
            "use that, or real workers"
        )


def gossip_settings(method: Method, config: RunConfig) -> dict[str, Any]:
    """Return the arguments of `gossamer.decentralize`."""
    if method.name == "decent-dp":
        raise InputError("the recipes train with Gossamer and torch, not with decent-dp; measure it by gossamer bench")
    if method.algorithm == "local":
        return {"topology": "complete", "algorithm": _exact_average(method, config)}
    given = {name: getattr(config, name) for name in ("every", "staleness", "average_every", "fragments")}
    chosen: dict[str, Any] = {
        name: value for name, value in given.items() if value != RunConfig.model_fields[name].default
    }
    name = config.combine if method.algorithm == "awc" else method.algorithm
    if config.outer is None and (config.outer_lr is not None or config.outer_momentum is not None):
        raise InputError(f"outer_lr and outer_momentum need an outer step, and {method.name} has none; choose outer")
    if config.outer is not None:
        chosen["outer"] = gossamer.outer_named(config.outer, config.outer_lr, config.outer_momentum)
    elastic = config.on_failure == "continue"
    return {
        "topology": method.topology,
        "algorithm": gossamer.algorithm(name, **chosen),
        "wire": method.wire,
        "on_failure": gossamer.Continue(soft_deadline=config.soft_deadline, hard_deadline=config.hard_deadline)
        if elastic
        else "raise",
    }


def outer_settings(config: RunConfig) -> dict[str, float]:
    """Return the learning rate and the momentum of DiLoCo's outer step."""
    lr, momentum = config.outer_lr, config.outer_momentum
    return {"lr": 0.7 if lr is None else lr, "momentum": 0.9 if momentum is None else momentum}


def _exact_average(method: Method, config: RunConfig) -> gossamer.ATC:
    """Return the policy that computes what LocalSGD and DiLoCo compute, on the complete topology."""
    outer = gossamer.Nesterov(**outer_settings(config)) if method.name == "diloco" else None
    return gossamer.ATC(every=method.local_steps(config.every), outer=outer)


def factor(config: RunConfig) -> Callable[[int], float]:
    """Return the learning rate of each step relative to its peak: a linear warm-up over w steps, then constant, half a
    cosine down to 0, or sqrt(w / step)."""
    warmup, steps = config.warmup_steps, config.steps

    def at(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if config.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup))))
        if config.schedule == "inverse-sqrt":
            return math.sqrt(max(1, warmup) / (step + 1))
        return 1.0

    return at


def make_scheduler(optimizer: torch.optim.Optimizer, config: RunConfig) -> LambdaLR:
    """Make the learning-rate scheduler of the run."""
    return LambdaLR(optimizer, factor(config))
