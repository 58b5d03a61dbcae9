"""Hooks on the user's module: they observe, never raise, and do nothing in copies and saved files."""

import copy
import io
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

import gossamer
from gossamer.engine.first_step import watch_first_step
from gossamer.engine.module_hooks import watch_forward, watch_loads
from gossamer.errors import GossamerWarning


class CountingStore:
    """A store that counts its calls, or has gone."""

    def __init__(self, gone=False):
        self.store, self.gone, self.calls = HashStore(), gone, 0

    def __getattr__(self, name):
        def call(*args):
            self.calls += 1
            if self.gone:
                raise RuntimeError("the store is gone")
            return getattr(self.store, name)(*args)

        return call


def watched(store, rank=0, size=2, model=None, replicas=2):
    model = nn.Linear(3, 2) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch_first_step(model, optimizer, store, rank, size, replicas=replicas)
    return model, optimizer


class Anything(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.weight.sum()


@pytest.mark.parametrize("kind", ["sparse", "nested", "meta", "empty", "text"])
def test_unusual_inputs_do_not_break_the_first_forward(kind):
    inputs = {
        "sparse": torch.eye(3).to_sparse(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": torch.empty(3, 3, device="meta"),
        "empty": torch.empty(0),
        "text": "words",
    }
    model, _ = watched(CountingStore(), model=Anything())
    model(inputs[kind])


def test_per_sample_gradients():
    model, _ = watched(CountingStore())
    parameters = dict(model.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, torch.randn(4, 3))
    assert gradients["weight"].shape == (4, 2, 3)


def test_a_store_that_is_gone_is_ignored():
    model, optimizer = watched(CountingStore(gone=True))
    for _ in range(10):
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, torch.optim.swa_utils.AveragedModel])
def test_copies_do_not_report(duplicate):
    store = CountingStore()
    model, _ = watched(store)
    copied = duplicate(model)
    for _ in range(3):
        copied(torch.randn(2, 3))
    assert store.calls == 0
    model(torch.randn(2, 3))
    assert store.calls == 1


def test_a_model_with_every_hook_is_saved_and_loaded(tmp_path):
    model, _ = watched(HashStore())
    watch_forward(model, lambda since: None)
    watch_loads(model, lambda: None)
    file = tmp_path / "model.pt"
    torch.save(model, file)
    copied = torch.load(file, weights_only=False)
    x = torch.randn(2, 3)
    assert torch.equal(copied(x), model(x))
    code = (
        f"import sys, torch; model = torch.load({str(file)!r}, weights_only=False); model(torch.ones(2, 3)); "
        "model.load_state_dict(model.state_dict()); assert 'gossamer' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)  # a saved model needs no Gossamer


def test_worker_0_warns_about_equal_first_batches_only():
    for same in (True, False):
        store = HashStore()
        made = [watched(store, rank) for rank in range(2)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(9):
                for rank, (model, optimizer) in enumerate(made):
                    model(torch.full((2, 3), float(step if same else step + rank))).sum().backward()
                    optimizer.step()
        said = [str(w.message) for w in caught if issubclass(w.category, GossamerWarning)]
        assert len(said) == same


@pytest.mark.parametrize(("gradients", "replicas", "warns"), [
    ([[1.0, 2.0], [1.0, 2.0]], 2, True),  # something has averaged them
    ([[1.0, 2.0], [1.0, 2.5]], 2, False),
    ([[0.0, 0.0], [0.0, 0.0]], 2, False),  # says nothing about where the gradients come from
    ([[1.0, 2.0], [1.0, 2.0]], 1, False),  # the workers of one replica
])  # fmt: skip
def test_worker_0_warns_about_equal_first_gradients(gradients, replicas, warns):
    """Without a call of the model, as in Lightning's training_step, there is no first batch to compare."""
    store = HashStore()
    made = [watched(store, rank, replicas=replicas) for rank in range(2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(20):
            for (model, optimizer), first in zip(made, gradients, strict=True):
                model.bias.grad = torch.tensor(first) + step
                optimizer.step()
    said = [str(w.message) for w in caught if issubclass(w.category, GossamerWarning)]
    assert len(said) == warns
    assert all("all 2 workers had the same gradient in their first step" in text for text in said)


def test_forward_passes_are_timed_in_training_only():
    model, seen = nn.Linear(3, 2), []
    watch_forward(model, seen.append)
    model(torch.ones(1, 3))
    with torch.no_grad():
        model(torch.ones(1, 3))
    model.eval()
    model(torch.ones(1, 3))
    assert len(seen) == 1


# Parameters that the user loads.


def cluster_of(n, algorithm):
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)) for _ in range(n)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.0) for m in models]
    cluster = gossamer.VirtualCluster(n)
    cluster.decentralize(models, optimizers, algorithm=algorithm, topology="complete", broadcast=False)
    return cluster, models, optimizers


def step(models, optimizers):
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()


ALGORITHMS = ["awc", "atc", gossamer.AWC(staleness=1), "ad-psgd", "a2cid2"]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
@pytest.mark.parametrize("part", ["model", "layer"])
def test_loaded_parameters_are_not_mixed_with_the_old_ones(algorithm, part):
    """The exchange in flight is of the old values: it is dropped, without reset()."""
    cluster, models, optimizers = cluster_of(3, algorithm)
    step(models, optimizers)
    loaded = {k: torch.full_like(v, 7.0) for k, v in models[0].state_dict().items()}
    for model in models:
        if part == "model":
            model.load_state_dict(loaded)
        else:
            for at in range(2):
                model[at].load_state_dict({k[2:]: v for k, v in loaded.items() if k.startswith(str(at))})
    with cluster.averaged() as mean:
        assert all(p.eq(7.0).all() for p in mean.parameters())
    for _ in range(3):
        step(models, optimizers)
        assert all(p.eq(7.0).all() for m in models for p in m.parameters())


def test_loading_inside_averaged_changes_nothing():
    cluster, models, optimizers = cluster_of(3, "awc")
    _, twins, twin_optimizers = cluster_of(3, "awc")
    step(models, optimizers)
    step(twins, twin_optimizers)
    with cluster.averaged() as model:
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    step(models, optimizers)
    step(twins, twin_optimizers)
    for model, twin in zip(models, twins, strict=True):
        assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_hooks_are_removed_at_close():
    cluster, models, _ = cluster_of(2, "awc")
    cluster.close()
    for module in models[0].modules():
        assert not module._load_state_dict_post_hooks
        assert not module._forward_pre_hooks
    torch.save(models[0], io.BytesIO())
