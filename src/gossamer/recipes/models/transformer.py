"""The transformer of Vaswani et al. 2017, "Attention is all you need": encoder, decoder, one shared embedding."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.recipes.models.attention import Attention, Cache, sinusoids


@dataclass(frozen=True)
class TransformerSize:
    layers: int
    width: int
    heads: int
    hidden: int


SIZES = {
    "tiny": TransformerSize(layers=2, width=64, heads=4, hidden=256),
    "small": TransformerSize(layers=3, width=256, heads=4, hidden=1024),
    "base": TransformerSize(layers=6, width=512, heads=8, hidden=2048),
}

Norm = Literal["pre", "post"]


class Transformer(nn.Module):
    """`norm="post"` is the paper's LayerNorm(x + f(x)); `"pre"` is x + f(LayerNorm(x)), which needs no warm-up."""

    def __init__(self, vocabulary: int, size: TransformerSize, *, norm: Norm, dropout: float, pad: int) -> None:
        super().__init__()
        self.size = size
        self.pad = pad
        self.embedding = nn.Embedding(vocabulary, size.width)
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.ModuleList(Layer(size, norm, dropout, cross=False) for _ in range(size.layers))
        self.decoder = nn.ModuleList(Layer(size, norm, dropout, cross=True) for _ in range(size.layers))
        pre = norm == "pre"
        self.encoder_norm: nn.Module = nn.LayerNorm(size.width) if pre else nn.Identity()
        self.decoder_norm: nn.Module = nn.LayerNorm(size.width) if pre else nn.Identity()
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        # Embeddings are scaled by sqrt(width) (section 3.4), so that inputs have variance 1 and scores start small.
        nn.init.normal_(self.embedding.weight, std=size.width**-0.5)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the scores of each next token, given the source and the target so far."""
        memory, mask = self.encode(source)
        x = self.embed(target)
        for layer in self.decoder:
            x = layer(x, memory=memory, memory_mask=mask, causal=True)
        return F.linear(self.decoder_norm(x), self.embedding.weight)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        mask = (source != self.pad)[:, None, None, :]
        x = self.embed(source)
        for layer in self.encoder:
            x = layer(x, mask=mask)
        return self.encoder_norm(x), mask

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        x = self.embedding(tokens) * math.sqrt(self.size.width)
        return self.dropout(x + sinusoids(start, tokens.shape[1], self.size.width, x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Self-attention, attention to the source (decoder only), feed-forward; each around a shortcut."""

    def __init__(self, size: TransformerSize, norm: Norm, dropout: float, *, cross: bool) -> None:
        super().__init__()
        self.pre = norm == "pre"
        self.attention = Attention(size.width, size.heads, dropout)
        self.cross = Attention(size.width, size.heads, dropout) if cross else None
        self.feed = nn.Sequential(
            nn.Linear(size.width, size.hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(size.hidden, size.width)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(3 if cross else 2))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        caches: tuple[Cache, Cache] | None = None,
    ) -> Tensor:
        own, other = caches or (None, None)
        x = self._around(0, x, lambda y: self.attention(y, mask=mask, causal=causal, cache=own))
        if self.cross is not None:
            cross = self.cross
            x = self._around(1, x, lambda y: cross(y, memory, mask=memory_mask, cache=other))
        return self._around(len(self.norms) - 1, x, self.feed)

    def _around(self, number: int, x: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
        norm = self.norms[number]
        if self.pre:
            return x + self.dropout(block(norm(x)))  # type: ignore[no-any-return]
        return norm(x + self.dropout(block(x)))  # type: ignore[no-any-return]


class Decoding:
    """Scores of the next token for many sentences at once, one token at a time, remembering what was computed."""

    def __init__(self, model: Transformer, source: Tensor, *, copies: int = 1) -> None:
        """Each sentence has `copies` rows, one a hypothesis."""
        memory, mask = model.encode(source)
        self._model = model
        self._memory = memory.repeat_interleave(copies, dim=0)
        self._mask = mask.repeat_interleave(copies, dim=0)
        self._caches = [(Cache(), Cache()) for _ in model.decoder]
        self._position = 0

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token a row, get log-probabilities (rows × vocabulary) of the token after it."""
        model = self._model
        x = model.embed(tokens[:, None].to(self._memory.device), start=self._position)
        for layer, caches in zip(model.decoder, self._caches, strict=True):
            x = layer(x, memory=self._memory, memory_mask=self._mask, caches=caches)
        self._position += 1
        scores = F.linear(model.decoder_norm(x[:, 0]), model.embedding.weight)
        return torch.log_softmax(scores.float(), dim=-1).cpu()

    def keep(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be dropped or repeated."""
        rows = rows.to(self._memory.device)
        self._memory, self._mask = self._memory[rows], self._mask[rows]
        for caches in self._caches:
            for cache in caches:
                cache.keep(rows)
