"""Byte-pair encoding over bytes: any text can be written, and decoding gives it back exactly."""

import hashlib
import os
from collections.abc import Iterable, Sequence

from gossamer import InputError
from gossamer.recipes.data.needs import need

PAD, BOS, EOS = 0, 1, 2
_SPECIAL = ["<pad>", "<bos>", "<eos>"]
SMALLEST = len(_SPECIAL) + 256


class Subwords:
    """A vocabulary learned from text. The same text gives the same vocabulary in every process."""

    def __init__(self, text: Iterable[str], size: int, *, exact: bool = True) -> None:
        """Learn `size` subwords; a corpus that yields fewer is an error if `exact`."""
        if size < SMALLEST:
            raise InputError(f"vocabulary = {size} is too small: bytes and marks alone are {SMALLEST}")
        # Its thread pool complains after a fork and gains nothing when every core has a worker.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        tokenizers = need("tokenizers", "tokenizers")
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        self._tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size, special_tokens=_SPECIAL, initial_alphabet=sorted(alphabet), show_progress=False
        )
        self._tokenizer.train_from_iterator(text, trainer)
        # A text that spells out a mark ("<eos>") must not end there.
        self._tokenizer.encode_special_tokens = True
        self.size: int = self._tokenizer.get_vocab_size()
        if exact and self.size < size:
            raise InputError(
                f"vocabulary = {size} is larger than the corpus allows, which yields {self.size} subwords: "
                f"use at most {self.size}"
            )

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(lines))]

    def decode(self, tokens: Iterable[Sequence[int]]) -> list[str]:
        return list(self._tokenizer.decode_batch([list(line) for line in tokens], skip_special_tokens=True))

    def digest(self) -> str:
        """Workers with the same digest speak the same language."""
        return hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()[:16]
