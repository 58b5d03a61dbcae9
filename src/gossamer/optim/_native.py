"""The native kernels of the optimizers: compiled once per user, loaded on first use, optional.

Note [When the native kernels run]
    A step goes through `_kernels.c` if the tensors are float32 on CPU and fill their memory in the same order,
    neither `foreach` nor `fused=False` is set, and a C compiler (`$CC`, or cc) could build the file. Otherwise
    torch operations compute the same step, only more slowly. Nothing is compiled at import: the first step of a
    process looks for the library in `$XDG_CACHE_HOME/gossamer` (~/.cache/gossamer) and builds it if it is
    missing, which takes about a second. The environment variable GOSSAMER_NATIVE=0 turns the kernels off.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("_kernels.c")
# No errno and no trapping, so that square roots and comparisons become vector instructions; NaN and infinities
# keep their meaning. `-march=native` makes the library one of this processor only: the cache key contains it.
FLAGS = ["-O3", "-march=native", "-std=c11", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-pthread"]
BUILD_SECONDS = 60

log = logging.getLogger(__name__)


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
    if os.environ.get("GOSSAMER_NATIVE", "1") == "0":
        return None
    try:
        return Kernels(ctypes.CDLL(str(_library())))
    except (OSError, subprocess.SubprocessError, AttributeError, ValueError) as error:
        log.debug("the native optimizer kernels are not available, torch operations step in: %s", error)
        return None


def _library() -> Path:
    compiler = shlex.split(os.environ.get("CC") or "cc")
    source = SOURCE.read_bytes()
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=BUILD_SECONDS, check=True).stdout
    identity = [source, " ".join([*compiler, *FLAGS]).encode(), version, _processor()]
    key = hashlib.sha256(b"\0".join(identity)).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gossamer"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _refuse_foreign(folder)
    library = folder / f"optim-{key}.so"
    if not library.exists():
        # Workers may build at the same time: each builds a file of its own, and the last rename wins.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / "optim.so"
            command = [*compiler, *FLAGS, str(SOURCE), "-o", str(built), "-lm"]
            subprocess.run(command, capture_output=True, timeout=BUILD_SECONDS, check=True)
            built.replace(library)
    return library


def _refuse_foreign(folder: Path) -> None:
    """Code is loaded from this folder, so nobody else may write to it."""
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"{folder} can be written by other users")


def _processor() -> bytes:
    """What `-march=native` depends on: a home folder may be shared by machines of different kinds."""
    lines = [platform.machine()]
    if Path("/proc/cpuinfo").exists():
        wanted = ("vendor_id", "cpu family", "model\t", "stepping", "flags", "Features", "CPU part")
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
            if line.startswith(wanted):
                lines.append(line)
    return "\n".join(lines).encode()
