"""The optimizer's moments in exact averages (average_moments=True).

Moments are local: every worker's second moment measures its own gradient noise. Where workers see different data, or
came and went, it can help to average them now and then, together with the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.comm import Mixed
from gossamer.engine.flat import Flat


class Moments:
    """Everything in the optimizer's state that has its parameter's shape, as one vector for each name."""

    def __init__(self, flats: list[Flat], optimizer: Optimizer):
        self._flats, self._optimizer = flats, optimizer
        self._gathered: list[tuple[Flat, str]] = []

    @torch.no_grad()
    def gather(self) -> list[Tensor]:
        """Copies of the moments, in an order that is the same on every worker once all have taken a step."""
        self._gathered = [(flat, name) for flat in self._flats for name in self._names(flat)]
        return [torch.cat([m.reshape(-1) for m in self._of(flat, name)]) for flat, name in self._gathered]

    @torch.no_grad()
    def put(self, index: int, mixed: Mixed) -> None:
        """The average of vector `index` into the optimizer's state."""
        flat, name = self._gathered[index]
        targets = list(self._of(flat, name))
        parts = torch.split(mixed.out, [t.numel() for t in targets])
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part.view(target.shape))

    def _names(self, flat: Flat) -> list[str]:
        state = self._optimizer.state
        return sorted(
            {
                name
                for place in flat.places
                for name, value in state.get(place.parameter, {}).items()
                if isinstance(value, Tensor) and value.shape == place.parameter.shape and value.is_floating_point()
            }
        )

    def _of(self, flat: Flat, name: str) -> Iterator[Tensor]:
        for place in flat.places:
            found = self._optimizer.state.get(place.parameter, {}).get(name)
            if found is not None:
                yield found
