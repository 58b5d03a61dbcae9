"""The IDX format of MNIST and Fashion-MNIST: a magic number, the sizes (big-endian), then the bytes."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer import InputError
from gossamer.recipes.data import files


def find(path: Path) -> Path | None:
    """The directory itself, if it looks like MNIST."""
    return path if files.find(path, "train-images-idx3-ubyte") else None


def read(directory: Path) -> tuple[Any, Any]:
    return _split(directory, "train"), _split(directory, "t10k")


def _split(directory: Path, part: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    images = read_idx(_existing(directory, f"{part}-images-idx3-ubyte"), dimensions=3)
    labels = read_idx(_existing(directory, f"{part}-labels-idx1-ubyte"), dimensions=1)
    return images[:, None], labels.astype(np.int64)


def _existing(directory: Path, name: str) -> Path:
    found = files.find(directory, name)
    if found is None:
        raise InputError(f"{directory} has neither {name} nor {name}.gz: the data set is incomplete")
    return found


def read_idx(path: Path, *, dimensions: int) -> NDArray[np.uint8]:
    """An array of unsigned bytes; the header is checked against the file's length."""
    raw = files.read_bytes(path)
    header = 4 + 4 * dimensions
    if len(raw) < header or raw[:3] != b"\x00\x00\x08" or raw[3] != dimensions:
        raise InputError(f"{path} is not an IDX file of unsigned bytes with {dimensions} dimensions")
    shape = tuple(int(size) for size in np.frombuffer(raw, ">u4", dimensions, offset=4))
    expected = int(np.prod(shape, dtype=np.int64))
    if len(raw) - header != expected:
        raise InputError(
            f"{path} announces {'x'.join(map(str, shape))} = {expected} bytes but holds {len(raw) - header}"
        )
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)
