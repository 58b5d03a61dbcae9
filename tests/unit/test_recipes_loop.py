"""The training loop on virtual workers, against plain torch loops."""

import json

import pytest
import torch

import gossamer
from gossamer import InputError
from gossamer.checkpoint import files
from gossamer.predict.methods import parse
from gossamer.recipes.config import make_config
from gossamer.recipes.gradients import Batched, Looped, choose
from gossamer.recipes.loop import Diverged, Progress
from gossamer.recipes.run import make_strategy, prepare, read_config, run
from gossamer.recipes.task import make_task
from toy import Toy

METHODS = ["ddp", "dsgd:ring", "dadam:ring", "accumadam:aer"]


def config_for(method, **values):
    given = {"virtual": True, "per_node": (2, 2), "steps": 6, "lr": 0.02, "batched": "off", "eval_every": 0, **values}
    return make_config({"task": "toy", "method": method, **given})


def trained(folder, method, task=None, resume=False, **values):
    """The final parameters of every replica."""
    config = config_for(method, checkpoint_every=values.pop("checkpoint_every", 1000), **values)
    progress = run(config, task or Toy(), parse(method), folder, resume=resume)
    return models(folder, progress.step)


def models(folder, step):
    """Every replica's parameters in the newest checkpoint, which must be that of `step`."""
    where = folder / "checkpoints"
    manifest = files.read_manifest(where, files.latest_in(where))
    assert manifest.step == step
    return [files.read_part(where, manifest, place)["model"] for place in range(manifest.workers)]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x[k], y[k]) for x, y in zip(a, b, strict=True) for k in x)


def close(a, b):
    for x, y in zip(a, b, strict=True):
        for k in x:
            torch.testing.assert_close(x[k], y[k], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("values", [{}, {"amp": True}, {"clip": 0.0}, {"schedule": "inverse-sqrt", "warmup": 3}])
def test_one_worker_trains_like_the_plain_loop(tmp_path, values):
    (got,) = trained(tmp_path, "dadam:aer", per_node=(1,), steps=5, **values)
    task = Toy()
    model, stream = task.model(0), task.batches(0, 1, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.9, 0.98))
    rates = {"inverse-sqrt": [1 / 3, 2 / 3, 1, (3 / 4) ** 0.5, (3 / 5) ** 0.5]}.get(values.get("schedule"))
    rates = rates or [(1 + torch.cos(torch.tensor(torch.pi * k / 5)).item()) / 2 for k in range(5)]
    for factor in rates:
        with torch.autocast("cpu", torch.bfloat16, enabled="amp" in values):
            loss = task.loss(model, next(stream))
        loss.backward()
        if values.get("clip", 1.0):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 0.02 * factor
        optimizer.step()
        optimizer.zero_grad()
    close([got], [model.state_dict()])


@pytest.mark.parametrize("micro", [1, 2])
def test_virtual_ddp_is_the_mean_gradient_of_all_workers(tmp_path, micro):
    (got,) = trained(tmp_path, "ddp", steps=4, micro_batches=micro, schedule="constant", warmup=0)
    task = Toy()
    model = task.model(0)
    streams = [task.batches(w, 4, seed=0) for w in range(4)]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.9, 0.98))
    for _ in range(4):
        batches = [next(s) for s in streams for _ in range(micro)]
        torch.stack([task.loss(model, b) for b in batches]).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    close([got], [model.state_dict()])


@pytest.mark.parametrize(("method", "values"), [("dsgd:complete", {}), ("dsgd:complete", {"exact_inside": True})])
def test_clip_is_the_threshold_of_all_reduce(tmp_path, monkeypatch, method, values):
    """Every replica clips by the handle, which knows what all-reduce would do."""
    seen = []
    ours = gossamer.Gossip.clip_grad_norm_

    def recorded(gossip, max_norm):
        seen.append((max_norm, gossip.replicas))
        return ours(gossip, max_norm)

    monkeypatch.setattr(gossamer.Gossip, "clip_grad_norm_", recorded)
    replicas = len(trained(tmp_path, method, steps=3, **values))
    assert seen == [(1.0, replicas)] * 3 * replicas


def test_virtual_ddp_keeps_the_buffers_of_the_first_worker(tmp_path):
    """As torch's DDP, which broadcasts worker 0's before every forward pass."""
    task = Toy(norm=True)
    (got,) = trained(tmp_path / "three", "ddp", task, steps=3)
    assert int(got["1.num_batches_tracked"]) == 3
    (got,) = trained(tmp_path / "one", "ddp", task, steps=1)
    means = []
    for worker in range(4):
        model = task.model(0)
        model(next(task.batches(worker, 4, seed=0))[0])
        means.append(model[1].running_mean)
    assert torch.equal(got["1.running_mean"], means[0])
    assert not any(torch.allclose(got["1.running_mean"], other) for other in means[1:])


def test_workers_of_a_node_keep_their_own_buffers(tmp_path):
    """The model has the mean of its node's workers, each of which continues from its own."""
    task = Toy(norm=True)
    first, second = trained(tmp_path / "run", "dadam:ring", task, steps=2, exact_inside=True, lr=1e-12)
    means = []
    for worker in range(4):
        model, stream = task.model(0), task.batches(worker, 4, seed=0)
        for _ in range(2):
            model(next(stream)[0])
        means.append(model[1].running_mean)
    torch.testing.assert_close(first["1.running_mean"], (means[0] + means[1]) / 2)
    torch.testing.assert_close(second["1.running_mean"], (means[2] + means[3]) / 2)
    assert int(first["1.num_batches_tracked"]) == 2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("exact_inside", [False, True])
@pytest.mark.parametrize("micro", [1, 2])
def test_vectorized_gradients_equal_the_loop(method, exact_inside, micro, tmp_path):
    config, task = config_for(method, exact_inside=exact_inside), Toy()
    strategy = make_strategy(config, task, parse(method), tmp_path, 0, None)
    batches = [[[next(s) for _ in range(micro)] for s in r.streams] for r in strategy.replicas]
    found = []
    for way in (Looped(task, config), Batched(task, config)):
        losses = way(strategy.replicas, batches)
        found.append((losses, [[p.grad.clone() for p in r.model.parameters()] for r in strategy.replicas]))
        for r in strategy.replicas:
            r.optimizer.zero_grad()
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("exact_inside", [False, True])
def test_attention_is_vectorized_without_a_loop(exact_inside, tmp_path):
    """vmap warns where it loops over an operation, as it does for torch's fused attention."""
    task = make_task("lm", {"batch": 2, "context": 8})
    config = config_for("dadam:ring", exact_inside=exact_inside)
    strategy = make_strategy(config, task, parse(config.method), tmp_path, 0, None)
    batches = [[[next(s)] for s in r.streams] for r in strategy.replicas]
    found = [way(strategy.replicas, batches) for way in (Looped(task, config), Batched(task, config))]
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_batches_of_unequal_shapes_are_looped(tmp_path):
    class Uneven(Toy):
        def batches(self, worker, workers, *, seed):
            return Toy(batch=4 + worker % 2).batches(worker, workers, seed=seed)

    looped = trained(tmp_path / "a", "dadam:ring", Uneven(), batched="off")
    assert same(trained(tmp_path / "b", "dadam:ring", Uneven(), batched="on"), looped)


def test_the_choice_restores_all_state_and_avoids_running_statistics(tmp_path):
    config = config_for("dadam:ring", batched="auto")
    for task in (Toy(), Toy(norm=True)):
        strategy = make_strategy(config, task, parse(config.method), tmp_path, 0, None)
        before = [r.state_dict() for r in strategy.replicas]
        _, name = choose(task, config, strategy.replicas)
        assert name in (("off",) if task.norm else ("on", "off"))
        for one, other in zip(before, [r.state_dict() for r in strategy.replicas], strict=True):
            assert one["streams"] == other["streams"]
            assert all(torch.equal(a, b) for a, b in zip(one["random"], other["random"], strict=True))
        assert all(p.grad is None for r in strategy.replicas for p in r.model.parameters())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "values", [{}, {"exact_inside": True, "ema": 0.9, "batched": "on"}, {"exact_inside": True}, {"staleness": 1}]
)
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, method, values):
    batched = bool(values.get("batched"))
    task = Toy(dropout=0.0 if batched else 0.3, norm=not batched)
    whole = trained(tmp_path / "whole", method, task, **values)
    config = config_for(method, checkpoint_every=3, **values)
    half = tmp_path / "half"
    stopped = run(config, task, parse(method), half, stop=_After(3))
    assert stopped.stopped
    assert files.steps_in(half / "checkpoints") == [3]
    assert same(trained(half, method, task, resume=True, **values), whole)
    rows, uncut = (
        [r for line in (run_folder / "metrics-00000.jsonl").read_text().splitlines() if "lr" in (r := json.loads(line))]
        for run_folder in (half, tmp_path / "whole")
    )
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6]
    assert [r["bytes"] for r in rows] == [r["bytes"] for r in uncut]


def test_evaluations_and_checkpoints_do_not_change_training(tmp_path):
    task = Toy(dropout=0.3)
    quiet = trained(tmp_path / "a", "dadam:ring", task)
    busy = trained(tmp_path / "b", "dadam:ring", task, eval_every=1, checkpoint_every=1)
    assert same(quiet, busy)


def test_the_newest_checkpoints_are_kept(tmp_path):
    trained(tmp_path, "dadam:ring", checkpoint_every=2, keep_last=2)
    assert files.steps_in(tmp_path / "checkpoints") == [4, 6]


def test_a_loss_that_is_not_finite_is_named(tmp_path):
    with pytest.raises(Diverged, match=r"after step .* at learning rate 1e[+]30; lower --lr"):
        trained(tmp_path, "dsgd:ring", lr=1e30, clip=0.0, schedule="constant", warmup=0)


def test_the_peer_package_is_not_trained_here(tmp_path):
    with pytest.raises(InputError, match="not with decent-dp"):
        trained(tmp_path, "decent-dp:aer")


def test_the_folder_says_what_was_run(tmp_path):
    config = config_for("accumadam:ring", options={"size": 1})
    prepare(tmp_path / "run", config, parse(config.method), Toy(), {"clock": {"kind": "measured"}})
    again, content = read_config(tmp_path / "run")
    assert again == config
    assert content["lr"] == 0.02
    assert content["parameters"] == 6 * 8 + 8 + 8 * 2 + 2
    with pytest.raises(Exception, match="already holds a run; resume it with --resume"):
        prepare(tmp_path / "run", config, parse(config.method), Toy(), {})


def test_simulated_time_and_bytes(tmp_path):
    config = config_for("ddp", eval_every=3)
    seen = []
    progress = run(config, Toy(), parse("ddp"), tmp_path, clock=lambda k: 0.5 * k, watch=seen.append)
    assert isinstance(progress, Progress)
    assert progress.seconds == 3.0
    assert progress.bytes == pytest.approx(6 * 2 * 3 / 4 * 4 * 74)
    assert [r["step"] for r in seen if "averaged" in r] == [3, 6]
    assert progress.units == 6 * 4 * 4


class _After:
    """Stop after `step` steps."""

    def __init__(self, step):
        from gossamer.recipes.graceful_stop import StopHere

        self.step, self.meeting, self.done = step, StopHere().meeting, StopHere().done

    def __call__(self, step):
        return step >= self.step
