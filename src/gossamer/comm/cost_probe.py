"""Measure what a worker's own processor does in an exchange: encode, decode, reduce and mix, for every wire.

The real exchange is run on one worker: what it sends is handed back as what it receives. All workers of the job measure
at the same time, so that cores and memory are shared as in training.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.comm.exchange import Anchor, Scratch, exchange
from gossamer.comm.launcher import node_name
from gossamer.comm.transport import clock
from gossamer.comm.wire import Wire
from gossamer.comm.wires import WIRES
from gossamer.topology.plan import Piece, Step

NBYTES = 2**26  # of fp32 parameters: larger than caches, and done in tens of milliseconds
REPEATS = 5
STAT, BOOT = Path("/proc/stat"), Path("/proc/sys/kernel/random/boot_id")
Meet = Callable[[str], Any]


@dataclass(frozen=True)
class Processing:
    """Bytes of fp32 parameters per second and worker, while all workers of the job do the same.

    `encode` and `merge` are what an exchange does before and after a message, by wire; `reduce` adds a worker's values
    to another's; `mix` writes the result into the parameters.
    """

    encode: dict[str, float]
    merge: dict[str, float]
    reduce: float
    mix: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def probe_processing(meet: Meet, nbytes: int = NBYTES) -> Processing:
    """Measure this worker. Collective: `meet(name)` returns when all workers have called it."""
    elements = nbytes // 4
    x, out, anchor = torch.randn(3, elements)
    encode: dict[str, float] = {}
    merge: dict[str, float] = {}
    for name, wire in WIRES.items():
        meet(f"wire-{name}")
        before, after = _exchange(wire, x, out, Anchor(anchor, 0))
        merge[name] = nbytes / after
        if not wire.lossless(x.dtype):
            encode[name] = nbytes / before
    meet("reduce")
    reduce = _median(lambda: torch.add(x, out, out=out))
    meet("mix")
    mix = _median(lambda: x.lerp_(out, 0.5))
    return Processing(encode, merge, nbytes / reduce, nbytes / mix)


def _exchange(wire: Wire, x: Tensor, out: Tensor, anchor: Anchor) -> tuple[float, float]:
    """Seconds before and after the messages of a swap of `x`."""
    whole = (Piece(1, 0, x.numel(), 0.5),)
    scratch = Scratch()
    before, after = [], []
    for _ in range(REPEATS):
        steps = exchange((Step("swap", "x", True, whole, whole),), x, out, wire, scratch, anchor=anchor, lazy=False)
        start = clock()
        batch = next(steps)
        before.append(clock() - start)
        for (_, sent), (_, received) in zip(batch.sends, batch.recvs, strict=True):
            received.copy_(sent)
        start = clock()
        try:
            next(steps)
        except StopIteration:
            after.append(clock() - start)
    return statistics.median(before[1:]), statistics.median(after[1:])


def _median(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS):
        start = clock()
        work()
        times.append(clock() - start)
    return statistics.median(times[1:])


class CpuMeter:
    """CPU seconds of this process, all threads, between `start()` and `seconds()`, with its part of the kernel's work
    for the network, which belongs to no process: the `active` workers of this machine cause that together."""

    def __init__(self, active: int = 1) -> None:
        self._active = max(1, active)
        self.start()

    def start(self) -> None:
        self._since = time.process_time(), interrupt_seconds()

    def seconds(self) -> float:
        own, kernel = self._since
        return time.process_time() - own + (interrupt_seconds() - kernel) / self._active


def interrupt_seconds() -> float:
    """Seconds that all cores of this machine have spent in interrupts since it started; 0 where that is not known."""
    try:
        fields = STAT.read_text().split(maxsplit=8)  # cpu, user, nice, system, idle, iowait, irq, softirq, ...
    except OSError:
        return 0.0
    return (int(fields[6]) + int(fields[7])) / os.sysconf("SC_CLK_TCK")


def machine() -> str:
    """The same text on all workers whose kernel is the same, whatever their host names and namespaces are."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return node_name()
