"""Image classification: a residual network on digits, MNIST-like sets, CIFAR-10 or a folder of images."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer import InputError
from gossamer.recipes.data import images
from gossamer.recipes.data.shards import Indices, alpha_of, dirichlet_shards, picker
from gossamer.recipes.models.resnet import DEPTHS, ResNet
from gossamer.recipes.options import VisionOptions
from gossamer.recipes.task import Batches, evaluating, seeded


class Batch(NamedTuple):
    images: Tensor
    labels: Tensor


class Vision:
    name = "vision"
    unit = "images"
    metric = "accuracy"
    higher_is_better = True

    def __init__(self, options: VisionOptions) -> None:
        self.options = options
        self._depth = _depth(options.model)
        self._alpha = alpha_of(options.partition)
        self._data = images.load(options.data, size=options.image_size)
        self._refuse_single_values()
        self._mean, self._deviation = _moments(self._data.train[0])
        self._shards = lru_cache(maxsize=4)(self._draw_shards)

    def model(self, seed: int) -> nn.Module:
        options = self.options
        with seeded(seed):
            return ResNet(
                self._depth,
                channels=self._data.train[0].shape[1],
                classes=self._data.classes,
                width=options.width,
                norm=options.norm,
            )

    def batches(self, worker: int, workers: int, *, seed: int) -> Batches:
        pixels, labels = self._data.train
        pick = picker(
            len(labels),
            self.options.batch,
            worker=worker,
            workers=workers,
            seed=seed,
            shards=None if self._alpha is None else self._shards,
            what="images",
        )

        def batch(i: int) -> Batch:
            indices = pick(i)
            chosen = self._augment(pixels[indices], np.random.default_rng((seed, worker, i)))
            return Batch(self._normalize(chosen), torch.from_numpy(labels[indices]))

        return Batches(batch)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch.images), batch.labels, label_smoothing=self.options.label_smoothing)

    def size(self, batch: Batch) -> int:
        return len(batch.labels)

    def evaluate(self, model: nn.Module, *, final: bool = False) -> dict[str, float]:
        pixels, labels = self._data.test
        count = len(labels) if final else min(len(labels), self.options.evaluate_on)
        # Data sets may be sorted by class, so the subset is spread over the whole set.
        chosen = np.linspace(0, len(labels) - 1, count).astype(np.int64)
        loss = correct = 0.0
        with evaluating(model) as bare:
            device = next(bare.parameters()).device
            for part in np.array_split(chosen, -(-count // 256)):
                target = torch.from_numpy(labels[part]).to(device)
                scores = bare(self._normalize(pixels[part]).to(device)).float()
                loss += F.cross_entropy(scores, target, reduction="sum").item()
                correct += (scores.argmax(1) == target).sum().item()
        return {"loss": loss / count, "accuracy": correct / count}

    def describe(self) -> dict[str, Any]:
        channels, height, width = self._data.train[0].shape[1:]
        return {
            "data": self._data.name,
            "training_images": len(self._data.train[1]),
            "test_images": len(self._data.test[1]),
            "classes": self._data.classes,
            "image": [channels, height, width],
            "model": self.options.model,
            "parameters": sum(parameter.numel() for parameter in self.model(0).parameters()),
        }

    def _refuse_single_values(self) -> None:
        """Refuse batches with one value per channel, which batch normalization cannot normalize.

        Each stage but the first halves height and width.
        """
        height, width = self._data.train[0].shape[2:]
        factor = 8 if self._depth == 50 else 4
        if self.options.norm == "batch" and self.options.batch == 1 and max(height, width) <= factor:
            raise InputError(
                f"{self.options.model} shrinks {height} x {width} images to one pixel, and batch normalization cannot "
                "work on one pixel of one image; use --batch 2 or more, or --norm group"
            )

    def _draw_shards(self, workers: int, seed: int) -> list[Indices]:
        assert self._alpha is not None
        return dirichlet_shards(self._data.train[1], workers, alpha=self._alpha, seed=seed)

    def _normalize(self, pixels: images.Pixels) -> Tensor:
        return (torch.from_numpy(pixels).float() / 255 - self._mean) / self._deviation

    def _augment(self, pixels: images.Pixels, random: np.random.Generator) -> images.Pixels:
        crop = self.options.crop
        if crop:
            height, width = pixels.shape[2:]
            padded = np.pad(pixels, ((0, 0), (0, 0), (crop, crop), (crop, crop)))
            corners = random.integers(0, 2 * crop + 1, size=(len(pixels), 2))
            cut = [image[:, y : y + height, x : x + width] for image, (y, x) in zip(padded, corners, strict=True)]
            pixels = np.stack(cut)
        if self.options.flip:
            mirrored = random.random(len(pixels)) < 0.5
            pixels = np.where(mirrored[:, None, None, None], pixels[..., ::-1], pixels)
        return pixels


def make(options: VisionOptions) -> Vision:
    return Vision(options)


def _moments(pixels: images.Pixels) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation per channel, from counts of the 256 levels: the data is not copied."""
    levels = np.arange(256) / 255
    moments = []
    for channel in range(pixels.shape[1]):
        share = np.bincount(pixels[:, channel].reshape(-1), minlength=256) / pixels[:, channel].size
        mean = float(share @ levels)
        # A constant channel must not divide by zero.
        moments.append((mean, max(float(share @ (levels - mean) ** 2) ** 0.5, 1e-3)))
    mean_and_deviation = torch.tensor(moments, dtype=torch.float32).T[:, :, None, None]
    return mean_and_deviation[0], mean_and_deviation[1]


def _depth(name: str) -> int:
    depth = name.removeprefix("resnet")
    if not name.startswith("resnet") or not depth.isdigit() or int(depth) not in DEPTHS:
        raise InputError(f"unknown model {name!r}: choose resnet followed by one of {', '.join(map(str, DEPTHS))}")
    return int(depth)
