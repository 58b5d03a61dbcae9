"""Which worker gets which samples, and in which order: functions of the seed, so nothing has to be saved."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gossamer import InputError

Indices = NDArray[np.int64]


class Order:
    """The numbers 0 … size-1 repeated without end: one permutation per epoch, drawn from (seed, epoch)."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._seed = seed
        self._permutation = lru_cache(maxsize=2)(self._draw)

    def take(self, start: int, count: int) -> Indices:
        """Return entries start … start+count-1 of the endless sequence; they may reach into the next epoch."""
        parts = []
        while count > 0:
            epoch, at = divmod(start, self.size)
            part = self._permutation(epoch)[at : at + count]
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return np.concatenate(parts)

    def _draw(self, epoch: int) -> Indices:
        return np.random.default_rng((self._seed, epoch)).permutation(self.size)


def alpha_of(partition: str) -> float | None:
    """Parse a partition: None for `iid`, the concentration for `dirichlet:ALPHA`."""
    name, _, value = partition.partition(":")
    if partition == "iid":
        return None
    try:
        alpha = float(value)
    except ValueError:
        alpha = 0.0
    if name != "dirichlet" or not 0.0 < alpha < float("inf"):
        raise InputError(
            f"partition {partition!r} is unknown: write 'iid', or 'dirichlet:ALPHA' with ALPHA > 0, e.g. dirichlet:0.1"
        )
    return alpha


def dirichlet_shards(labels: NDArray[np.integer], workers: int, *, alpha: float, seed: int) -> list[Indices]:
    """Divide all samples into disjoint shards, equal in size (± 1) and skewed by label.

    Every worker draws its preferences q ~ Dirichlet(alpha) over the labels and, in turn, takes a sample whose label
    is drawn from q among the labels that are left (Hsu, Qi and Brown 2019, "Measuring the effects of non-identical
    data distribution"). Equal sizes keep the workers' mean objective equal to that of the whole data set.
    """
    random = np.random.default_rng((seed, 1))
    classes = np.unique(labels)
    pools = [random.permutation(np.flatnonzero(labels == label)).tolist() for label in classes]
    preferences = random.dirichlet(np.full(len(classes), alpha), size=workers)
    draws = random.random(len(labels))
    shards: list[list[int]] = [[] for _ in range(workers)]
    cumulative = _cumulative(preferences, pools)
    for turn, draw in enumerate(draws):
        shard = turn % workers
        chosen = int(np.searchsorted(cumulative[shard], draw, side="right"))
        shards[shard].append(pools[chosen].pop())
        if not pools[chosen]:
            cumulative = _cumulative(preferences, pools)
    return [np.sort(np.array(shard, dtype=np.int64)) for shard in shards]


def _cumulative(preferences: NDArray[np.float64], pools: list[list[int]]) -> NDArray[np.float64]:
    left = np.array([len(pool) > 0 for pool in pools], dtype=np.float64)
    # The small constant lets a worker take from any pool once its preferred pools are empty.
    weights = (preferences + 1e-9) * left
    sums = np.cumsum(weights, axis=1)
    total = np.maximum(sums[:, -1:], 1e-300)
    # A draw below 1 must not pass the last pool that is left, despite rounding.
    return np.where(sums >= sums[:, -1:], 1.0, sums / total)


def picker(
    samples: int,
    batch: int,
    *,
    worker: int,
    workers: int,
    seed: int,
    shards: Callable[[int, int], list[Indices]] | None = None,
    what: str = "samples",
) -> Callable[[int], Indices]:
    """Return a function `pick(i)` that gives the sample numbers of the worker's i-th batch.

    Without shards the workers share one endless order and together see every sample once per epoch. With
    `shards(workers, seed)`, the samples of each worker, a worker sees its own shard once per epoch.
    """
    check_workers(samples, batch, worker=worker, workers=workers, what=what)
    if shards is not None:
        shard = shards(workers, seed)[worker]
        own = Order(len(shard), seed)
        return lambda i: shard[own.take(i * batch, batch)]
    order = Order(samples, seed)
    return lambda i: order.take((i * workers + worker) * batch, batch)


def check_workers(samples: int, batch: int, *, worker: int, workers: int, what: str = "samples") -> None:
    """Refuse a worker that does not exist, and more workers than the data has batches for."""
    if not 0 <= worker < workers:
        raise InputError(f"worker {worker} does not exist among {workers} workers: workers are counted from 0")
    if samples // workers < batch:
        raise InputError(
            f"{samples} {what} do not give each of {workers} workers a batch of {batch}: "
            "use fewer workers, a smaller batch or more data"
        )
