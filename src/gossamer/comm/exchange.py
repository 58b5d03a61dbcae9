"""One exchange: the communication of one bucket in one round, as a coroutine.

`exchange` carries out a worker's program (gossamer.topology.plan) on tensors. It yields a `Batch` of messages
whenever it needs the network and goes on once they have arrived; who moves the bytes is the driver's business: a
communication thread over gloo, a side stream over NCCL, or all workers of one process in turn. So there is one
implementation of the arithmetic for every transport.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.comm.wire import Wire
from gossamer.topology.plan import Piece, Program, Step


@dataclass(frozen=True)
class Batch:
    """Messages to send and to receive together: `(peer, tensor)` each, in one order on both sides of a pair."""

    sends: list[tuple[int, Tensor]]
    recvs: list[tuple[int, Tensor]]


@dataclass(frozen=True)
class Mixed:
    """What an exchange leaves behind. `weight is None`: `out` is the mixed value; else it is
    `x + weight * (out - x)`, left to whoever applies it, in the one pass over the parameters that it needs anyway."""

    out: Tensor
    weight: float | None = None

    def write_to(self, x: Tensor) -> None:
        """x <- mixed."""
        if self.weight is None:
            x.copy_(self.out)
        else:
            x.lerp_(self.out, self.weight)

    def correct(self, x: Tensor, sent: Tensor) -> None:
        """x <- x + (mixed - sent), for parameters that moved on since `sent` was sent."""
        if self.weight is None:
            x.add_(self.out).sub_(sent)
        else:
            x.add_(self.out.sub_(sent), alpha=self.weight)


Exchange = Generator[Batch, None, Mixed | None]


@dataclass
class Scratch:
    """Byte buffers that live as long as their thread: fresh large allocations would fault in new pages each time."""

    buffers: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict)

    def take(self, use: str, nbytes: int, device: torch.device) -> Tensor:
        held = self.buffers.get((use, device))
        if held is None or held.numel() < nbytes:
            held = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.buffers[use, device] = held
        return held[:nbytes]

    def cut(self, use: str, sizes: list[int], like: Tensor) -> list[Tensor]:
        """One tensor of `like`'s dtype for each number of elements, each aligned."""
        item = like.element_size()
        starts, total = [], 0
        for size in sizes:
            starts.append(total)
            total += -(-size * item // 64) * 64
        whole = self.take(use, total, like.device)
        return [whole[s : s + n * item].view(like.dtype) for s, n in zip(starts, sizes, strict=True)]

    def payloads(self, use: str, sizes: list[int], wire: Wire, device: torch.device) -> list[Tensor]:
        """One payload for each number of elements, each aligned."""
        lengths = [wire.payload_bytes(n) for n in sizes]
        starts, total = [], 0
        for length in lengths:
            starts.append(total)
            total += -(-length // 64) * 64
        whole = self.take(use, total, device)
        return [whole[s : s + n] for s, n in zip(starts, lengths, strict=True)]


def exchange(program: Program, x: Tensor, out: Tensor, wire: Wire, scratch: Scratch, *, lazy: bool = True) -> Exchange:
    """Mix `x` (read only, flat) by `program`. `out` is the receive buffer: x's elements plus room for rounding up
    shards (`room_for`). Returns what is to be applied, or None when the round has nothing for this worker. A plain swap
    is left for the pass that applies it unless `lazy=False`."""
    if not program:
        return None
    size = x.numel()
    result = out[:size]
    lossless = wire.lossless(x.dtype)
    first = program[0]
    if lazy and len(program) == 1 and first.kind == "swap" and (lossless or not first.wired) and len(first.recvs) == 1:
        (piece,) = first.recvs
        if piece.stop - piece.start == size:
            yield Batch([(p.peer, x) for p in first.sends], [(piece.peer, result)])
            return Mixed(result, piece.weight)
    if first.kind == "swap" or (first.kind == "reduce" and first.wired):
        result.copy_(x)  # pieces that no message touches keep their value
    means: list[Tensor] = []  # of a wired reduce, for the spread that follows
    for step in program:
        value = x if step.source == "x" else result
        if step.kind == "reduce" and not step.wired:
            yield from _reduce_inside(step, value, out)
        elif step.kind == "reduce":
            means = yield from _reduce_across(step, value, wire, lossless, scratch)
        elif step.kind == "spread":
            yield from _spread(step, value, result, means, wire, lossless, scratch)
        elif step.kind == "gather":
            yield Batch(_views(step.sends, result), _views(step.recvs, result))
        else:
            yield from _swap(step, value, result, wire if step.wired and not lossless else None, scratch)
    return Mixed(result)


def arrived(scratch: Scratch) -> Exchange:
    """An exchange with nothing left to do, for results restored from a checkpoint."""
    return None
    yield


def room_for(size: int, largest_part: int) -> int:
    """Elements `out` needs: every shard has ceil(size / parts) elements, so a part may overshoot by its count."""
    return size + largest_part


def _views(pieces: tuple[Piece, ...], value: Tensor) -> list[tuple[int, Tensor]]:
    return [(p.peer, value[p.start : p.stop]) for p in pieces]


def _sizes(pieces: tuple[Piece, ...]) -> list[int]:
    return [p.stop - p.start for p in pieces]


def _reduce_inside(step: Step, value: Tensor, out: Tensor) -> Generator[Batch, None, None]:
    """The reduce-scatter inside a node: the neighbors' copies of my shard wait in the rest of `out`, which is free
    until the gather."""
    slots: list[Tensor] = []
    if step.own:
        (mine,) = step.own
        each = mine.stop - mine.start
        position = 0
        for _ in step.recvs:
            if position < mine.stop and position + each > mine.start:
                position = mine.stop
            slots.append(out[position : position + each])
            position += each
    yield Batch(_views(step.sends, value), [(p.peer, s) for p, s in zip(step.recvs, slots, strict=True)])
    if step.own:
        mean = out[mine.start : mine.stop]
        torch.add(value[mine.start : mine.stop], slots[0], out=mean)
        for slot in slots[1:]:
            mean.add_(slot)
        mean.mul_(mine.weight)


def _reduce_across(
    step: Step, value: Tensor, wire: Wire, lossless: bool, scratch: Scratch
) -> Generator[Batch, None, list[Tensor]]:
    """Each owner's weighted mean of its ranges, of the values as they were sent."""
    if lossless:
        received = scratch.cut("recv", _sizes(step.recvs), value)
        yield Batch(_views(step.sends, value), [(p.peer, t) for p, t in zip(step.recvs, received, strict=True)])
    else:
        outgoing = scratch.payloads("send", _sizes(step.sends), wire, value.device)
        incoming = scratch.payloads("recv", _sizes(step.recvs), wire, value.device)
        for p, payload in zip(step.sends, outgoing, strict=True):
            wire.encode(value[p.start : p.stop], payload)
        yield Batch(
            [(p.peer, t) for p, t in zip(step.sends, outgoing, strict=True)],
            [(p.peer, t) for p, t in zip(step.recvs, incoming, strict=True)],
        )
        received = scratch.cut("values", _sizes(step.recvs), value)
        for payload, t in zip(incoming, received, strict=True):
            wire.decode(payload, t)
    means = scratch.cut("means", _sizes(step.own), value)
    for own, mean in zip(step.own, means, strict=True):
        part = value[own.start : own.stop]
        mean.copy_(part if lossless else _rounded(part, wire, scratch))
        mean.mul_(own.weight)
        for p, t in zip(step.recvs, received, strict=True):
            if (p.start, p.stop) == (own.start, own.stop):
                mean.add_(t, alpha=p.weight)
    return means


def _spread(
    step: Step, value: Tensor, result: Tensor, means: list[Tensor], wire: Wire, lossless: bool, scratch: Scratch
) -> Generator[Batch, None, None]:
    """Every owner gives its mean, in full precision, to the other owners: out += mean - (own value as sent)."""
    by_range = {(o.start, o.stop): m for o, m in zip(step.own, means, strict=True)}
    received = scratch.cut("recv", _sizes(step.recvs), value)
    yield Batch(
        [(p.peer, by_range[p.start, p.stop]) for p in step.sends],
        [(p.peer, t) for p, t in zip(step.recvs, received, strict=True)],
    )
    for p, mean in [*zip(step.own, means, strict=True), *zip(step.recvs, received, strict=True)]:
        target = result[p.start : p.stop]
        if lossless:
            target.copy_(mean)
        else:
            rounded = _rounded(value[p.start : p.stop], wire, scratch)
            target.add_(mean).sub_(rounded)


def _swap(
    step: Step, value: Tensor, result: Tensor, wire: Wire | None, scratch: Scratch
) -> Generator[Batch, None, None]:
    """out += weight * (received - value), in the correction form when rounded in flight."""
    if wire is None:
        received = scratch.cut("recv", _sizes(step.recvs), value)
        yield Batch(_views(step.sends, value), [(p.peer, t) for p, t in zip(step.recvs, received, strict=True)])
        for p, t in zip(step.recvs, received, strict=True):
            target = result[p.start : p.stop]
            if step.source == "out":
                target.lerp_(t, p.weight)
            else:
                target.add_(t.sub_(value[p.start : p.stop]), alpha=p.weight)
        return
    outgoing = scratch.payloads("send", _sizes(step.sends), wire, value.device)
    incoming = scratch.payloads("recv", _sizes(step.recvs), wire, value.device)
    for p, payload in zip(step.sends, outgoing, strict=True):
        wire.encode(value[p.start : p.stop], payload)
    yield Batch(
        [(p.peer, t) for p, t in zip(step.sends, outgoing, strict=True)],
        [(p.peer, t) for p, t in zip(step.recvs, incoming, strict=True)],
    )
    for p, payload in zip(step.recvs, incoming, strict=True):
        part = value[p.start : p.stop]
        (theirs,) = scratch.cut("values", [part.numel()], part)
        wire.decode(payload, theirs)
        theirs.sub_(_rounded(part, wire, scratch))
        result[p.start : p.stop].add_(theirs, alpha=p.weight)


def _rounded(part: Tensor, wire: Wire, scratch: Scratch) -> Tensor:
    """Q(part): what the other side decodes."""
    (payload,) = scratch.payloads("own", [part.numel()], wire, part.device)
    (rounded,) = scratch.cut("rounded", [part.numel()], part)
    wire.encode(part, payload)
    wire.decode(payload, rounded)
    return rounded
