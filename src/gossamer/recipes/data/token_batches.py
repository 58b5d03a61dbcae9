"""Batches by token count: sentences of similar length together, up to a budget of tokens including padding."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer import InputError
from gossamer.recipes.data.shards import Indices
from gossamer.recipes.data.text import BOS, EOS, PAD

Encoded = tuple[list[int], list[int]]


class Pairs(NamedTuple):
    """A batch of sentences, padded on the right: `source` ends with EOS, `target` begins with BOS and ends with EOS."""

    source: Tensor
    target: Tensor


def length(pair: Encoded) -> int:
    """Return the columns that a pair needs: the tokens of its longer side and EOS."""
    return max(len(pair[0]), len(pair[1])) + 1


def pad(pairs: Sequence[Encoded], *, rows: int = 0, columns: int = 0) -> Pairs:
    """Pad to at least `rows` sentences and `columns` tokens; added rows have an empty source and no target."""
    source = [[*line, EOS] for line, _ in pairs]
    target = [[BOS, *line, EOS] for _, line in pairs]
    empty = max(0, rows - len(pairs))
    source += [[EOS]] * empty
    target += [[BOS, PAD]] * empty
    return Pairs(_rectangle(source, columns), _rectangle(target, columns + 1 if columns else 0))


def _rectangle(lines: list[list[int]], columns: int) -> Tensor:
    width = max(columns, max(len(line) for line in lines))
    return torch.tensor([line + [PAD] * (width - len(line)) for line in lines])


class TokenBatches:
    """The batches of every epoch over a set of sentences.

    Sentences are sorted by length, with ties in an order drawn anew every epoch, and cut where the next sentence would
    exceed the budget. The sorted lengths, and so the cuts, are the same in every epoch: an epoch has `len(self)`
    batches, and the batch of any epoch and number follows from the seed. The order of the batches is drawn anew every
    epoch.
    """

    def __init__(self, lengths: NDArray[np.int64], budget: int, *, seed: int, alike: int = 1) -> None:
        """Let `alike` consecutive batches have similar lengths, so that as many workers can have the same shape."""
        self._lengths = lengths
        self._seed = seed
        self._alike = alike
        self._cuts = _cuts(np.sort(lengths), budget)
        usable = (len(self._cuts) - 1) // alike * alike
        self._skipped = len(self._cuts) - 1 - usable
        self._count = usable
        self._plan = lru_cache(maxsize=2)(self._draw)

    def __len__(self) -> int:
        return self._count

    def pick(self, number: int) -> Indices:
        """Return the sentences of a batch; batches are numbered through all epochs."""
        epoch, at = divmod(number, self._count)
        return self._plan(epoch)[at]

    def shape(self, number: int) -> tuple[int, int]:
        """Return rows and columns that hold each of the `alike` batches that this batch belongs to."""
        first = number - number % self._alike
        together = [self._lengths[self.pick(at)] for at in range(first, first + self._alike)]
        return max(len(lengths) for lengths in together), int(max(lengths.max() for lengths in together))

    def _draw(self, epoch: int) -> list[Indices]:
        random = np.random.default_rng((self._seed, epoch))
        order = np.lexsort((random.random(len(self._lengths)), self._lengths))
        batches = [order[start:end] for start, end in zip(self._cuts[:-1], self._cuts[1:], strict=True)]
        # Batches beyond a multiple of `alike` are left out, at a different place every epoch.
        start = int(random.integers(self._skipped + 1))
        groups = [range(at, at + self._alike) for at in range(start, start + self._count, self._alike)]
        return [batches[number] for group in random.permutation(len(groups)) for number in groups[group]]


def _cuts(lengths: NDArray[np.int64], budget: int) -> list[int]:
    if len(lengths) and lengths[-1] > budget:
        raise InputError(f"batch = {budget} tokens is less than the longest sentence ({lengths[-1]}): raise batch")
    cuts = [0]
    for at, longest in enumerate(lengths):
        if (at + 1 - cuts[-1]) * longest > budget:
            cuts.append(at)
    return [*cuts, len(lengths)]
