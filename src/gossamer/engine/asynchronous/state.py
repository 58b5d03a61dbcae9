"""The state of a worker under asynchronous gossip: x, x~, and the step counts that it knows of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from gossamer.comm import Accelerator, Job, NoTurns, Turns
from gossamer.engine.asynchronous.clock import VirtualClock, WallClock
from gossamer.engine.flat import Bucket
from gossamer.engine.metrics import Metrics
from gossamer.topology import Layout
from gossamer.topology.a2cid2 import Rates
from gossamer.trace import TraceWriter

CHUNK = 2**17  # elements
ALPHA = 0.5  # of an exchange, on x
FASTER = 2**20  # times as many steps as others: impossible


P = ParamSpec("P")
R = TypeVar("R")


def in_turn(
    thread: Literal["training", "beside"],
) -> Callable[[Callable[Concatenate[State, P], R]], Callable[Concatenate[State, P], R]]:
    """A method of `State` that the training thread or the communication thread beside it calls: see `Turns`."""

    def decorate(method: Callable[Concatenate[State, P], R]) -> Callable[Concatenate[State, P], R]:
        @wraps(method)
        def taken(self: State, /, *args: P.args, **kwargs: P.kwargs) -> R:
            with self.turns.training() if thread == "training" else self.turns.beside():
                return method(self, *args, **kwargs)

        return taken

    return decorate


class State:
    """x, x~ (None for AD-PSGD) and the step counts. The caller of every method holds the lane's lock.

    The model's parameters y, the buckets, are a copy of x that is refreshed when a step begins: forward and backward
    read y undisturbed while x moves, and a step that raises leaves x and x~ as they were.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        rank: int,
        n: int,
        rates: Rates | None,
        rate: float,
        accelerator: Accelerator | None = None,
    ):
        """`rates` are A2CiD2's constants; None for AD-PSGD."""
        self.turns = NoTurns() if accelerator is None else Turns(accelerator)
        self._y = [b.x for b in buckets]
        self._rank = rank
        self.eta, self.alpha_tilde = 0.0, ALPHA
        self.x = [y.clone() for y in self._y]
        self.x_tilde: list[Tensor] | None = None
        if rates is not None and rates.eta is not None and rates.alpha_tilde is not None:
            self.eta, self.alpha_tilde = rate * rates.eta, rates.alpha_tilde
            self.x_tilde = [y.clone() for y in self._y]
        self.sent = [torch.empty_like(y) for y in self._y] if n > 1 else []
        # Row 0: the steps that are known of each worker. Row 1: the same, but parked workers count as the furthest one.
        self.counts = torch.zeros(2, n, dtype=torch.int64)
        self.heard = torch.zeros(2, n, dtype=torch.int64)
        self.members = torch.arange(n)  # ranks whose steps count
        self.time = 0.0  # Mix has been applied up to this time
        # One temporary per dtype and device: a new one per chunk would fault in new pages each time.
        self._spare = {(y.dtype, y.device): torch.empty(CHUNK, dtype=y.dtype, device=y.device) for y in self._y}

    def replan(self, members: Sequence[int], rates: Rates | None, rate: float) -> None:
        """The members have changed: count the steps of `members`, and use the constants of their graph."""
        self.members = torch.tensor(members)
        if rates is not None and rates.eta is not None and rates.alpha_tilde is not None:
            self.eta, self.alpha_tilde = rate * rates.eta, rates.alpha_tilde

    @in_turn("training")
    def show(self, now: float) -> None:
        """Before a step: Mix, and y <- x."""
        self.mix(now)
        self.release()

    @in_turn("training")
    def displace(self) -> None:
        """After a step: add the displacement y - x to x and to x~."""
        for b, whole in enumerate(self._y):
            if self.x_tilde is None:
                self.x[b].copy_(whole)
                continue
            for y, x, xt in _chunks(whole, self.x[b], self.x_tilde[b]):
                xt.add_(torch.sub(y, x, out=self._temporary(y)))
                x.copy_(y)
        self.counts[:, self._rank] += 1

    def mix(self, now: float) -> None:
        """Mix(dt): x and x~ approach each other; their sum stays."""
        elapsed, self.time = now - self.time, max(now, self.time)
        if self.x_tilde is None or elapsed <= 0:
            return
        share = -math.expm1(-2 * self.eta * elapsed) / 2
        for b in range(len(self.x)):
            for x, xt in _chunks(self.x[b], self.x_tilde[b]):
                d = torch.sub(xt, x, out=self._temporary(x)).mul_(share)
                x.add_(d)
                xt.sub_(d)

    @in_turn("beside")
    def depart(self, now: float) -> None:
        """Mix, and copy x into the buffers that are sent to a partner."""
        self.mix(now)
        for sent, x in zip(self.sent, self.x, strict=True):
            sent.copy_(x)

    @in_turn("beside")
    def arrive(self, now: float, jobs: Sequence[Job]) -> None:
        """Mix, then x -= m / 2 and x~ -= alpha~ m with the values that `jobs` (one per bucket) received."""
        self.mix(now)
        for job in jobs:
            assert job.result is not None
            b = job.bucket
            x_tilde = self.x[b] if self.x_tilde is None else self.x_tilde[b]
            for got, sent, x, xt in _chunks(job.result.out, self.sent[b], self.x[b], x_tilde):
                towards = got.sub_(sent)
                x.add_(towards, alpha=ALPHA)
                if self.x_tilde is not None:
                    xt.add_(towards, alpha=self.alpha_tilde)
        torch.maximum(self.counts, self.heard, out=self.counts)

    def believable(self) -> bool:
        """Whether the step counts that a partner has sent can be true: no worker takes FASTER times as many steps as
        any worker that is known. Counts only grow, so one that is nonsense would spread to all, and stay."""
        most = FASTER * (1 + int(self.counts.max()))
        return bool(((self.heard >= 0) & (self.heard <= most)).all())

    def excuse(self) -> None:
        """Count this worker as the furthest one, so that it holds nobody back while it takes no steps."""
        self.counts[1, self._rank] = self.counts[1].max()

    def ahead(self) -> int:
        """How many steps this worker is ahead of the slowest worker that it knows of."""
        return int(self.counts[0, self._rank] - self.counts[1, self.members].min())

    def slowest(self) -> int:
        """The worker with the fewest steps."""
        return int(self.members[self.counts[1, self.members].argmin()])

    @in_turn("training")
    def adopt(self) -> None:
        """Take the parameters, which the user has written, as the state."""
        for b, y in enumerate(self._y):
            self.x[b].copy_(y)
            if self.x_tilde is not None:
                self.x_tilde[b].copy_(y)

    @in_turn("training")
    def release(self) -> None:
        """y <- x."""
        for y, x in zip(self._y, self.x, strict=True):
            y.copy_(x)

    @in_turn("training")
    def state_dict(self) -> dict[str, Any]:
        return {
            "time": self.time,
            "counts": self.counts.clone(),
            "x": [x.clone() for x in self.x],
            "x_tilde": None if self.x_tilde is None else [x.clone() for x in self.x_tilde],
        }

    @in_turn("training")
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.time = state["time"]
        self.counts.copy_(state["counts"])
        for mine, saved in zip(self.x, state["x"], strict=True):
            mine.copy_(saved)
        if self.x_tilde is not None:
            for mine, saved in zip(self.x_tilde, state["x_tilde"], strict=True):
                mine.copy_(saved)

    def _temporary(self, like: Tensor) -> Tensor:
        return self._spare[like.dtype, like.device][: like.numel()]


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matching pieces that stay in the cache between the passes of an update."""
    return zip(*(torch.split(t, CHUNK) for t in tensors), strict=True)


class EventMetrics(Metrics):
    """Adds the unit of time, once it is agreed, per lane: the step times of optimizers may differ."""

    def __init__(
        self, worker: int, layout: Layout, writer: TraceWriter | None, lane: int, time: WallClock | VirtualClock
    ):
        super().__init__(worker, layout, writer)
        self._lane, self._clock = lane, time

    def summary(self) -> dict[str, Any]:
        unit = self._clock.unit if isinstance(self._clock, WallClock) else None
        return {**super().summary(), "unit_seconds_by_lane": {} if unit is None else {self._lane: unit}}
