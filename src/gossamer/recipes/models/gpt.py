"""A language model in the style of GPT-2 (Radford et al. 2019): pre-norm, learned positions, tied embedding."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.recipes.models.attention import Attention


@dataclass(frozen=True)
class GptSize:
    layers: int
    heads: int
    width: int


SIZES = {
    "nano": GptSize(layers=2, heads=4, width=64),
    "micro": GptSize(layers=4, heads=4, width=128),
    "mini": GptSize(layers=6, heads=6, width=384),
    "small": GptSize(layers=12, heads=12, width=768),
}


class GPT(nn.Module):
    def __init__(self, vocabulary: int, context: int, size: GptSize, *, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size.width)
        self.positions = nn.Embedding(context, size.width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(size, dropout) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        for name, parameter in self.named_parameters():
            # Each layer adds two blocks to the residual stream; GPT-2 scales them to keep its variance.
            if name.endswith(("attention.out.weight", "feed.2.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * size.layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the next token at every position."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


class Block(nn.Module):
    def __init__(self, size: GptSize, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = Attention(size.width, size.heads, dropout)
        self.feed_norm = nn.LayerNorm(size.width)
        self.feed = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(approximate="tanh"), nn.Linear(4 * size.width, size.width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), causal=True))
        return x + self.dropout(self.feed(self.feed_norm(x)))  # type: ignore[no-any-return]
