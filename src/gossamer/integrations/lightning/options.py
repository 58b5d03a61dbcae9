"""The arguments of Lightning's two strategies."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from gossamer import GossamerWarning, InputError
from gossamer.integrations._settings import FIXED, NAMES, check_settings

FRAMEWORK = "Lightning"


def checked(strategy: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for `decentralize`; raise InputError if Lightning cannot train with them."""
    if "pytorch_lightning" in sys.modules:
        warnings.warn(
            f"pytorch_lightning is imported, and its Trainer refuses strategies of the package lightning, such as "
            f"{strategy}; write `import lightning.pytorch as pl` instead of `import pytorch_lightning as pl`",
            GossamerWarning,
            stacklevel=3,
        )
    for name in settings:
        if name not in NAMES:
            known = ", ".join(n for n in NAMES if n not in FIXED)
            raise InputError(
                f"{strategy} has no argument {name!r}; besides those of Lightning it takes {known}, which it passes to "
                "gossamer.decentralize"
            )
    check_settings(FRAMEWORK, settings, steps_together=True)
    return dict(settings)


def as_timedelta(timeout: float | timedelta) -> timedelta:
    """The time limit of `decentralize` as torch's process groups take it."""
    try:
        return timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"timeout must be a positive duration (seconds or a timedelta), got {timeout!r}") from None
