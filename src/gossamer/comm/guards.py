"""Check the values that neighbors sent before they are mixed in."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gossamer.comm.accelerator import widest_float
from gossamer.comm.exchange import ExchangeSteps, Scratch

CHUNK = 2**18  # elements
Refuse = Callable[[int, str], None]  # a peer, and why its values are not mixed in


def inspected(
    make: Callable[[Scratch], ExchangeSteps], x: Tensor, most: float, refuse: Refuse, difference: bool, scratch: Scratch
) -> ExchangeSteps:
    """Run the exchange that `make` returns. Return None instead of its result if values that arrived are not finite, or
    if the result would move `x` by more than `most` times the norm of `x`.

    The exchange is completed either way, because other workers wait for this worker's messages. `difference` says that
    the result is mixed - x instead of the mixed value. `refuse` is called with every sender and the reason.
    """
    steps = make(scratch)
    senders: dict[int, None] = {}
    bad: dict[int, str] = {}
    try:
        batch = next(steps)
        while True:
            yield batch
            for peer, message in batch.recvs:
                senders[peer] = None
                if message.is_floating_point() and not finite(message):
                    bad[peer] = "its values are not finite"
            batch = next(steps)
    except StopIteration as stop:
        mixed = stop.value
    if mixed is not None and not bad:
        size = x.numel()
        jump = _norm(mixed.out[:size], None if difference else x) * (1.0 if mixed.weight is None else mixed.weight)
        own = _norm(x, None)
        if not math.isfinite(jump):
            bad = dict.fromkeys(senders, "its values are not finite")
        elif own > 0 and jump > most * own:  # a bucket that is exactly zero has no size to compare with
            why = f"it would move the parameters by {jump:.3g}, more than {most:g} times their norm"
            bad = dict.fromkeys(senders, why)
    for peer, why in bad.items():
        refuse(peer, why)
    return None if bad else mixed


def finite(values: Tensor) -> bool:
    """Whether all values are finite. The sum of absolute values shows it; double precision does not overflow."""
    return math.isfinite(float(torch.linalg.vector_norm(values, 1, dtype=widest_float(values))))


def _norm(a: Tensor, b: Tensor | None) -> float:
    """The norm of a, or of a - b, computed in chunks."""
    total = 0.0
    for start in range(0, a.numel(), CHUNK):
        part = a[start : start + CHUNK]
        if b is not None:
            part = part - b[start : start + CHUNK]
        total += float(torch.linalg.vector_norm(part, dtype=widest_float(part))) ** 2
    return math.sqrt(total)
