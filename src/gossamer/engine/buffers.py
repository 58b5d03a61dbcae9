"""Module buffers in the averaged model: floating-point ones are averaged, integer ones take the maximum."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor, nn

from gossamer.comm import Job
from gossamer.engine.control import Control


def averaged_buffers(module: nn.Module, control: Control) -> Generator[list[Job], None, list[tuple[Tensor, Tensor]]]:
    """The averaged value of each buffer, as (buffer, value) pairs."""
    floats = [b for b in module.buffers() if b.is_floating_point()]
    others = [b for b in module.buffers() if not b.is_floating_point() and not b.is_complex()]
    values: list[tuple[Tensor, Tensor]] = []
    if floats:
        sent = torch.cat([b.detach().double().flatten().cpu() for b in floats])
        job = control.average(sent)
        yield [job]
        parts = torch.split(Control.read(job, sent), [b.numel() for b in floats])
        values += [(b, p.view(b.shape).to(b.device, b.dtype)) for b, p in zip(floats, parts, strict=True)]
    if others:
        # An average of one row a worker is everybody's row: the maximum of integers without a reduction of its own.
        own = torch.cat([b.detach().double().flatten().cpu() for b in others])
        n = control.layout.n
        rows = torch.zeros(n, own.numel(), dtype=torch.float64)
        rows[control.place] = own
        job = control.average(rows)
        yield [job]
        largest = (Control.read(job, rows).view(n, -1) * n).round().amax(dim=0)
        parts = torch.split(largest, [b.numel() for b in others])
        values += [(b, p.view(b.shape).to(b.device, b.dtype)) for b, p in zip(others, parts, strict=True)]
    return values
