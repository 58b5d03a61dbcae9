"""Reading files that may be compressed."""

import gzip
import zlib
from pathlib import Path

from gossamer import InputError


def find(directory: Path, name: str) -> Path | None:
    """`name` or `name.gz` in the directory."""
    return next((path for path in (directory / name, directory / f"{name}.gz") if path.is_file()), None)


def read_bytes(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}") from None


def read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}): convert it or leave it out") from None
