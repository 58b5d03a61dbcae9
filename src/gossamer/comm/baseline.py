"""What a benchmark needs of torch.distributed: a process group, and torch's own DDP, the baseline."""

# No postponed annotations here: torch looks at those of communication hooks.
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from gossamer.comm.pace import Pace, sleep_until
from gossamer.comm.transport import clock

Sent = Callable[[float, float, int], None]  # start, end (perf_counter), bytes: one bucket's all-reduce
HOOKS: dict[str, Any] = {
    "fp32": default_hooks.allreduce_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}


def start() -> tuple[int, int]:
    """Join the process group that the environment describes; rank and size."""
    if dist.is_initialized():  # left behind by a run that failed
        dist.destroy_process_group()
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


_kept: list[nn.Module] = []


def stop(model: nn.Module | None = None) -> None:
    """Leave the process group, after all workers have come here.

    A group that is destroyed while one of its threads returns from a Python hook waits for that thread, which waits for
    the interpreter's lock. So a DDP `model` with such a hook, and its group with it, is kept until the process ends.
    """
    dist.barrier()
    if isinstance(model, nn.parallel.DistributedDataParallel) and model._comm_hooks:
        _kept.append(model)
    dist.destroy_process_group()


def barrier() -> None:
    dist.barrier()


def mean(values: list[float]) -> list[float]:
    """The mean over all workers, entry by entry."""
    return _reduce(values, dist.ReduceOp.SUM, dist.get_world_size())


def largest(value: float) -> float:
    """The largest over all workers."""
    return _reduce([value], dist.ReduceOp.MAX, 1)[0]


def _reduce(values: list[float], how: Any, divisor: int) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, how)
    return [float(v) / divisor for v in tensor]


def ddp(model: nn.Module, *, bucket_mb: float | None = None, wire: str = "fp32", sent: Sent | None = None) -> nn.Module:
    """torch's DDP; `bucket_mb` is its bucket_cap_mb (MiB), `wire` its compression hook.

    `sent` is told about every bucket's all-reduce. On a paced network the all-reduces take as long as a ring needs.
    """
    options: dict[str, Any] = {} if bucket_mb is None else {"bucket_cap_mb": bucket_mb}
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, **options)
    pace = Pace.from_environment(dist.get_rank())
    if pace is not None or sent is not None:
        wrapped.register_comm_hook(None, _watched(HOOKS[wire], 4 if wire == "fp32" else 2, pace, sent))
    elif wire != "fp32":  # fp32 without a hook is torch's own path
        inner = HOOKS[wire]

        def compress(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
            future: torch.futures.Future[Tensor] = inner(state, bucket)
            return future

        # torch refuses its own bf16 hook, by name, on anything but NCCL; gloo has learnt to add bf16 meanwhile
        wrapped.register_comm_hook(None, compress)
    return wrapped


def _watched(inner: Any, width: int, pace: Pace | None, sent: Sent | None) -> Any:
    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        begin = clock()
        size = bucket.buffer().numel() * width
        until = pace.reserve_allreduce(size) if pace is not None else 0.0
        future: torch.futures.Future[Tensor] = inner(state, bucket)
        if pace is None:
            return future.then(lambda done: _told(done, sent, begin, size))
        late: torch.futures.Future[Tensor] = torch.futures.Future()

        def hand_over() -> None:
            future.wait()
            sleep_until(until)
            late.set_result(_told(future, sent, begin, size))

        threading.Thread(target=hand_over, daemon=True).start()
        return late

    return hook


def _told(done: Any, sent: Sent | None, begin: float, size: int) -> Tensor:
    if sent is not None:
        sent(begin, clock(), size)
    result: Tensor = done.value()
    return result
