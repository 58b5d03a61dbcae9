"""One exchange: the communication of one bucket in one round, as a coroutine.

`exchange` carries out a worker's program (gossamer.topology.plan) on tensors. It yields a `Batch` of messages
whenever it needs the network and continues once they have arrived. A driver moves the bytes: a communication thread
over gloo, a side stream over NCCL, or a loop over all workers of one process. So there is one implementation of the
arithmetic for every transport.

Note [Why averages divide]: 1/n is not a floating-point number unless n is a power of two. Multiplying by its rounded
value moves the workers' mean by up to 5e-8 of itself in every round, always in the same direction. So a mean is a sum
with integer weights, divided once by the number of workers; and a swap with any other weight than 1/2 adds
`weight * (received - value)`, whose rounding vanishes with the difference.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from gossamer.comm.wire import Wire
from gossamer.errors import GossamerError
from gossamer.topology.plan import Piece, Program, Step


@dataclass(frozen=True)
class Batch:
    """Messages to send and to receive together, as `(peer, tensor)`, in the same order on both sides of a pair."""

    sends: list[tuple[int, Tensor]]
    recvs: list[tuple[int, Tensor]]
    optional: bool = False  # a swap of a weighted round, which this worker's own value in place of the peer's undoes


@dataclass(frozen=True)
class Mixed:
    """The result of an exchange. If `weight` is None, `out` is the mixed value. Otherwise the mixed value is
    `x + weight * (out - x)`, computed when the result is applied, in the one pass over the parameters that this needs
    anyway."""

    out: Tensor
    weight: float | None = None

    def write_to(self, x: Tensor) -> None:
        """x <- mixed."""
        if self.weight is None:
            x.copy_(self.out)
        else:
            x.lerp_(self.out, self.weight)

    def add_to(self, x: Tensor) -> None:
        """x <- x + weight * out, for a `correction`."""
        x.add_(self.out, alpha=1.0 if self.weight is None else self.weight)


ExchangeSteps = Generator[Batch, None, Mixed | None]


class Combine(Protocol):
    """`torch.add`, `torch.maximum` and the like."""

    def __call__(self, a: Tensor, b: Tensor, /, *, out: Tensor) -> object: ...


@dataclass
class Scratch:
    """Byte buffers that live as long as their thread. Large new allocations would fault in new pages each time."""

    buffers: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict)
    readable: bool = True  # False: the exchange is only queued (NCCL), so its coroutine must not look at what arrived

    def take(self, use: str, nbytes: int, device: torch.device) -> Tensor:
        held = self.buffers.get((use, device))
        if held is None or held.numel() < nbytes:
            held = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.buffers[use, device] = held
        return held[:nbytes]

    def cut(self, use: str, sizes: list[int], like: Tensor) -> list[Tensor]:
        """One aligned tensor of `like`'s dtype for each number of elements in `sizes`."""
        item = like.element_size()
        starts, total = [], 0
        for size in sizes:
            starts.append(total)
            total += -(-size * item // 64) * 64
        whole = self.take(use, total, like.device)
        return [whole[s : s + n * item].view(like.dtype) for s, n in zip(starts, sizes, strict=True)]

    def one(self, use: str, size: int, like: Tensor) -> Tensor:
        """A tensor of `like`'s dtype with `size` elements."""
        return self.cut(use, [size], like)[0]

    def payloads(self, use: str, sizes: list[int], wire: Wire, device: torch.device) -> list[Tensor]:
        """One aligned payload for each number of elements in `sizes`."""
        lengths = [wire.payload_bytes(n) for n in sizes]
        starts, total = [], 0
        for length in lengths:
            starts.append(total)
            total += -(-length // 64) * 64
        whole = self.take(use, total, device)
        return [whole[s : s + n] for s, n in zip(starts, lengths, strict=True)]


@dataclass(frozen=True)
class Anchor:
    """What values are sent relative to, for the elements of one bucket: see Note [Anchors] in quantized.py. `id` names
    the exact average that it is the result of; None: it is not common to the workers, so nothing can be sent."""

    value: Tensor
    id: int | None


class OtherAnchor(GossamerError):
    """A neighbor sends relative to another anchor than this worker's; `peer` is that neighbor."""

    def __init__(self, peer: int, theirs: int, mine: int | None):
        self.peer = peer
        super().__init__(
            f"worker {peer} sends parameters relative to another exact average than this worker has (anchor "
            f"{theirs:x}, here {'none' if mine is None else f'{mine:x}'}), so they are not mixed in; the next exact "
            "average (average_every) makes the anchors equal again"
        )


def exchange(
    program: Program,
    x: Tensor,
    out: Tensor,
    wire: Wire,
    scratch: Scratch,
    *,
    anchor: Anchor | None = None,
    lazy: bool = True,
) -> ExchangeSteps:
    """Mix the flat tensor `x`, which is only read, by `program`.

    Args:
        out: The receive buffer, of `room_for(...)` elements.
        wire: Format of messages between nodes.
        anchor: What messages are relative to, if the format has anchors; None: zero.
        lazy: Leave the arithmetic of a plain swap to the pass that applies the result.

    Returns:
        The result to apply, or None if this worker takes no part in the round.
    """
    if not program:
        return None
    size = x.numel()
    result = out[:size]
    lossless = wire.lossless(x.dtype)
    first = program[0]
    if len(program) == 1 and first.kind == "swap" and (lossless or not first.wired) and len(first.recvs) == 1:
        (piece,) = first.recvs
        if piece.stop - piece.start == size:
            yield Batch([(p.peer, x) for p in first.sends], [(piece.peer, result)])
            if lazy:
                return Mixed(result, piece.weight)
            assert piece.weight == 0.5  # only exact averages are not lazy
            result.mul_(0.5).add_(x, alpha=0.5)  # the same bits on both sides of a pair
            return Mixed(result)
    if first.kind == "swap" or (first.kind == "reduce" and first.wired):
        result.copy_(x)  # pieces that no message touches keep their value
    means: list[Tensor] = []  # of a wired reduce, for the spread that follows
    coded = None if lossless else _Coded(wire, anchor, scratch)
    weighted = len(program) > 1 and all(step.kind == "swap" for step in program)
    for at, step in enumerate(program):
        value = x if step.source == "x" else result
        if step.kind == "reduce" and not step.wired:
            yield from _reduce_inside(step, value, out, torch.add)
            for own in step.own:
                out[own.start : own.stop].div_(1 + len(step.recvs))  # Note [Why averages divide]
        elif step.kind == "reduce":
            means = yield from _reduce_across(step, value, coded, scratch)
        elif step.kind == "spread":
            yield from _spread(step, value, result, means, coded, scratch)
        elif step.kind == "gather":
            yield Batch(_views(step.sends, result), _views(step.recvs, result))
        else:
            mixed = [p for earlier in program[:at] if earlier.kind == "swap" for p in earlier.recvs]
            yield from _swap(step, value, result, coded if step.wired else None, scratch, mixed, optional=weighted)
    return Mixed(result)


def correction(
    program: Program, x: Tensor, out: Tensor, wire: Wire, scratch: Scratch, *, anchor: Anchor | None = None
) -> ExchangeSteps:
    """The same, but the result is a correction: `out` becomes mixed - x (divided by the weight), to be added to
    parameters that have changed since the launch."""
    mixed = yield from exchange(program, x, out, wire, scratch, anchor=anchor)
    if mixed is not None:
        mixed.out.sub_(x)
    return mixed


def reduction(program: Program, x: Tensor, out: Tensor, combine: Combine, scratch: Scratch) -> ExchangeSteps:
    """Combine all workers' `x` element by element (`torch.add`, `torch.maximum`), by the program of a uniform round.
    Works in x's own dtype, and every worker gets the same bits."""
    result = out[: x.numel()]
    if program[0].kind != "reduce" or program[0].wired:
        result.copy_(x)
    for step in program:
        value = x if step.source == "x" else result
        if step.kind == "reduce" and not step.wired:
            yield from _reduce_inside(step, value, out, combine)
            continue
        received = scratch.cut("recv", _sizes(step.recvs), x)
        if step.kind in ("reduce", "swap"):
            yield Batch(_views(step.sends, value), _named(step.recvs, received))
            for p, got in zip(step.recvs, received, strict=True):
                target = result[p.start : p.stop]
                combine(target, got, out=target)
        else:  # spread and gather: the result of the worker that owns the range
            yield Batch(_views(step.sends, result), _views(step.recvs, result))
    return Mixed(result)


def arrived(scratch: Scratch) -> ExchangeSteps:
    """An exchange with nothing left to do, for results restored from a checkpoint."""
    return None
    yield


def room_for(size: int, largest_part: int) -> int:
    """Number of elements of `out`: every shard has ceil(size / parts) elements, so all shards of a part together may
    exceed `size` by the number of workers in the part."""
    return size + largest_part


def _views(pieces: tuple[Piece, ...], value: Tensor) -> list[tuple[int, Tensor]]:
    return [(p.peer, value[p.start : p.stop]) for p in pieces]


def _sizes(pieces: tuple[Piece, ...]) -> list[int]:
    return [p.stop - p.start for p in pieces]


def _reduce_inside(step: Step, value: Tensor, out: Tensor, combine: Combine) -> Generator[Batch, None, None]:
    """The reduce-scatter inside a node. The other workers' copies of this worker's shard are received into the rest of
    `out`, which is free until the gather."""
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
        total = out[mine.start : mine.stop]
        combine(value[mine.start : mine.stop], slots[0], out=total)
        for slot in slots[1:]:
            combine(total, slot, out=total)


def _reduce_across(
    step: Step, value: Tensor, coded: _Coded | None, scratch: Scratch
) -> Generator[Batch, None, list[Tensor]]:
    """The weighted mean of every range that this worker owns, computed from the values as they were sent."""
    if coded is None:
        received = scratch.cut("recv", _sizes(step.recvs), value)
        yield Batch(_views(step.sends, value), _named(step.recvs, received))
    else:
        received = yield from coded.send(step, value)
    means = scratch.cut("means", _sizes(step.own), value)
    for own, mean in zip(step.own, means, strict=True):
        part = value[own.start : own.stop]
        if coded is None:
            torch.mul(part, own.weight, out=mean)
        else:
            mean.zero_()
            coded.add_rounded(mean, part, own.start, own.weight)
        workers = own.weight
        for p, got in zip(step.recvs, received, strict=True):
            if (p.start, p.stop) == (own.start, own.stop):
                if coded is None:
                    mean.add_(got, alpha=p.weight)
                else:
                    coded.add_decoded(mean, got, p.weight)
                workers += p.weight
        mean.div_(workers)  # Note [Why averages divide]
    return means


def _spread(
    step: Step, value: Tensor, result: Tensor, means: list[Tensor], coded: _Coded | None, scratch: Scratch
) -> Generator[Batch, None, None]:
    """Every owner sends its mean, in full precision, to the other owners: out += mean - (own value as sent)."""
    by_range = {(o.start, o.stop): m for o, m in zip(step.own, means, strict=True)}
    received = scratch.cut("recv", _sizes(step.recvs), value)
    yield Batch([(p.peer, by_range[p.start, p.stop]) for p in step.sends], _named(step.recvs, received))
    for p, mean in [*zip(step.own, means, strict=True), *zip(step.recvs, received, strict=True)]:
        target = result[p.start : p.stop]
        if coded is None:
            target.copy_(mean)
        else:
            # the difference first: it is small, and so is its rounding
            coded.add_rounded(mean, value[p.start : p.stop], p.start, -1.0)
            target.add_(mean)


def _swap(
    step: Step,
    value: Tensor,
    result: Tensor,
    coded: _Coded | None,
    scratch: Scratch,
    mixed: list[Piece],
    *,
    optional: bool,
) -> Generator[Batch, None, None]:
    """out += weight * (received - value). On a lossy wire both values are the rounded ones. `mixed`: the pieces that
    earlier swaps have put into the result."""
    if coded is None:
        received = scratch.cut("recv", _sizes(step.recvs), value)
        yield Batch(_views(step.sends, value), _named(step.recvs, received), optional)
        for p, got in zip(step.recvs, received, strict=True):
            target = result[p.start : p.stop]
            plain = step.source == "out" or len(step.recvs) == 1
            if p.weight == 0.5 and plain and not any(q.start < p.stop and p.start < q.stop for q in mixed):
                target.mul_(0.5).add_(got, alpha=0.5)  # the same bits on both sides of equal parts, and of a pair
            else:
                target.add_(got.sub_(value[p.start : p.stop]), alpha=p.weight)
        return
    sent = coded.encoded(step, value)
    incoming = yield from coded.exchanged(step, sent, value, optional=optional)
    mine = {(p.start, p.stop): payload for p, payload in zip(step.sends, sent, strict=True)}
    for p, theirs in zip(step.recvs, incoming, strict=True):
        own = mine.get((p.start, p.stop))
        if own is None:  # a directed round: nothing was sent
            own = coded.payload(value, p)
        target = result[p.start : p.stop]
        coded.wire.correct(target, theirs, own, p.weight, partial(scratch.one, "decoded", like=target))


@dataclass(frozen=True)
class _Coded:
    """A lossy wire and what its messages are relative to."""

    wire: Wire
    anchor: Anchor | None
    scratch: Scratch

    def send(self, step: Step, value: Tensor) -> Generator[Batch, None, list[Tensor]]:
        """Send the step's pieces encoded. Return the payloads that arrived; raise `OtherAnchor` if one has another."""
        return (yield from self.exchanged(step, self.encoded(step, value), value))

    def encoded(self, step: Step, value: Tensor) -> list[Tensor]:
        """The payloads of the pieces that the step sends."""
        wire = self.wire
        outgoing = self.scratch.payloads("send", _sizes(step.sends), wire, value.device)
        for p, payload in zip(step.sends, outgoing, strict=True):
            wire.encode(value[p.start : p.stop], payload, self._anchor(p.start, p.stop))
            if wire.anchored:
                wire.mark(payload, -1 if self._id is None else self._id)
        return outgoing

    def exchanged(
        self, step: Step, outgoing: list[Tensor], value: Tensor, *, optional: bool = False
    ) -> Generator[Batch, None, list[Tensor]]:
        """Send payloads; return those that arrived."""
        wire = self.wire
        incoming = self.scratch.payloads("recv", _sizes(step.recvs), wire, value.device)
        yield Batch(_named(step.sends, outgoing), _named(step.recvs, incoming), optional)
        for p, payload in zip(step.recvs, incoming, strict=True) if wire.anchored and self.scratch.readable else ():
            if wire.marked(payload) != self._id:
                raise OtherAnchor(p.peer, wire.marked(payload), self._id)
        return incoming

    def payload(self, value: Tensor, p: Piece) -> Tensor:
        """A piece as it would be sent."""
        (payload,) = self.scratch.payloads("own", [p.stop - p.start], self.wire, value.device)
        self.wire.encode(value[p.start : p.stop], payload, self._anchor(p.start, p.stop))
        return payload

    def add_decoded(self, target: Tensor, payload: Tensor, weight: float) -> None:
        """target += weight * decode(payload)."""
        for at in self.wire.chunks(target.numel()):
            (decoded,) = self.scratch.cut("decoded", [at.stop - at.start], target)
            self.wire.decode(payload, decoded, at.start, target.numel())
            target[at].add_(decoded, alpha=weight)

    def add_rounded(self, target: Tensor, value: Tensor, start: int, weight: float) -> None:
        """target += weight * Q(value), where Q(value) is what the other side decodes; `value` begins at `start`."""
        for at in self.wire.chunks(value.numel()):
            part = value[at]
            (payload,) = self.scratch.payloads("own", [part.numel()], self.wire, part.device)
            (rounded,) = self.scratch.cut("rounded", [part.numel()], part)
            self.wire.encode(part, payload, self._anchor(start + at.start, start + at.stop))
            self.wire.decode(payload, rounded, 0, part.numel())
            target[at].add_(rounded, alpha=weight)

    @property
    def _id(self) -> int | None:
        return 0 if self.anchor is None else self.anchor.id

    def _anchor(self, start: int, stop: int) -> Tensor | None:
        return None if self.anchor is None else self.anchor.value[start:stop]


def _named(pieces: tuple[Piece, ...], tensors: list[Tensor]) -> list[tuple[int, Tensor]]:
    return [(p.peer, t) for p, t in zip(pieces, tensors, strict=True)]
