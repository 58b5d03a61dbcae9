"""Labeled images: scikit-learn's digits, MNIST-like IDX files, CIFAR-10 batches, or a folder of images."""

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer import InputError
from gossamer.recipes.data import files
from gossamer.recipes.data.files import need

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]
Split = tuple[Pixels, Labels]


@dataclass(frozen=True)
class Images:
    """Labeled images in memory. Pixels are samples × channels × height × width; labels count from 0."""

    name: str
    classes: int
    train: Split
    test: Split

    def __post_init__(self) -> None:
        for split, (pixels, labels) in (("training", self.train), ("test", self.test)):
            if len(pixels) != len(labels):
                raise InputError(f"{self.name} has {len(pixels)} {split} images but {len(labels)} labels")
            if len(pixels) == 0:
                raise InputError(f"{self.name} has no {split} images")
            if labels.min() < 0 or labels.max() >= self.classes:
                raise InputError(
                    f"{self.name} has {split} labels from {labels.min()} to {labels.max()}, "
                    f"but its {self.classes} classes are counted from 0"
                )
        if self.train[0].shape[1:] != self.test[0].shape[1:]:
            train, test = (_shape(split[0]) for split in (self.train, self.test))
            raise InputError(f"{self.name} has training images of {train} but test images of {test}")
        if min(self.train[0].shape[2:]) < 8:
            raise InputError(f"{self.name} has images of {_shape(self.train[0])}: the smallest size is 8x8")


def load(path: Path | None, *, size: int | None = None) -> Images:
    """Load the data set in `path`: IDX files, CIFAR-10 batches or one folder per class; without a path the digits."""
    if path is None:
        return digits()
    if not path.is_dir():
        raise InputError(f"{path} is not a directory: name the one that holds the data set's files")
    for find, read in ((find_mnist, read_mnist), (find_cifar, read_cifar)):
        if root := find(path):
            if size is not None:
                raise InputError(f"image_size = {size} is for image folders: the images in {root} have one size")
            return Images(path.name, 10, *read(root))
    classes, train, test = read_folder(path, size=size)
    return Images(path.name, classes, train, test)


def digits() -> Images:
    """Load the 1,797 digits of 8 x 8 pixels that come with scikit-learn; a fixed fifth is for testing."""
    data = need("sklearn.datasets", "scikit-learn").load_digits()
    pixels = np.round(data.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = data.target.astype(np.int64)
    test = np.zeros(len(labels), dtype=bool)
    test[np.random.default_rng(0).permutation(len(labels))[: len(labels) // 5]] = True
    return Images("digits", 10, (pixels[~test], labels[~test]), (pixels[test], labels[test]))


def _shape(pixels: Pixels) -> str:
    return f"{pixels.shape[3]}x{pixels.shape[2]} with {pixels.shape[1]} channels"


# -- MNIST and Fashion-MNIST -----------------------------------------------------------------------------------------


def find_mnist(path: Path) -> Path | None:
    """Return the directory if it holds MNIST's files."""
    return path if files.find(path, "train-images-idx3-ubyte") else None


def read_mnist(directory: Path) -> tuple[Split, Split]:
    """Read the training and the test set of MNIST or Fashion-MNIST."""
    return _mnist_split(directory, "train"), _mnist_split(directory, "t10k")


def _mnist_split(directory: Path, part: str) -> Split:
    images = read_idx(_existing(directory, f"{part}-images-idx3-ubyte"), dimensions=3)
    labels = read_idx(_existing(directory, f"{part}-labels-idx1-ubyte"), dimensions=1)
    return images[:, None], labels.astype(np.int64)


def _existing(directory: Path, name: str) -> Path:
    found = files.find(directory, name)
    if found is None:
        raise InputError(f"{directory} has neither {name} nor {name}.gz: the data set is incomplete")
    return found


def read_idx(path: Path, *, dimensions: int) -> Pixels:
    """Read an array of unsigned bytes: a magic number, the sizes (big-endian), then the bytes.

    The header is checked against the length of the file.
    """
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


# -- CIFAR-10 --------------------------------------------------------------------------------------------------------

_CIFAR_RECORD = 1 + 3 * 32 * 32
_CIFAR_TRAIN = [f"data_batch_{number}" for number in range(1, 6)]


def find_cifar(path: Path) -> Path | None:
    """Return the directory with the batches: `path`, or the directory inside it that the archive makes."""
    for root in (path, path / "cifar-10-batches-bin", path / "cifar-10-batches-py"):
        if (root / "data_batch_1.bin").is_file() or (root / "data_batch_1").is_file():
            return root
    return None


def read_cifar(directory: Path) -> tuple[Split, Split]:
    """Read the training and the test set of CIFAR-10, in its binary or its Python version."""
    train = [_cifar_batch(directory, name) for name in _CIFAR_TRAIN]
    pixels, labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
    return (pixels, labels), _cifar_batch(directory, "test_batch")


def _cifar_batch(directory: Path, name: str) -> Split:
    binary, python = directory / f"{name}.bin", directory / name
    if binary.is_file():
        return read_cifar_binary(binary)
    if python.is_file():
        return read_cifar_python(python)
    raise InputError(f"{directory} has neither {name}.bin nor {name}: the data set is incomplete")


def read_cifar_binary(path: Path) -> Split:
    """Read records of one label byte and 3 x 32 x 32 pixel bytes."""
    raw = files.read_bytes(path)
    if not raw or len(raw) % _CIFAR_RECORD:
        raise InputError(
            f"{path} holds {len(raw)} bytes, which is no multiple of {_CIFAR_RECORD}: not a CIFAR-10 batch"
        )
    records = np.frombuffer(raw, np.uint8).reshape(-1, _CIFAR_RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def read_cifar_python(path: Path) -> Split:
    """Read a pickled dictionary with `data` and `labels`, without running code that the file may contain."""
    try:
        content = _ArraysOnly(io.BytesIO(files.read_bytes(path)), encoding="bytes").load()
        data, labels = content[b"data"], np.asarray(content[b"labels"], dtype=np.int64)
    except InputError:
        raise
    except Exception as error:  # a damaged pickle raises almost anything
        raise InputError(f"{path} is not a CIFAR-10 python batch: {type(error).__name__}") from None
    if (
        not isinstance(data, np.ndarray)
        or data.dtype != np.uint8
        or data.ndim != 2
        or data.shape[1] != _CIFAR_RECORD - 1
    ):
        raise InputError(f"{path} holds no array of {_CIFAR_RECORD - 1} bytes per image: not a CIFAR-10 python batch")
    return data.reshape(-1, 3, 32, 32), labels


class _ArraysOnly(pickle.Unpickler):
    """Rebuild numpy arrays and nothing else; plain pickle would run any function that the file names."""

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
                f"a CIFAR-10 batch asks for {module}.{name}, which only a harmful or damaged file does: it is not read"
            ) from None


def _latin1(text: str, encoding: str) -> bytes:
    """Decode bytes as Python 3 writes them into an old pickle."""
    return text.encode("latin1")


# -- a folder of images ----------------------------------------------------------------------------------------------

_IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm"}
_TEST_EVERY = 10


def read_folder(path: Path, *, size: int | None) -> tuple[int, Split, Split]:
    """Read one directory of images per class, below `train` and `test` (or `val`); returns (classes, train, test).

    Without a test directory every tenth image is for testing.
    """
    train_root = path / "train" if (path / "train").is_dir() else path
    test_root = next((path / name for name in ("test", "val") if (path / name).is_dir()), None)
    classes = _classes(train_root, leave_out={"test", "val"} if train_root == path else set())
    if len(classes) < 2:
        raise InputError(
            f"{path} is not a data set that this task reads: expected MNIST's IDX files, CIFAR-10's batches, "
            "or one directory of images for each of at least two classes"
        )
    train = [(file, label) for label, name in enumerate(classes) for file in _images(train_root / name)]
    if test_root is not None:
        if unknown := sorted(set(_classes(test_root)) - set(classes)):
            raise InputError(f"{test_root} has the class {unknown[0]!r}, which {train_root} does not have")
        test = [(file, label) for label, name in enumerate(classes) for file in _images(test_root / name)]
    else:
        test = train[_TEST_EVERY - 1 :: _TEST_EVERY]
        train = [pair for at, pair in enumerate(train) if at % _TEST_EVERY != _TEST_EVERY - 1]
    if not train or not test:
        raise InputError(f"{path} has {len(train)} training and {len(test)} test images: it needs some of both")
    pixels = _stack([file for file, _ in train + test], size)
    labels = np.array([label for _, label in train + test], dtype=np.int64)
    cut = len(train)
    return len(classes), (pixels[:cut], labels[:cut]), (pixels[cut:], labels[cut:])


def _classes(root: Path, leave_out: set[str] | None = None) -> list[str]:
    names = (entry.name for entry in root.iterdir() if entry.is_dir() and any(_images(entry)))
    return sorted(set(names) - (leave_out or set()))


def _images(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(file for file in directory.iterdir() if file.suffix.lower() in _IMAGE_SUFFIXES)


def _stack(paths: list[Path], size: int | None) -> Pixels:
    image = need("PIL.Image", "pillow")
    arrays: list[np.ndarray] = []
    for path in paths:
        try:
            with image.open(path) as opened:
                picture = opened.convert("RGB")
        except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as error:
            raise InputError(f"cannot read the image {path}: {error}") from None
        if size is not None:
            picture = picture.resize((size, size))
        array = np.asarray(picture, dtype=np.uint8)
        if arrays and array.shape != arrays[0].shape:
            height, width = array.shape[:2]
            first = arrays[0].shape
            raise InputError(
                f"{path} is {width}x{height} pixels but {paths[0].name} is {first[1]}x{first[0]}: "
                "make all images equal, or set image_size"
            )
        arrays.append(array)
    return np.ascontiguousarray(np.stack(arrays).transpose(0, 3, 1, 2))
