"""What transports need of an accelerator: streams, events and host memory. The only file of Gossamer that knows them.

`Accelerator` is written with torch's device-independent API, so it covers CUDA, ROCm, XPU and MPS. Nobody has run it on
hardware yet (docs/gpu-checklist.md). Tests replace it by a device whose streams are late and overtake each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gossamer.comm.transport import Event, clock

SHORTEST_POLL, LONGEST_POLL = 2e-5, 1e-3  # seconds between looks at an event


class Accelerator:
    """One device of this process."""

    def __init__(self, device: torch.device):
        self.device = device

    def stream(self) -> Any:
        """A new stream beside the one that trains; where the device has only one stream, that one."""
        try:
            return torch.Stream(device=self.device)
        except (RuntimeError, NotImplementedError):
            return self._current()

    def running_on(self, stream: Any) -> AbstractContextManager[Any]:
        """Queue this thread's work on `stream` inside the block."""
        return nullcontext() if stream == self._current() else stream

    def mark(self) -> Event:
        """An event behind everything that this thread has queued on its current stream."""
        event: Event = self._current().record_event()
        return event

    def wait_for(self, event: Event) -> None:
        """Queue a wait on this thread's current stream: what is queued later runs after `event`. Does not block."""
        self._current().wait_event(event)

    def host_memory(self, nbytes: int) -> Tensor:
        """Bytes on the host, pinned if the device can copy from and to pinned memory."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except (RuntimeError, NotImplementedError):
            return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between device and host. Only pinned memory is copied without blocking this thread."""
        host = source if target.device.type == self.device.type else target
        target.copy_(source, non_blocking=host.is_pinned())

    def _current(self) -> Any:
        return torch.accelerator.current_stream(self.device)


def arrives(event: Event, timeout: float) -> bool:
    """Wait at most `timeout` seconds for `event`. Return whether all work before it is done.

    Polls: a device that waits for another worker (NCCL) cannot be waited for with a time limit in any other way.
    """
    until, pause = clock() + timeout, SHORTEST_POLL
    while not event.query():
        left = until - clock()
        if left <= 0:
            return event.query()
        time.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_POLL)
    return True


def widest_float(tensor: Tensor) -> torch.dtype:
    """Double precision, or single precision on MPS, which has no other."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


class Turns:
    """Orders what two threads do in turns to the same tensors, each on a stream of its own: the training thread on its
    current stream, a thread beside it on a side stream, where its work does not queue behind a whole backward pass.
    The caller holds a lock in each block."""

    def __init__(self, accelerator: Accelerator):
        self._accelerator, self._stream = accelerator, accelerator.stream()
        self._last: Event | None = None

    @contextmanager
    def training(self) -> Iterator[None]:
        """A turn of the training thread."""
        if self._last is not None:
            self._accelerator.wait_for(self._last)
        yield
        self._last = self._accelerator.mark()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """A turn of the other thread."""
        with self._accelerator.running_on(self._stream), self.training():
            yield


class NoTurns:
    """The same on the CPU, where an operation is done when it returns."""

    def training(self) -> AbstractContextManager[None]:
        return nullcontext()

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()
