"""A dense reference for outer steps, each in the form of its paper and not in the engine's common one.

`y` are the workers' values after the local steps, `phi` their outer points, both (n, elements); `mixed(values)` applies
the matrix of the round. A rule returns the new outer points.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from reference import Dense, Gradient

Mixes = Callable[[np.ndarray], np.ndarray]


class Nesterov:
    """DiLoCo's outer step on Wy - phi: u <- b u + D, phi <- phi + a (D + b u)."""

    def __init__(self, lr: float, momentum: float):
        self.a, self.b, self.u = lr, momentum, 0.0

    def __call__(self, y, phi, mixed: Mixes, average: bool):
        d = mixed(y) - phi
        self.u = self.b * self.u + d
        return phi + self.a * (d + self.b * self.u)


class HeavyBall:
    """NoLoCo: delta <- b delta + a mean(Delta) + a (mean(phi) - phi), phi <- phi + delta."""

    def __init__(self, lr: float, momentum: float):
        self.a, self.b, self.delta = lr, momentum, 0.0

    def __call__(self, y, phi, mixed: Mixes, average: bool):
        self.delta = self.b * self.delta + self.a * mixed(y - phi) + self.a * (mixed(phi) - phi)
        return phi + self.delta


class Accelerated:
    """theta <- y - a (y - Wy) + g (y - y of the last exchange)."""

    def __init__(self, lr: float, momentum: float):
        self.a, self.g, self.last = lr, momentum, None

    def __call__(self, y, phi, mixed: Mixes, average: bool):
        last = phi if self.last is None else self.last
        self.last = y.copy()
        return y - self.a * (y - mixed(y)) + self.g * (y - last)


class SlowMo:
    """At exact averages u <- b u + (x0 - mean) / rate, x0 <- x0 - a rate u; else y <- Wy."""

    rate = 0.1

    def __init__(self, lr: float, momentum: float):
        self.a, self.b, self.u, self.x0 = lr, momentum, 0.0, None

    def __call__(self, y, phi, mixed: Mixes, average: bool):
        self.x0 = phi if self.x0 is None else self.x0
        if not average:
            return mixed(y)
        self.u = self.b * self.u + (self.x0 - mixed(y)) / self.rate
        self.x0 = self.x0 - self.a * self.rate * self.u
        return self.x0


RULES = {"nesterov": Nesterov, "heavy-ball": HeavyBall, "accelerated": Accelerated, "slowmo": SlowMo}


class DenseOuter(Dense):
    """Dense with an outer step every `every` steps: at once (atc), or while the next `every` steps run (awc).

    With fragments, each bucket takes its own outer steps, in the rounds in which it is exchanged.
    """

    def __init__(self, topology, start, make, *, outer: str, lr: float, momentum: float, **settings):
        super().__init__(topology, start, make, **settings)
        self.rules = [RULES[outer](lr, momentum) for _ in range(self.bucket.max() + 1)]
        self.phi = self.stacked()
        self.sent: np.ndarray | None = None
        self.k = 0

    def _outer(self, y: np.ndarray) -> np.ndarray:
        """Where training goes on from `y`."""
        k, every = self.k, self.average_every // self.every
        average = every > 0 and k % every >= every - self.fragments
        after = y.copy()
        for b, rule in enumerate(self.rules):
            here = self.bucket == b
            if (k + b) % self.fragments == 0 and here.any():
                matrix = self.matrix(k, b)
                self.phi[:, here] = after[:, here] = rule(
                    y[:, here], self.phi[:, here], lambda v, matrix=matrix: matrix @ v, average
                )
        self.k += 1
        return after

    def step(self, gradient: Gradient) -> None:
        gradients = gradient(self.steps, [p.detach() for p in self.parameters])
        for p, g in zip(self.parameters, gradients, strict=True):
            p.grad = g
        ends = (self.steps + 1) % self.every == 0
        if self.algorithm == "awc" and ends and self.sent is not None:
            self.write(self.stacked() + self._outer(self.sent) - self.sent)
        self.optimizer.step()
        self.steps += 1
        if ends and self.algorithm == "atc":
            self.write(self._outer(self.stacked()))
        elif ends:
            self.sent = self.stacked()
