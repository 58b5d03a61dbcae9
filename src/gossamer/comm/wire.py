"""Wire formats: how values are encoded in flight between two nodes.

Rounding in flight must not move the workers' mean. So no worker averages with a neighbor's rounded value directly: both
sides apply the same correction `x_i += w (Q(x_j) - Q(x_i))`, which uses their own rounded value too (the correction
form). The gains and losses of a pair cancel for any Q. The consensus distance then stops at the rounding (about 1e-3
relative for bf16). Exact averages travel in full precision and reduce it further. The formats with fewer bits
(quantized.py) round the distance to an anchor instead: see Note [Anchors] there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gossamer.comm._native import kernels_for

CHUNK = 2**15  # elements
TakeScratch = Callable[[int], Tensor]  # memory for so many elements of a target, by a torch operation


class Wire:
    """`encode` writes a value into a byte payload and `decode` reads it back; `Q = decode(encode(.))`.

    Elements are rounded in blocks of `block` elements, and any range of whole blocks can be decoded by itself.
    """

    name: str
    block = 1
    anchored = False  # whether values travel relative to an anchor, whose id is in the payload

    def lossless(self, dtype: torch.dtype) -> bool:
        """Whether values of `dtype` travel unchanged."""
        raise NotImplementedError

    def payload_bytes(self, elements: int) -> int:
        raise NotImplementedError

    def mark(self, payload: Tensor, anchor: int) -> None:
        """Write the id of the anchor into the payload."""
        raise NotImplementedError

    def marked(self, payload: Tensor) -> int:
        """The id of the anchor that a payload is relative to."""
        raise NotImplementedError

    def encode(self, value: Tensor, payload: Tensor, anchor: Tensor | None = None) -> None:
        """Write `value`, relative to `anchor` if the format has one, into the payload."""
        raise NotImplementedError

    def decode(self, payload: Tensor, out: Tensor, start: int, elements: int) -> None:
        """Decode the elements from `start`, a multiple of `block`, into `out`; the payload holds `elements`."""
        raise NotImplementedError

    def correct(self, target: Tensor, theirs: Tensor, mine: Tensor, weight: float, scratch: TakeScratch) -> None:
        """target += weight * (Q(x_j) - Q(x_i)), both as payloads; `scratch` gives memory for twice a chunk."""
        for at in self.chunks(target.numel()):
            a, b = scratch(2 * (at.stop - at.start)).chunk(2)
            self.decode(theirs, a, at.start, target.numel())
            self.decode(mine, b, at.start, target.numel())
            target[at].add_(a.sub_(b), alpha=weight)

    def chunks(self, elements: int) -> Iterator[slice]:
        """Ranges of whole blocks that fit into the cache while they are decoded, compared and added."""
        each = CHUNK // self.block * self.block
        for start in range(0, elements, each):
            yield slice(start, min(start + each, elements))


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

    def encode(self, value: Tensor, payload: Tensor, anchor: Tensor | None = None) -> None:
        rounded = payload.view(self.dtype)
        if self.dtype == torch.float16:  # values that are too large travel as its largest value, not as infinity
            kernels = kernels_for(value)
            if kernels is not None and kernels.takes_half(self.dtype):
                kernels.encode_fp16(value, rounded)
                return
            largest = torch.finfo(torch.float16).max
            for part, out in zip(torch.split(value, CHUNK), torch.split(rounded, CHUNK), strict=True):
                out.copy_(torch.where(part.isinf(), part, part.clamp(-largest, largest)))
        else:
            rounded.copy_(value)

    def decode(self, payload: Tensor, out: Tensor, start: int, elements: int) -> None:
        out.copy_(payload.view(self.dtype)[start : start + out.numel()])

    def correct(self, target: Tensor, theirs: Tensor, mine: Tensor, weight: float, scratch: TakeScratch) -> None:
        kernels = kernels_for(target)
        if kernels is not None and kernels.takes_half(self.dtype):
            kernels.correct_half(theirs.view(self.dtype), mine.view(self.dtype), weight, target)
        else:
            super().correct(target, theirs, mine, weight, scratch)
