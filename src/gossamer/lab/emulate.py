"""An emulated accelerator: a model with real parameters and gradients that sleeps instead of computing.

The forward pass takes a third and the backward pass two thirds of the step's compute time, spread evenly over the
layers. Sleeping uses no CPU time, so many workers fit on two cores, while exchanges, optimizer and network are real.
Gradients become ready layer by layer, last layer first, as in a real backward pass, so DDP can overlap its buckets.
With `busy`, the model computes instead of sleeping: matrix products that take the compute time on an idle core, and
longer where communication competes for the core.

Time dilation: a result depends on the ratio of communication to compute, gamma = (bytes / bandwidth) / compute.
Dividing the bandwidth and multiplying the compute time by the same factor does not change gamma, hence no speedup, but
reduces the share of the CPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.errors import InputError

FORWARD = 1 / 3  # share of the compute time; the backward pass takes the rest


class PassTimer:
    """Sleeps until points in time, so that overheads and late wake-ups do not add up over layers.

    A pass (forward or backward) starts with `begin()`; layer i of L ends after (i + 1) / L of the time of the pass.
    """

    def __init__(self) -> None:
        self._begin = 0.0

    def begin(self) -> None:
        self._begin = time.perf_counter()

    def sleep_until(self, seconds: float) -> None:
        """Return `seconds` after `begin`, or at once if that time has passed."""
        left = self._begin + seconds - time.perf_counter()
        if left > 0:
            time.sleep(left)  # releases the GIL, so communication threads continue


class BusyCore:
    """Keeps a core busy with an amount of work that takes `seconds` on an idle core."""

    def __init__(self) -> None:
        self._matrix = torch.randn(96, 96)
        self.rate = max(self._measured() for _ in range(3))  # products per second

    def _measured(self, products: int = 400) -> float:
        start = time.thread_time()  # without the time in which others had the core
        self._multiply(products)
        return products / (time.thread_time() - start)

    def _multiply(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self._matrix, self._matrix)

    def work(self, seconds: float) -> None:
        self._multiply(round(seconds * self.rate))


class _Sleep(torch.autograd.Function):
    """Identity on the activation that sleeps; its backward pass also gives every parameter a gradient."""

    @staticmethod
    def forward(ctx: Any, activation: Tensor, layer: EmulatedLayer, *parameters: Tensor) -> Tensor:
        model, index = layer.model, layer.index
        ctx.layer = layer
        model.spend(FORWARD * model.step_seconds, index)
        return activation.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        layer = ctx.layer
        model, done = layer.model, layer.model.depth - layer.index
        model.spend((1 - FORWARD) * model.step_seconds, done - 1)
        # For timing, a constant gradient is enough. Each needs new memory, because DDP and optimizers keep gradients.
        return (grad, None, *(torch.full_like(p, model.gradient) for p in layer.parameters()))


class EmulatedLayer(nn.Module):
    """One layer: `numel` real parameters, no arithmetic."""

    def __init__(self, numel: int, index: int, model: EmulatedModel) -> None:
        super().__init__()
        width = max(1, math.isqrt(numel))
        sizes = [(numel // width, width), (numel % width,)] if numel % width else [(numel // width, width)]
        self.weights = nn.ParameterList(nn.Parameter(torch.full(size, 0.01)) for size in sizes)
        self.index = index
        object.__setattr__(self, "model", model)  # a plain reference: the model is not a submodule of its layer

    model: EmulatedModel

    def forward(self, activation: Tensor) -> Tensor:
        slow: Tensor = _Sleep.apply(activation, self, *self.parameters())  # type: ignore[no-untyped-call]
        return slow


class EmulatedModel(nn.Module):
    """`model_mb` MB (10^6 bytes) of fp32 parameters in `layers` layers; a step computes for `seconds[step]`.

        table = ComputeTime(0.4, parse_jitter("lognormal:0.3")).sample(workers, steps, seed)
        model = EmulatedModel(model_mb=4, layers=8, seconds=table[:, rank])
        for _ in range(steps):
            model().backward()          # the loss is a scalar; the model needs no input
            optimizer.step(); optimizer.zero_grad()

    The step counter advances with each forward pass in training mode; after the last entry `seconds` starts over.
    `reset()` sets the counter to the beginning, so that every method gets the same compute times.
    """

    def __init__(
        self,
        model_mb: float,
        layers: int,
        seconds: Sequence[float] | float,
        *,
        gradient: float = 1e-4,
        busy: bool = False,
    ) -> None:
        super().__init__()
        numel = round(model_mb * 1e6 / 4) if math.isfinite(model_mb) else 0
        if layers < 1 or numel < layers:
            raise InputError(
                f"an emulated model needs at least one parameter per layer, got {model_mb} MB in {layers} layers"
            )
        times = [float(s) for s in ([seconds] if isinstance(seconds, int | float) else seconds)]
        if not times or not all(math.isfinite(s) and s >= 0 for s in times):
            raise InputError(f"compute times must be finite and at least 0 seconds, got {times[:8]}; pass e.g. 0.4")
        self.depth = layers
        self.seconds = tuple(times)
        self.gradient = gradient
        self.clock = PassTimer()
        self._core = BusyCore() if busy else None
        self.step = -1
        cuts = [numel * i // layers for i in range(layers + 1)]
        self.layers = nn.ModuleList(EmulatedLayer(cuts[i + 1] - cuts[i], i, self) for i in range(layers))

    def spend(self, seconds: float, layer: int) -> None:
        """Compute for the next layer of a pass of `seconds`, in which `layer` layers are done."""
        if self._core is not None:
            self._core.work(seconds / self.depth)
            return
        if layer == 0:
            self.clock.begin()
        self.clock.sleep_until(seconds * (layer + 1) / self.depth)

    @property
    def step_seconds(self) -> float:
        """The compute time of the current step."""
        return self.seconds[max(0, self.step) % len(self.seconds)]

    @property
    def parameter_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def reset(self) -> None:
        """Start over with the first entry of `seconds`."""
        self.step = -1

    def forward(self, batch: Tensor | None = None) -> Tensor:
        """Return a scalar loss. `batch` is accepted because training loops pass one, and is ignored."""
        if self.training:
            self.step += 1
        activation = torch.zeros((), requires_grad=True)
        for layer in self.layers:
            activation = layer(activation)
        return activation
