"""The naive dense reference of synchronous gossip: all workers' parameters stacked, one matrix product a bucket.

Independent of the engine: it shares only `topology.matrix(k)`. One lane (optimizer) a `Dense`. The optimizers are
elementwise, so torch's own optimizer on the stacked parameters is that optimizer on every worker's plain copy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.topology import Topology

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Gradient = Callable[[int, list[Tensor]], list[Tensor]]  # (step, stacked parameters) -> stacked gradients
Late = Callable[[int, int], bool]  # (worker, step): its exchange has not arrived yet


def bucket_of(shapes: list[tuple[int, ...]], item: int, bucket_bytes: int | None, fragments: int = 1) -> np.ndarray:
    """Which bucket every element is in: parameters padded to 64 bytes one after the other, then equal slices."""
    align = 64 // item
    starts, total = [], 0
    for shape in shapes:
        starts.append(total)
        total += -(-int(np.prod(shape)) // align) * align
    count = 1 if bucket_bytes is None else -(-total * item // bucket_bytes)
    count = min(-(-count // fragments), max(1, total // align // fragments)) * fragments
    bounds = [total // align * b // count * align for b in range(1, count)]
    places = [start + np.arange(int(np.prod(shape))) for start, shape in zip(starts, shapes, strict=True)]
    return np.searchsorted(bounds, np.concatenate(places), side="right")


class Dense:
    """x_i(t+1) = d(grad f_i(x_i(t))) + sum_j W(k)_ij x_j(t)  (awc), or W(k) applied after the step (atc)."""

    def __init__(
        self,
        topology: Topology,
        start: list[Tensor],
        make: MakeOptimizer,
        *,
        algorithm: str = "awc",
        every: int = 1,
        average_every: int = 0,
        fragments: int = 1,
        stagger: bool = True,
        bucket_bytes: int | None = None,
        staleness: int = 0,
        late: Late = lambda worker, step: False,
        forced: tuple[int, ...] = (),
    ):
        self.topology, self.n = topology, topology.n
        self.parameters = [nn.Parameter(value.detach().clone()) for value in start]  # (n, *shape) each
        self.optimizer = make(self.parameters)
        self.algorithm, self.every, self.average_every, self.fragments = algorithm, every, average_every, fragments
        self.stagger, self.staleness, self.late, self.forced = stagger, staleness, late, forced
        self.bucket = bucket_of([tuple(v.shape[1:]) for v in start], start[0].element_size(), bucket_bytes, fragments)
        self._matrices: dict[int, np.ndarray] = {}
        self.steps = 0
        self.launched = [0] * self.n  # rounds launched by each worker
        self.in_flight = [False] * self.n
        self.skips = [0] * self.n
        self.was_late: set[tuple[int, int]] = set()  # (worker, step), for a transport that replays it
        self.snapshots: dict[int, dict[int, np.ndarray]] = {}  # round -> worker -> what it sent

    def matrix(self, k: int, bucket: int) -> np.ndarray:
        everyone = np.full((self.n, self.n), 1 / self.n)
        if k in self.forced:
            return everyone
        turns = [t for t in range(k + 1) if (t + bucket) % self.fragments == 0]  # rounds in which it is exchanged
        if k not in turns:
            return np.eye(self.n)
        if self.average_every:
            rounds = self.average_every // self.every
            next_average = (k // rounds + 1) * rounds  # exact: the last turn of the bucket before it
            if not any((t + bucket) % self.fragments == 0 for t in range(k + 1, next_average)):
                return everyone
        at = (len(turns) - 1 + (bucket // self.fragments if self.stagger else 0)) % self.topology.period
        if at not in self._matrices:
            self._matrices[at] = self.topology.matrix(at)
        return self._matrices[at]

    def stacked(self) -> np.ndarray:
        """All parameters, (n, elements), in double precision."""
        return np.concatenate([p.detach().double().numpy().reshape(self.n, -1) for p in self.parameters], axis=1)

    def write(self, values: np.ndarray) -> None:
        at = 0
        with torch.no_grad():
            for p in self.parameters:
                width = p[0].numel()
                p.copy_(torch.from_numpy(values[:, at : at + width].copy()).reshape(p.shape))
                at += width

    def mixed(self, k: int, values: np.ndarray) -> np.ndarray:
        out = np.empty_like(values)
        for b in np.unique(self.bucket):
            out[:, self.bucket == b] = self.matrix(k, int(b)) @ values[:, self.bucket == b]
        return out

    def step(self, gradient: Gradient) -> None:
        """One step of every worker; an exchange counts as arrived when all it needs were launched in earlier steps."""
        gradients = gradient(self.steps, [p.detach() for p in self.parameters])  # at the un-mixed point
        for p, g in zip(self.parameters, gradients, strict=True):
            p.grad = g
        if self.algorithm == "awc":
            self._corrections()
        self.optimizer.step()
        self.steps += 1
        if self.algorithm == "atc":
            if self.steps % self.every == 0:
                self.write(self.mixed(self.launched[0], self.stacked()))
                self.launched = [k + 1 for k in self.launched]
            return
        values = self.stacked()
        for i in range(self.n):
            if not self.in_flight[i] and self.steps % self.every == 0:
                self.snapshots.setdefault(self.launched[i], {})[i] = values[i]
                self.launched[i] += 1
                self.in_flight[i], self.skips[i] = True, 0

    def _corrections(self) -> None:
        """x_i += sum_j W_ij s_j - s_i against what was sent, for every worker whose exchange has arrived."""
        values = self.stacked()
        moved = values.copy()
        done = []
        for i in range(self.n):
            if not self.in_flight[i]:
                continue
            k = self.launched[i] - 1
            rows = {int(b): self.matrix(k, int(b))[i] for b in np.unique(self.bucket)}
            needs = {int(j) for row in rows.values() for j in np.flatnonzero(row)} - {i}
            absent = not all(j in self.snapshots[k] for j in needs)
            if needs and (absent or self.late(i, self.steps)):
                self.was_late.add((i, self.steps))
            if (i, self.steps) in self.was_late and self.skips[i] < self.staleness:
                self.skips[i] += 1
                continue
            assert not absent, f"worker {i} would wait for ever in step {self.steps}: the script is impossible"
            for b, row in rows.items():
                here = self.bucket == b
                sent = self.snapshots[k]
                total = sum(row[j] * sent[j][here] for j in np.flatnonzero(row))
                moved[i, here] = values[i, here] + total - sent[i][here]
            done.append(i)
        for i in done:
            self.in_flight[i] = False
        self.write(moved)


def quadratic(n: int, shapes: list[tuple[int, ...]], steps: int, dtype: torch.dtype, seed: int = 0) -> Gradient:
    """A different quadratic on every worker in every step: gradient (t % 3 + 1) / 2 * (x - target)."""
    generator = torch.Generator().manual_seed(seed)
    targets = [
        [torch.randn((n, *shape), generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
        for _ in range(steps)
    ]

    def gradient(t: int, values: list[Tensor]) -> list[Tensor]:
        return [(x - c) * ((t % 3 + 1) / 2) for x, c in zip(values, targets[t], strict=True)]

    return gradient


def distance(values: np.ndarray) -> float:
    """The consensus distance: RMS over the workers of the distance to the mean."""
    return float(np.sqrt(np.square(values - values.mean(axis=0)).sum(axis=1).mean()))
