"""The translation task: number words, subwords, batches, beam search, bad files, training that learns."""

import gzip
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer import InputError
from gossamer.recipes.data import number_words
from gossamer.recipes.data.corpora import load_parallel
from gossamer.recipes.data.text import BOS, EOS, PAD, SMALLEST, Subwords
from gossamer.recipes.data.token_batches import pad
from gossamer.recipes.models.beam import beam_search
from gossamer.recipes.models.transformer import Decoding, Transformer, TransformerSize
from gossamer.recipes.task import make_task

TINY = TransformerSize(layers=2, width=16, heads=2, hidden=32)


def _reference(number):
    num2words = pytest.importorskip("num2words").num2words
    # num2words writes "einstausend" after a hundred (201,000); German says "zweihunderteintausend" (Duden).
    german = num2words(number, lang="de").replace("einstausend", "eintausend")
    return num2words(number, lang="en").replace(",", ""), german


def test_number_words_equal_an_independent_generator():
    sample = np.random.default_rng(0).integers(0, number_words.LIMIT, size=1500)
    edges = [100_000, 100_001, 101_000, 101_101, 201_000, 999_999, 21_021, 1_000, 1_001, 10_001]
    for number in itertools.chain(range(2200), edges, sample.tolist()):
        assert (number_words.english(number), number_words.german(number)) == _reference(number), number


def test_the_independent_generator_needs_that_one_correction_only():
    num2words = pytest.importorskip("num2words").num2words
    differing = [n for n in range(0, 300_000, 1000) if num2words(n, lang="de") != number_words.german(n)]
    assert differing == [101_000, 201_000]


def test_training_never_draws_a_held_out_number():
    train = set(itertools.islice(number_words.draw(np.random.default_rng(0)), 5000))
    test = set(itertools.islice(number_words.draw(np.random.default_rng(0), test=True), 500))
    assert not train & test
    assert min(test) >= 1000
    assert max(train | test) < number_words.LIMIT
    assert {len(str(number)) for number in train} == {1, 2, 3, 4, 5, 6}


@pytest.fixture(scope="module")
def subwords():
    return Subwords([number_words.german(n) + " " + number_words.english(n) for n in range(2000)], 300)


@settings(max_examples=200)
@given(text=st.text())
def test_decoding_restores_any_text(subwords, text):
    assert subwords.decode(subwords.encode([text])) == [text]


@pytest.mark.parametrize("text", ["<eos> and <pad>", "Größe  mit   Leerzeichen ", "日本語\n\tüß", ""])
def test_decoding_restores_special_tokens_and_spaces_in_the_text(subwords, text):
    encoded = subwords.encode([text])
    assert subwords.decode(encoded) == [text]
    assert not {PAD, BOS, EOS} & set(encoded[0])


def test_the_same_text_gives_the_same_vocabulary():
    text = [number_words.german(n) for n in range(3000)]
    digests = {Subwords(text, 320).digest() for _ in range(3)}
    assert len(digests) == 1
    assert digests != {Subwords(text[:50], 300).digest()}


def test_impossible_vocabularies_are_refused():
    with pytest.raises(InputError, match="vocabulary = 5000 is larger than the corpus allows, which yields"):
        Subwords(["one two three"], 5000)
    with pytest.raises(InputError, match=f"100 is too small: bytes and special tokens alone are {SMALLEST}"):
        Subwords(["one two three"], 100)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_decoder_does_not_look_ahead_and_padding_changes_nothing(norm):
    torch.manual_seed(0)
    model = Transformer(30, TINY, norm=norm, dropout=0.0, pad=PAD)
    short = pad([([5, 6, 7], [8, 9])])
    wide = pad([([5, 6, 7], [8, 9]), ([4] * 9, [3] * 9)], rows=4, columns=14)
    alone = model(short.source, short.target)
    beside = model(wide.source, wide.target)
    assert torch.allclose(alone[0], beside[0, : alone.shape[1]], atol=1e-5)
    assert beside.isfinite().all()
    changed = short.target.clone()
    changed[0, -1] = 11
    assert torch.allclose(alone[:, :-1], model(short.source, changed)[:, :-1], atol=1e-6)


def test_source_target_and_output_share_one_embedding():
    size = TransformerSize(layers=1, width=8, heads=2, hidden=16)
    model = Transformer(50, size, norm="post", dropout=0.0, pad=PAD)
    attention, feed, norm = 4 * (8 * 8 + 8), 8 * 16 + 16 + 16 * 8 + 8, 2 * 8
    assert sum(p.numel() for p in model.parameters()) == 50 * 8 + (3 * attention) + 2 * feed + 5 * norm


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_decoding_token_by_token_equals_the_whole_forward(norm):
    torch.manual_seed(1)
    model = Transformer(30, TINY, norm=norm, dropout=0.0, pad=PAD).eval()
    batch = pad([([5, 6, 7], [8, 9, 10, 11]), ([9] * 5, [12, 13, 14, 15])])
    with torch.no_grad():
        whole = torch.log_softmax(model(batch.source, batch.target), dim=-1)
        decoding = Decoding(model, batch.source)
        for place in range(batch.target.shape[1]):
            step = decoding.step(batch.target[:, place])
            assert torch.allclose(step, whole[:, place], atol=1e-5)
            if place == 1:  # rows may be reordered on the way
                decoding.keep(torch.tensor([1, 0]))
                batch, whole = type(batch)(*(side.flip(0) for side in batch)), whole.flip(0)


class Toy:
    """A random language whose next token depends on the last two; each sentence has its own."""

    def __init__(self, sentences, beams, vocabulary, seed):
        random = torch.Generator().manual_seed(seed)
        table = torch.randn(sentences, vocabulary, vocabulary, vocabulary, generator=random) * 2
        self.table = table.log_softmax(-1)
        self.sentence = torch.arange(sentences).repeat_interleave(beams)
        self.last = torch.zeros(sentences * beams, dtype=torch.long)

    def step(self, tokens):
        scores = self.table[self.sentence, self.last, tokens]
        self.last = tokens
        return scores

    def keep(self, rows):
        self.sentence, self.last = self.sentence[rows], self.last[rows]


def _score(table, tokens):
    return sum(table[context].item() for context in zip(tokens, tokens[1:], tokens[2:], strict=False))


def _brute_force(toy, sentence, *, end, longest, length_penalty):
    vocabulary = toy.table.shape[-1]
    words = [token for token in range(vocabulary) if token != end]
    best = (-math.inf, None)
    for length in range(longest):
        for body in itertools.product(words, repeat=length):
            tokens = [0, 1, *body, end]
            best = max(best, (_score(toy.table[sentence], tokens) / ((6 + length) / 6) ** length_penalty, list(body)))
    return best[1]


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_wide_beam_finds_what_brute_force_finds(seed, length_penalty):
    vocabulary, longest, sentences, end = 4, 5, 3, 2
    beams = (vocabulary - 1) ** longest
    toy = Toy(sentences, beams, vocabulary, seed)
    expected = [
        _brute_force(toy, at, end=end, longest=longest, length_penalty=length_penalty) for at in range(sentences)
    ]
    # The toy's first context is (0, start): feed it the start mark 1 after an imagined 0.
    found = beam_search(toy, sentences, start=1, end=end, beams=beams, longest=longest, length_penalty=length_penalty)
    assert found == expected


def test_a_wider_beam_never_scores_worse_on_average():
    def score(beams):
        total = 0.0
        for seed in range(12):
            toy = Toy(1, beams, 6, seed)
            table = toy.table[0]
            (body,) = beam_search(toy, 1, start=1, end=2, beams=beams, longest=6)
            tokens = [0, 1, *body, 2]
            total += _score(table, tokens) / ((6 + len(body)) / 6) ** 0.6
        return total

    assert score(1) < score(3) <= score(40)


class Reluctant:
    """Eight words of three choices each, then the end; ending at once has the better score but is unlikely."""

    def __init__(self, rows):
        self.rows, self.place = rows, 0

    def step(self, tokens):
        self.place += 1
        wanted = [0.0, 0.0, 0.007, 0.331, 0.331, 0.331] if self.place <= 8 else [0.0, 0.0, 0.97, 0.01, 0.01, 0.01]
        return torch.tensor([wanted] * self.rows).log()

    def keep(self, rows):
        self.rows = len(rows)


@pytest.mark.parametrize("beams", [1, 2, 3])
def test_an_unlikely_end_is_not_taken(beams):
    (found,) = beam_search(Reluctant(beams), 1, start=1, end=2, beams=beams, longest=20)
    assert len(found) == 8
    # What the score alone would choose: nothing.
    assert math.log(0.007) > (8 * math.log(0.331) + math.log(0.97)) / ((5 + 9) / 6) ** 0.6


@pytest.mark.parametrize("seed", range(5))
def test_one_beam_is_greedy(seed):
    toy = Toy(1, 1, 6, seed)
    (found,) = beam_search(toy, 1, start=1, end=2, beams=1, longest=8)
    tokens = [0, 1]
    while len(tokens) < 10 and tokens[-1] != 2:
        tokens.append(int(toy.table[0, tokens[-2], tokens[-1]].argmax()))
    assert found == [token for token in tokens[2:] if token != 2]


def test_a_sentence_without_an_end_stops_at_the_limit():
    toy = Toy(2, 3, 4, seed=0)
    toy.table[..., 2] = -math.inf
    found = beam_search(toy, 2, start=1, end=2, beams=3, longest=5)
    assert [len(tokens) for tokens in found] == [5, 5]


def test_training_learns_number_words():
    task = make_task("translate", {"batch": 256, "evaluate_on": 16})
    model, stream = task.model(0), task.batches(0, 1, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    before = task.evaluate(model)
    for _ in range(40):
        batch = next(stream)
        assert task.size(batch) <= 256
        loss = task.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = task.evaluate(model)
    assert after["loss"] < 0.5 * before["loss"]
    assert after["chrf"] > before["chrf"]
    assert set(after) == {"loss", "bleu", "chrf", "exact"}
    assert model.training


def test_a_perfect_translation_scores_one_hundred(monkeypatch):
    task = make_task("translate", {"evaluate_on": 20})
    answers = dict(task._corpus.validation)
    monkeypatch.setattr(task, "translate", lambda model, sentences, beams: [answers[s] for s in sentences])
    scores = task.evaluate(task.model(0))
    assert scores["bleu"] == pytest.approx(100)
    assert scores["chrf"] == pytest.approx(100)
    assert scores["exact"] == 1


def test_label_smoothing_ignores_padding():
    task = make_task("translate", {"label_smoothing": 0.1})
    model = task.model(0)
    batch = next(task.batches(0, 1, seed=0))
    wider = type(batch)(*(torch.nn.functional.pad(side, (0, 3), value=PAD) for side in batch))
    assert task.loss(model, batch).item() == pytest.approx(task.loss(model, wider).item(), rel=1e-5)
    assert task.size(batch) == task.size(wider)


def test_number_batches_resume_differ_between_workers_and_take_one_shape():
    task = make_task("translate", {"batch": 200, "same_shape": True})
    streams = [task.batches(worker, 3, seed=1) for worker in range(3)]
    batches = [next(stream) for stream in streams]
    assert len({(b.source.shape, b.target.shape) for b in batches}) == 1
    assert batches[0].source.numel() <= 200
    assert not torch.equal(batches[0].target, batches[1].target)
    resumed = task.batches(0, 3, seed=1)
    resumed.load_state_dict(streams[0].state_dict())
    assert torch.equal(next(resumed).target, next(streams[0]).target)


def test_number_words_can_be_skewed_by_length():
    task = make_task("translate", {"partition": "dirichlet:0.05", "batch": 600})
    lengths = [task.size(next(task.batches(worker, 6, seed=0))) for worker in range(6)]
    assert max(lengths) > 2 * min(lengths)


def _write(root, *, lines=60, zipped=False, **overrides):
    for part in ("train", "val", "test_a", "test_b"):
        for language, words in (("en", number_words.english), ("de", number_words.german)):
            name = f"{part}.{language}"
            text = overrides.get(name.replace(".", "_"), "".join(f"{words(37 * n)}\n" for n in range(lines)))
            raw = text.encode()
            (root / f"{name}{'.gz' if zipped else ''}").write_bytes(gzip.compress(raw) if zipped else raw)


@pytest.mark.parametrize("zipped", [False, True])
def test_parallel_files(tmp_path, zipped):
    _write(tmp_path, zipped=zipped)
    text = load_parallel(tmp_path, "en", "de")
    assert text.train[1] == ("thirty-seven", "siebenunddreißig")
    assert text.test_name == "test_a"
    assert load_parallel(tmp_path, "de", "en", test="test_b").train[1] == ("siebenunddreißig", "thirty-seven")


@pytest.mark.parametrize("same_shape", [False, True])
def test_file_batches_see_every_sentence_once_and_respect_the_budget(tmp_path, same_shape):
    _write(tmp_path, lines=200)
    options = {"data": tmp_path, "batch": 60, "same_shape": same_shape, "vocabulary": 280}
    task = make_task("translate", options)
    workers = 2
    plan = task._corpus._plan(60, 0, workers if same_shape else 1)
    streams = [task.batches(worker, workers, seed=0) for worker in range(workers)]
    seen = []
    for _ in range(len(plan) // workers):
        batches = [next(stream) for stream in streams]
        if same_shape:
            assert len({(b.source.shape, b.target.shape) for b in batches}) == 1
        else:
            assert all(b.source.numel() <= 60 and b.target[:, 1:].numel() <= 60 for b in batches)
        seen += [tuple(row[row != PAD].tolist()) for b in batches for row in b.source]
    real = [row for row in seen if row != (EOS,)]
    assert len(real) == len(set(real))
    if not same_shape and len(plan) % workers == 0:
        assert len(real) == 200
    assert len(real) >= 0.9 * 200


def test_file_batches_by_length_stay_in_their_shard(tmp_path):
    _write(tmp_path, lines=200)
    task = make_task("translate", {"data": tmp_path, "batch": 80, "partition": "dirichlet:0.1"})
    seen = []
    for worker in range(4):
        stream = task.batches(worker, 4, seed=0)
        rows = {tuple(row[row != PAD].tolist()) for _ in range(60) for row in next(stream).source}
        assert len(rows) == 50
        seen.append(rows)
    assert len(set.union(*seen)) == 200
    with pytest.raises(InputError, match="same_shape needs partition 'iid'"):
        make_task("translate", {**task.options.model_dump(), "same_shape": True}).batches(0, 4, seed=0)


def test_final_evaluation_uses_the_test_set_and_the_beam(tmp_path):
    _write(tmp_path, test_a_en="one\ntwo\n\n", test_a_de="eins\nzwei\n\n")
    task = make_task("translate", {"data": tmp_path, "beams": 2, "evaluate_on": 3})
    scores = task.evaluate(task.model(0), final=True)
    assert 0 <= scores["exact"] <= 1
    assert task.describe()["test_sentences"] == 3
    assert task.describe()["test"] == "test_a"


def test_bad_files_are_refused_in_one_sentence(tmp_path):
    def refused(match, **options):
        with pytest.raises(InputError, match=match) as caught:
            make_task("translate", {"data": tmp_path, **options})
        assert "\n" not in str(caught.value)

    refused("has neither train.en nor train.en.gz")
    _write(tmp_path, train_de="eins\n")
    refused("train.en has 60 lines but train.de has 1: parallel files need one line per sentence")
    _write(tmp_path, train_en="", train_de="")
    refused("has no training sentences")
    _write(tmp_path, val_en="\n", val_de="\n")
    refused("has no sentences in val.en and val.de")
    _write(tmp_path)
    refused("has no test set 'test_c': it has test_a, test_b", test="test_c")
    refused("src and tgt are both 'de'", src="de")
    refused("has neither train.fr nor", src="fr")
    refused("vocabulary = 9000 is larger than the corpus allows", vocabulary=9000)
    _write(tmp_path, train_en="one two three\n" * 60)
    refused("no sentence of .* has at most 2 tokens: raise max_length and batch", max_length=2)
    (tmp_path / "train.en").write_bytes(b"\xff\xfe" * 60)
    refused("is not UTF-8 text")


def test_more_workers_than_sentences_are_refused(tmp_path):
    _write(tmp_path, lines=8)
    task = make_task("translate", {"data": tmp_path, "batch": 100})
    with pytest.raises(InputError, match="8 sentences do not give each of 9 workers a batch of 1"):
        task.batches(0, 9, seed=0)
    with pytest.raises(InputError, match="8 sentences do not give each of 8 workers a batch of 100 tokens"):
        task.batches(0, 8, seed=0)


def test_number_words_have_their_languages_and_their_smallest_batch():
    with pytest.raises(InputError, match="number words go from en to de, not from en to fr: pass data"):
        make_task("translate", {"tgt": "fr"})
    with pytest.raises(InputError, match="batch = 5 tokens is less than the longest number word: use at least"):
        make_task("translate", {"batch": 5}).batches(0, 1, seed=0)
