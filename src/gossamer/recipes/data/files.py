"""Reading data files, which may be compressed, and importing packages that only some tasks need."""

import gzip
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any

from gossamer import InputError


def need(module: str, package: str) -> Any:
    """Import a module; raise `InputError` that names its package if it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise InputError(f"this task needs the package {package}: pip install {package}") from None


def find(directory: Path, name: str) -> Path | None:
    """Return `name` or `name.gz` in the directory, if there is one."""
    return next((path for path in (directory / name, directory / f"{name}.gz") if path.is_file()), None)


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, decompressed if its name ends in .gz."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}") from None


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 file, decompressed if its name ends in .gz."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}): convert it or leave it out") from None
