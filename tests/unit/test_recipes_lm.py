"""The language-model task: text in and out, windows, GPT-2's own size, bad files, training that learns."""

import gzip
import math

import pytest
import torch

from gossamer import InputError
from gossamer.recipes.models.gpt import GPT, SIZES
from gossamer.recipes.task import make_task


def test_gpt2_small_has_its_published_size():
    with torch.device("meta"):
        model = GPT(50257, 1024, SIZES["small"], dropout=0.0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808


def test_the_model_does_not_look_ahead():
    torch.manual_seed(0)
    model = GPT(20, 8, SIZES["nano"], dropout=0.0)
    tokens = torch.randint(20, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = 0
    assert torch.allclose(model(tokens)[:, :5], model(changed)[:, :5], atol=1e-6)


def test_a_new_model_predicts_uniformly():
    task = make_task("lm", {"evaluate_on": 16})
    scores = task.evaluate(task.model(0))
    assert scores["loss"] == pytest.approx(math.log(256), abs=0.2)
    assert scores["bits_per_byte"] == pytest.approx(8, abs=0.3)
    assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]))


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_decoding_restores_the_text(tmp_path, tokenizer):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps. Füße, 日本語.\n" * 60)
    task = make_task("lm", {"data": tmp_path, "tokenizer": tokenizer, "context": 16})
    text = "A new line\n\twith  spaces, ß and 日本\n"
    assert task.decode(task.encode(text)) == text


def test_windows_predict_every_token_once(tmp_path):
    text = "".join(chr(33 + n % 90) for n in range(1001))
    (tmp_path / "text.txt").write_text(text)
    task = make_task("lm", {"data": tmp_path / "text.txt", "context": 10, "batch": 1})
    stream = task.batches(0, 1, seed=0)
    windows = [next(stream).tokens[0].tolist() for _ in range(90)]
    training = task.encode(text[:901])
    expected = [training[at : at + 11] for at in range(0, 900, 10)]
    assert len(expected) == 90
    assert sorted(windows) == sorted(expected)
    assert task.size(next(stream)) == 10


def test_all_workers_get_one_shape_and_a_resumed_stream_continues():
    task = make_task("lm")
    streams = [task.batches(worker, 4, seed=2) for worker in range(4)]
    batches = [next(stream).tokens for stream in streams]
    assert {batch.shape for batch in batches} == {(8, 65)}
    assert not torch.equal(batches[0], batches[1])
    resumed = task.batches(2, 4, seed=2)
    resumed.load_state_dict(streams[2].state_dict())
    assert torch.equal(next(resumed).tokens, next(streams[2]).tokens)


def test_dirichlet_gives_workers_different_parts_of_the_text(tmp_path):
    (tmp_path / "text.txt").write_text("".join(chr(97 + n // 200) * 10 for n in range(4000)))
    task = make_task("lm", {"data": tmp_path, "context": 20, "batch": 100, "partition": "dirichlet:0.05"})
    letters = [set(next(task.batches(worker, 8, seed=0)).tokens.unique().tolist()) for worker in range(8)]
    even = make_task("lm", {"data": tmp_path, "context": 20, "batch": 100})
    mixed = set(next(even.batches(0, 8, seed=0)).tokens.unique().tolist())
    assert max(len(found) for found in letters) < len(mixed)


def test_training_learns_python_source():
    task = make_task("lm", {"evaluate_on": 32})
    model, stream = task.model(0), task.batches(0, 1, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    before = task.evaluate(model)
    for _ in range(40):
        loss = task.loss(model, next(stream))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = task.evaluate(model)
    assert after["loss"] < 0.75 * before["loss"]
    assert model.training


def test_directories_are_read_in_order_without_hidden_files(tmp_path):
    (tmp_path / "b.txt").write_text("second " * 50)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.md.gz").write_bytes(gzip.compress(b"first " * 50))
    (tmp_path / ".hidden").write_bytes(b"\xff\xff")
    one = make_task("lm", {"data": tmp_path, "context": 8})
    (tmp_path / "whole.txt").write_text("first " * 50 + "\n" + "second " * 50)
    other = make_task("lm", {"data": tmp_path / "whole.txt", "context": 8})
    assert one.describe()["data_digest"] == other.describe()["data_digest"]


def test_bad_text_is_refused_in_one_sentence(tmp_path):
    def refused(match, **options):
        with pytest.raises(InputError, match=match) as caught:
            make_task("lm", {"data": tmp_path, **options})
        assert "\n" not in str(caught.value)

    refused("holds no files")
    (tmp_path / "empty.txt").write_text(" \n")
    refused("holds no text: its 1 file")
    (tmp_path / "short.txt").write_text("short")
    refused("is too short: a tenth of it must hold more than context = 64 tokens")
    (tmp_path / "short.txt").write_text("one two three four five. " * 200)
    refused("vocabulary = 5000 is larger than the corpus allows", tokenizer="bpe", vocabulary=5000)
    refused("vocabulary = 300 is for tokenizer = 'bpe'", vocabulary=300)
    (tmp_path / "binary").write_bytes(b"\x80\x81")
    refused("is not UTF-8 text")


def test_more_workers_than_windows_are_refused(tmp_path):
    (tmp_path / "text.txt").write_text("one two three four five. " * 100)
    task = make_task("lm", {"data": tmp_path})
    with pytest.raises(InputError, match="35 windows of 64 tokens do not give each of 5 workers a batch of 8"):
        task.batches(0, 5, seed=0)
