"""What the optimizers share: settings, checks, state as torch's Adam keeps it, and Adam's own step."""

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer, ParamsT

from gossamer.errors import InputError
from gossamer.optim._update import Hyper

Group = dict[str, Any]
State = dict[str, Any]
Members = list[tuple[Tensor, State]]


class AdamBase(Optimizer):
    """An optimizer whose state contains that of torch's Adam, and which is Adam for some of its settings."""

    decoupled = False
    """Whether weight decay shrinks the parameters (AdamW) or is a part of the gradient (Adam)."""

    def __init__(self, params: ParamsT, defaults: Group):
        self._check(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        if isinstance(param_group, dict):  # anything else is torch's to refuse
            self._check(self.defaults | param_group)
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: State) -> None:
        """Load a checkpoint of this optimizer, or one of torch's Adam or AdamW.

        Settings that the checkpoint does not hold keep their present values.
        """
        for group in state_dict["param_groups"]:
            if group.get("amsgrad"):
                raise InputError(
                    f"The checkpoint was made with amsgrad=True, but {type(self).__name__} keeps no maximum of the "
                    "second moment: continue it with torch's optimizer, or set amsgrad=False in its param_groups."
                )
        before = self.param_groups
        super().load_state_dict(state_dict)
        for old, new in zip(before, self.param_groups, strict=True):
            for name, value in old.items():
                new.setdefault(name, value)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo  # a compiled step would be a chain of graph breaks: it reads counters and addresses
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; return the closure's loss."""
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

    def _step_group(self, group: Group) -> None:
        raise NotImplementedError

    def _check(self, group: Group) -> None:
        """Raise InputError if a setting is out of range."""
        lr, betas = group["lr"], group["betas"]
        if group.get("amsgrad"):
            raise InputError(
                f"amsgrad is True, but {type(self).__name__} keeps no maximum of the second moment: leave amsgrad out."
            )
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise InputError(f"lr has {lr.numel()} elements, but a tensor lr has one: pass a float or a scalar.")
        if not lr >= 0:
            raise InputError(f"lr is {lr}, but a learning rate is at least 0: pass a value such as 1e-3.")
        if len(betas) != 2 or not all(isinstance(b, (int, float)) and 0 <= b < 1 for b in betas):
            raise InputError(f"betas are {betas}, but they are two floats in [0, 1): pass e.g. (0.9, 0.999).")
        for name in ("eps", "weight_decay"):
            if not group[name] >= 0:
                raise InputError(f"{name} is {group[name]}, but it is at least 0: pass 0 or a positive value.")
        if group["foreach"] and group["fused"]:
            raise InputError("foreach and fused are both True, but only one implementation runs: set one of them.")
        if group["foreach"] and isinstance(lr, Tensor):
            raise InputError("lr is a tensor, but foreach=True takes a float: pass a float lr or fused=True.")

    def _moments(self, param: Tensor, group: Group) -> State:
        """The state of a parameter, with Adam's entries in it."""
        state: State = self.state[param]
        if "exp_avg" not in state:
            # As in torch: a counter on the device only where the fused kernel reads it there.
            device = param.device if group["fused"] else "cpu"
            wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
            state["step"] = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state

    def _hyper(self, group: Group, betas: tuple[float, float]) -> Hyper:
        return Hyper(
            lr=group["lr"],
            beta1=betas[0],
            beta2=betas[1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=self.decoupled,
            maximize=group["maximize"],
            foreach=group["foreach"],
            fused=group["fused"],
        )

    def _adam_step(self, members: Members, group: Group) -> None:
        """Adam's own step, by torch's own function."""
        params = [p for p, _ in members]
        states = [s for _, s in members]
        beta1, beta2 = group["betas"]
        update = adamw if self.decoupled else adam
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


def slot(param: Tensor, state: State, *extra: str) -> list[Tensor]:
    """[x, g, m, v] and state[extra] as plain real tensors."""
    grad = param.grad
    assert grad is not None
    tensors = [param, grad, state["exp_avg"], state["exp_avg_sq"], *(state[name] for name in extra)]
    if type(grad) is not Tensor and hasattr(grad, "to_local"):  # sharded (DTensor): the update is elementwise
        tensors = [t.to_local() for t in tensors]
    return [torch.view_as_real(t) for t in tensors] if param.is_complex() else tensors


def _check_gradient(param: Tensor, group: Group) -> None:
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
