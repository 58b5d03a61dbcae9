"""What users save with: torch, safetensors, transformers, Accelerate, Lightning and DCP, on a model that gossips.

Every saver runs inside `averaged()` on two real workers; the file must hold the mean of all parameters, by their names.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from workers import real

State = dict[str, Tensor]


class Tied(nn.Module):
    """Tied weights and a convolution in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(30, 8), nn.Linear(8, 30)
        self.out.weight = self.embed.weight
        self.conv = nn.Conv2d(1, 4, 3, bias=False).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.steps += 1
        image = self.embed(tokens).unsqueeze(1)  # (batch, 1, 8 tokens, 8 features)
        return self.out(self.embed(tokens) * (1 + self.norm(self.conv(image)).relu().mean()))


def plain_savers(model: nn.Module, folder: Path) -> dict[str, State]:
    import safetensors.torch as safe
    import torch.distributed.checkpoint as dcp

    torch.save(model.state_dict(), folder / "model.pt")
    safe.save_model(model, str(folder / "model.safetensors"))
    untied = {name: value for name, value in model.state_dict().items() if name != "out.weight"}
    safe.save_file(untied, str(folder / "untied.safetensors"))
    dcp.save(model.state_dict(), checkpoint_id=folder / "dcp", no_dist=True)

    found = {"torch.save": torch.load(folder / "model.pt", weights_only=True)}
    fresh = Tied()
    assert safe.load_model(fresh, str(folder / "model.safetensors")) == (set(), [])
    found["save_model"] = fresh.state_dict()
    file = safe.load_file(str(folder / "untied.safetensors"))
    found["save_file"] = {**file, "out.weight": file["embed.weight"]}
    into = copy.deepcopy(Tied().state_dict())
    dcp.load(into, checkpoint_id=folder / "dcp", no_dist=True)
    found["dcp"] = into
    return found


def lightning_saver(model: nn.Module, folder: Path) -> dict[str, State]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import SingleDeviceStrategy

    fabric = Fabric(accelerator="cpu", strategy=SingleDeviceStrategy(torch.device("cpu")))
    fabric.save(folder / "fabric.ckpt", {"model": model})
    return {"Fabric.save": torch.load(folder / "fabric.ckpt", weights_only=True)["model"]}


def averaged_and_saved(rank, decentralize, folder, save):
    """Train, save by `save` on worker 0 inside averaged(), and return what the files hold and what they should."""
    torch.manual_seed(rank)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with decentralize(model, optimizer) as gossip:
        for _ in range(3):
            tokens = torch.randint(30, (4, 8))
            nn.functional.cross_entropy(model(tokens).transpose(1, 2), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        own = {name: value.clone() for name, value in model.state_dict().items()}
        with gossip.averaged():
            mean = {name: value.clone() for name, value in model.state_dict().items()}
            files = save(model, folder) if rank == 0 else {}
    return own, mean, files


def assert_saved(results, savers):
    (own, mean, files), (other, *_) = results
    assert list(files) == savers
    for name, value in mean.items():
        if not value.is_floating_point():
            continue
        assert not torch.equal(own[name], value)  # the workers' models differ
        torch.testing.assert_close(value, (own[name] + other[name]) / 2)
    for saver, state in files.items():
        assert list(state) == list(mean) or sorted(state) == sorted(mean), saver
        for name, value in mean.items():
            assert torch.equal(state[name], value), f"{saver}: {name}"


def test_torch_safetensors_and_dcp(pools, tmp_path):
    results = pools(2).run(real, averaged_and_saved, tmp_path, plain_savers)
    assert_saved(results, ["torch.save", "save_model", "save_file", "dcp"])


def test_lightning(pools, tmp_path):
    pytest.importorskip("lightning")
    assert_saved(pools(2).run(real, averaged_and_saved, tmp_path, lightning_saver), ["Fabric.save"])


def saved_by_accelerate(rank, decentralize, folder):
    """`save_model` inside averaged(), then `save_state` and `load_state`, which Accelerate runs on every worker."""
    from accelerate import Accelerator
    from safetensors.torch import load_model

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(rank)
    model = Tied()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    accelerator._models.append(model)  # what prepare(model) does before it wraps the model in DDP
    with decentralize(model, optimizer) as gossip:

        def train() -> None:
            tokens = torch.randint(30, (4, 8))
            accelerator.backward(nn.functional.cross_entropy(model(tokens).transpose(1, 2), tokens))
            optimizer.step()
            optimizer.zero_grad()

        train()
        with gossip.averaged():
            mean = copy.deepcopy(model.state_dict())
            accelerator.save_model(model, folder / "model")
            accelerator.save_state(folder / "state")
        accelerator.wait_for_everyone()  # worker 0 writes the model
        train()
        accelerator.load_state(folder / "state")
        loaded = copy.deepcopy(model.state_dict())
    files = {}
    for name in ("model", "state"):
        fresh = Tied()
        assert load_model(fresh, str(folder / name / "model.safetensors")) == (set(), [])
        files[name] = fresh.state_dict()
    dist.barrier()
    return mean, loaded, files


def test_accelerate(pools, tmp_path):
    pytest.importorskip("accelerate")
    for mean, loaded, files in pools(2).run(real, saved_by_accelerate, tmp_path):
        for state in (loaded, files["model"], files["state"]):
            assert sorted(state) == sorted(mean)
            assert all(torch.equal(state[name], value) for name, value in mean.items())


def saved_by_transformers(rank, decentralize, folder):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    torch.manual_seed(rank)
    model = GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with decentralize(model, optimizer) as gossip:
        tokens = torch.randint(32, (2, 16))
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        with gossip.averaged():
            mean = copy.deepcopy(model.state_dict())
            if rank == 0:
                model.save_pretrained(folder)
        dist.barrier()
    return mean, GPT2LMHeadModel.from_pretrained(folder).state_dict()


def test_transformers(pools, tmp_path):
    pytest.importorskip("transformers")
    for mean, loaded in pools(2).run(real, saved_by_transformers, tmp_path):
        assert sorted(loaded) == sorted(mean)
        assert all(torch.equal(loaded[name], value) for name, value in mean.items())
