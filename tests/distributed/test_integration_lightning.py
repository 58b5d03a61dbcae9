"""Lightning's Trainer and Fabric train by gossip, with the real library on real workers."""

import importlib
import math
import re
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gossamer import InputError

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "lightning.md"
LIKE_DDP = {"topology": "complete", "algorithm": "atc"}


def call(rank, name, *args, **kwargs):
    """Call a function of `lightning_workers`, which only workers import: lightning takes seconds to import."""
    return getattr(importlib.import_module("lightning_workers"), name)(rank, *args, **kwargs)


def mean_of(results, key, at):
    return torch.stack([r[key][at] for r in results]).mean(dim=0)


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "extra", "options"),
    [
        ("automatic", {}, {}),
        ("automatic", {}, {"accumulate_grad_batches": 2}),
        ("automatic", {"gradients": "node"}, {"accumulate_grad_batches": 2}),
        ("by hand", {}, {}),
    ],
    ids=["automatic", "accumulation", "exact inside the node", "two optimizers by hand"],
)
def test_atc_on_a_complete_topology_with_sgd_is_ddp(pools, model, extra, options):
    pool = pools(2, 2)
    ddp = pool.run(call, "fit", "ddp", model=model, **options)
    ours = pool.run(call, "fit", LIKE_DDP | extra, model=model, **options)
    for a, b in zip(ours, ddp, strict=True):
        assert a["steps"] == b["steps"] > 0
        torch.testing.assert_close(a["final"], b["final"], rtol=1e-5, atol=1e-6)
        assert a["metrics"]["val_loss"] == pytest.approx(b["metrics"]["val_loss"], rel=1e-5)


def test_the_registered_name_learns_and_ends_with_the_mean(pools):
    results = pools(2, 2).run(call, "fit", "gossamer", max_epochs=6, test=True)
    for result in results:
        assert sum(result["losses"][-4:]) < 0.6 * sum(result["losses"][:4])
        assert torch.equal(result["final"], results[0]["final"])
        assert result["metrics"]["test_loss"] == pytest.approx(result["metrics"]["val_loss"])
    assert not torch.equal(results[0]["stepped"][-1], results[2]["stepped"][-1])  # of another node
    torch.testing.assert_close(results[0]["final"], mean_of(results, "stepped", -1))


def test_hooks_reach_the_handle_while_fit_runs(pools):
    for seen in pools(2, 2).run(call, "handle"):
        assert seen["distance"] > 0
        assert seen["stats"] == 4
        assert seen["after"].startswith("GossipStrategy.gossip exists only while Trainer.fit() runs")


def test_validation_is_of_the_mean_and_leaves_the_workers_parameters(pools):
    results = pools(2, 2).run(call, "fit", {"topology": "aer"}, max_epochs=3)
    for epoch in range(3):
        last = 4 * (epoch + 1) - 1
        for result in results:
            assert torch.equal(result["validated"][epoch], results[0]["validated"][epoch])
            assert last + 1 == 12 or torch.equal(result["began"][last + 1], result["stepped"][last])
        torch.testing.assert_close(results[0]["validated"][epoch], mean_of(results, "stepped", last))


def test_the_clipping_threshold_is_that_of_ddp(pools):
    ddp = pools(2, 2).run(call, "fit", "ddp", gradient_clip_val=1e-3)
    ours = pools(2, 2).run(call, "fit", {"topology": "aer"}, gradient_clip_val=1e-3)
    for a, b in zip(ours, ddp, strict=True):
        assert b["norms"] == pytest.approx([1e-3] * 8, rel=1e-3)
        assert a["norms"][0] == pytest.approx(1e-3, rel=1e-3)  # nothing is known of the noise yet
        assert all(0.999e-3 < norm < 1.001e-3 * math.sqrt(4) for norm in a["norms"])


def test_a_batch_calls_no_collective_of_the_default_group(pools):
    assert min(min(counts) for counts in pools(2, 2).run(call, "collectives", "ddp")) > 0
    for counts in pools(2, 2).run(call, "collectives", {"topology": "aer"}):
        assert counts == [0, 0]


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_the_mean_and_a_plain_file_of_lightning(pools, tmp_path):
    save = {"save_top_k": 1, "monitor": "val_loss", "save_last": "link"}
    results = pools(2, 2).run(call, "fit", {"topology": "aer"}, save=save, folder=str(tmp_path), max_epochs=3)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["epoch=2-step=12.ckpt", "epoch=2-step=12.ckpt.workers", "last.ckpt"]  # the others were removed
    loaded = pools(2, 2).run(call, "plain_model", str(tmp_path / "last.ckpt"))[0]
    assert torch.equal(loaded, results[0]["validated"][2])
    for metrics in pools(2, 2).run(call, "validate", str(tmp_path / "last.ckpt")):
        assert metrics["val_loss"] == pytest.approx(results[0]["metrics"]["val_loss"])


def test_weights_alone_are_one_file(pools, tmp_path):
    pools(2, 2).run(call, "fit", {}, save={"save_weights_only": True}, folder=str(tmp_path), max_epochs=1)
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=0-step=4.ckpt"]


@pytest.mark.parametrize(
    ("save", "at", "loader"),
    [
        ({"every_n_epochs": 1}, "epoch=1-step=8.ckpt", None),
        ({"every_n_epochs": 1, "save_on_train_epoch_end": True}, "epoch=1-step=8.ckpt", None),
        ({"every_n_train_steps": 4}, "epoch=1-step=8.ckpt", None),
        ({"every_n_train_steps": 6}, "epoch=1-step=6.ckpt", "stateful"),
    ],
    ids=["after validation", "end of the epoch", "last batch", "middle of the epoch"],
)
def test_every_worker_resumes_bit_by_bit(pools, tmp_path, save, at, loader):
    options = {"model": "random", "save": {"save_top_k": -1, **save}, "max_epochs": 4, "loader": loader}
    whole = pools(2, 2).run(call, "fit", {"topology": "ring"}, folder=str(tmp_path / "a"), **options)
    resumed = pools(2, 2).run(
        call,
        "fit",
        {"topology": "ring"},
        folder=str(tmp_path / "b"),
        resume=str(tmp_path / "a" / at),
        seed=9,
        **options,
    )
    assert not torch.equal(whole[0]["stepped"][-1], whole[1]["stepped"][-1])
    for a, b in zip(whole, resumed, strict=True):
        rest = len(b["losses"])
        assert 0 < rest < len(a["losses"])
        assert a["losses"][-rest:] == b["losses"]
        assert all(torch.equal(x, y) for x, y in zip(a["stepped"][-rest:], b["stepped"], strict=True))
        assert all(torch.equal(a["state"][k], b["state"][k]) for k in a["state"])


def test_another_topology_continues_from_the_workers_own_parameters(pools, tmp_path):
    first = pools(2, 2).run(call, "fit", {"topology": "ring"}, save={}, folder=str(tmp_path), max_epochs=1)
    resumed = pools(2, 2).run(call, "fit", {"topology": "aer"}, resume=str(tmp_path / "epoch=0-step=4.ckpt"))
    for a, b in zip(first, resumed, strict=True):
        assert torch.equal(b["began"][0], a["stepped"][-1])
        assert b["steps"] == 8


def test_without_the_workers_files_every_worker_continues_from_the_mean(pools, tmp_path):
    save = {"every_n_epochs": 1, "save_top_k": -1}
    first = pools(2, 2).run(call, "fit", {}, save=save, folder=str(tmp_path), max_epochs=1)
    (tmp_path / "epoch=0-step=4.ckpt.workers").rename(tmp_path / "elsewhere")
    resumed = pools(2, 2).run(call, "warned", {}, resume=str(tmp_path / "epoch=0-step=4.ckpt"))
    for (result, texts), worker in zip(resumed, range(4), strict=True):
        torch.testing.assert_close(result["began"][0], first[0]["validated"][0])
        assert len(texts) == (worker == 0)
    assert "own files, epoch=0-step=4.ckpt.workers/" in resumed[0][1][0]
    assert "every worker continues from the mean" in resumed[0][1][0]


def test_another_number_of_workers_continues_from_the_mean(pools, tmp_path):
    first = pools(2, 2).run(call, "fit", {}, save={}, folder=str(tmp_path), max_epochs=1)
    resumed = pools(2).run(call, "warned", {}, resume=str(tmp_path / "epoch=0-step=4.ckpt"))
    for result, _ in resumed:
        torch.testing.assert_close(result["began"][0], first[0]["validated"][0])
    assert "saved by 4 workers and this job has 2" in resumed[0][1][0]


def test_a_checkpoint_inside_averaged_is_refused(pools, tmp_path):
    texts = pools(2, 2).run(call, "save_inside", str(tmp_path)) + pools(2, 2).run(call, "fabric_inside", str(tmp_path))
    for text in texts:
        assert text.startswith("a checkpoint inside `with gossip.averaged()`")


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "after"), [("training_step", 0), ("training_step", 3), ("validation_step", 4), ("signal", 3)]
)
def test_an_exception_on_one_worker_ends_all(pools, where, after):
    # longer than a worker waits for another one, so that the worker's own error is seen
    errors = pools(2, 2).run(call, "fit_until", {"topology": "aer"}, where, after=after, timeout=300)
    assert errors[1][0] == ("SIGTERMException" if where == "signal" else "ValueError")
    assert all(error is not None for error in errors)
    if where == "training_step":  # the others wait for a neighbor; later they may be in a barrier of Lightning's
        assert {kind for worker, (kind, _) in enumerate(errors) if worker != 1} == {"PeerError"}
        assert all("worker 1" in text for worker, (_, text) in enumerate(errors) if worker != 1)


def test_a_checkpoint_of_a_failing_worker_waits_for_nobody(pools, tmp_path):
    errors = pools(2, 2).run(call, "fit_until", {"topology": "aer"}, "training_step", who=0, on_exception=str(tmp_path))
    assert errors[0] == ("ValueError", "this batch cannot be read")
    assert all(error is not None for error in errors)
    assert [path.name for path in tmp_path.iterdir()] == ["on_exception.ckpt"]


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("asynchronous", "algorithm 'ad-psgd' lets every worker step at its own pace, but Lightning meets all"),
        ("a policy", "lets every worker step at its own pace"),
        ("elastic", "on_failure='continue' cannot work in Lightning: its process group is fixed"),
        ("elastic in Fabric", "cannot work in Lightning: its process group is fixed"),
        (
            "unknown",
            "GossipStrategy has no argument 'find_unused_parameters'; besides those of Lightning it takes",
        ),
        ("timeout", "timeout must be a positive duration (seconds or a timedelta), got 'soon'"),
        ("topology", "donut"),
        (
            "process group",
            "gossip in Lightning is among all workers of the job, which begin with the parameters of worker 0",
        ),
        ("wrapped", "module 'net' of the model is already wrapped in DistributedDataParallel; pass the bare module"),
        ("wrapped in Fabric", "Lightning replaces DDP, but the model is already wrapped in DistributedDataParallel"),
        ("sharded", "Lightning saves and restores whole models, but parameter 'net.0.weight' is sharded"),
        ("sync_batchnorm", "Trainer(sync_batchnorm=True) makes all workers wait for each other in every forward pass"),
        ("optimizer alone", "sets up a model and its optimizers together; call fabric.setup(model, optimizer) instead"),
        ("model alone", "0 models gossip, and `gossip` needs exactly one"),
    ],
)
def test_bad_input_is_one_sentence(pools, what, sentence):
    for text in pools(2, 2).run(call, "refused", what):
        assert sentence in text


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (None, "needs lightning, which is not installed: pip install 'lightning>=2.5', or '.[lightning]' in a clone"),
        ("2.4.1", "needs lightning 2.5 or newer and was tested with 2.6.6, but 2.4.1 is installed"),
    ],
)
def test_a_missing_or_old_framework_is_one_sentence(monkeypatch, found, sentence):
    monkeypatch.setitem(sys.modules, "lightning", None if found is None else ModuleType("lightning"))
    monkeypatch.delitem(sys.modules, "gossamer.integrations.lightning", raising=False)
    monkeypatch.setattr(metadata, "version", lambda name: found)
    with pytest.raises(InputError, match=re.escape(sentence)):
        importlib.import_module("gossamer.integrations.lightning")


def test_users_of_pytorch_lightning_are_told_what_to_import(pools):
    (text,) = pools(2, 2).run(call, "beside_pytorch_lightning")[0]
    assert "write `import lightning.pytorch as pl` instead of `import pytorch_lightning as pl`" in text


# -- Fabric -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_fabric_equals_its_ddp_and_does_not_warn(pools, accumulate):
    ddp = pools(2, 2).run(call, "fabric_loop", "ddp", accumulate=accumulate)
    ours = pools(2, 2).run(call, "fabric_loop", LIKE_DDP, accumulate=accumulate)
    for a, b in zip(ours, ddp, strict=True):
        torch.testing.assert_close(a["final"], b["final"], rtol=1e-5, atol=1e-6)
        assert a["warnings"] == []


def test_fabric_by_name_learns_and_clips_as_ddp(pools):
    results = pools(2, 2).run(call, "fabric_loop", "gossamer", steps=40, clip=100.0)
    for result in results:
        assert sum(result["losses"][-4:]) < 0.6 * sum(result["losses"][:4])
    clipped = pools(2, 2).run(call, "fabric_loop", "gossamer", clip=1e-3)
    assert all(r["norms"][0] == pytest.approx(1e-3, rel=1e-3) for r in clipped)
    assert all(0.999e-3 < norm < 1.001e-3 * math.sqrt(4) for r in clipped for norm in r["norms"])


def test_fabric_saves_the_mean_and_resumes_bit_by_bit(pools, tmp_path):
    path = str(tmp_path / "half.ckpt")
    whole = pools(2, 2).run(call, "fabric_loop", {"topology": "ring"}, save=path, dropout=0.3)
    resumed = pools(2, 2).run(call, "fabric_loop", {"topology": "ring"}, resume=path, dropout=0.3)
    plain = torch.load(path, weights_only=True)
    mean = torch.cat([value.double().flatten() for value in plain["model"].values()])
    torch.testing.assert_close(mean, torch.stack([r["own"] for r in whole]).mean(dim=0))
    for a, b in zip(whole, resumed, strict=True):
        assert torch.equal(a["own"], a["after save"])
        assert a["losses"][6:] == b["losses"]
        assert torch.equal(a["final"], b["final"])
        assert b["rest"] == {}
    closed = torch.load(f"{path}.closed", weights_only=True)  # a plain file: nothing gossips any more
    assert closed.keys() == {"model"}
    assert not (tmp_path / "half.ckpt.closed.workers").exists()


def test_fabric_trains_several_models(pools, tmp_path):
    for seen in pools(2, 2).run(call, "fabric_pair", str(tmp_path)):
        assert all(distance > 0 for distance in seen["distances"])
        assert seen["restored"]
        assert seen["rest"] == {}
        assert seen["error"].startswith("2 models gossip")


# -- documentation ----------------------------------------------------------------------------------------------------


def test_the_blocks_of_the_page_run_as_one_program(pools, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    assert len(blocks) == 4
    printed = pools(2).run(call, "run_blocks", blocks, str(tmp_path))
    assert re.search(r"^2 workers: validation loss \d\.\d+$", printed[0], re.M), printed[0]
    assert re.search(r"^loss \d\.\d+ of the last batch$", printed[0], re.M), printed[0]
    names = {path.name for path in tmp_path.iterdir()}
    assert {"checkpoints", "fabric.ckpt", "fabric.ckpt.workers"} <= names
    assert len(list((tmp_path / "checkpoints").glob("last.ckpt.workers/*/worker-0000?.ckpt"))) == 2
