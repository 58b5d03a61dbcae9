"""Translation: the transformer on number words or on parallel files, judged by BLEU."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from gossamer import InputError
from gossamer.recipes.data.corpora import FileCorpus, NumberCorpus, Pair, encode
from gossamer.recipes.data.files import need
from gossamer.recipes.data.shards import alpha_of
from gossamer.recipes.data.text import BOS, EOS, PAD
from gossamer.recipes.data.token_batches import Pairs, length, pad
from gossamer.recipes.models.beam import beam_search
from gossamer.recipes.models.transformer import SIZES, Decoding, Transformer
from gossamer.recipes.options import TranslateOptions
from gossamer.recipes.task import Batches, evaluating, seeded

_TOGETHER = 64


class Translate:
    name = "translate"
    unit = "tokens"
    metric = "bleu"
    higher_is_better = True

    def __init__(self, options: TranslateOptions) -> None:
        self.options = options
        alpha_of(options.partition)
        self._corpus: FileCorpus | NumberCorpus
        if options.data is not None:
            self._corpus = FileCorpus(
                options.data,
                source=options.src,
                target=options.tgt,
                test=options.test,
                vocabulary=options.vocabulary,
                max_length=min(options.max_length, options.batch),
            )
        elif (options.src, options.tgt) != ("en", "de"):
            raise InputError(f"number words go from en to de, not from {options.src} to {options.tgt}: pass data")
        else:
            self._corpus = NumberCorpus(vocabulary=options.vocabulary)
        self._subwords = self._corpus.subwords

    def model(self, seed: int) -> nn.Module:
        options = self.options
        with seeded(seed):
            return Transformer(
                self._subwords.size, SIZES[options.model], norm=options.norm, dropout=options.dropout, pad=PAD
            )

    def batches(self, worker: int, workers: int, *, seed: int) -> Batches:
        options = self.options
        return Batches(
            self._corpus.batches(
                worker,
                workers,
                seed=seed,
                budget=options.batch,
                partition=options.partition,
                same_shape=options.same_shape,
            )
        )

    def loss(self, model: nn.Module, batch: Pairs) -> Tensor:
        """Return the cross entropy per target token, EOS included."""
        scores = model(batch.source, batch.target[:, :-1])
        return F.cross_entropy(
            scores.flatten(0, 1),
            batch.target[:, 1:].flatten(),
            ignore_index=PAD,
            label_smoothing=self.options.label_smoothing,
        )

    def size(self, batch: Pairs) -> int:
        return int((batch.target[:, 1:] != PAD).sum())

    def evaluate(self, model: nn.Module, *, final: bool = False) -> dict[str, float]:
        """Return the validation loss and the scores of greedy translations of validation sentences.

        If final, the test set is translated by beam search instead.
        """
        options = self.options
        count = None if final else options.evaluate_on
        with evaluating(model) as bare:
            loss = self._loss(bare, self._corpus.validation[:count])
            pairs = self._corpus.test if final else self._corpus.validation[:count]
            found = self.translate(bare, [source for source, _ in pairs], beams=options.beams if final else 1)
        return {"loss": loss, **_scores(found, [target for _, target in pairs], self._corpus.bleu_tokenizer)}

    def translate(self, model: nn.Module, sentences: list[str], *, beams: int) -> list[str]:
        """Translate sentences, those of similar length together."""
        assert isinstance(model, Transformer)
        device = model.embedding.weight.device
        encoded = [tokens[: self.options.max_length - 1] for tokens in self._subwords.encode(sentences)]
        order = sorted(range(len(encoded)), key=lambda at: len(encoded[at]))
        found: list[list[int]] = [[] for _ in encoded]
        for first in range(0, len(order), _TOGETHER):
            places = order[first : first + _TOGETHER]
            source = pad([(encoded[at], []) for at in places]).source.to(device)
            outputs = beam_search(
                Decoding(model, source, copies=beams),
                len(places),
                start=BOS,
                end=EOS,
                beams=beams,
                longest=min(self.options.max_length, 2 * source.shape[1] + 10),
                length_penalty=self.options.length_penalty,
            )
            for at, tokens in zip(places, outputs, strict=True):
                found[at] = tokens
        return self._subwords.decode(found)

    def describe(self) -> dict[str, Any]:
        return {
            **self._corpus.facts,
            "validation_sentences": len(self._corpus.validation),
            "test_sentences": len(self._corpus.test),
            "bleu_tokenizer": self._corpus.bleu_tokenizer,
            "vocabulary": self._subwords.size,
            "vocabulary_digest": self._subwords.digest(),
            "model": self.options.model,
            "parameters": sum(parameter.numel() for parameter in self.model(0).parameters()),
        }

    def _loss(self, model: nn.Module, pairs: list[Pair]) -> float:
        cut = self.options.max_length - 1
        encoded = [(source[:cut], target[:cut]) for source, target in encode(self._subwords, pairs)]
        encoded.sort(key=length)
        device = next(model.parameters()).device
        total = tokens = 0.0
        for first in range(0, len(encoded), _TOGETHER):
            batch = Pairs(*(side.to(device) for side in pad(encoded[first : first + _TOGETHER])))
            scores = model(batch.source, batch.target[:, :-1]).float()
            wanted = batch.target[:, 1:]
            total += F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=PAD, reduction="sum").item()
            tokens += self.size(batch)
        return total / tokens


def make(options: TranslateOptions) -> Translate:
    return Translate(options)


def _scores(found: list[str], wanted: list[str], tokenizer: str) -> dict[str, float]:
    sacrebleu = need("sacrebleu", "sacrebleu")
    return {
        "bleu": sacrebleu.corpus_bleu(found, [wanted], tokenize=tokenizer).score,
        "chrf": sacrebleu.corpus_chrf(found, [wanted]).score,
        "exact": sum(one == other for one, other in zip(found, wanted, strict=True)) / len(wanted),
    }
