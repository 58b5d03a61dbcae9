"""A folder of images: one directory a class, below `train` and `test` (or `val`), or without them split by us."""

from pathlib import Path
from typing import Any

import numpy as np

from gossamer import InputError
from gossamer.recipes.data.needs import need

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm"}
_TEST_EVERY = 10


def read(path: Path, *, size: int | None) -> tuple[int, Any, Any]:
    """`(classes, train, test)`; without a test directory every tenth image of a class is for testing."""
    train_root = path / "train" if (path / "train").is_dir() else path
    test_root = next((path / name for name in ("test", "val") if (path / name).is_dir()), None)
    classes = _classes(train_root, leave_out={"test", "val"} if train_root == path else set())
    if len(classes) < 2:
        raise InputError(
            f"{path} is no data set that this task reads: expected MNIST's IDX files, CIFAR-10's batches, "
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
    return sorted(file for file in directory.iterdir() if file.suffix.lower() in _SUFFIXES)


def _stack(paths: list[Path], size: int | None) -> Any:
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
