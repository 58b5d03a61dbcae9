"""What the integrations with Accelerate and the Hugging Face Trainer refuse, in one process, and how they say it."""

import importlib
import sys
from importlib import metadata

import pytest
import torch
from torch import nn

import gossamer

accelerate_state = pytest.importorskip("accelerate.state")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """Accelerate keeps its state in the process."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    yield
    accelerate_state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate_state.GradientState._reset_state()


@pytest.fixture
def arguments(tmp_path):
    from transformers import TrainingArguments

    return {
        "model": nn.Linear(2, 2),
        "args": TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True),
    }


@pytest.mark.parametrize("framework", ["accelerate", "transformers"])
def test_names_the_extra_of_a_missing_framework(monkeypatch, framework):
    monkeypatch.delitem(sys.modules, f"gossamer.integrations.{framework}", raising=False)
    monkeypatch.setitem(sys.modules, framework, None)
    with pytest.raises(
        gossamer.InputError,
        match=rf"not installed: pip install '{framework}>=.*', or '\.\[{framework}\]' in a clone .* \(tested with",
    ):
        importlib.import_module(f"gossamer.integrations.{framework}")


@pytest.mark.parametrize(
    ("framework", "old", "oldest"), [("accelerate", "0.34.2", "1.0"), ("transformers", "4.57", "5.0")]
)
def test_names_the_version_of_an_old_framework(monkeypatch, framework, old, oldest):
    known = metadata.version
    monkeypatch.delitem(sys.modules, f"gossamer.integrations.{framework}", raising=False)
    monkeypatch.setattr(metadata, "version", lambda name: old if name == framework else known(name))
    with pytest.raises(
        gossamer.InputError, match=f"needs {framework} {oldest} or newer and was tested with .* but {old} is"
    ):
        importlib.import_module(f"gossamer.integrations.{framework}")


ELASTIC = ["continue", gossamer.Continue(hard_deadline=9)]


@pytest.mark.parametrize("on_failure", ELASTIC, ids=["name", "policy"])
def test_refuses_elastic_jobs(on_failure, arguments):
    from gossamer.integrations.accelerate import GossipAccelerator
    from gossamer.integrations.transformers import GossipTrainer

    with pytest.raises(gossamer.InputError, match="cannot work in Accelerate: its process group"):
        GossipAccelerator(cpu=True, on_failure=on_failure)
    with pytest.raises(gossamer.InputError, match="cannot work in the Hugging Face Trainer: its process group"):
        GossipTrainer(**arguments, on_failure=on_failure)


@pytest.mark.parametrize("algorithm", ["ad-psgd", gossamer.A2CiD2()], ids=["name", "policy"])
def test_the_trainer_refuses_asynchronous_algorithms(algorithm, arguments):
    from gossamer.integrations.transformers import GossipTrainer

    with pytest.raises(gossamer.InputError, match="Trainer meets all workers at the same steps; use 'awc'"):
        GossipTrainer(**arguments, algorithm=algorithm)


def test_refuses_workers_that_accelerate_does_not_see(monkeypatch):
    """Without a GPU and without cpu=True, Accelerate would train each worker of torchrun on its own."""
    from gossamer.integrations.accelerate import GossipAccelerator

    monkeypatch.setenv("WORLD_SIZE", "4")
    if torch.cuda.is_available():
        pytest.skip("Accelerate sees the workers on GPUs")
    with pytest.raises(gossamer.InputError, match="WORLD_SIZE is 4, but Accelerate runs as a single process"):
        GossipAccelerator()


def test_refuses_other_kinds_of_parallelism():
    from accelerate import Accelerator

    from gossamer.integrations.accelerate import GossipAccelerator

    accelerator = Accelerator(cpu=True)
    accelerator.state.parallelism_config = object()
    with pytest.raises(
        gossamer.InputError, match=r"one whole replica per process, .* parallelism_config; leave it out"
    ):
        GossipAccelerator.of(accelerator, {})


def test_refuses_a_model_in_data_parallel():
    from gossamer.integrations.accelerate import GossipAccelerator

    with pytest.raises(gossamer.InputError, match="already wrapped in DataParallel; pass the bare module"):
        GossipAccelerator(cpu=True).prepare(nn.DataParallel(nn.Linear(2, 2)))


def test_refuses_one_process_with_several_gpus(arguments):
    from gossamer.integrations.transformers import GossipTrainer

    arguments["args"]._n_gpu = 2
    with pytest.raises(gossamer.InputError, match="one process with 2 GPUs has nothing to gossip with"):
        GossipTrainer(**arguments)


def test_a_misspelled_argument_is_the_frameworks_error(arguments):
    from gossamer.integrations.accelerate import GossipAccelerator
    from gossamer.integrations.transformers import GossipTrainer

    with pytest.raises(TypeError, match="topolgy"):
        GossipAccelerator(cpu=True, topolgy="aer")
    with pytest.raises(TypeError, match="topolgy"):
        GossipTrainer(**arguments, topolgy="aer")


def test_a_trainer_without_the_methods_that_are_extended(monkeypatch, arguments):
    from transformers import Trainer

    from gossamer.integrations.transformers import GossipTrainer

    monkeypatch.delattr(Trainer, "_save_optimizer_and_scheduler")
    with pytest.raises(gossamer.GossamerError, match=r"has no Trainer\._save_optimizer_and_scheduler"):
        GossipTrainer(**arguments)


def test_one_process_trains_without_gossip(tmp_path):
    from gossamer.integrations.accelerate import GossipAccelerator

    accelerator = GossipAccelerator(cpu=True, topology="aer")
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(3, 2)).square().sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e-3)
    assert norm > 1e-3
    assert float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()) == pytest.approx(1e-3, rel=1e-3)
    optimizer.step()
    assert accelerator.gossip is None
    with accelerator.averaged(), accelerator.no_sync(model):
        saved = accelerator.get_state_dict(model)["weight"].clone()
    accelerator.save_state(str(tmp_path))
    accelerator.load_state(str(tmp_path))
    accelerator.end_training()
    assert torch.equal(saved, model.weight)
    assert not (tmp_path / "gossamer").exists()
