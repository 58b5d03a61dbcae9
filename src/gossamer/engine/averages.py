"""Exact averages over all workers for collective calls: of parameters, small values and module buffers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gossamer.comm import Channel, Combine, Job, Plain, Stamp, reduction, room_for, widest_float
from gossamer.topology import Layout, build
from gossamer.topology.schedule import Schedule

if TYPE_CHECKING:
    from gossamer.engine.lane import Lane

Reduced = Generator[list[Job], None, Tensor]  # yields the exchanges it waits for, returns the result


class Control:
    """Reduces values over the workers of `layout`.

    Args:
        ranks: the ranks of the workers, if worker i of `layout` is not rank i. `place` is this worker's index.
        stamp: makes the header of messages, for transports that need one.
        calls: the number of reductions before this object's first one.
    """

    def __init__(
        self,
        rank: int,
        layout: Layout,
        channel: Channel,
        ranks: tuple[int, ...] | None = None,
        stamp: Callable[[], Stamp] | None = None,
        calls: int = 0,
    ):
        self.rank, self.layout, self.channel, self.stamp = rank, layout, channel, stamp
        self.place = rank if ranks is None else ranks.index(rank)
        self.schedule = Schedule(build("complete", layout), stagger=False, ranks=ranks)
        self._calls = calls

    def average(self, vector: Tensor) -> Reduced:
        """The mean of `vector` over all workers, in double precision. Collective."""
        total = yield from self.reduce(vector.detach().to("cpu", torch.float64).flatten(), torch.add)
        return total.div_(self.layout.n)

    def reduce(self, value: Tensor, combine: Combine) -> Reduced:
        """All workers' flat CPU tensors `value`, combined element by element in their own dtype. Collective: all
        workers must make the same calls in the same order."""
        out = torch.empty(room_for(value.numel(), max(self.layout.per_node)), dtype=value.dtype)
        program = self.schedule.program(0, 0, self.rank, value.numel(), average=True)
        self._calls += 1
        if not program:  # a single worker, or nothing to reduce
            return value.clone()
        job = Job(self._calls, 0, partial(reduction, program, value, out, combine))
        if self.stamp is not None:
            job.stamp = self.stamp()
        self.channel.launch(job)
        yield [job]
        return out[: value.numel()]


@torch.no_grad()
def means_of(lanes: Sequence[Lane]) -> Generator[list[Job], None, list[list[Tensor]]]:
    """The exact mean of every bucket of every lane. Collective."""
    means, jobs = [], []
    for lane in lanes:
        for flat in lane.flats:
            flat.check()
            flat.pack()
        outs = [lane.room(b.x) for b in lane.buckets]
        jobs += lane.average(lane.values(), outs, Plain())
        means.append(outs)
    yield jobs
    return [
        [o[: b.x.numel()] for o, b in zip(outs, lane.buckets, strict=True)]
        for lane, outs in zip(lanes, means, strict=True)
    ]


def hold_mean(
    lanes: Sequence[Lane], control: Control, model: nn.Module | None
) -> Generator[list[Job], None, Callable[[], None]]:
    """Write the mean of all workers into the parameters, and into the buffers of `model` if it is given. Collective.

    Returns a function that restores what they were, bit by bit.
    """
    means = yield from means_of(lanes)
    buffers, kept = [], []
    if model is not None:
        kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        buffers = yield from averaged_buffers(model, control)
    with torch.no_grad():
        for lane, outs in zip(lanes, means, strict=True):
            lane.averaged += 1
            for bucket, mean in zip(lane.buckets, outs, strict=True):
                _swap_contents(bucket.x, mean)
            for flat in lane.flats:
                flat.unpack()
        for buffer, value in buffers:
            buffer.copy_(value)

    @torch.no_grad()
    def restore() -> None:
        for lane, outs in zip(lanes, means, strict=True):
            lane.averaged -= 1
            for bucket, own in zip(lane.buckets, outs, strict=True):
                bucket.x.copy_(own)
            for flat in lane.flats:
                flat.unpack()
        for buffer, value in kept:
            buffer.copy_(value)

    return restore


def keep_mean(lanes: Sequence[Lane], control: Control, model: nn.Module | None) -> Generator[list[Job], None, None]:
    """Replace the parameters by the mean of all workers, and the buffers of `model` if it is given. Collective."""
    yield from hold_mean(lanes, control, model)
    for lane in lanes:
        lane.averaged -= 1
        lane.adopt()


def distance(lanes: Sequence[Lane], control: Control, shards: int) -> Generator[list[Job], None, float]:
    """The consensus distance. `shards`: over how many workers of a node one replica is spread. Collective."""
    means = yield from means_of(lanes)
    squared = torch.zeros(1, dtype=torch.float64)
    for lane, outs in zip(lanes, means, strict=True):
        for value, center in zip(lane.values(), outs, strict=True):
            squared += float(torch.linalg.vector_norm(value - center, dtype=widest_float(value))) ** 2
    mean = yield from control.average(squared)
    return math.sqrt(float(mean) * shards)


def _swap_contents(a: Tensor, b: Tensor, chunk: int = 2**18) -> None:
    """Swap the values of two tensors in chunks, without a third tensor of their size."""
    for start in range(0, a.numel(), chunk):
        part = a[start : start + chunk].clone()
        a[start : start + chunk].copy_(b[start : start + chunk])
        b[start : start + chunk].copy_(part)


def averaged_buffers(module: nn.Module, control: Control) -> Generator[list[Job], None, list[tuple[Tensor, Tensor]]]:
    """The buffers that differ between workers, as pairs (buffer, value over all workers). Collective.

    The value is the mean for floating-point and complex buffers and the maximum for integers and booleans. Buffers with
    the same bytes on every worker, such as masks, cost one checksum and are left out.
    """
    buffers = [b for b in module.buffers() if b.layout is torch.strided]  # sparse buffers stay local
    if not buffers:
        return []
    digests = torch.tensor([_digest(b) for b in buffers])
    largest = yield from control.reduce(torch.cat([digests, -digests]), torch.maximum)
    differ = (largest[: len(buffers)] != -largest[len(buffers) :]).tolist()
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in (b for b, d in zip(buffers, differ, strict=True) if d):
        by_dtype.setdefault(_reduced_dtype(buffer), []).append(buffer)
    values: list[tuple[Tensor, Tensor]] = []
    for dtype, members in by_dtype.items():
        sent = torch.cat([_real(b).to("cpu", dtype).flatten() for b in members])
        if dtype.is_floating_point:
            result = (yield from control.reduce(sent, torch.add)).div_(control.layout.n)
        else:
            result = yield from control.reduce(sent, torch.maximum)
        parts = torch.split(result, [_real(b).numel() for b in members])
        values += [(b, _like(b, p)) for b, p in zip(members, parts, strict=True)]
    return values


def _real(buffer: Tensor) -> Tensor:
    data = buffer.detach()
    return torch.view_as_real(data.resolve_conj()) if data.is_complex() else data


def _like(buffer: Tensor, flat: Tensor) -> Tensor:
    """`flat` with the shape, dtype and device of `buffer`."""
    real = _real(buffer)
    value = flat.view(real.shape).to(real.device, real.dtype)
    return torch.view_as_complex(value.contiguous()) if buffer.is_complex() else value


def _reduced_dtype(buffer: Tensor) -> torch.dtype:
    """The dtype in which a buffer is reduced: its own where torch has the arithmetic."""
    dtype = _real(buffer).dtype
    if dtype.is_floating_point:
        return torch.promote_types(dtype, torch.float32) if dtype.itemsize > 1 else torch.float32
    # torch has no maximum of wide unsigned integers; uint64 values from 2**63 on would compare as negative
    wider = {torch.bool: torch.uint8, torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
    return wider.get(dtype, dtype)


def _digest(buffer: Tensor) -> int:
    """A checksum of a buffer's bytes that fits into an int64, as does its negative."""
    flat = _real(buffer).cpu().contiguous().flatten()
    return int.from_bytes(hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=7).digest())
