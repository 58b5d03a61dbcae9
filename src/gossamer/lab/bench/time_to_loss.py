"""Time to loss: a small task with real data and gradients and an emulated compute time.

A student network learns to classify random inputs; a fixed random network (the teacher) gives the labels. Every step
draws new samples, so the loss of a step is that of unseen data. The layers of the student sleep like those of an
emulated accelerator, a third of the time in the forward pass and the rest in the backward pass, so DDP can overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

import gossamer
from gossamer.comm import baseline, process_groups
from gossamer.comm.torchft_peer import PeerName, TorchftPeer
from gossamer.lab.bench.worker import optimizer_of
from gossamer.lab.emulate import FORWARD, PassTimer
from gossamer.predict.methods import Method

INPUTS, CLASSES, HIDDEN_LAYERS = 64, 10, 4


@dataclass(frozen=True)
class LearningRun:
    """The settings of one run; `seconds_of[rank]` are the compute times of a worker, one per step."""

    method: Method
    lr: float
    seconds_of: tuple[tuple[float, ...], ...]
    width: int = 256
    batch: int = 32
    seed: int = 0
    bucket_mb: float | None = None
    timeout: float = 120.0
    gradients: Literal["worker", "node"] = "worker"
    options: dict[str, Any] = field(default_factory=dict)  # settings of the algorithm's policy, or of torchft


class _Pause(torch.autograd.Function):
    """Identity that sleeps for its layer's share of the compute time, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Student, layer: int) -> Tensor:
        ctx.model, ctx.layer = model, layer
        if layer == 0:
            model.clock.begin()
        model.clock.sleep_until(FORWARD * model.seconds * (layer + 1) / model.depth)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        model, done = ctx.model, ctx.model.depth - ctx.layer
        if done == 1:
            model.clock.begin()
        model.clock.sleep_until((1 - FORWARD) * model.seconds * done / model.depth)
        return grads[0], None, None


class Student(nn.Module):
    """A network of equally wide layers; `seconds` is the compute time of the next step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [INPUTS, *[width] * HIDDEN_LAYERS, CLASSES]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.depth = len(self.layers)
        self.seconds = 0.0
        self.clock = PassTimer()

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x if index == 0 else torch.relu(x))
            if self.training:
                paused: Tensor = _Pause.apply(x, self, index)  # type: ignore[no-untyped-call]
                x = paused
        return x


def teacher() -> Callable[[Tensor], Tensor]:
    """The function that gives the labels, the same on every worker and in every run."""
    source = torch.Generator().manual_seed(1234)
    first = torch.randn(INPUTS, 48, generator=source) / INPUTS**0.5
    second = torch.randn(48, CLASSES, generator=source)
    return lambda x: (torch.tanh(2 * x @ first) @ second).argmax(1)


def learn(rank: int, run: LearningRun) -> dict[str, Any]:
    """Train; return the `times` (seconds since the common start) and `losses` of all steps and the `final` loss.

    The final loss is that of the exact mean of all workers' models on 4096 unseen samples.
    """
    torch.set_num_threads(1)
    process_groups.join_world()
    torch.manual_seed(run.seed)  # all methods and workers start with the same model
    model = Student(run.width)
    labels, data = teacher(), torch.Generator().manual_seed(1000 * run.seed + rank)
    optimizer = optimizer_of(run.method.optimizer, model.parameters(), run.lr)
    gossip: gossamer.Gossip | None = None
    peer: TorchftPeer | None = None
    policy = {name: value for name, value in run.options.items() if name != "combine"}
    forward: nn.Module = model
    if run.method.algorithm == "ddp":
        forward = baseline.ddp(model, bucket_mb=run.bucket_mb, wire=run.method.wire)
    elif run.method.algorithm == "local":
        every = run.method.local_steps(1)
        peer = TorchftPeer(cast(PeerName, run.method.name), model, optimizer, **{"every": every, **run.options})
    else:
        gossip = gossamer.decentralize(
            model,
            optimizer,
            topology=run.method.topology or "aer",
            algorithm=gossamer.algorithm(run.options.get("combine", run.method.algorithm), **policy),
            wire=run.method.wire,
            exchange=gossamer.Exchange(bucket_mib=run.bucket_mb),
            gradients=run.gradients,
            timeout=run.timeout,
        )
    seconds = run.seconds_of[rank]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(seconds), run.lr / 20)
    times, losses = [], []
    process_groups.wait_for_all()
    begin = time.monotonic()
    for compute in seconds:
        model.seconds = compute
        x = torch.randn(run.batch, INPUTS, generator=data)
        loss = nn.functional.cross_entropy(forward(x), labels(x))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        times.append(time.monotonic() - begin)
        losses.append(loss.item())
    trained = gossip or peer
    final = _final_loss(model, trained, labels)
    if trained is not None:
        trained.close()
    process_groups.leave_world()
    return {"times": times, "losses": losses, "final": final}


def _final_loss(
    model: Student, trained: gossamer.Gossip | TorchftPeer | None, labels: Callable[[Tensor], Tensor]
) -> float:
    x = torch.randn(4096, INPUTS, generator=torch.Generator().manual_seed(99))
    model.eval()
    with torch.no_grad():
        if trained is None:
            return float(nn.functional.cross_entropy(model(x), labels(x)))
        with trained.averaged():
            return float(nn.functional.cross_entropy(model(x), labels(x)))


def curve(answers: list[dict[str, Any]], window: int = 20) -> list[tuple[float, float]]:
    """(seconds, loss) per step: the time of the slowest worker, and the mean loss over workers and `window` steps."""
    times = [max(a["times"][k] for a in answers) for k in range(len(answers[0]["times"]))]
    means = [sum(a["losses"][k] for a in answers) / len(answers) for k in range(len(times))]
    return [(times[k], sum(means[k - window + 1 : k + 1]) / window) for k in range(window - 1, len(times))]


def time_to(points: list[tuple[float, float]], target: float) -> float | None:
    """The time at which a curve first reaches the target; None if it does not."""
    return next((t for t, loss in points if loss <= target), None)
