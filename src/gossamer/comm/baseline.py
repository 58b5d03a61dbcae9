"""torch's own DDP, the baseline that Gossamer is compared with, in benchmarks and recipes alike."""

# No postponed annotations here: torch looks at those of communication hooks.
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from gossamer.comm.pace import Pace, sleep_until
from gossamer.comm.transport import clock
from gossamer.trace import TraceWriter

Sent = Callable[[float, float, int], None]  # start, end (perf_counter), bytes: one bucket's all-reduce
HOOKS: dict[str, Any] = {
    "fp32": default_hooks.allreduce_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}


def ddp(
    model: nn.Module, *, bucket_mb: float | None = None, wire: str = "fp32", sent: Sent | None = None
) -> DistributedDataParallel:
    """Wrap `model` in torch's DDP.

    Args:
        bucket_mb: DDP's `bucket_cap_mb`, in MiB.
        wire: Compression hook: "fp32" (none), "bf16" or "fp16".
        sent: Called for every bucket's all-reduce. On a paced network an all-reduce takes as long as a ring would.
    """
    options: dict[str, Any] = {} if bucket_mb is None else {"bucket_cap_mb": bucket_mb}
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, **options)
    pace = Pace.from_environment(dist.get_rank())
    if pace is not None or sent is not None:
        wrapped.register_comm_hook(None, _watched(HOOKS[wire], 4 if wire == "fp32" else 2, pace, sent))
    elif wire != "fp32":  # fp32 without a hook is torch's own path
        inner = HOOKS[wire]

        def compress(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
            future: torch.futures.Future[Tensor] = inner(state, bucket)
            return future

        # torch refuses its own bf16 hook, by name, on backends other than NCCL, although gloo can add bf16
        wrapped.register_comm_hook(None, compress)
    return wrapped


def _watched(inner: Any, width: int, pace: Pace | None, sent: Sent | None) -> Any:
    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        begin = clock()
        size = bucket.buffer().numel() * width
        until = pace.reserve_allreduce(size) if pace is not None else 0.0
        future: torch.futures.Future[Tensor] = inner(state, bucket)
        if pace is None:
            return future.then(lambda done: _reported(done, sent, begin, size))
        late: torch.futures.Future[Tensor] = torch.futures.Future()

        def finish_late() -> None:
            future.wait()
            sleep_until(until)
            late.set_result(_reported(future, sent, begin, size))

        threading.Thread(target=finish_late, daemon=True).start()
        return late

    return hook


def _reported(done: Any, sent: Sent | None, begin: float, size: int) -> Tensor:
    """The result of an all-reduce, after it was reported to `sent`."""
    if sent is not None:
        sent(begin, clock(), size)
    result: Tensor = done.value()
    return result


class DdpTimeline:
    """Writes a DDP worker's spans: forward; backward until the last bucket is ready; wait until its all-reduce is done;
    the optimizer's step; and every bucket's all-reduce. Pass `sent` to `ddp`, then `attach`."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer, self._shift = writer, writer.now() - clock()
        self._exchanges: list[tuple[float, float, int]] = []  # of the current step; appended by the group's threads
        self._begin = self._middle = 0.0
        self._step = 0

    def sent(self, start: float, end: float, size: int) -> None:
        self._exchanges.append((start, end, size))

    def attach(self, wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        wrapped.register_forward_pre_hook(self._forward_begins)
        wrapped.register_forward_hook(self._forward_ends)
        optimizer.register_step_pre_hook(self._step_begins)
        optimizer.register_step_post_hook(self._step_ends)

    def _record(self, category: str, start: float, end: float, **attrs: Any) -> None:
        self._writer.record(category, start + self._shift, end + self._shift, step=self._step, **attrs)

    def _forward_begins(self, *_: Any) -> None:
        self._begin = clock()
        if self._middle:  # a micro-batch before this one
            self._record("backward", self._middle, self._begin)

    def _forward_ends(self, *_: Any) -> None:
        self._middle = clock()
        self._record("forward", self._begin, self._middle)

    def _step_begins(self, *_: Any) -> None:
        self._begin = clock()
        found, self._exchanges = self._exchanges, []
        ready = max((start for start, _, _ in found), default=self._begin)
        self._record("backward", self._middle, ready)
        self._record("wait", ready, max((end for _, end, _ in found), default=ready))
        for start, end, size in found:
            self._record("exchange", start, end, bytes=size)

    def _step_ends(self, *_: Any) -> None:
        self._record("step", self._begin, clock())
        self._middle = 0.0
        self._step += 1
