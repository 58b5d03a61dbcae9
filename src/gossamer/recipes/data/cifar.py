"""CIFAR-10 as it is distributed: the binary version, or Python batches, which are pickles of untrusted origin."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer import InputError
from gossamer.recipes.data import files

_RECORD = 1 + 3 * 32 * 32
_TRAIN = [f"data_batch_{number}" for number in range(1, 6)]


def find(path: Path) -> Path | None:
    """The directory with the batches: `path` itself or the one inside it that the archive makes."""
    for root in (path, path / "cifar-10-batches-bin", path / "cifar-10-batches-py"):
        if (root / "data_batch_1.bin").is_file() or (root / "data_batch_1").is_file():
            return root
    return None


def read(directory: Path) -> tuple[Any, Any]:
    train = [_batch(directory, name) for name in _TRAIN]
    pixels, labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
    return (pixels, labels), _batch(directory, "test_batch")


def _batch(directory: Path, name: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    binary, python = directory / f"{name}.bin", directory / name
    if binary.is_file():
        return read_binary(binary)
    if python.is_file():
        return read_python(python)
    raise InputError(f"{directory} has neither {name}.bin nor {name}: the data set is incomplete")


def read_binary(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Records of one label byte and 3 x 32 x 32 pixel bytes."""
    raw = files.read_bytes(path)
    if not raw or len(raw) % _RECORD:
        raise InputError(f"{path} holds {len(raw)} bytes, which is no multiple of {_RECORD}: not a CIFAR-10 batch")
    records = np.frombuffer(raw, np.uint8).reshape(-1, _RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def read_python(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """A pickled dictionary with `data` and `labels`, read without running anything it may contain."""
    try:
        content = _ArraysOnly(io.BytesIO(files.read_bytes(path)), encoding="bytes").load()
        data, labels = content[b"data"], np.asarray(content[b"labels"], dtype=np.int64)
    except InputError:
        raise
    except Exception as error:  # a damaged pickle raises almost anything
        raise InputError(f"{path} is not a CIFAR-10 python batch: {type(error).__name__}") from None
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != _RECORD - 1:
        raise InputError(f"{path} holds no array of {_RECORD - 1} bytes an image: not a CIFAR-10 python batch")
    return data.reshape(-1, 3, 32, 32), labels


class _ArraysOnly(pickle.Unpickler):
    """Knows how to rebuild a numpy array and nothing else; plain pickle would run any function a file names."""

    def find_class(self, module: str, name: str) -> Any:
        rebuild = np.array(0).__reduce__()[0]
        known = {
            ("numpy.core.multiarray", "_reconstruct"): rebuild,
            ("numpy._core.multiarray", "_reconstruct"): rebuild,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): _latin1,
        }
        try:
            return known[module, name]
        except KeyError:
            raise InputError(
                f"a CIFAR-10 batch asks for {module}.{name}, which only a harmful or damaged file does: not read"
            ) from None


def _latin1(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes into an old pickle."""
    return text.encode("latin1")
