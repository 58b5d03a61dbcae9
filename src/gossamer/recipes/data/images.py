"""Labeled images in memory, and where they come from: `load(path)` recognizes the format by the files it finds."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gossamer import InputError
from gossamer.recipes.data import cifar, folder, idx
from gossamer.recipes.data.needs import need

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Images:
    """`pixels` are samples × channels × height × width, labels count from 0."""

    name: str
    classes: int
    train: tuple[Pixels, Labels]
    test: tuple[Pixels, Labels]

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
    """Digits without a path; else MNIST-like IDX files, CIFAR-10 batches or a folder of images a class."""
    if path is None:
        return digits()
    if not path.is_dir():
        raise InputError(f"{path} is not a directory: name the one that holds the data set's files")
    for kind in (idx, cifar):
        if root := kind.find(path):
            if size is not None:
                raise InputError(f"image_size = {size} is for image folders: the images in {root} have one size")
            return Images(path.name, 10, *kind.read(root))
    classes, train, test = folder.read(path, size=size)
    return Images(path.name, classes, train, test)


def digits() -> Images:
    """The 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn; a fixed fifth is for testing."""
    data = need("sklearn.datasets", "scikit-learn").load_digits()
    pixels = np.round(data.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = data.target.astype(np.int64)
    test = np.zeros(len(labels), dtype=bool)
    test[np.random.default_rng(0).permutation(len(labels))[: len(labels) // 5]] = True
    return Images("digits", 10, (pixels[~test], labels[~test]), (pixels[test], labels[test]))


def _shape(pixels: Pixels) -> str:
    return f"{pixels.shape[3]}x{pixels.shape[2]} with {pixels.shape[1]} channels"
