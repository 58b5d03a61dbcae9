"""One AccumAdam step on lists of tensors, cut into pieces that stay in the cache."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adamw import adamw

# On CPU a piece is small enough for its second pass to hit the cache, and large enough that the calls (some
# 10 µs a piece) and the restarts of the prefetcher do not show. Tensors below `_CPU_SMALL_BYTES` are gathered.
_CPU_PIECE_BYTES = 2 << 20
_CPU_SMALL_BYTES = 64 << 10
_DEVICE_PIECE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """What one group's update needs beside its tensors; the betas are those of one accumulation."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool
    foreach: bool | None
    fused: bool | None


@dataclass
class Piece:
    """Tensors of one device and dtype that are updated together; `dense` if each fills its memory in order."""

    dense: bool = True
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    grad_sums: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    numel: int = 0

    def append(self, tensors: list[Tensor], step: Tensor) -> None:
        param, grad, exp_avg, exp_avg_sq, grad_sum = tensors
        self.params.append(param)
        self.grads.append(grad)
        self.exp_avgs.append(exp_avg)
        self.exp_avg_sqs.append(exp_avg_sq)
        self.grad_sums.append(grad_sum)
        self.steps.append(step)
        self.numel += param.numel()


Scratches = dict[tuple[torch.device, torch.dtype, torch.Size | None], Tensor]


def accumulate_step(slots: list[tuple[list[Tensor], Tensor]], count: int, length: int, hyper: Hyper) -> None:
    """Step every slot ([x, g, m̂, v̂, b], t̂ − 1), whose b holds the sum of `count` of `length` gradients.

    The step counters are left as they are: the caller advances them after the last gradient.
    """
    scratches: Scratches = {}
    for piece in _pieces(slots):
        _update(piece, *_scratch_moments(piece, scratches), count, length, hyper)


def _pieces(slots: list[tuple[list[Tensor], Tensor]]) -> Iterator[Piece]:
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


def _in_memory_order(tensors: list[Tensor]) -> list[Tensor] | None:
    """Contiguous views of all tensors, dimensions ordered as the parameter's; None if they do not exist."""
    if all(t.is_contiguous() for t in tensors):
        return tensors
    strides = tensors[0].stride()
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    views = [t.permute(order) for t in tensors]
    views[1] = views[1].contiguous()  # a gradient is only read, so a copy in the right order will do
    return views if all(t.is_contiguous() for t in views) else None


def _scratch_moments(piece: Piece, scratches: Scratches) -> tuple[list[Tensor], list[Tensor]]:
    """Copies of m̂ and v̂ that this step may overwrite.

    A large tensor's go to one buffer for the whole step: fresh memory would cost page faults, and leave the
    cache. Many small ones are copied by one call; times 1, because a list has no public clone.
    """
    if len(piece.params) > 1 or not piece.dense:
        moments = torch._foreach_mul(piece.exp_avgs, 1), torch._foreach_mul(piece.exp_avg_sqs, 1)
        return list(moments[0]), list(moments[1])
    param = piece.params[0]
    shape = param.shape
    both = scratches.get((param.device, param.dtype, shape))
    if both is None:  # a view costs as much as the copy of a small tensor, so keep one for each shape
        buffer = scratches.get((param.device, param.dtype, None))
        if buffer is None or buffer.numel() < 2 * piece.numel:
            buffer = scratches[param.device, param.dtype, None] = param.new_empty(2 * piece.numel)
        both = scratches[param.device, param.dtype, shape] = buffer[: 2 * piece.numel].view(2, *shape)
    exp_avg, exp_avg_sq = both.unbind()
    return [exp_avg.copy_(piece.exp_avgs[0])], [exp_avg_sq.copy_(piece.exp_avg_sqs[0])]


def _update(
    piece: Piece, exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], count: int, length: int, hyper: Hyper
) -> None:
    params, grads = piece.params, piece.grads
    # The decay of plain Adam is a part of the gradient, so it must reach b as well as this step's moments.
    if hyper.maximize:
        grads = list(torch._foreach_neg(grads))
    if hyper.weight_decay != 0 and not hyper.decoupled:
        grads = list(torch._foreach_add(grads, params, alpha=hyper.weight_decay))
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
        torch._foreach_copy_(piece.grad_sums, grads)
    elif count < length - 1:
        torch._foreach_add_(piece.grad_sums, grads)
    else:
        mean = exp_avgs  # done with, and in the cache: the last sum need not go out to memory
        for out, grad_sum, grad in zip(mean, piece.grad_sums, grads, strict=True):
            torch.add(grad_sum, grad, out=out)
        torch._foreach_mul_(mean, 1 / length)
        torch._foreach_lerp_(piece.exp_avgs, mean, 1 - hyper.beta1)
        torch._foreach_mul_(mean, mean)
        torch._foreach_lerp_(piece.exp_avg_sqs, mean, 1 - hyper.beta2)
