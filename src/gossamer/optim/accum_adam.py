"""AccumAdam and AccumAdamW: Adam whose moments move once every `accumulate` steps."""

from typing import Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from gossamer.errors import InputError
from gossamer.optim._base import AdamBase, Group, Members, State, slot
from gossamer.optim._update import accum_adam


class AccumAdam(AdamBase):
    """Adam with accumulated moments (Wang et al., "From Promise to Practice", ICLR 2025).

    With s = `accumulate`, t̂ = ceil(t / s) and g the gradient of step t (weight decay included):

        m ← β1 m̂ + (1 − β1) g,   v ← β2 v̂ + (1 − β2) g²       used in this step only
        x ← x − α (m / (1 − β1^t̂)) / (sqrt(v / (1 − β2^t̂)) + ε)
        b ← b + g / s
        every s steps:  m̂ ← β1 m̂ + (1 − β1) b,   v̂ ← β2 v̂ + (1 − β2) b²,   b ← 0

    `accumulate=1` is `torch.optim.Adam`, bit by bit in the same implementation mode. Counters are kept per
    parameter: a parameter without a gradient is skipped, as in torch. A changed `accumulate` of a group takes
    effect when a parameter's running accumulation is complete.

    `betas_per="accumulation"` applies the betas once every s steps, as the paper does, so the memory of the
    moments grows s-fold in steps; `"step"` uses β^s instead, which keeps their time constant in steps.

    `foreach` and `fused` choose the implementation as in torch. If neither is given, `accumulate=1` leaves the
    choice to torch, and a longer accumulation takes the fastest one: see Note [When native kernels run]. amsgrad is
    refused.

    State of a parameter: `exp_avg` (m̂), `exp_avg_sq` (v̂) and `step` (finished accumulations) as torch's Adam
    names them, so its checkpoints load; `grad_sum` (s·b), `accumulated` (how many gradients it holds; the sum
    is meaningless at 0) and `length` (the s of the running accumulation).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        accumulate: int = 4,
        betas_per: Literal["accumulation", "step"] = "accumulation",
        foreach: bool | None = None,
        fused: bool | None = None,
        maximize: bool = False,
        amsgrad: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "accumulate": accumulate,
            "betas_per": betas_per,
            "foreach": foreach,
            "fused": fused,
            "maximize": maximize,
            "amsgrad": amsgrad,
        }
        super().__init__(params, defaults)

    def _check(self, group: Group) -> None:
        super()._check(group)
        accumulate = group["accumulate"]
        if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
            raise InputError(
                f"accumulate is {accumulate!r}, but it is a number of steps: pass an integer of at least 1."
            )
        if group["betas_per"] not in ("accumulation", "step"):
            raise InputError(
                f"betas_per is {group['betas_per']!r}, but the betas act per 'accumulation' or per 'step': pass "
                "either of them."
            )

    def _step_group(self, group: Group) -> None:
        phases: dict[tuple[int, int], Members] = {}
        for param in group["params"]:
            if param.grad is not None:
                state = self._accumulation(param, group)
                phases.setdefault((state["accumulated"], state["length"]), []).append((param, state))
        for (count, length), members in phases.items():
            if length == 1:
                self._adam_step(members, group)
                continue
            power = length if group["betas_per"] == "step" else 1
            beta1, beta2 = group["betas"]
            slots = [(slot(param, state, "grad_sum"), state["step"]) for param, state in members]
            accum_adam(slots, count, length, self._hyper(group, (beta1**power, beta2**power)))
            for _, state in members:
                state["accumulated"] = (count + 1) % length
            if count + 1 == length:
                torch._foreach_add_([state["step"] for _, state in members], 1)

    def _accumulation(self, param: Tensor, group: Group) -> State:
        state = self._moments(param, group)
        if state.setdefault("accumulated", 0) == 0:
            state["length"] = group["accumulate"]
        if state["length"] > 1 and "grad_sum" not in state:
            state["grad_sum"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state


class AccumAdamW(AccumAdam):
    """AccumAdam whose weight decay shrinks the parameters and stays out of the moments.

    Every step x ← (1 − α λ) x comes before AccumAdam's update (Loshchilov and Hutter, ICLR 2019), on every
    parameter of a group whose `weight_decay` λ is not 0. `accumulate=1` is `torch.optim.AdamW`, bit by bit.
    """

    decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        accumulate: int = 4,
        betas_per: Literal["accumulation", "step"] = "accumulation",
        foreach: bool | None = None,
        fused: bool | None = None,
        maximize: bool = False,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            accumulate=accumulate,
            betas_per=betas_per,
            foreach=foreach,
            fused=fused,
            maximize=maximize,
            amsgrad=amsgrad,
        )
