"""Exchanges of an accelerator's tensors by a CPU transport: every message is copied through pinned memory of the host.

The arithmetic of an exchange, rounding for the wire included, runs on the device; only the messages cross the bus.
Each communication thread has a stream and buffers of its own, so copies overlap training and each other.

Note [When a staged message is safe]: the stream of a thread waits for the event of the launch, so it reads parameters
as they were launched. Bytes are sent after the event behind their copy to the host has been seen. A receive buffer is
reused after the event behind its copy to the device has been seen. A job is done after the event behind its last
operation has been seen, so a caller that waited for it may read the result on any stream, and no stream still reads the
parameters. An error ends a job in the same way.
"""

from __future__ import annotations

import math

from torch import Tensor

from gossamer.comm.accelerator import Accelerator, arrives
from gossamer.comm.exchange import Batch, ExchangeSteps, Scratch
from gossamer.comm.transport import Job

ALIGNED = 64  # bytes

Messages = list[tuple[int, Tensor]]


class Stage:
    """Copies the messages of one communication thread between device and host."""

    def __init__(self, accelerator: Accelerator):
        self._accelerator, self._stream = accelerator, accelerator.stream()
        self._held: dict[str, Tensor] = {}

    def steps(self, job: Job, scratch: Scratch) -> ExchangeSteps:
        """The exchange of `job` with host memory in place of the device's tensors. Tensors on the host pass through."""
        device = self._accelerator
        try:
            with device.running_on(self._stream):
                if job.ready is not None:
                    device.wait_for(job.ready)
                steps = job.make(scratch)
            while True:
                with device.running_on(self._stream):
                    try:
                        batch = next(steps)
                    except StopIteration as stop:
                        return stop.value  # type: ignore[no-any-return]
                    sends = self._on_host("send", batch.sends)
                    recvs = self._on_host("recv", batch.recvs)
                    self._copy(sends, batch.sends)
                self._settle()
                yield Batch(sends, recvs, batch.optional)
                with device.running_on(self._stream):
                    self._copy(batch.recvs, recvs)
        finally:
            self._settle()

    def _on_host(self, use: str, messages: Messages) -> Messages:
        """Host memory for the messages of a batch; the same memory in every batch."""
        sizes = [0 if self._passes(t) else t.numel() * t.element_size() for _, t in messages]
        starts, total = [], 0
        for size in sizes:
            starts.append(total)
            total += -(-size // ALIGNED) * ALIGNED
        held = self._held.get(use)
        if held is None or held.numel() < total:
            self._settle()  # copies from the old memory
            held = self._held[use] = self._accelerator.host_memory(total)
        return [
            (peer, t if self._passes(t) else held[start : start + size].view(t.dtype).view(t.shape))
            for (peer, t), start, size in zip(messages, starts, sizes, strict=True)
        ]

    def _passes(self, tensor: Tensor) -> bool:
        return tensor.device.type != self._accelerator.device.type or tensor.numel() == 0

    def _copy(self, targets: Messages, sources: Messages) -> None:
        for (_, target), (_, source) in zip(targets, sources, strict=True):
            if target is not source:
                self._accelerator.copy(target, source)

    def _settle(self) -> None:
        """Wait until the stream of this thread has nothing to do."""
        with self._accelerator.running_on(self._stream):
            event = self._accelerator.mark()
        arrives(event, math.inf)
