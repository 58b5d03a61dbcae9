"""Wire formats: how values are encoded in flight between two nodes.

Rounding in flight must not move the workers' mean. So no worker averages with a neighbor's rounded value directly: both
sides apply the same correction `x_i += w (Q(x_j) - Q(x_i))`, which uses their own rounded value too (the correction
form). The gains and losses of a pair cancel for any Q. The consensus distance then stops at the rounding (about 1e-3
relative for bf16, 5e-3 for int8). Exact averages travel in full precision and reduce it further.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gossamer.errors import InputError

CHUNK = 2**15  # elements


class Wire:
    """`encode` writes a value into a byte payload and `decode` reads it back; `Q = decode(encode(.))`.

    Elements are rounded in blocks of `block` elements, and any range of whole blocks can be decoded by itself.
    """

    block = 1

    name: str

    def lossless(self, dtype: torch.dtype) -> bool:
        """Whether values of `dtype` travel unchanged."""
        raise NotImplementedError

    def payload_bytes(self, elements: int) -> int:
        raise NotImplementedError

    def encode(self, value: Tensor, payload: Tensor) -> None:
        raise NotImplementedError

    def decode(self, payload: Tensor, out: Tensor, start: int, elements: int) -> None:
        """Decode the elements from `start`, a multiple of `block`, into `out`; the payload holds `elements`."""
        raise NotImplementedError


class Plain(Wire):
    """No conversion: values travel in the parameters' own dtype."""

    name = "fp32"

    def lossless(self, dtype: torch.dtype) -> bool:
        return True


class Half(Wire):
    """Two bytes per element: bf16 keeps the range of fp32, fp16 has three more bits of precision."""

    def __init__(self, name: str, dtype: torch.dtype):
        self.name, self.dtype = name, dtype

    def lossless(self, dtype: torch.dtype) -> bool:
        return dtype == self.dtype

    def payload_bytes(self, elements: int) -> int:
        return 2 * elements

    def encode(self, value: Tensor, payload: Tensor) -> None:
        rounded = payload.view(self.dtype)
        if self.dtype == torch.float16:  # values that are too large travel as its largest value, not as infinity
            largest = torch.finfo(torch.float16).max
            for part, out in zip(torch.split(value, CHUNK), torch.split(rounded, CHUNK), strict=True):
                out.copy_(torch.where(part.isinf(), part, part.clamp(-largest, largest)))
        else:
            rounded.copy_(value)

    def decode(self, payload: Tensor, out: Tensor, start: int, elements: int) -> None:
        out.copy_(payload.view(self.dtype)[start : start + out.numel()])


SMALLEST = 1e-36  # blocks below this travel as zeros: 127 / max|block| would overflow


class Int8(Wire):
    """One byte per element and one fp32 scale per block: `round(127 x / max|block|)`."""

    name = "int8"
    block = 256

    def lossless(self, dtype: torch.dtype) -> bool:
        return False

    def payload_bytes(self, elements: int) -> int:
        return elements + 4 * -(-elements // self.block)

    def encode(self, value: Tensor, payload: Tensor) -> None:
        scale, body = self._fields(payload, value.numel())
        for rows, at, blocks in self._rows(0, value.numel()):
            part = value[at].view(rows, -1)
            largest = part.abs().amax(dim=1).float()
            largest = torch.where(largest < SMALLEST, 0.0, largest)
            torch.mul(largest, 1 / 127, out=scale[blocks])
            # 127 / largest in fp32, also for half precision parameters, where it would overflow below 2e-3
            inverse = torch.where(largest > 0, 127 / largest, 0.0)[:, None]
            scaled = torch.mul(part, inverse, out=part.new_empty(part.shape, dtype=_at_least_fp32(part.dtype)))
            body[at].view(rows, -1).copy_(scaled.round_().clamp_(-127, 127))

    def decode(self, payload: Tensor, out: Tensor, start: int, elements: int) -> None:
        scale, body = self._fields(payload, elements)
        for rows, at, blocks in self._rows(start, out.numel()):
            part = out[at.start - start : at.stop - start].view(rows, -1)
            if part.dtype == torch.float32:
                part.copy_(body[at].view(rows, -1)).mul_(scale[blocks, None])
            else:
                wide = body[at].view(rows, -1).to(_at_least_fp32(part.dtype))
                part.copy_(wide.mul_(scale[blocks, None]))

    def _fields(self, payload: Tensor, elements: int) -> tuple[Tensor, Tensor]:
        split = 4 * -(-elements // self.block)
        return payload[:split].view(torch.float32), payload[split:].view(torch.int8)

    def _rows(self, start: int, elements: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield (rows, elements, blocks): all whole blocks as one matrix, then the rest as one shorter row."""
        first, whole = start // self.block, elements // self.block
        middle = start + whole * self.block
        if whole:
            yield whole, slice(start, middle), slice(first, first + whole)
        if start + elements > middle:
            yield 1, slice(middle, start + elements), slice(first + whole, first + whole + 1)


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


WIRES: dict[str, Wire] = {
    w.name: w for w in (Plain(), Half("bf16", torch.bfloat16), Half("fp16", torch.float16), Int8())
}


def wire_named(name: str) -> Wire:
    """The wire format called `name`."""
    if not isinstance(name, str) or name not in WIRES:
        raise InputError(f"unknown wire {name!r}; choose one of {', '.join(WIRES)}")
    return WIRES[name]
