"""The native kernels of the optimizers.

A step goes through `_kernels.c` if the tensors are float32 on CPU and fill their memory in the same order, neither
`foreach` nor `fused=False` is set, and the file could be built: see Note [When native kernels run] in
gossamer/native.py. Otherwise torch operations compute the same step, only more slowly.
"""

import ctypes
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gossamer.native import load

SOURCE = Path(__file__).with_name("_kernels.c")


class Scalars(ctypes.Structure):
    """What a kernel reads beside the tensors; `_kernels.c` says what each number is."""

    _fields_ = [
        (name, ctypes.c_float)
        for name in (
            *("gradient", "l2", "shrink", "beta1", "beta2", "rate1", "rate2", "step_size", "eps"),
            *("a", "b", "low", "high", "square_rate", "inverse_length"),
        )
    ]


class Kernels:
    """The compiled library. Every call steps a list of slots [x, g, m, v, s] with the same scalars."""

    def __init__(self, library: ctypes.CDLL):
        self._gossip_adam, self._accum_adam = library.gossamer_gossip_adam, library.gossamer_accum_adam
        self._gossip_adam.restype = self._accum_adam.restype = None
        self._gossip_adam.argtypes = _ARGUMENTS
        self._accum_adam.argtypes = (*_ARGUMENTS, ctypes.c_int64)

    def gossip_adam(self, slots: Sequence[Sequence[Tensor]], scalars: Scalars) -> None:
        self._gossip_adam(_words(slots), len(slots), scalars, torch.get_num_threads())

    def accum_adam(self, slots: Sequence[Sequence[Tensor]], scalars: Scalars, phase: int) -> None:
        """`phase` is 0 for the first gradient of an accumulation, 2 for the last, 1 between."""
        self._accum_adam(_words(slots), len(slots), scalars, torch.get_num_threads(), phase)


_ARGUMENTS = (ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(Scalars), ctypes.c_int64)


def _words(slots: Sequence[Sequence[Tensor]]) -> ctypes.Array[ctypes.c_int64]:
    """The slots as the kernels' structs: five addresses and a length, eight bytes each."""
    words = [word for slot in slots for word in (*(t.data_ptr() for t in slot), slot[0].numel())]
    return (ctypes.c_int64 * len(words))(*words)


def fits(tensors: Iterable[Tensor]) -> bool:
    """Whether the kernels take these tensors, as far as device, dtype and type go."""
    return all(t.dtype is torch.float32 and t.is_cpu and type(t) in (Tensor, torch.nn.Parameter) for t in tensors)


@functools.cache
def kernels() -> Kernels | None:
    """The kernels, built if need be; None if they are turned off or cannot be built here."""
    library = load(SOURCE)
    return None if library is None else Kernels(library)
