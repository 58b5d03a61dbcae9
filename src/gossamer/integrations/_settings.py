"""The settings of gossip inside a framework, and what every framework refuses."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

import gossamer
from gossamer import ADPSGD, A2CiD2, Continue, InputError

NAMES = [name for name in inspect.signature(gossamer.decentralize).parameters if name not in ("model", "optimizer")]
FIXED = ("process_group", "broadcast")
"""Settings that a framework leaves no choice in."""
OWN_LOOP = "call gossamer.decentralize() in a loop of your own"


def split_settings(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keyword arguments of `gossamer.decentralize` in `kwargs`, and the others."""
    settings = {key: value for key, value in kwargs.items() if key in NAMES}
    return settings, {key: value for key, value in kwargs.items() if key not in NAMES}


def check_settings(framework: str, settings: Mapping[str, Any], *, steps_together: bool) -> None:
    """Refuse settings of `decentralize` that cannot work inside `framework`.

    `steps_together`: the framework meets all workers at the same steps, so that asynchronous algorithms do not fit.
    """
    failure = settings.get("on_failure")
    if failure == "continue" or isinstance(failure, Continue):
        raise InputError(
            f"on_failure={failure!r} cannot work in {framework}: its process group is fixed, so its own "
            f"collective calls fail once a worker is dead; leave it out and resume from a checkpoint, or {OWN_LOOP}"
        )
    if steps_together and is_asynchronous(settings):
        raise InputError(
            f"algorithm {settings['algorithm']!r} lets every worker step at its own pace, but {framework} meets all "
            "workers at the same steps; use 'awc' (with AWC(staleness=...) against slow workers) or 'atc', or "
            f"{OWN_LOOP}"
        )
    for name in FIXED:
        if name in settings:
            raise InputError(
                f"gossip in {framework} is among all workers of the job, which begin with the parameters of worker 0; "
                f"leave {name}= out, or {OWN_LOOP}"
            )


def is_asynchronous(settings: Mapping[str, Any]) -> bool:
    """Whether the settings choose an asynchronous algorithm."""
    chosen = settings.get("algorithm", "awc")
    return chosen in (ADPSGD.name, A2CiD2.name) if isinstance(chosen, str) else isinstance(chosen, ADPSGD | A2CiD2)


def refuse_wrapped(framework: str, model: nn.Module) -> None:
    """Raise InputError for a model that another kind of data parallelism has wrapped or sharded."""
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            wrapped = f"module {name!r} of the model" if name else "the model"
            raise InputError(
                f"gossip in {framework} replaces DDP, but {wrapped} is already wrapped in {type(module).__name__}; "
                "pass the bare module. To average gradients inside each node, pass gradients='node'"
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "to_local"):
            raise InputError(
                f"{framework} saves and restores whole models, but parameter {name!r} is sharded; train a sharded "
                "model in your own loop, as examples/fsdp2_inside.py does"
            )
