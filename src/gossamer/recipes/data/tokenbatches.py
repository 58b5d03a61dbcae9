"""Batches by token count: sentences of like length together, no more than a budget of tokens, padding included."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer import InputError
from gossamer.recipes.data.shards import Indices
from gossamer.recipes.data.subwords import BOS, EOS, PAD

Encoded = tuple[list[int], list[int]]


class Pairs(NamedTuple):
    """`source` ends with EOS; `target` has BOS before and EOS behind; both padded on the right."""

    source: Tensor
    target: Tensor


def length(pair: Encoded) -> int:
    """Tokens that a pair takes in a rectangle: the longer side and its mark."""
    return max(len(pair[0]), len(pair[1])) + 1


def pad(pairs: Sequence[Encoded], *, rows: int = 0, columns: int = 0) -> Pairs:
    """At least `rows` sentences and `columns` tokens; an added row has a source that ends at once and no target."""
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
    """An epoch's batches over some sentences.

    Sentences are sorted by length, ties in an order drawn anew every epoch, and cut where the next one would pass
    the budget. The sorted lengths are the same in every epoch, so the cuts are too: an epoch has `len(self)` batches,
    and the batch of any epoch and number follows from the seed. Their order is drawn anew every epoch as well.
    """

    def __init__(self, lengths: NDArray[np.int64], budget: int, *, seed: int, alike: int = 1) -> None:
        """`alike` batches in a row come from neighbors in length, so that as many workers get one shape."""
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
        """The sentences of a batch, counted through all epochs."""
        epoch, at = divmod(number, self._count)
        return self._plan(epoch)[at]

    def shape(self, number: int) -> tuple[int, int]:
        """Rows and columns that hold any of the `alike` batches this one belongs to."""
        first = number - number % self._alike
        together = [self._lengths[self.pick(at)] for at in range(first, first + self._alike)]
        return max(len(lengths) for lengths in together), int(max(lengths.max() for lengths in together))

    def _draw(self, epoch: int) -> list[Indices]:
        random = np.random.default_rng((self._seed, epoch))
        order = np.lexsort((random.random(len(self._lengths)), self._lengths))
        batches = [order[start:end] for start, end in zip(self._cuts[:-1], self._cuts[1:], strict=True)]
        # What does not fill a row of `alike` is left out, from a different place every epoch.
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
