"""The wire formats by name."""

from __future__ import annotations

import torch

from gossamer.comm.quantized import Quantized
from gossamer.comm.wire import Half, Plain, Wire
from gossamer.errors import InputError

WIRES: dict[str, Wire] = {
    wire.name: wire
    for wire in (
        Plain(),
        Half("bf16", torch.bfloat16),
        Half("fp16", torch.float16),
        Quantized("int8", 8),
        Quantized("int4", 4),
    )
}


def wire_named(name: str) -> Wire:
    """The wire format called `name`."""
    if not isinstance(name, str) or name not in WIRES:
        raise InputError(f"unknown wire {name!r}; choose one of {', '.join(WIRES)}")
    return WIRES[name]
