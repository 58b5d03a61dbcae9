"""Language modeling: a GPT-2-style model on running text, judged by its validation loss."""

import hashlib
import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer import InputError
from gossamer.recipes.data.shards import Indices, alpha_of, dirichlet_shards, picker
from gossamer.recipes.data.text import Subwords, load_text
from gossamer.recipes.models.gpt import GPT, SIZES
from gossamer.recipes.options import LmOptions
from gossamer.recipes.task import Batches, evaluating, seeded

_VALIDATION_SHARE = 0.1
_SUBWORDS = 2000
_SOURCES = 20


class Batch(NamedTuple):
    tokens: Tensor
    """batch × (context + 1): each token except the last predicts the next token."""


class LanguageModel:
    name = "lm"
    unit = "tokens"
    metric = "loss"
    higher_is_better = False

    def __init__(self, options: LmOptions) -> None:
        self.options = options
        self._alpha = alpha_of(options.partition)
        if options.tokenizer == "byte" and options.vocabulary is not None:
            raise InputError(f"vocabulary = {options.vocabulary} is for tokenizer = 'bpe': bytes always have 256")
        self._name, documents = load_text(options.data)
        text = "\n".join(documents)
        cut = round(len(text) * (1 - _VALIDATION_SHARE))
        self._digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._subwords = None
        if options.tokenizer == "bpe":
            lines = text[:cut].splitlines(keepends=True)
            self._subwords = Subwords(lines, options.vocabulary or _SUBWORDS, exact=options.vocabulary is not None)
        self._train = self._windows(text[:cut])
        self._validation = self._windows(text[cut:])
        self._bytes_per_token = len(text[cut:].encode()) / len(self._encode(text[cut:]))
        self._shards = lru_cache(maxsize=4)(self._draw_shards)

    @property
    def vocabulary(self) -> int:
        return 256 if self._subwords is None else self._subwords.size

    def model(self, seed: int) -> nn.Module:
        options = self.options
        with seeded(seed):
            return GPT(self.vocabulary, options.context, SIZES[options.model], dropout=options.dropout)

    def batches(self, worker: int, workers: int, *, seed: int) -> Batches:
        pick = picker(
            len(self._train),
            self.options.batch,
            worker=worker,
            workers=workers,
            seed=seed,
            shards=None if self._alpha is None else self._shards,
            what=f"windows of {self.options.context} tokens",
        )
        return Batches(lambda i: self._batch(self._train[pick(i)]))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        scores = model(batch.tokens[:, :-1])
        return F.cross_entropy(
            scores.flatten(0, 1), batch.tokens[:, 1:].flatten(), label_smoothing=self.options.label_smoothing
        )

    def size(self, batch: Batch) -> int:
        return batch.tokens[:, 1:].numel()

    def evaluate(self, model: nn.Module, *, final: bool = False) -> dict[str, float]:
        windows = self._validation
        count = len(windows) if final else min(len(windows), self.options.evaluate_on)
        chosen = np.linspace(0, len(windows) - 1, count).astype(np.int64)
        total = 0.0
        with evaluating(model) as bare:
            device = next(bare.parameters()).device
            for part in np.array_split(chosen, -(-count // 64)):
                tokens = self._batch(windows[part]).tokens.to(device)
                scores = bare(tokens[:, :-1]).float()
                total += F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").item()
        loss = total / (count * self.options.context)
        # The loss of a model that diverged may overflow exp.
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return {"loss": loss, "perplexity": perplexity, "bits_per_byte": loss / math.log(2) / self._bytes_per_token}

    def describe(self) -> dict[str, Any]:
        return {
            "data": self._name,
            "data_digest": self._digest,
            "training_tokens": len(self._train) * self.options.context,
            "validation_tokens": len(self._validation) * self.options.context,
            "tokenizer": self.options.tokenizer,
            "vocabulary": self.vocabulary,
            "model": self.options.model,
            "parameters": sum(parameter.numel() for parameter in self.model(0).parameters()),
        }

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self._encode(text)]

    def decode(self, tokens: list[int]) -> str:
        if self._subwords is None:
            return bytes(tokens).decode("utf-8", errors="replace")
        return self._subwords.decode([tokens])[0]

    def _encode(self, text: str) -> NDArray[np.integer]:
        if self._subwords is None:
            return np.frombuffer(text.encode(), dtype=np.uint8)
        lines = self._subwords.encode(text.splitlines(keepends=True))
        return np.array([token for line in lines for token in line], dtype=np.int32)

    def _windows(self, text: str) -> NDArray[np.integer]:
        """Cut the text into windows of context + 1 tokens; neighbors share one, so every token is predicted once."""
        context = self.options.context
        tokens = self._encode(text)
        if len(tokens) <= context:
            raise InputError(
                f"{self._name} is too short: a tenth of it must hold more than context = {context} tokens "
                f"(it holds {len(tokens)}); use more text or a smaller context"
            )
        return np.lib.stride_tricks.sliding_window_view(tokens, context + 1)[::context]

    def _draw_shards(self, workers: int, seed: int) -> list[Indices]:
        """Cut the corpus into twentieths, as if they were different sources: text has no labels."""
        assert self._alpha is not None
        sources = np.arange(len(self._train)) * _SOURCES // len(self._train)
        return dirichlet_shards(sources, workers, alpha=self._alpha, seed=seed)

    @staticmethod
    def _batch(windows: NDArray[np.integer]) -> Batch:
        return Batch(torch.from_numpy(windows.astype(np.int64)))


def make(options: LmOptions) -> LanguageModel:
    return LanguageModel(options)
