"""Quantized wires: int8 and int4, in blocks of 128 elements with one scale each, relative to an anchor.

A block of differences d = x - a is sent as `round(d / scale)`, where `scale` is max|d| / 127 (int8) or max|d| / 7
(int4), rounded up to bfloat16. Two int4 values share a byte: one of the first half of a block and one of the second.
Rounding is to the nearest, because stochastic rounding leaves the workers further apart (benchmarks/wire.py). A block
with a value that is not finite is NaN on arrival.

float32 values on the CPU are encoded by native kernels where they can be built, and otherwise, with the same bits, by
torch operations: see _native.py.

Note [Anchors]
    The rounding error is a fraction of what is sent. Parameters of different workers differ little, so sending them
    relative to an anchor a that all workers share makes the error small:

        x_i += w (Q(x_j - a) - Q(x_i - a))

    Both sides apply the same two rounded values with opposite signs, so the mean of the workers is conserved whatever
    the anchors are. But the correction is towards the neighbor only if both anchors are equal. Every exact average,
    which travels in full precision, becomes the new anchor on all workers that took part in it. Every message carries
    the id of its anchor, and an exchange between different anchors is refused (`OtherAnchor`) on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gossamer.comm._native import kernels_for
from gossamer.comm.wire import TakeScratch, Wire

BLOCK = 128
ID_BYTES = 8
CACHED = 256  # blocks that torch operations work on at a time
SMALLEST = 1e-36  # blocks below this travel as zeros: 1 / scale would overflow
NOT_A_NUMBER = 0x7FC0  # in bfloat16


class Quantized(Wire):
    """`bits` per element. A payload is the id of the anchor, the scales of all blocks, and the rounded values."""

    block = BLOCK
    anchored = True

    def __init__(self, name: str, bits: int):
        self.name, self.bits, self.levels = name, bits, 2 ** (bits - 1) - 1

    def lossless(self, dtype: torch.dtype) -> bool:
        return False

    def payload_bytes(self, elements: int) -> int:
        return ID_BYTES + 2 * _blocks(elements) + -(-elements * self.bits // 8)

    def mark(self, payload: Tensor, anchor: int) -> None:
        payload[:ID_BYTES].view(torch.int64).fill_(anchor)

    def marked(self, payload: Tensor) -> int:
        return int(payload[:ID_BYTES].view(torch.int64).item())

    def encode(self, value: Tensor, payload: Tensor, anchor: Tensor | None = None) -> None:
        scales, body = self._fields(payload, value.numel())
        kernels = kernels_for(value, anchor)
        if kernels is not None:
            kernels.encode(value, anchor, self.bits, 1 / self.levels, SMALLEST, scales, body)
            return
        for rows, at, blocks in _rows(0, value.numel()):
            self._encode(value[at], None if anchor is None else anchor[at], rows, scales[blocks], body[self._bytes(at)])

    def _encode(self, value: Tensor, anchor: Tensor | None, rows: int, scales: Tensor, body: Tensor) -> None:
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        d = (wide if anchor is None else wide - anchor).float().view(rows, -1)
        largest = d.abs().amax(dim=1)
        bits = ((largest * (1 / self.levels)).view(torch.int32).long() + 0xFFFF) >> 16
        bits = torch.where(bits < 0x7F80, bits, NOT_A_NUMBER)
        bits = torch.where(largest < SMALLEST, 0, bits)
        scales.copy_(bits)
        usable = (bits > 0) & (bits != NOT_A_NUMBER)
        inverse = torch.where(usable, 1 / _floats(bits), 0.0)[:, None]
        q = torch.where(usable[:, None], torch.mul(d, inverse).round_(), 0.0).to(torch.int8).view(torch.uint8)
        if self.bits == 4:
            half = (q.shape[1] + 1) // 2
            first, second = q[:, :half] & 15, q[:, half:] << 4
            first[:, : second.shape[1]] |= second
            q = first
        body.view(rows, -1).copy_(q)

    def decode(self, payload: Tensor, out: Tensor, start: int, elements: int) -> None:
        scales, body = self._fields(payload, elements)
        first = start // BLOCK
        kernels = kernels_for(out)
        if kernels is not None:
            kernels.decode(scales[first:], body[start * self.bits // 8 :], self.bits, out)
            return
        for rows, at, blocks in _rows(start, out.numel()):
            packed = body[self._bytes(at)].view(rows, -1)
            length = (at.stop - at.start) // rows
            q = packed.view(torch.int8)
            if self.bits == 4:
                q = torch.cat([(packed << 4).view(torch.int8) >> 4, (q >> 4)[:, : length // 2]], dim=1)
            wide = q.to(torch.promote_types(out.dtype, torch.float32)) * _floats(scales[blocks].long())[:, None]
            out[at.start - start : at.stop - start].copy_(wide.view(-1))

    def correct(self, target: Tensor, theirs: Tensor, mine: Tensor, weight: float, scratch: TakeScratch) -> None:
        kernels, elements = kernels_for(target), target.numel()
        if kernels is None:
            super().correct(target, theirs, mine, weight, scratch)
        else:
            kernels.correct(self._fields(theirs, elements), self._fields(mine, elements), self.bits, weight, target)

    def _fields(self, payload: Tensor, elements: int) -> tuple[Tensor, Tensor]:
        split = ID_BYTES + 2 * _blocks(elements)
        return payload[ID_BYTES:split].view(torch.int16), payload[split:]

    def _bytes(self, at: slice) -> slice:
        """The bytes of the elements `at`, which begin with a block."""
        return slice(at.start * self.bits // 8, -(-at.stop * self.bits // 8))


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def _floats(bits: Tensor) -> Tensor:
    """The float32 values of bfloat16 bits."""
    return (bits << 16).to(torch.int32).view(torch.float32)


def _rows(start: int, elements: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield (rows, elements, blocks): whole blocks as matrices that fit into the cache, then the rest as one row."""
    stop = start + elements
    while start < stop:
        rows = min(CACHED, (stop - start) // BLOCK)
        end = start + rows * BLOCK if rows else stop
        yield max(1, rows), slice(start, end), slice(start // BLOCK, _blocks(end))
        start = end
