"""What Lightning's two strategies check before they train by gossip."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch import nn

import gossamer
from gossamer import ADPSGD, A2CiD2, GossamerWarning, InputError

# Arguments of `decentralize` that a strategy sets itself, or that do not fit a job of Lightning.
NOT_PASSED_ON = ("model", "optimizer", "process_group", "broadcast")


def checked(strategy: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for `decentralize`; raise InputError if Lightning cannot train with them."""
    if "pytorch_lightning" in sys.modules:
        warnings.warn(
            f"pytorch_lightning is imported, and its Trainer refuses strategies of the package lightning, such as "
            f"{strategy}; write `import lightning.pytorch as pl` instead of `import pytorch_lightning as pl`",
            GossamerWarning,
            stacklevel=3,
        )
    known = [name for name in inspect.signature(gossamer.decentralize).parameters if name not in NOT_PASSED_ON]
    for name in settings:
        if name not in known:
            raise InputError(
                f"{strategy} has no argument {name!r}; besides those of Lightning it takes {', '.join(known)}, which "
                "it passes to gossamer.decentralize"
            )
    algorithm = settings.get("algorithm", "awc")
    policy = gossamer.algorithm(algorithm) if isinstance(algorithm, str) else algorithm
    if isinstance(policy, ADPSGD | A2CiD2):
        raise InputError(
            f"algorithm {policy.name!r} lets every worker step at its own pace, but Lightning gives all workers the "
            "same number of steps and meets them at every epoch; use 'awc' or 'atc' here, or call "
            "gossamer.decentralize in your own loop"
        )
    if settings.get("on_failure", "raise") != "raise":
        raise InputError(
            f"on_failure={settings['on_failure']!r} makes the job elastic, but Lightning's samplers, barriers and "
            "metrics need all the workers that started; leave it out here, or call gossamer.decentralize in your own "
            "loop"
        )
    return dict(settings)


def as_timedelta(timeout: float | timedelta) -> timedelta:
    """The time limit of `decentralize` as torch's process groups take it."""
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)


def refuse_wrapped(strategy: str, model: nn.Module) -> None:
    """Raise InputError for a model that another kind of data parallelism has wrapped or sharded."""
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            place = f"its module {name!r}" if name else "it"
            raise InputError(
                f"{strategy} averages parameters itself, but the model is wrapped twice: {place} is a "
                "DistributedDataParallel; pass the model without it"
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "to_local"):
            raise InputError(
                f"{strategy} saves and restores whole models, but parameter {name!r} is sharded; train a sharded model "
                "in your own loop, as examples/fsdp2_inside.py does"
            )
