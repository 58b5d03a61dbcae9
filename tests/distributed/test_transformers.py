"""Gossip in the Hugging Face Trainer, on real workers with the real library and a tiny model without a download."""

import warnings
from types import SimpleNamespace

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
    return vector(trainer.model), losses, type(trainer.model_wrapped).__name__


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
    for (own, losses, wrapped), (ddp, ddp_losses, ddp_wrapped) in zip(ours, theirs, strict=True):
        assert (wrapped, ddp_wrapped) == ("GPT2LMHeadModel", "DistributedDataParallel")
        torch.testing.assert_close(own, ddp, **close)
        assert losses == pytest.approx(ddp_losses, abs=2e-3)


def test_the_loss_falls(pools, tmp_path):
    results = pools(2).run(run, {"topology": "aer"}, str(tmp_path), max_steps=40, logging_steps=10)
    for own, losses, _ in results:
        assert losses[-1] < 0.5 * losses[0]
        assert torch.equal(own, results[0][0]), "the model is the mean when train() returns"


def recorder():
    """A callback that notes each worker's own parameters after every step, and those of every evaluation."""
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        def __init__(self):
            self.own, self.evaluated, self.norms = {}, {}, []

        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            self.norms.append(float(torch.stack([p.grad.norm() for p in model.parameters()]).norm()))

        def on_step_end(self, args, state, control, model=None, **_):
            self.own[state.global_step] = vector(model)

        def on_prediction_step(self, args, state, control, model=None, **_):
            self.evaluated.setdefault(state.global_step, vector(model))

        def on_train_end(self, args, state, control, model=None, **_):
            self.end = vector(model)

    return Recorder()


def best(rank, folder):
    """The best of three evaluations is the first: the learning rate is far too large."""
    from transformers import GPT2LMHeadModel

    with fresh_accelerate():
        record = recorder()
        trainer = make(
            {"topology": "ring"},
            folder,
            callbacks=[record],
            learning_rate=5.0,
            optim="sgd",
            max_grad_norm=0.0,
            eval_strategy="steps",
            save_strategy="steps",
            eval_steps=2,
            save_steps=2,
            load_best_model_at_end=True,
        )
        trainer.train()
        best = trainer.state.best_model_checkpoint
        saved = vector(GPT2LMHeadModel.from_pretrained(best))
        assert trainer.gossip is None
        metrics = trainer.evaluate()
        trainer.save_model(f"{folder}/final")
        names = sorted(load_file(f"{best}/model.safetensors"))
        losses = trainer.state.best_metric, metrics["eval_loss"]
        return SimpleNamespace(**vars(record)), vector(trainer.model), saved, best, losses, names


def test_evaluates_saves_and_loads_the_mean(pools, tmp_path):
    results = pools(2).run(best, str(tmp_path))
    for record, model, saved, folder, (metric, loss), names in results:
        assert sorted(record.evaluated) == [2, 4, 6]
        for step, mean in record.evaluated.items():
            assert not torch.equal(results[0][0].own[step], results[1][0].own[step])
            assert torch.equal(mean, results[0][0].evaluated[step])
            own = torch.stack([r[0].own[step] for r in results])
            torch.testing.assert_close(mean, own.mean(0), rtol=1e-6, atol=1e-6)
        step = int(folder.rpartition("-")[2])
        assert step < 6
        assert torch.equal(saved, record.evaluated[step])
        assert torch.equal(model, saved)
        assert torch.equal(record.end, saved), "callbacks see the best model as well"
        assert loss == pytest.approx(metric, rel=1e-5)
        assert len(names) == 16, "all parameters but the tied lm_head"


def clip(rank, folder):
    with fresh_accelerate():
        record = recorder()
        trainer = make({}, folder, callbacks=[record], max_grad_norm=0.01)
        trainer.train()
        return record.norms, trainer.args.average_tokens_across_devices


def test_clips_at_the_threshold_of_all_reduce(pools, tmp_path):
    for norms, tokens in pools(2).run(clip, str(tmp_path)):
        assert norms[0] == pytest.approx(0.01, rel=1e-3)  # nothing is known of the noise yet
        assert all(0.0099 < norm < 0.01 * 2**0.5 * 1.001 for norm in norms)
        assert tokens is False


def interrupted(rank, settings, folder, resume=None):
    with fresh_accelerate():
        record = recorder()
        common = {"dropout": 0.1, "max_steps": 7, "save_strategy": "steps", "save_steps": 3, "callbacks": [record]}
        trainer = make(settings, folder, **common)
        torch.manual_seed(100 * rank)
        trainer.train(resume_from_checkpoint=resume)
        return record.own, record.end, trainer.state.global_step


SETTINGS = [{"topology": "ring"}, {"algorithm": gossamer.AWC(every=2), "wire": "bf16"}]


@pytest.mark.parametrize("settings", SETTINGS, ids=["awc", "every-2-bf16"])
def test_resumes_every_worker_exactly(pools, tmp_path, settings):
    whole = pools(2).run(interrupted, settings, str(tmp_path / "whole"))
    again = pools(2).run(interrupted, settings, str(tmp_path / "again"), str(tmp_path / "whole/checkpoint-3"))
    for (own, end, steps), (resumed, resumed_end, resumed_steps) in zip(whole, again, strict=True):
        assert (steps, resumed_steps) == (7, 7)
        assert sorted(resumed) == [4, 5, 6, 7]
        assert all(torch.equal(resumed[step], own[step]) for step in resumed)
        assert torch.equal(end, resumed_end)


def continued(rank, settings, folder, steps, again=False):
    with fresh_accelerate():
        trainer = make(settings, folder, max_steps=steps, save_strategy="steps", save_steps=steps)
        trainer.train(resume_from_checkpoint=steps > 2)
        if again:
            trainer.train()  # once more, from where the model is
            return trainer.gossip is None, vector(trainer.model)
        return trainer.state.global_step, vector(trainer.model)


def test_continues_checkpoints_of_ddp_and_back(pools, tmp_path):
    folder = str(tmp_path)
    for settings, steps in (({}, 2), (None, 4), ({}, 6)):
        assert [step for step, _ in pools(2).run(continued, settings, folder, steps)] == [steps] * 2
    (closed, model), (_, other) = pools(2).run(continued, {}, folder, 6, again=True)
    assert closed
    assert torch.equal(model, other)


def fails(rank, folder):
    from transformers import TrainerCallback

    class Failing(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if rank == 1 and state.global_step == 3:
                raise RuntimeError("a mistake in the user's code")

    with fresh_accelerate():
        try:
            make({}, folder, callbacks=[Failing()], logging_steps=100).train()
        except Exception as error:
            return type(error).__name__, str(error)


def test_a_failing_worker_does_not_hang_the_others(pools, tmp_path):
    (kind, said), failed = pools(2).run(fails, str(tmp_path))
    assert failed == ("RuntimeError", "a mistake in the user's code")
    assert kind == "PeerError"
    assert "worker 1" in said


def mixed_in(rank, folder):
    """GossipTrainer in front of another trainer class."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    from gossamer.integrations.transformers import GossipTrainer

    class Mine(GossipTrainer, Seq2SeqTrainer):
        pass

    with fresh_accelerate():
        plain = make({}, folder)
        args = Seq2SeqTrainingArguments(
            output_dir=folder, use_cpu=True, report_to="none", disable_tqdm=True, max_steps=2, save_strategy="no"
        )
        trainer = Mine(model=plain.model, args=args, train_dataset=Sequences(64), topology="ring")
        trainer.train()
        return isinstance(trainer, Seq2SeqTrainer), vector(trainer.model)


def test_works_in_front_of_another_trainer_class(pools, tmp_path):
    (kind, model), (_, other) = pools(2).run(mixed_in, str(tmp_path))
    assert kind
    assert torch.equal(model, other)


def wrapped(rank, folder):
    with fresh_accelerate():
        trainer = make({}, folder)
        trainer.model = trainer.model_wrapped = torch.nn.parallel.DistributedDataParallel(trainer.model)
        try:
            trainer.train()
        except gossamer.InputError as error:
            return str(error)
        finally:
            trainer.accelerator.wait_for_everyone()
            trainer.model = trainer.model_wrapped = trainer.model.module


def test_refuses_a_model_in_ddp(pools, tmp_path):
    for said in pools(2).run(wrapped, str(tmp_path)):
        assert "already wrapped in DistributedDataParallel; pass the bare module" in said


def counts_tokens(rank, folder):
    with fresh_accelerate(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        make({}, folder, include_num_input_tokens_seen="all")
        return [str(w.message) for w in told if w.category is gossamer.GossamerWarning]


def test_warns_of_a_gather_at_every_batch(pools, tmp_path):
    for said in pools(2).run(counts_tokens, str(tmp_path)):
        assert len(said) == 1
        assert "every step waits for the slowest worker; set it to 'no'" in said[0]
