"""Import a framework when it is needed, with a clear error if it is missing or too old."""

from __future__ import annotations

import re
from importlib import import_module, metadata
from types import ModuleType

from gossamer.errors import InputError

# The oldest release of each framework that these integrations support, and the one that the tests run with.
SUPPORTED = {
    "accelerate": ("1.0", "1.15.0"),
    "lightning": ("2.5", "2.6.6"),
    "ray": ("2.40", "2.60.0"),
    "transformers": ("5.0", "5.23.0"),
}
PACKAGES = {"ray": "ray[train]"}  # what to install, where it is not the name of the module


def require(framework: str) -> ModuleType:
    """Import `framework`; raise InputError if it is missing or older than the oldest supported release."""
    oldest, tested = SUPPORTED[framework]
    try:
        module = import_module(framework)
    except ModuleNotFoundError as error:
        if error.name != framework:
            raise
        raise InputError(
            f"gossamer.integrations.{framework} needs {framework}, which is not installed: pip install "
            f"'{PACKAGES.get(framework, framework)}>={oldest}', or '.[{framework}]' in a clone of Gossamer "
            f"(tested with {framework} {tested})"
        ) from error
    found = metadata.version(framework)
    if _release(found) < _release(oldest):
        raise InputError(
            f"gossamer.integrations.{framework} needs {framework} {oldest} or newer and was tested with {tested}, but "
            f"{found} is installed: pip install -U {framework}"
        )
    return module


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a release: "2.6.6rc1" is (2, 6, 6)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
