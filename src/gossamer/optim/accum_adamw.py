"""AccumAdamW: AccumAdam with decoupled weight decay."""

from typing import Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from gossamer.optim.accum_adam import AccumAdam


class AccumAdamW(AccumAdam):
    """AccumAdam whose weight decay shrinks the parameters and stays out of the moments.

    Every step x ← (1 − α λ) x comes before AccumAdam's update (Loshchilov and Hutter, ICLR 2019), on every
    parameter of a group whose `weight_decay` λ is not 0. `accumulate=1` is `torch.optim.AdamW`, bit by bit.
    """

    _decoupled = True

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
        )
