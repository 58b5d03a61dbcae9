"""A dense, single-loop simulation of asynchronous gossip's event sequence, to hold the engine to.

Mix(dt) = 1/2 [[1 + e, 1 - e], [1 - e, 1 + e]],  e = exp(-2 eta dt)
gradient of worker i:   Mix; the optimizer's displacement is added to x_i and x~_i
exchange of i and j:    Mix both; m = x_i - x_j;  x_i -= m / 2, x_j += m / 2;  x~_i -= a m, x~_j += a m
"""

import math

import torch

from gossamer.topology import Layout, build
from gossamer.topology.a2cid2 import rates_of
from gossamer.topology.events import Events

PAD = 8  # the engine aligns parameters to 64 bytes; equal lengths make equal roundings


def padded(parameters):
    """All parameters as one vector, laid out as the engine does."""
    rows = []
    for p in parameters:
        flat = p.detach().flatten()
        rows += [flat, flat.new_zeros(-len(flat) % PAD)]
    return torch.cat(rows)


class AsyncReference:
    """n workers with their own parameters and optimizer, stepped in the order of their clocks."""

    def __init__(self, topology, parameters, make_optimizer, *, algorithm, rate=1.0, seed=0, gaps="poisson"):
        n = len(parameters)
        self.y = [[torch.nn.Parameter(p.detach().clone()) for p in ps] for ps in parameters]
        self.optimizers = [make_optimizer(ps) for ps in self.y]
        self.x = [padded(ps) for ps in self.y]
        self.x_tilde = [x.clone() for x in self.x]
        graph = build(topology, Layout.flat(n)) if isinstance(topology, str) else topology
        rates = rates_of(graph)
        accelerated = algorithm == "a2cid2" and n > 1
        self.eta = rate * rates.eta if accelerated else 0.0
        self.alpha_tilde = rates.alpha_tilde if accelerated else 0.5
        self.mixed = [0.0] * n
        self.time = [0.0] * n
        self.steps = [0] * n
        self.events = Events(graph, rate, seed, gaps).stream()
        self.event = next(self.events, None)

    def _mix(self, i, now):
        e = -math.expm1(-2 * self.eta * (now - self.mixed[i])) / 2
        self.mixed[i] = now
        if self.eta:
            d = (self.x_tilde[i] - self.x[i]).mul_(e)
            self.x[i] += d
            self.x_tilde[i] -= d

    def _exchange_until(self, now):
        while self.event is not None and self.event.time <= now:
            _, at, i, j = self.event
            self._mix(i, at)
            self._mix(j, at)
            m = self.x[i] - self.x[j]
            self.x[i].sub_(m, alpha=0.5)
            self.x[j].add_(m, alpha=0.5)
            self.x_tilde[i].sub_(m, alpha=self.alpha_tilde)
            self.x_tilde[j].add_(m, alpha=self.alpha_tilde)
            self.event = next(self.events)

    def step(self, i, gradients, duration=1.0):
        """Worker i's next gradient, which was taken at its parameters y before this call."""
        self.time[i] += duration
        now = self.time[i]
        self._exchange_until(now)
        self._mix(i, now)
        at = 0
        for p, g in zip(self.y[i], gradients, strict=True):
            p.data.copy_(self.x[i][at : at + p.numel()].view(p.shape))
            p.grad = g.clone()
            at += -(-p.numel() // PAD) * PAD
        self.optimizers[i].step()
        after = padded(self.y[i])
        self.x_tilde[i] += after - self.x[i]
        self.x[i] = after
        self.steps[i] += 1

    def order(self, total, durations):
        """Whose step comes next: the earliest to finish, the lowest number first."""
        for _ in range(total):
            yield min((self.time[i] + durations(i, self.steps[i]), i) for i in range(len(self.x)))[1]
