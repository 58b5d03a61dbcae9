"""The updates on lists of tensors: by the native kernels, or by torch operations in pieces that stay in the cache."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from gossamer.optim import _native

# On CPU a piece is small enough to stay in the cache from one operation to the next, and large enough that the calls
# (some 10 µs per piece) and the restarts of the prefetcher do not show. Tensors below `_CPU_SMALL_BYTES` are gathered.
_CPU_PIECE_BYTES = 1 << 20
_CPU_SMALL_BYTES = 64 << 10
_DEVICE_PIECE_BYTES = 64 << 20

Slot = list[Tensor]
"""[x, g, m, v] of a parameter and s, the optimizer's own tensor if it has one, all real and of one shape."""


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """What one group's update needs beside its tensors."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool
    foreach: bool | None
    fused: bool | None

    @property
    def may_be_native(self) -> bool:
        return self.foreach is None and self.fused is not False

    def scalars(self, step: float, **own: float) -> _native.Scalars:
        """The kernels' numbers for Adam's step number `step`; `own` are those of one optimizer."""
        lr = float(self.lr)
        decay = lr * self.weight_decay if self.decoupled else 0.0
        return _native.Scalars(
            gradient=-1.0 if self.maximize else 1.0,
            l2=0.0 if self.decoupled else self.weight_decay,
            shrink=1 - decay,
            beta1=self.beta1,
            beta2=self.beta2,
            rate1=1 - self.beta1,
            rate2=1 - self.beta2,
            step_size=lr / (1 - self.beta1**step),
            eps=self.eps,
            **own,
        )


@dataclass(frozen=True)
class Corrected:
    """GossipAdam's numbers at one step: q ← β2 q + square_rate m², D = clamp(a v + b q, low v, high v)."""

    step: float
    a: float
    b: float
    low: float
    high: float
    square_rate: float


@dataclass
class Piece:
    """Tensors of one device and dtype that are updated together; `dense` if each fills its memory in order."""

    dense: bool = True
    slots: list[Slot] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    numel: int = 0

    def append(self, slot: Slot, step: Tensor) -> None:
        self.slots.append(slot)
        self.steps.append(step)
        self.numel += slot[0].numel()

    def columns(self) -> list[list[Tensor]]:
        """The lists of x, g, m, v and s."""
        return [list(column) for column in zip(*self.slots, strict=True)]


Numbered = Sequence[tuple[Slot, Tensor]]
"""Slots with the step counters of their parameters."""

Scratches = dict[tuple[torch.device, torch.dtype, torch.Size | None], Tensor]


def gossip_adam(slots: Numbered, corrected: Corrected, hyper: Hyper) -> None:
    """Step slots whose s is q, and whose counters stand at `corrected.step` already."""
    native, rest = _divide(slots, hyper)
    if native is not None:
        numbers = {name: getattr(corrected, name) for name in ("a", "b", "low", "high", "square_rate")}
        native.kernels.gossip_adam([slot for slot, _ in native.slots], hyper.scalars(corrected.step, **numbers))
    for piece in _pieces(rest):
        _gossip_adam(piece, corrected, hyper)


def accum_adam(slots: Numbered, count: int, length: int, hyper: Hyper) -> None:
    """Step slots whose s holds the sum of `count` of `length` gradients.

    The step counters are left as they are: the caller advances them after the last gradient.
    """
    native, rest = _divide(slots, hyper)
    if native is not None:
        phase = 0 if count == 0 else 2 if count + 1 == length else 1
        by_step: dict[float, list[Slot]] = {}
        for slot, step in native.slots:
            by_step.setdefault(step.item() + 1, []).append(slot)
        for number, members in by_step.items():
            high = 1 / (1 - hyper.beta2**number)
            scalars = hyper.scalars(number, high=high, inverse_length=1 / length)
            native.kernels.accum_adam(members, scalars, phase)
    scratches: Scratches = {}
    for piece in _pieces(rest):
        _accum_adam(piece, *_scratch_moments(piece, scratches), count, length, hyper)


def fused_adam(slots: Numbered, hyper: Hyper) -> None:
    """Adam's step on slots [x, g, m, v] and their counters, by torch's fused kernel."""
    params, grads, exp_avgs, exp_avg_sqs = (list(column) for column in zip(*(slot for slot, _ in slots), strict=True))
    steps = [step for _, step in slots]
    torch._foreach_add_(steps, 1)
    update = torch._fused_adamw_ if hyper.decoupled else torch._fused_adam_
    update(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        amsgrad=False,
        maximize=hyper.maximize,
    )


def for_fused_adam(tensors: Slot) -> Slot | None:
    """The tensors as torch's fused kernel on CPU needs them, which walks memory and ignores strides; None if it cannot
    take them."""
    dtype = tensors[0].dtype
    plain = all(t.is_cpu and t.dtype is dtype and type(t) in (Tensor, torch.nn.Parameter) for t in tensors)
    return _in_memory_order(tensors) if plain else None


@dataclass(frozen=True)
class _Native:
    kernels: _native.Kernels
    slots: Numbered


def _divide(slots: Numbered, hyper: Hyper) -> tuple[_Native | None, Numbered]:
    """The slots that the native kernels step, and those that torch operations step."""
    if not hyper.may_be_native:
        return None, slots
    native, rest = [], []
    for tensors, step in slots:
        dense = _in_memory_order(tensors) if _native.fits(tensors) else None
        if dense is None:
            rest.append((tensors, step))
        else:
            native.append((dense, step))
    kernels = _native.kernels() if native else None
    return (None, slots) if kernels is None else (_Native(kernels, native), rest)


def _pieces(slots: Numbered) -> Iterator[Piece]:
    """Cut large tensors and gather small ones, so that every piece is about as large as the cache allows."""
    gathering: dict[tuple[torch.device, torch.dtype], Piece] = {}
    for tensors, step in slots:
        param = tensors[0]
        numel = param.numel()
        if numel == 0:
            continue
        dense = _in_memory_order(tensors)
        if dense is None:
            alone = Piece(dense=False)
            alone.append(tensors, step)
            yield alone
            continue
        size = param.element_size()
        limit = (_CPU_PIECE_BYTES if param.is_cpu else _DEVICE_PIECE_BYTES) // size
        if numel > (_CPU_SMALL_BYTES // size if param.is_cpu else limit):
            whole = [(t,) for t in dense] if numel <= limit else [torch.split(t.view(-1), limit) for t in dense]
            for parts in zip(*whole, strict=True):
                part = Piece()
                part.append(list(parts), step)
                yield part
            continue
        key = (param.device, param.dtype)
        piece = gathering.get(key)
        if piece is not None and piece.numel + numel > limit:
            yield piece
            piece = None
        if piece is None:
            piece = gathering[key] = Piece()
        piece.append(dense, step)
    yield from gathering.values()


def _in_memory_order(tensors: Slot) -> Slot | None:
    """Contiguous views of all tensors, dimensions ordered as the parameter's; None if they do not exist."""
    if all(t.is_contiguous() for t in tensors):
        return tensors
    strides = tensors[0].stride()
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    views = [t.permute(order) for t in tensors]
    views[1] = views[1].contiguous()  # a gradient is only read, so a copy in the right order will do
    return views if all(t.is_contiguous() for t in views) else None


def _signed(params: list[Tensor], grads: list[Tensor], hyper: Hyper) -> list[Tensor]:
    """The gradients to descend along. Coupled decay is a part of them, so that it reaches the moments."""
    if hyper.maximize:
        grads = list(torch._foreach_neg(grads))
    if hyper.weight_decay != 0 and not hyper.decoupled:
        grads = list(torch._foreach_add(grads, params, alpha=hyper.weight_decay))
    return grads


def _gossip_adam(piece: Piece, corrected: Corrected, hyper: Hyper) -> None:
    columns = piece.columns()
    if columns[0][0].dtype in (torch.bfloat16, torch.float16):  # compute in float32, as torch's fused Adam does
        wide = [[t.float() for t in column] for column in columns]
        _gossip_adam_columns(wide, corrected, hyper)
        for stored, computed in zip(columns, wide, strict=True):
            if stored is not columns[1]:
                torch._foreach_copy_(stored, computed)
    else:
        _gossip_adam_columns(columns, corrected, hyper)


def _gossip_adam_columns(columns: list[list[Tensor]], corrected: Corrected, hyper: Hyper) -> None:
    params, grads, m, v, q = columns
    lr = float(hyper.lr)
    grads = _signed(params, grads, hyper)
    if hyper.weight_decay != 0 and hyper.decoupled:
        torch._foreach_mul_(params, 1 - lr * hyper.weight_decay)
    torch._foreach_lerp_(m, grads, 1 - hyper.beta1)
    torch._foreach_mul_(v, hyper.beta2)
    torch._foreach_addcmul_(v, grads, grads, 1 - hyper.beta2)
    torch._foreach_mul_(q, hyper.beta2)
    torch._foreach_addcmul_(q, m, m, corrected.square_rate)
    root = torch._foreach_mul(v, corrected.a)
    torch._foreach_add_(root, q, alpha=corrected.b)
    bound = torch._foreach_mul(v, corrected.low)
    torch._foreach_maximum_(root, bound)
    torch._foreach_mul_(bound, corrected.high / corrected.low)
    torch._foreach_minimum_(root, bound)
    torch._foreach_sqrt_(root)
    torch._foreach_add_(root, hyper.eps)
    torch._foreach_addcdiv_(params, m, root, -lr / (1 - hyper.beta1**corrected.step))


def _scratch_moments(piece: Piece, scratches: Scratches) -> tuple[list[Tensor], list[Tensor]]:
    """Copies of m̂ and v̂ that this step may overwrite.

    A large tensor's go to one buffer for the whole step: fresh memory would cost page faults, and leave the
    cache. Many small ones are copied by one call; times 1, because a list has no public clone.
    """
    _, _, exp_avgs, exp_avg_sqs, _ = piece.columns()
    if len(piece.slots) > 1 or not piece.dense:
        return list(torch._foreach_mul(exp_avgs, 1)), list(torch._foreach_mul(exp_avg_sqs, 1))
    param = piece.slots[0][0]
    shape = param.shape
    both = scratches.get((param.device, param.dtype, shape))
    if both is None:  # a view costs as much as the copy of a small tensor, so keep one for each shape
        buffer = scratches.get((param.device, param.dtype, None))
        if buffer is None or buffer.numel() < 2 * piece.numel:
            buffer = scratches[param.device, param.dtype, None] = param.new_empty(2 * piece.numel)
        both = scratches[param.device, param.dtype, shape] = buffer[: 2 * piece.numel].view(2, *shape)
    exp_avg, exp_avg_sq = both.unbind()
    return [exp_avg.copy_(exp_avgs[0])], [exp_avg_sq.copy_(exp_avg_sqs[0])]


def _accum_adam(
    piece: Piece, exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], count: int, length: int, hyper: Hyper
) -> None:
    """`exp_avgs` and `exp_avg_sqs` are copies of the moments, to be overwritten."""
    params, grads, kept_avgs, kept_avg_sqs, grad_sums = piece.columns()
    grads = _signed(params, grads, hyper)
    weight_decay = hyper.weight_decay if hyper.decoupled else 0.0

    fused = hyper.fused
    if fused is None and hyper.foreach is None:
        fused = params[0].is_cpu
    if fused and piece.dense:  # the kernel walks memory and ignores strides
        torch._fused_adamw_(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            list(torch._foreach_add(piece.steps, 1)),
            lr=hyper.lr,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            weight_decay=weight_decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=False,
        )
    else:
        adamw(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [step.clone() for step in piece.steps],
            foreach=hyper.foreach,
            fused=None if hyper.fused is None else False,
            amsgrad=False,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            lr=hyper.lr,
            weight_decay=weight_decay,
            eps=hyper.eps,
            maximize=False,
        )

    if count == 0:  # overwriting the sum here is cheaper than clearing it after the last gradient
        torch._foreach_copy_(grad_sums, grads)
    elif count < length - 1:
        torch._foreach_add_(grad_sums, grads)
    else:
        mean = exp_avgs  # no longer needed, and in the cache: the last sum need not go out to memory
        for out, grad_sum, grad in zip(mean, grad_sums, grads, strict=True):
            torch.add(grad_sum, grad, out=out)
        torch._foreach_mul_(mean, 1 / length)
        torch._foreach_lerp_(kept_avgs, mean, 1 - hyper.beta1)
        torch._foreach_mul_(mean, mean)
        torch._foreach_lerp_(kept_avg_sqs, mean, 1 - hyper.beta2)
