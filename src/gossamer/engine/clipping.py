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
    noise of successive steps is independent, so |cos| of successive gradients is the share of the signal, taken on a
    sample of the coordinates; a share that was measured between the replicas takes its place, see Note [Why the signal
    is measured between workers]. The square of the averaged norm is estimated as ‖g‖² − (1 − 1/R) N, at least ‖g‖²/R,
    N being the running mean over the steps before: noise is discounted as all-reduce does, and what exceeds the usual
    noise, such as a spike that all replicas share, counts in full. Nothing waits for the device.

    DTensors are clipped at √R times the threshold unless the share was measured: the workers of a replica would sample
    different shards, and clip differently.
    """

    # Note [Why clipping needs the noise]
    #     Clipping at `max_norm` would clip nearly every step where noise dominates, because all-reduce's norm is √R
    #     times smaller. Clipping at √R times `max_norm` would not clip where signal dominates, early in training and in
    #     spikes, which are what clipping is for: benchmarks/records/quality-paired-lm.

    def __init__(self) -> None:
        self._before: Tensor | None = None  # the sample of the gradient of the step before
        self._noise = self._weight = torch.zeros(())  # running sum of the noise, and of its weights

    def clip(
        self,
        parameters: Sequence[Tensor],
        max_norm: float,
        replicas: int,
        share: float | None = None,
        *,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip in place; return the norm of the replica's own gradient before.

        `share` is the share of the signal where it has been measured between the replicas.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm: Tensor = nn.utils.get_total_norm(gradients, error_if_nonfinite=error_if_nonfinite, foreach=foreach)
        averaged = self._averaged_norm(parameters, norm, replicas, share) if gradients and replicas > 1 else norm
        nn.utils.clip_grads_with_norm_(parameters, max_norm, averaged, foreach)
        return norm

    @torch.no_grad()
    def _averaged_norm(self, parameters: Sequence[Tensor], norm: Tensor, replicas: int, share: float | None) -> Tensor:
        gathered = getattr(norm, "full_tensor", None)
        if gathered is not None and share is None:
            unshared: Tensor = norm / replicas**0.5
            return unshared
        power: Tensor = (norm if gathered is None else gathered()).float().square()
        # With a measured share the sample only tells whether there was a step before.
        sample = power.new_ones(1) if gathered is not None else _sample(parameters, norm.device)
        if self._before is None or self._before.shape != sample.shape:  # the first step, or other tensors than before
            self._before, self._noise, self._weight = torch.zeros_like(sample), power.new_zeros(()), power.new_zeros(())
        before, noise, weight = (value.to(power.device) for value in (self._before, self._noise, self._weight))
        usual = noise / weight.clamp(min=1e-6)
        averaged = torch.maximum(power - (1 - 1 / replicas) * usual, power / replicas).sqrt()
        similar = nn.functional.cosine_similarity(sample, before, dim=0).abs()
        now = power * ((1 - similar).clamp(min=0) if share is None else 1 - share)  # equal ones round to more than 1
        now = torch.where(usual > 0, torch.minimum(now, _SPIKE * usual), now)
        counts = now.isfinite() & before.any()  # an overflow leaves the estimate as it was
        self._noise = torch.where(counts, (1 - _MEMORY) * now + _MEMORY * noise, noise)
        self._weight = torch.where(counts, 1 - _MEMORY + _MEMORY * weight, weight)
        self._before = torch.where(sample.isfinite().all(), sample, before)
        return averaged

    def state_dict(self) -> dict[str, Any]:
        return {"before": self._before, "noise": self._noise, "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before, self._noise, self._weight = state["before"], state["noise"], state["weight"]


def _sample(parameters: Sequence[Tensor], device: torch.device) -> Tensor:
    """Every k-th coordinate of the gradient; zeros for parameters without one."""
    every = -(-sum(p.numel() for p in parameters) // _SAMPLE) | 1  # odd: not the same columns of every matrix
    parts = [
        torch.zeros(-(-p.numel() // every), device=device)
        if p.grad is None
        else p.grad.detach().flatten()[::every].to(device, torch.float32)
        for p in parameters
    ]
    return torch.cat(parts)
