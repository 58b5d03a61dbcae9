"""Wire formats: what a value looks like in flight between two nodes.

Rounding in flight must not move the workers' mean. So nobody averages with a neighbor's rounded value directly:
both sides apply the same correction `x_i += w (Q(x_j) - Q(x_i))`, each using its own rounded value too (the
correction form). What the pair gains and loses cancels for any Q. The consensus distance then stops at the
rounding (about 1e-3 relative for bf16, 5e-3 for int8), and exact averages pull it further down.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.errors import InputError


class Wire:
    """`encode` writes a value into a byte payload, `decode` reads it back; `Q = decode(encode(.))`."""

    name: str

    def lossless(self, dtype: torch.dtype) -> bool:
        """Whether values of `dtype` travel as they are."""
        raise NotImplementedError

    def payload_bytes(self, elements: int) -> int:
        raise NotImplementedError

    def encode(self, value: Tensor, payload: Tensor) -> None:
        raise NotImplementedError

    def decode(self, payload: Tensor, out: Tensor) -> None:
        raise NotImplementedError


class Plain(Wire):
    """Full precision: the parameters' own dtype."""

    name = "fp32"

    def lossless(self, dtype: torch.dtype) -> bool:
        return True


class Half(Wire):
    """Two bytes an element: bf16 keeps the range, fp16 keeps three more bits."""

    def __init__(self, name: str, dtype: torch.dtype):
        self.name, self.dtype = name, dtype

    def lossless(self, dtype: torch.dtype) -> bool:
        return dtype == self.dtype

    def payload_bytes(self, elements: int) -> int:
        return 2 * elements

    def encode(self, value: Tensor, payload: Tensor) -> None:
        payload.view(self.dtype).copy_(value)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(payload.view(self.dtype))


class Int8(Wire):
    """One byte an element and one fp32 scale per block: `round(127 x / max|block|)`."""

    name = "int8"
    BLOCK = 256

    def lossless(self, dtype: torch.dtype) -> bool:
        return False

    def payload_bytes(self, elements: int) -> int:
        return elements + 4 * -(-elements // self.BLOCK)

    def encode(self, value: Tensor, payload: Tensor) -> None:
        blocks = -(-value.numel() // self.BLOCK)
        whole = value.numel() // self.BLOCK
        scale = payload[: 4 * blocks].view(torch.float32)
        body = payload[4 * blocks :].view(torch.int8)
        for start, stop, rows in self._spans(value.numel(), whole):
            part = value[start:stop].view(rows, -1)
            at = slice(start // self.BLOCK, start // self.BLOCK + rows)
            largest = part.abs().amax(dim=1).float()
            torch.mul(largest, 1 / 127, out=scale[at])
            inverse = torch.where(largest > 0, 127 / largest, 0.0).to(part.dtype)
            body[start:stop].view(rows, -1).copy_((part * inverse[:, None]).round_().clamp_(-127, 127))

    def decode(self, payload: Tensor, out: Tensor) -> None:
        blocks = -(-out.numel() // self.BLOCK)
        whole = out.numel() // self.BLOCK
        scale = payload[: 4 * blocks].view(torch.float32)
        body = payload[4 * blocks :].view(torch.int8)
        for start, stop, rows in self._spans(out.numel(), whole):
            at = slice(start // self.BLOCK, start // self.BLOCK + rows)
            target = out[start:stop].view(rows, -1)
            target.copy_(body[start:stop].view(rows, -1)).mul_(scale[at, None].to(target.dtype))

    def _spans(self, elements: int, whole: int) -> list[tuple[int, int, int]]:
        """The whole blocks as one matrix, then the rest as one shorter row."""
        spans = [(0, whole * self.BLOCK, whole)] if whole else []
        if elements > whole * self.BLOCK:
            spans.append((whole * self.BLOCK, elements, 1))
        return spans


WIRES: dict[str, Wire] = {
    w.name: w for w in (Plain(), Half("bf16", torch.bfloat16), Half("fp16", torch.float16), Int8())
}


def wire_named(name: str) -> Wire:
    if name not in WIRES:
        raise InputError(f"unknown wire {name!r}; choose one of {', '.join(WIRES)}")
    return WIRES[name]
