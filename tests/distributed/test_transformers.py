"""Gossip in the Hugging Face Trainer, on real workers with the real library and a tiny model without a download."""

import json
from pathlib import Path

import pytest
import torch
from hugging_face import fresh_accelerate
from safetensors.torch import load_file
from workers import vector

import gossamer

ATC = {"algorithm": "atc", "topology": "complete"}


class Sequences(torch.utils.data.Dataset):
    """Token sequences that count upwards, each from its own start."""

    def __init__(self, count, first=0):
        self.count, self.first = count, first

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        tokens = (torch.arange(8) + 5 * (index + self.first)) % 32
        return {"input_ids": tokens, "labels": tokens}


def make(settings, folder, dropout=0.0, callbacks=None, **arguments):
    """A Trainer (settings None) or GossipTrainer of a one-layer GPT-2 with tied embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from gossamer.integrations.transformers import GossipTrainer

    given = {
        "output_dir": folder,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 6,
        "logging_steps": 2,
        "save_strategy": "no",
        "learning_rate": 0.05,
        **arguments,
    }
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32,
        n_positions=8,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    common = {
        "model": GPT2LMHeadModel(config),
        "args": TrainingArguments(**given),
        "train_dataset": Sequences(64),
        "eval_dataset": Sequences(16, first=100),
        "callbacks": callbacks,
    }
    return Trainer(**common) if settings is None else GossipTrainer(**common, **settings)


def train(settings, folder, **arguments):
    trainer = make(settings, folder, **arguments)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return vector(trainer.model), losses


def run(rank, *args, **kwargs):
    with fresh_accelerate():
        return train(*args, **kwargs)


@pytest.mark.parametrize(
    "arguments", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}], ids=["plain", "accumulate", "bf16"]
)
def test_equals_the_trainers_own_ddp(pools, tmp_path, arguments):
    given = {"optim": "sgd", "max_grad_norm": 0.0, **arguments}
    theirs = pools(2).run(run, None, str(tmp_path), **given)
    ours = pools(2).run(run, ATC, str(tmp_path), **given)
    close = {"rtol": 1e-2, "atol": 1e-2} if "bf16" in arguments else {"rtol": 2e-5, "atol": 2e-6}
    for (own, losses), (ddp, ddp_losses) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, ddp, **close)
        assert losses == pytest.approx(ddp_losses, abs=2e-3)
