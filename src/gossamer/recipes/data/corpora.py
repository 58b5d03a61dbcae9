"""Sentences for the translation task: parallel files, or number words generated on demand."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gossamer import InputError
from gossamer.recipes.data import files, number_words
from gossamer.recipes.data.shards import Indices, alpha_of, check_workers, dirichlet_shards
from gossamer.recipes.data.text import Subwords
from gossamer.recipes.data.token_batches import Encoded, Pairs, TokenBatches, length, pad

_VOCABULARY = 4000
_NUMBER_VOCABULARY = 320
_LENGTH_CLASSES = 10

Pair = tuple[str, str]


@dataclass(frozen=True)
class ParallelText:
    """Parallel text: line i of the source file translates to line i of the target file."""

    name: str
    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]
    test_name: str


def load_parallel(directory: Path, source: str, target: str, *, test: str | None = None) -> ParallelText:
    """Load `train`, `val` and `test*` with suffixes `.SRC` and `.TGT`, plain or `.gz`; without a test set use `val`."""
    if not directory.is_dir():
        raise InputError(
            f"{directory} is not a directory: name the directory that holds train.{source} and train.{target}"
        )
    if source == target:
        raise InputError(f"src and tgt are both {source!r}: name two languages")
    names = {path.name.removesuffix(".gz") for path in directory.iterdir()}
    tests = sorted(name.removesuffix(f".{source}") for name in names if _is_test(name, source))
    if test is not None and test not in tests:
        known = f"it has {', '.join(tests)}" if tests else f"it has no test*.{source}"
        raise InputError(f"{directory} has no test set {test!r}: {known}")
    chosen = test or (tests[0] if tests else "val")
    train = [pair for pair in read_parallel(directory, "train", source, target) if all(pair)]
    if not train:
        raise InputError(f"{directory} has no training sentences: train.{source} or train.{target} is empty")
    return ParallelText(
        directory.name,
        train,
        _some(directory, "val", source, target),
        _some(directory, chosen, source, target),
        chosen,
    )


def read_parallel(directory: Path, part: str, source: str, target: str) -> list[Pair]:
    """Read the sentence pairs of a part such as `train`."""
    sides = []
    for language in (source, target):
        path = files.find(directory, f"{part}.{language}")
        if path is None:
            raise InputError(f"{directory} has neither {part}.{language} nor {part}.{language}.gz")
        # Not splitlines(), which also splits at characters that occur inside sentences and would misalign the sides.
        text = files.read_text(path).removesuffix("\n")
        lines = text.split("\n") if text else []
        sides.append([line.strip() for line in lines])
    if len(sides[0]) != len(sides[1]):
        raise InputError(
            f"{part}.{source} has {len(sides[0])} lines but {part}.{target} has {len(sides[1])}: "
            "parallel files need one line per sentence on both sides"
        )
    return list(zip(*sides, strict=True))


def _some(directory: Path, part: str, source: str, target: str) -> list[Pair]:
    pairs = read_parallel(directory, part, source, target)
    if not any(all(pair) for pair in pairs):
        raise InputError(f"{directory} has no sentences in {part}.{source} and {part}.{target}")
    return pairs


def _is_test(name: str, language: str) -> bool:
    return name.startswith("test") and name.endswith(f".{language}")


class FileCorpus:
    """Parallel files. Batches contain every training sentence once per epoch."""

    def __init__(
        self,
        directory: Path,
        *,
        source: str,
        target: str,
        test: str | None,
        vocabulary: int | None,
        max_length: int,
    ) -> None:
        text = load_parallel(directory, source, target, test=test)
        self.subwords = Subwords(
            (side for pair in text.train for side in pair), vocabulary or _VOCABULARY, exact=vocabulary is not None
        )
        pairs = encode(self.subwords, text.train)
        self._train = [pair for pair in pairs if length(pair) <= max_length]
        if not self._train:
            raise InputError(f"no sentence of {directory} has at most {max_length} tokens: raise max_length and batch")
        self._lengths = np.array([length(pair) for pair in self._train])
        self.bleu_tokenizer = "13a"
        self.validation = text.validation
        self.test = text.test
        self.facts: dict[str, Any] = {
            "data": text.name,
            "languages": [source, target],
            "training_sentences": len(self._train),
            "too_long": len(pairs) - len(self._train),
            "test": text.test_name,
        }
        self._plan = lru_cache(maxsize=2)(self._make_plan)
        self._shards = lru_cache(maxsize=2)(self._draw_shards)

    def batches(
        self, worker: int, workers: int, *, seed: int, budget: int, partition: str, same_shape: bool
    ) -> Callable[[int], Pairs]:
        check_workers(len(self._train), 1, worker=worker, workers=workers, what="sentences")
        alpha = alpha_of(partition)
        if alpha is not None:
            if same_shape:
                raise InputError(f"same_shape needs partition 'iid', not with {partition!r}: drop one of them")
            shard = self._shards(workers, alpha, seed)[worker]
            own = TokenBatches(self._lengths[shard], budget, seed=seed)
            return lambda i: pad([self._train[at] for at in shard[own.pick(i)]])
        plan = self._plan(budget, seed, workers if same_shape else 1)
        if len(plan) < workers:
            raise InputError(
                f"{len(self._train)} sentences do not give each of {workers} workers a batch of {budget} tokens: "
                "use fewer workers, a smaller batch or more data"
            )

        def batch(i: int) -> Pairs:
            number = i * workers + worker
            rows, columns = plan.shape(number) if same_shape else (0, 0)
            return pad([self._train[at] for at in plan.pick(number)], rows=rows, columns=columns)

        return batch

    def _make_plan(self, budget: int, seed: int, alike: int) -> TokenBatches:
        return TokenBatches(self._lengths, budget, seed=seed, alike=alike)

    def _draw_shards(self, workers: int, alpha: float, seed: int) -> list[Indices]:
        """Divide the sentences by length, which differs between sources of text; sentences have no labels."""
        edges = np.quantile(self._lengths, np.linspace(0, 1, _LENGTH_CLASSES + 1)[1:-1])
        return dirichlet_shards(np.digitize(self._lengths, edges), workers, alpha=alpha, seed=seed)


class NumberCorpus:
    """English and German number words up to 999,999, drawn anew for every batch."""

    def __init__(self, *, vocabulary: int | None) -> None:
        sample = list(islice(number_words.draw(np.random.default_rng(0)), 4000))
        text = [_words(number) for number in sample]
        self.subwords = Subwords((side for pair in text for side in pair), vocabulary or _NUMBER_VOCABULARY)
        self._longest = max(length(pair) for pair in encode(self.subwords, text))
        # A German number is one word: BLEU over words would be zero or one hundred.
        self.bleu_tokenizer = "char"
        # Drawn without repeats; validation and test do not overlap, and training sees neither.
        unseen = list(dict.fromkeys(islice(number_words.draw(np.random.default_rng(1), test=True), 1400)))[:1024]
        self.validation = [_words(number) for number in unseen[:512]]
        self.test = [_words(number) for number in unseen[512:]]
        self.facts: dict[str, Any] = {"data": "number words", "languages": ["en", "de"], "test": "held-out numbers"}

    def batches(
        self, worker: int, workers: int, *, seed: int, budget: int, partition: str, same_shape: bool
    ) -> Callable[[int], Pairs]:
        rows = budget // self._longest
        check_workers(workers, 1, worker=worker, workers=workers)
        if rows < 1:
            raise InputError(
                f"batch = {budget} tokens is less than the longest number word: use at least {self._longest}"
            )
        alpha = alpha_of(partition)
        digits = None
        if alpha is not None:  # workers differ in how long their numbers are
            digits = np.random.default_rng((seed, 1)).dirichlet(np.full(number_words.LENGTHS, alpha), size=workers)[
                worker
            ]

        def batch(i: int) -> Pairs:
            drawn = number_words.draw(np.random.default_rng((seed, worker, i)), digits=digits)
            pairs: list[Encoded] = []
            while len(pairs) < rows:
                found = encode(self.subwords, [_words(number) for number in islice(drawn, rows - len(pairs))])
                pairs += [pair for pair in found if length(pair) <= self._longest]
            return pad(pairs, columns=self._longest if same_shape else 0)

        return batch


def encode(subwords: Subwords, pairs: list[Pair]) -> list[Encoded]:
    sides = (subwords.encode([pair[side] for pair in pairs]) for side in (0, 1))
    return list(zip(*sides, strict=True))


def _words(number: int) -> Pair:
    return number_words.english(number), number_words.german(number)
