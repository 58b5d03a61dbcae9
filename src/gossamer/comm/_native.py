"""The native kernels of the wire formats.

float32 values on the CPU go through `_kernels.c` where it could be built: see Note [When native kernels run] in
gossamer/native.py. Otherwise torch operations compute the same, only more slowly.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from gossamer.native import load

SOURCE = Path(__file__).with_name("_kernels.c")
POINTER, WHOLE, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Kernels:
    """The compiled library. The interpreter's lock is released during a call."""

    def __init__(self, library: ctypes.CDLL):
        def function(name: str, *arguments: type) -> Callable[..., None]:
            found: ctypes._NamedFuncPointer = getattr(library, f"gossamer_{name}")
            found.restype, found.argtypes = None, arguments
            return found

        self._encode = function("encode", POINTER, POINTER, WHOLE, WHOLE, REAL, REAL, POINTER, POINTER)
        self._decode = function("decode", POINTER, POINTER, WHOLE, POINTER, WHOLE)
        self._correct = function("correct_quantized", *[POINTER] * 4, WHOLE, REAL, POINTER, WHOLE)
        halves = [POINTER, POINTER, REAL, POINTER, WHOLE]
        self._correct_half = {torch.bfloat16: function("correct_bf16", *halves)}
        self._encode_fp16 = None
        if hasattr(library, "gossamer_encode_fp16"):  # the processor converts fp16
            self._correct_half[torch.float16] = function("correct_fp16", *halves)
            self._encode_fp16 = function("encode_fp16", POINTER, POINTER, WHOLE)

    def takes_half(self, dtype: torch.dtype) -> bool:
        """Whether this processor converts `dtype`."""
        return dtype in self._correct_half

    def encode(
        self,
        x: Tensor,
        anchor: Tensor | None,
        bits: int,
        inverse_levels: float,
        smallest: float,
        scales: Tensor,
        body: Tensor,
    ) -> None:
        a = None if anchor is None else anchor.data_ptr()
        self._encode(x.data_ptr(), a, x.numel(), bits, inverse_levels, smallest, scales.data_ptr(), body.data_ptr())

    def decode(self, scales: Tensor, body: Tensor, bits: int, out: Tensor) -> None:
        self._decode(scales.data_ptr(), body.data_ptr(), bits, out.data_ptr(), out.numel())

    def correct(
        self, theirs: tuple[Tensor, Tensor], mine: tuple[Tensor, Tensor], bits: int, weight: float, target: Tensor
    ) -> None:
        """target += weight * (theirs - mine), both as (scales, body)."""
        pointers = [t.data_ptr() for t in (*theirs, *mine)]
        self._correct(*pointers, bits, weight, target.data_ptr(), target.numel())

    def encode_fp16(self, x: Tensor, out: Tensor) -> None:
        assert self._encode_fp16 is not None
        self._encode_fp16(x.data_ptr(), out.data_ptr(), x.numel())

    def correct_half(self, theirs: Tensor, mine: Tensor, weight: float, target: Tensor) -> None:
        """target += weight * (theirs - mine)."""
        correct = self._correct_half[theirs.dtype]
        correct(theirs.data_ptr(), mine.data_ptr(), weight, target.data_ptr(), target.numel())


@functools.cache
def kernels() -> Kernels | None:
    """The kernels; None where they are turned off or cannot be built."""
    library = load(SOURCE)
    return None if library is None else Kernels(library)


def kernels_for(*tensors: Tensor | None) -> Kernels | None:
    """The kernels if they take these tensors. An active dispatch mode must see torch operations."""
    given = [t for t in tensors if t is not None]
    plain = all(type(t) in (Tensor, torch.nn.Parameter) for t in given) and _get_current_dispatch_mode() is None
    fit = plain and all(t.dtype is torch.float32 and t.is_cpu and t.is_contiguous() for t in given)
    return kernels() if fit else None
