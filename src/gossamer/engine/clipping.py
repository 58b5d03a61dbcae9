"""Clip a replica's own gradient as all-reduce would clip the average of all replicas' gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_SAMPLE = 65536  # coordinates of the gradient that are kept from step to step
_MEMORY = 0.9  # of the running estimate of the noise
_SPIKE = 4.0  # one gradient may raise the estimate as if its noise were at most this many times the estimate


class GradientClipper:
    """Estimates the norm of the averaged gradient from a replica's own gradients, and clips by it.

    The squared norm of a replica's gradient is signal plus noise, S + N, that of the average of R replicas S + N/R. The
    noise of successive steps is independent, so S is the inner product of successive gradients, and N follows; both are
    taken on a sample of the coordinates. The averaged norm is estimated as ‖g‖² − (1 − 1/R) N, N being the running
    mean of the steps before: noise is discounted as all-reduce does, and what exceeds the usual noise, such as a spike
    that all replicas share, counts in full. Nothing waits for the device.
    """

    # Note [Why clipping needs the noise]
    #     Clipping at `max_norm` would clip nearly every step where noise dominates, because all-reduce's norm is √R
    #     times smaller. Clipping at √R times `max_norm` would not clip where signal dominates, early in training and in
    #     spikes, which are what clipping is for: benchmarks/records/quality-paired-lm.

    def __init__(self) -> None:
        self._before: Tensor | None = None  # the sample of the gradient of the step before
        self._noise: Tensor | None = None  # running sum of the noise, and of its weights
        self._weight = 0.0

    def clip(
        self,
        parameters: Sequence[Tensor],
        max_norm: float,
        replicas: int,
        *,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip in place; return the norm of the replica's own gradient before."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm: Tensor = nn.utils.get_total_norm(gradients, error_if_nonfinite=error_if_nonfinite, foreach=foreach)
        averaged = self._averaged_norm(parameters, norm, replicas) if gradients and replicas > 1 else norm
        nn.utils.clip_grads_with_norm_(parameters, max_norm, averaged, foreach)
        return norm

    @torch.no_grad()
    def _averaged_norm(self, parameters: Sequence[Tensor], norm: Tensor, replicas: int) -> Tensor:
        if hasattr(norm, "full_tensor"):  # shards: the workers of a replica have different samples
            shared: Tensor = norm / replicas**0.5
            return shared
        power = norm.float().square()
        usual = torch.zeros_like(power) if self._noise is None else self._noise / self._weight
        averaged = torch.maximum(power - (1 - 1 / replicas) * usual, power / replicas).sqrt()
        sample = _sample(parameters)
        before = torch.zeros_like(sample) if self._before is None else self._before
        if self._before is not None:
            noise = power * (1 - nn.functional.cosine_similarity(sample, before, dim=0).abs())
            if self._noise is not None:
                noise = torch.minimum(noise, _SPIKE * usual)
            noise = torch.where(noise.isfinite(), noise, usual)  # an overflow leaves the estimate as it was
            self._noise = (1 - _MEMORY) * noise + _MEMORY * self._weight * usual
            self._weight = 1 - _MEMORY + _MEMORY * self._weight
        self._before = torch.where(sample.isfinite().all(), sample, before)
        return averaged

    def state_dict(self) -> dict[str, Any]:
        return {"before": self._before, "noise": self._noise, "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before, self._noise, self._weight = state["before"], state["noise"], state["weight"]


def _sample(parameters: Sequence[Tensor]) -> Tensor:
    """Every k-th coordinate of the gradient; zeros for parameters without one."""
    every = max(1, -(-sum(p.numel() for p in parameters) // _SAMPLE))
    home = parameters[0].device
    parts = [
        torch.zeros(-(-p.numel() // every), device=home)
        if p.grad is None
        else p.grad.detach().flatten()[::every].to(home, torch.float32)
        for p in parameters
    ]
    return torch.cat(parts)
