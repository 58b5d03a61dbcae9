"""AccumAdam: Adam whose moments move once every `accumulate` steps, for small local batches."""

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer, ParamsT

from gossamer.errors import InputError
from gossamer.optim._update import Hyper, accumulate_step


class AccumAdam(Optimizer):
    """Adam with accumulated moments (Wang et al., "From Promise to Practice", ICLR 2025).

    With s = `accumulate`, t̂ = ceil(t / s) and g the gradient of step t (weight decay included):

        m ← β1 m̂ + (1 − β1) g,   v ← β2 v̂ + (1 − β2) g²       used in this step only
        x ← x − α (m / (1 − β1^t̂)) / (sqrt(v / (1 − β2^t̂)) + ε)
        b ← b + g / s
        every s steps:  m̂ ← β1 m̂ + (1 − β1) b,   v̂ ← β2 v̂ + (1 − β2) b²,   b ← 0

    `accumulate=1` is `torch.optim.Adam`, bit by bit in the same implementation mode. Counters are kept for
    each parameter: one without a gradient is skipped, as in torch. A changed `accumulate` of a group takes
    effect when a parameter's running accumulation is complete.

    `betas_per="accumulation"` applies the betas once every s steps, as the paper does, so the memory of the
    moments grows s-fold in steps; `"step"` uses β^s instead, which keeps their time constant in steps.

    `foreach` and `fused` choose the implementation as in torch. If neither is given, `accumulate=1` leaves the
    choice to torch and a longer accumulation takes the fused kernel on CPU.

    State of a parameter: `exp_avg` (m̂), `exp_avg_sq` (v̂) and `step` (finished accumulations) as torch's Adam
    names them, so its checkpoints load; `grad_sum` (s·b), `accumulated` (how many gradients it holds; the sum
    is meaningless at 0) and `length` (the s of the running accumulation).
    """

    _decoupled = False

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
        }
        _check(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            _check(self.defaults | param_group)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a checkpoint of torch's Adam lacks our settings
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step on every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Every gradient is checked before the first parameter moves: a refused step changes nothing.
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    _check_gradient(param, group)
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        phases: dict[tuple[int, int], list[tuple[Tensor, dict[str, Any]]]] = {}
        for param in group["params"]:
            if param.grad is not None:
                state = self._state_of(param, group)
                phases.setdefault((state["accumulated"], state["length"]), []).append((param, state))
        for (count, length), members in phases.items():
            if length == 1:
                self._plain_step(members, group)
                continue
            slots = [(_slot(param, state), state["step"]) for param, state in members]
            accumulate_step(slots, count, length, self._hyper(group, length))
            for _, state in members:
                state["accumulated"] = (count + 1) % length
            if count + 1 == length:
                torch._foreach_add_([state["step"] for _, state in members], 1)

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if "exp_avg" not in state:
            # As in torch: a counter on the device only where the fused kernel reads it there.
            device = param.device if group["fused"] else "cpu"
            wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
            state["step"] = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        if state.setdefault("accumulated", 0) == 0:
            state["length"] = group["accumulate"]
        if state["length"] > 1 and "grad_sum" not in state:
            state["grad_sum"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state

    def _hyper(self, group: dict[str, Any], length: int) -> Hyper:
        power = length if group["betas_per"] == "step" else 1
        beta1, beta2 = (beta**power for beta in group["betas"])
        return Hyper(
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=self._decoupled,
            maximize=group["maximize"],
            foreach=group["foreach"],
            fused=group["fused"],
        )

    def _plain_step(self, members: list[tuple[Tensor, dict[str, Any]]], group: dict[str, Any]) -> None:
        """With nothing to accumulate this is Adam itself, so torch's own function does it."""
        params = [p for p, _ in members]
        states = [s for _, s in members]
        beta1, beta2 = group["betas"]
        update = adamw if self._decoupled else adam
        update(
            params,
            [p.grad for p in params],  # type: ignore[misc]
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            foreach=group["foreach"],
            fused=group["fused"],
            has_complex=any(p.is_complex() for p in params),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


def _slot(param: Tensor, state: dict[str, Any]) -> list[Tensor]:
    """[x, g, m̂, v̂, b] as plain real tensors."""
    grad = param.grad
    assert grad is not None
    tensors = [param, grad, state["exp_avg"], state["exp_avg_sq"], state["grad_sum"]]
    if type(grad) is not Tensor and hasattr(grad, "to_local"):  # sharded (DTensor): the update is elementwise
        tensors = [t.to_local() for t in tensors]
    return [torch.view_as_real(t) for t in tensors] if param.is_complex() else tensors


def _check(group: dict[str, Any]) -> None:
    lr, betas, accumulate = group["lr"], group["betas"], group["accumulate"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise InputError(f"lr has {lr.numel()} elements, but a tensor lr has one: pass a float or a scalar.")
    if not lr >= 0:
        raise InputError(f"lr is {lr}, but a learning rate is at least 0: pass a value such as 1e-3.")
    if len(betas) != 2 or not all(isinstance(b, (int, float)) and 0 <= b < 1 for b in betas):
        raise InputError(f"betas are {betas}, but they are two floats in [0, 1): pass e.g. (0.9, 0.999).")
    for name in ("eps", "weight_decay"):
        if not group[name] >= 0:
            raise InputError(f"{name} is {group[name]}, but it is at least 0: pass 0 or a positive value.")
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise InputError(f"accumulate is {accumulate!r}, but it counts steps: pass an integer of at least 1.")
    if group["betas_per"] not in ("accumulation", "step"):
        raise InputError(
            f"betas_per is {group['betas_per']!r}, but the betas act per 'accumulation' or per 'step': pass one."
        )
    if group["foreach"] and group["fused"]:
        raise InputError("foreach and fused are both True, but only one implementation runs: set one of them.")
    if group["foreach"] and isinstance(lr, Tensor):
        raise InputError("lr is a tensor, but foreach=True takes a float: pass a float lr or fused=True.")


def _check_gradient(param: Tensor, group: dict[str, Any]) -> None:
    grad = param.grad
    assert grad is not None
    if grad.layout != torch.strided:
        raise InputError(
            f"The gradient of a parameter of shape {tuple(param.shape)} is sparse, but the moments are dense: "
            "use sparse=False in the layer that made it, or torch.optim.SparseAdam for that parameter."
        )
    if group["fused"] and not param.is_floating_point():
        raise InputError(
            f"A parameter of shape {tuple(param.shape)} is {param.dtype}, but fused=True takes real floating "
            "point only: put it into a group with fused=False."
        )
    if type(grad) is not Tensor and getattr(grad, "placements", None) != getattr(param, "placements", None):
        raise InputError(
            f"The gradient of a sharded parameter of shape {tuple(param.shape)} has other placements than the "
            "parameter: redistribute it before step()."
        )
