"""The settings of gossip inside a framework: which keyword arguments are `decentralize`'s, and which cannot work."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import gossamer
from gossamer import ADPSGD, A2CiD2, Continue, InputError

NAMES = frozenset(inspect.signature(gossamer.decentralize).parameters) - {"model", "optimizer"}


def split_settings(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keyword arguments of `gossamer.decentralize` in `kwargs`, and the others."""
    settings = {key: value for key, value in kwargs.items() if key in NAMES}
    return settings, {key: value for key, value in kwargs.items() if key not in NAMES}


def check_settings(settings: Mapping[str, Any], framework: str) -> None:
    """Refuse settings of `decentralize` that cannot work inside `framework`."""
    failure = settings.get("on_failure")
    if failure == "continue" or isinstance(failure, Continue):
        raise InputError(
            f"on_failure='continue' cannot work in {framework}: its process group is fixed, so a collective call of "
            "the framework fails once a worker is dead; use on_failure='raise' and resume from a checkpoint, or call "
            "gossamer.decentralize() in a loop of your own"
        )


def is_asynchronous(settings: Mapping[str, Any]) -> bool:
    """Whether the settings choose an asynchronous algorithm."""
    chosen = settings.get("algorithm", "awc")
    return chosen in (ADPSGD.name, A2CiD2.name) if isinstance(chosen, str) else isinstance(chosen, ADPSGD | A2CiD2)
