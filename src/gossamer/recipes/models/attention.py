"""Multi-head attention, used by both the translation and the language model."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Cache:
    """Keys and values of the positions seen so far, for decoding one token at a time."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def keep(self, rows: Tensor) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        cache: Cache | None = None,
    ) -> Tensor:
        """Attend from x to `memory` (to x itself without one); `mask` is True where attention is allowed."""
        query = self._split(self.query(x))
        if memory is not None and cache is not None and cache.keys is not None and cache.values is not None:
            keys, values = cache.keys, cache.values
        else:
            attended = x if memory is None else memory
            keys, values = self._split(self.key(attended)), self._split(self.value(attended))
            if cache is not None:
                if memory is None and cache.keys is not None and cache.values is not None:
                    keys = torch.cat((cache.keys, keys), dim=2)
                    values = torch.cat((cache.values, values), dim=2)
                cache.keys, cache.values = keys, values
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, keys, values, mask, dropout, causal)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        rows, columns, width = x.shape
        return x.view(rows, columns, self.heads, width // self.heads).transpose(1, 2)


def sinusoids(start: int, count: int, width: int, like: Tensor) -> Tensor:
    """PE(p, 2i) = sin(p / 10000^(2i/width)), PE(p, 2i+1) = cos(the same): Vaswani et al. 2017, section 3.5."""
    positions = torch.arange(start, start + count, device=like.device, dtype=torch.float32)[:, None]
    rates = torch.exp(torch.arange(0, width, 2, device=like.device, dtype=torch.float32) * (-math.log(10000.0) / width))
    angles = positions * rates
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).to(like.dtype)
