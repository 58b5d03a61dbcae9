"""Batches, shards and the task registry: which worker sees which sample when."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer import InputError
from gossamer.recipes.data.shards import Order, alpha_of, dirichlet_shards, picker
from gossamer.recipes.data.token_batches import TokenBatches
from gossamer.recipes.options import TASKS, options_type
from gossamer.recipes.task import Batches, evaluating, make_task, seeded


def test_batches_continue_from_their_state():
    stream = Batches(lambda i: i * i)
    assert [next(stream) for _ in range(3)] == [0, 1, 4]
    resumed = Batches(lambda i: i * i)
    resumed.load_state_dict(stream.state_dict())
    assert next(resumed) == next(stream) == 9


@given(st.integers(1, 30), st.integers(0, 100), st.integers(1, 70))
def test_an_order_is_one_permutation_after_another(size, start, count):
    order = Order(size, seed=3)
    taken = order.take(start, count)
    everything = order.take(0, start + count)
    assert taken.tolist() == everything[start:].tolist()
    for epoch in range((start + count) // size):
        assert sorted(everything[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_epochs_and_seeds_differ():
    first, second = Order(50, seed=0), Order(50, seed=1)
    assert first.take(0, 50).tolist() != first.take(50, 50).tolist()
    assert first.take(0, 50).tolist() != second.take(0, 50).tolist()
    assert first.take(0, 50).tolist() == Order(50, seed=0).take(0, 50).tolist()


def test_workers_together_see_every_sample_once_per_epoch():
    picks = [picker(60, 5, worker=worker, workers=4, seed=7) for worker in range(4)]
    for epoch in range(2):
        seen = np.concatenate([pick(i) for i in range(3 * epoch, 3 * epoch + 3) for pick in picks])
        assert sorted(seen) == list(range(60))


def test_workers_of_a_step_never_share_a_sample_inside_an_epoch():
    picks = [picker(100, 8, worker=worker, workers=3, seed=0) for worker in range(3)]
    step = np.concatenate([pick(2) for pick in picks])
    assert len(set(step.tolist())) == 24


@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0, 100.0])
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_dirichlet_shards_are_disjoint_covering_and_equal_in_size(alpha, workers):
    labels = np.random.default_rng(0).integers(0, 10, size=501)
    shards = dirichlet_shards(labels, workers, alpha=alpha, seed=5)
    assert sorted(np.concatenate(shards)) == list(range(501))
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


def test_smaller_alpha_skews_more():
    labels = np.repeat(np.arange(10), 200)

    def largest_share(alpha):
        shards = dirichlet_shards(labels, 8, alpha=alpha, seed=0)
        return np.mean([np.bincount(labels[shard], minlength=10).max() / len(shard) for shard in shards])

    shares = [largest_share(alpha) for alpha in (0.05, 1.0, 1000.0)]
    # An even share is 0.1; no share can pass 0.8, as a class has 200 samples and a shard 250.
    assert shares[0] > 0.4 > shares[1] > shares[2]
    assert shares[2] < 0.15


def test_dirichlet_shards_follow_the_seed():
    labels = np.arange(200) % 10
    one, same, other = (dirichlet_shards(labels, 4, alpha=0.1, seed=seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_sharded_worker_stays_in_its_shard_and_sees_all_of_it():
    labels = np.arange(120) % 10
    shards = dirichlet_shards(labels, 4, alpha=0.1, seed=0)
    pick = picker(120, 6, worker=2, workers=4, seed=0, shards=lambda workers, seed: shards)
    assert sorted(np.concatenate([pick(i) for i in range(5)])) == shards[2].tolist()


@pytest.mark.parametrize(
    "text", ["", "dirichlet", "dirichlet:", "dirichlet:0", "dirichlet:-1", "dirichlet:nan", "random"]
)
def test_unknown_partitions_are_refused(text):
    with pytest.raises(InputError, match="partition"):
        alpha_of(text)


def test_more_workers_than_samples_are_refused():
    with pytest.raises(InputError, match="10 samples do not give each of 11 workers a batch of 1"):
        picker(10, 1, worker=0, workers=11, seed=0)
    with pytest.raises(InputError, match="fewer workers"):
        picker(100, 26, worker=0, workers=4, seed=0)
    with pytest.raises(InputError, match="worker 4 does not exist"):
        picker(100, 1, worker=4, workers=4, seed=0)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=80), st.integers(40, 120), st.integers(0, 3))
def test_token_batches_respect_the_budget_and_see_each_sentence_once(lengths, budget, epoch):
    array = np.array(lengths)
    batches = TokenBatches(array, budget, seed=2)
    numbers = range(epoch * len(batches), (epoch + 1) * len(batches))
    picked = [batches.pick(number) for number in numbers]
    assert sorted(np.concatenate(picked)) == list(range(len(lengths)))
    assert all(len(pick) * array[pick].max() <= budget for pick in picked)


def test_token_batches_are_drawn_anew_every_epoch():
    lengths = np.repeat(np.arange(3, 9), 30)
    batches = TokenBatches(lengths, 48, seed=0)
    first = [batches.pick(at).tolist() for at in range(len(batches))]
    second = [batches.pick(at + len(batches)).tolist() for at in range(len(batches))]
    assert first != second
    assert {tuple(sorted(pick)) for pick in first} != {tuple(sorted(pick)) for pick in second}
    assert first == [TokenBatches(lengths, 48, seed=0).pick(at).tolist() for at in range(len(batches))]


def test_token_batches_alike_fit_one_shape():
    lengths = np.random.default_rng(0).integers(3, 30, size=400)
    batches = TokenBatches(lengths, 120, seed=0, alike=4)
    assert len(batches) % 4 == 0
    for first in range(0, len(batches), 4):
        shapes = {batches.shape(at) for at in range(first, first + 4)}
        assert len(shapes) == 1
        rows, columns = shapes.pop()
        for at in range(first, first + 4):
            pick = batches.pick(at)
            assert len(pick) <= rows
            assert lengths[pick].max() <= columns


def test_a_sentence_beyond_the_budget_is_refused():
    with pytest.raises(InputError, match=r"batch = 8 tokens is less than the longest sentence \(9\)"):
        TokenBatches(np.array([3, 9]), 8, seed=0)


def test_unknown_tasks_and_options_are_refused():
    with pytest.raises(InputError, match="unknown task 'speech': choose one of vision, translate, lm"):
        make_task("speech")
    with pytest.raises(InputError, match=r"task 'lm' has no option 'bach': its options are .*batch"):
        make_task("lm", {"bach": 3})
    with pytest.raises(InputError, match="option 'batch' of task 'vision' is 0: input should be greater"):
        make_task("vision", {"batch": 0})


@pytest.mark.parametrize("name", TASKS)
def test_every_task_refuses_a_wrong_partition_and_a_missing_path(name, tmp_path):
    with pytest.raises(InputError, match="partition 'sorted' is unknown"):
        make_task(name, {"partition": "sorted"})
    with pytest.raises(InputError, match=r"missing (is not a directory|does not exist)"):
        make_task(name, {"data": tmp_path / "missing"})


@pytest.mark.parametrize("name", TASKS)
def test_options_explain_themselves(name):
    fields = options_type(name).model_fields
    assert {"data", "batch", "partition", "label_smoothing", "evaluate_on", "model"} <= set(fields)
    make_task(name, options_type(name)())


def test_evaluating_restores_every_mode_and_takes_no_gradient():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    model[1].eval()
    with evaluating(model) as bare:
        assert bare is model
        assert not any(module.training for module in model.modules())
        assert not model(torch.ones(1, 2)).requires_grad
    assert model.training
    assert model[0].training
    assert not model[1].training


def test_seeded_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with seeded(5):
        first = torch.rand(3)
    with seeded(5):
        assert torch.equal(first, torch.rand(3))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("name", "package"), [("vision", "sklearn.datasets"), ("translate", "tokenizers")])
def test_a_missing_package_is_named_with_its_remedy(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        InputError, match=r"needs the package (scikit-learn|tokenizers): pip install (scikit-learn|tokenizers)$"
    ):
        make_task(name)


def test_the_documented_example_runs(capsys):
    text = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(code, {})
    assert "'accuracy':" in capsys.readouterr().out


@pytest.mark.parametrize("name", TASKS)
def test_every_option_of_a_task_is_documented(name):
    text = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    missing = [option for option in options_type(name).model_fields if not re.search(rf"`{option}\b", text)]
    assert missing == []
