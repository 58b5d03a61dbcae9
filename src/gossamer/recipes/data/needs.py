"""Packages that only some tasks need are imported when they are used."""

from importlib import import_module
from typing import Any

from gossamer import InputError


def need(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise InputError(f"this task needs the package {package}: pip install 'gossamer[recipes]'") from None
