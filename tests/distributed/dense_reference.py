"""The mathematics of gossip written plainly: one thread a worker, dense matrices, double precision.

The same scenario functions run here and on real processes: `decentralize` is the argument that differs. A worker's
round k is `x_i <- sum_j W_ij(k) x_j` over the values that everybody sent as their k-th, whatever was skipped when.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from gossamer.topology import Layout, resolve


class DenseCluster:
    def __init__(self, per_node: Sequence[int]):
        self.layout = Layout.of(list(per_node))
        self.changed = threading.Condition()
        self.sent: dict[tuple[int, int, int], list[torch.Tensor]] = {}  # (lane, round, worker) -> a vector per dtype
        self.want: dict[int, int] = {}
        self.posted: dict[int, dict[int, Any]] = {}
        self.first: nn.Module | None = None

    def run(self, scenario: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """`scenario(rank, decentralize, *args)` on every worker; the results by rank."""
        results: list[Any] = [None] * self.layout.n
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            def decentralize(model: Any, optimizer: Any, **settings: Any) -> DenseHandle:
                return DenseHandle(self, rank, model, optimizer, **settings)

            try:
                results[rank] = scenario(rank, decentralize, *args, **kwargs)
            except BaseException as error:
                errors.append(error)
                with self.changed:
                    self.changed.notify_all()

        threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(self.layout.n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
            if errors:
                raise errors[0]
            assert not thread.is_alive(), "the dense reference stands still"
        return results


class DenseLane:
    def __init__(self, handle: DenseHandle, index: int, optimizer: torch.optim.Optimizer):
        self.handle, self.index, self.k, self.steps, self.in_flight = handle, index, 0, 0, False
        kinds: dict[torch.dtype, list[nn.Parameter]] = {}
        names = {p: name for name, p in handle.model.named_parameters()}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad and (handle.keep is None or handle.keep(names[p], p)):
                    kinds.setdefault(p.dtype, []).append(p)
        self.kinds = list(kinds.values())
        optimizer.register_step_pre_hook(lambda *_: self.before())
        optimizer.register_step_post_hook(lambda *_: self.after())

    def values(self) -> list[torch.Tensor]:
        return [torch.cat([p.detach().double().flatten() for p in kind]) for kind in self.kinds]

    @torch.no_grad()
    def write(self, values: list[torch.Tensor]) -> None:
        for kind, value in zip(self.kinds, values, strict=True):
            for p, part in zip(kind, value.split([p.numel() for p in kind]), strict=True):
                p.copy_(part.view(p.shape))

    def matrix(self, k: int, bucket: int) -> np.ndarray:
        h = self.handle
        n = h.topology.n
        if h.average_every and (k + 1) % (h.average_every // h.every) == 0:
            return np.full((n, n), 1 / n)
        return h.topology.matrix(k + bucket)

    def _needs(self, k: int) -> list[int]:
        return [
            j
            for j in range(self.handle.topology.n)
            if any(self.matrix(k, b)[self.handle.rank, j] for b in range(len(self.kinds)))
        ]

    def arrived(self) -> bool:
        return not self.in_flight or all(
            (self.index, self.k - 1, j) in self.handle.cluster.sent for j in self._needs(self.k - 1)
        )

    def mix(self) -> None:
        """Wait for the round in flight and apply it. With the condition held."""
        cluster = self.handle.cluster
        while not self.arrived():
            cluster.want[self.index] = max(cluster.want.get(self.index, 0), self.k)
            cluster.changed.notify_all()
            assert cluster.changed.wait(300), "the dense reference stands still"
        if self.in_flight:
            mixed = []
            for b in range(len(self.kinds)):
                row = self.matrix(self.k - 1, b)[self.handle.rank]
                mixed.append(sum(row[j] * cluster.sent[self.index, self.k - 1, j][b] for j in np.flatnonzero(row)))
            self.write(mixed)
            self.in_flight = False

    def launch(self) -> None:
        cluster = self.handle.cluster
        cluster.sent[self.index, self.k, self.handle.rank] = self.values()
        self.k += 1
        self.in_flight = True
        cluster.changed.notify_all()
        if self.handle.algorithm == "atc":
            self.mix()

    def before(self) -> None:
        with self.handle.cluster.changed:
            self.mix()

    def after(self) -> None:
        self.steps += 1
        if self.steps % self.handle.every == 0:
            with self.handle.cluster.changed:
                self.launch()

    def mix_only(self) -> None:
        self.mix()
        self.launch()


class DenseHandle:
    def __init__(
        self,
        cluster: DenseCluster,
        rank: int,
        model: nn.Module,
        optimizer: Any,
        *,
        topology: Any = "aer",
        algorithm: str = "awc",
        every: int = 1,
        average_every: int = 0,
        parameters: Any = None,
        **_: Any,
    ):
        self.cluster, self.rank, self.model, self.keep = cluster, rank, model, parameters
        self.topology, self.algorithm = resolve(topology, cluster.layout), algorithm
        self.every, self.average_every, self.epoch = every, average_every, 0
        with cluster.changed:
            while rank != 0 and cluster.first is None:
                cluster.changed.wait(300)
            with torch.no_grad():
                for mine, theirs in zip(_all(model), _all(cluster.first or model), strict=True):
                    mine.copy_(theirs)
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        if rank == 0:
            cluster.first = _Copy(model)
        self.lanes = [DenseLane(self, i, o) for i, o in enumerate(optimizers)]
        self.wait_for_all("start")
        with cluster.changed:
            cluster.changed.notify_all()

    def wait_for_all(self, what: str) -> dict[int, Any]:
        """Park until all workers are here; give blocked trainers the rounds they need meanwhile."""
        cluster = self.cluster
        with cluster.changed:
            key: Any = (what, self.epoch)
            self.epoch += 1
            here = cluster.posted.setdefault(key, {})
            here[self.rank] = [lane.k for lane in self.lanes]
            cluster.changed.notify_all()
            while len(here) < cluster.layout.n:
                moved = False
                for lane in self.lanes:
                    if lane.k < cluster.want.get(lane.index, 0) and lane.arrived():
                        lane.mix_only()
                        moved = True
                if not moved:
                    assert cluster.changed.wait(300), "the dense reference stands still"
            return here

    def meet(self) -> None:
        entries = self.wait_for_all("meet")
        with self.cluster.changed:
            for at, lane in enumerate(self.lanes):
                while lane.k < max(entry[at] for entry in entries.values()):
                    lane.mix_only()

    def gather(self, value: Any) -> list[Any]:
        self.cluster.posted.setdefault(("value", self.epoch), {})[self.rank] = value  # type: ignore[arg-type]
        key = ("value", self.epoch)
        self.wait_for_all("gather")
        return [self.cluster.posted[key][r] for r in range(self.cluster.layout.n)]  # type: ignore[index]

    def average(self) -> None:
        everyone = self.gather([lane.values() for lane in self.lanes])
        for at, lane in enumerate(self.lanes):
            lane.write([sum(theirs[at][b] for theirs in everyone) / len(everyone) for b in range(len(lane.kinds))])

    @contextmanager
    def averaged(self) -> Any:
        self.meet()
        own = [lane.values() for lane in self.lanes]
        self.average()
        yield self.model
        for lane, values in zip(self.lanes, own, strict=True):
            lane.write(values)

    def consensus_distance(self) -> float:
        self.meet()
        rows = torch.stack(
            [torch.cat([v for lane in x for v in lane]) for x in self.gather([x.values() for x in self.lanes])]
        )
        return float((rows - rows.mean(0)).square().sum(1).mean().sqrt())

    def close(self) -> None:
        self.meet()
        self.average()

    def __enter__(self) -> DenseHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Copy(nn.Module):
    """The values of worker 0 at the start."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.values = [t.detach().clone() for t in _all(model)]


def _all(model: nn.Module) -> list[torch.Tensor]:
    if isinstance(model, _Copy):
        return model.values
    return [*model.parameters(), *model.buffers()]
