"""Gossip in Hugging Face Accelerate, on real workers with the real library."""

import atexit
import os
import time
from pathlib import Path

import pytest
import torch
from hugging_face import fresh_accelerate
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from workers import mlp, seeded, vector

import gossamer
from gossamer.lab import WorkerPool
from gossamer.lab.workers import WorkerFailed


def data(samples=64):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, torch.stack([x.sum(1), x[:, 0] * x[:, 1], x[:, 2].sin()], 1))


def objects(optimizer="sgd", lr=0.05, batch_size=4):
    """What a user's script makes: model, optimizer, loader and scheduler."""
    model = seeded(0, mlp)
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "gossip-adamw": gossamer.GossipAdamW}
    own = kinds[optimizer](model.parameters(), lr=lr)
    loader = DataLoader(data(), batch_size=batch_size, shuffle=True, generator=torch.Generator().manual_seed(3))
    return model, own, loader, torch.optim.lr_scheduler.LinearLR(own, 1.0, 0.1, total_iters=64)


def accelerator_of(settings, **kwargs):
    from accelerate import Accelerator

    from gossamer.integrations.accelerate import GossipAccelerator

    return Accelerator(cpu=True, **kwargs) if settings is None else GossipAccelerator(cpu=True, **settings, **kwargs)


def train(accelerator, model, optimizer, loader, scheduler, epochs=1, clip=None, skip=0):
    """The loop of Accelerate's documentation; the losses of this worker, one per batch."""
    losses = []
    for _ in range(epochs):
        for x, y in accelerator.skip_first_batches(loader, skip):
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def run(rank, *args, **kwargs):
    with fresh_accelerate():
        return run_here(*args, **kwargs)


def run_here(settings, epochs=1, optimizer="sgd", lr=0.05, **kwargs):
    accelerator = accelerator_of(settings, **kwargs)
    prepared = accelerator.prepare(*objects(optimizer, lr))
    losses = train(accelerator, *prepared, epochs=epochs)
    model = accelerator.unwrap_model(prepared[0])
    wrapped = type(prepared[0]).__name__
    own, rate = vector(model), prepared[1].param_groups[0]["lr"]
    if settings is not None:
        with accelerator.averaged():
            mean = vector(model)
        accelerator.end_training()
        assert torch.equal(vector(model), mean), "the model is the mean after the end"
    return losses, own, rate, wrapped


ATC = {"algorithm": "atc", "topology": "complete"}


@pytest.mark.parametrize("kwargs", [{}, {"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}])
def test_equals_accelerates_own_ddp(pools, kwargs):
    theirs = pools(4).run(run, None, epochs=2, **kwargs)
    ours = pools(4).run(run, ATC, epochs=2, **kwargs)
    for (losses, own, rate, wrapped), (ddp_losses, ddp, ddp_rate, ddp_wrapped) in zip(ours, theirs, strict=True):
        assert (wrapped, ddp_wrapped) == ("Sequential", "DistributedDataParallel")
        assert rate == ddp_rate
        close = {"rtol": 1e-2, "atol": 1e-2} if kwargs.get("mixed_precision") else {"rtol": 2e-5, "atol": 2e-6}
        torch.testing.assert_close(own, ddp, **close)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(ddp_losses), **close)


def test_the_loss_falls(pools):
    results = pools(2, 2).run(
        run, {"topology": "aer", "gradients": "worker"}, epochs=15, optimizer="gossip-adamw", lr=0.2
    )
    losses = torch.tensor([losses for losses, *_ in results]).mean(0)
    assert losses[-4:].mean() < 0.3 * losses[:4].mean()
    assert not torch.equal(results[0][1], results[1][1]), "workers hold parameters of their own"


def clipped(rank, gradients):
    """The norm of the first gradient, and those of the first and the fourth after clipping."""
    with fresh_accelerate():
        accelerator = accelerator_of({"gradients": gradients})
        model, *_ = accelerator.prepare(*objects())
        left = []
        for step in range(4):
            source = torch.Generator().manual_seed(step)  # alike in all workers; the gradients differ from step to step
            for p in model.parameters():
                p.grad = 100 * torch.randn(p.shape, generator=source)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            left.append(float(torch.stack([p.grad.norm() for p in model.parameters()]).norm()))
        return float(norm), left[0], left[3]


@pytest.mark.parametrize(("gradients", "replicas"), [("worker", 4), ("node", 2), ("auto", 2)])
def test_clips_by_the_handle_at_the_threshold_of_all_reduce(pools, gradients, replicas):
    """In the first step nothing is known of the noise; later it fills the gradient, and all-reduce would average it."""
    for norm, first, second in pools(2, 2).run(clipped, gradients):
        assert norm > 10
        assert first == pytest.approx(0.5, rel=1e-3)
        assert 0.5 * 1.01 < second <= 0.5 * replicas**0.5 * 1.001


def accumulated(rank):
    """Gradients of two batches, of which only the last is averaged inside the node, and all of them by hand."""
    with fresh_accelerate():
        accelerator = accelerator_of({"gradients": "node"}, gradient_accumulation_steps=2)
        model, *_ = accelerator.prepare(*objects())
        for part in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(2, 6) * (1 + rank + part)).square().sum())
                if part == 0:
                    local = torch.cat([p.grad.flatten() for p in model.parameters()])
        return local, torch.cat([p.grad.flatten() for p in model.parameters()])


def test_accumulation_averages_inside_the_node_once(pools):
    results = pools(2, 2).run(accumulated)
    assert not torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][1], results[2][1])


def saved(rank, folder, settings, stop):
    """Train `stop` batches, save, go on to the end; the exact parameters at the end, and the mean when it was saved."""
    with fresh_accelerate():
        accelerator = accelerator_of(settings)
        model, optimizer, loader, scheduler = accelerator.prepare(*objects("adamw"))
        torch.manual_seed(rank)
        for at, (x, y) in enumerate(loader):
            if at == stop:
                accelerator.save_state(folder)
                accelerator.save_state(folder)  # a folder may be written again
                accelerator.save_model(model, f"{folder}/export")
                with accelerator.averaged():
                    mean = {k: v.clone() for k, v in model.state_dict().items()}
            one_step(accelerator, model, optimizer, scheduler, x, y)
        return mean, vector(model), torch.rand(1), scheduler.get_last_lr()


def one_step(accelerator, model, optimizer, scheduler, x, y):
    noisy = x + 0.1 * torch.randn(x.shape)  # the state of the random generators matters
    accelerator.backward(nn.functional.mse_loss(model(noisy), y))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def resumed(rank, folder, settings, stop):
    with fresh_accelerate():
        accelerator = accelerator_of(settings)
        model, optimizer, loader, scheduler = accelerator.prepare(*objects("adamw"))
        torch.manual_seed(77 + rank)
        batches = iter(accelerator.skip_first_batches(loader, stop))
        first = next(batches)
        accelerator.load_state(folder)
        loaded = vector(model)
        for x, y in [first, *batches]:
            one_step(accelerator, model, optimizer, scheduler, x, y)
        return loaded, vector(model), torch.rand(1), scheduler.get_last_lr()


SETTINGS = [{"topology": "ring"}, {"algorithm": gossamer.AWC(every=2), "wire": "bf16"}]


@pytest.mark.parametrize("settings", SETTINGS, ids=["awc", "every-2-bf16"])
def test_resumes_every_worker_exactly(pools, tmp_path, settings):
    folder = str(tmp_path / "state")
    whole = pools(4).run(saved, folder, settings, 2)
    again = pools(4).run(resumed, folder, settings, 2)
    assert not torch.equal(again[0][0], again[1][0]), "every worker has loaded its own parameters"
    for (_, *expected), (_, *got) in zip(whole, again, strict=True):
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])
        assert got[2] == expected[2]


def test_the_plain_files_hold_the_mean(pools, tmp_path):
    folder = tmp_path / "state"
    (mean, *_), *_ = pools(2).run(saved, str(folder), {}, 2)
    for file in (folder / "model.safetensors", folder / "export" / "model.safetensors"):
        plain = load_file(file)
        assert plain.keys() == mean.keys()
        assert all(torch.equal(plain[name], mean[name]) for name in mean)


def saves_tied_weights(rank, folder):
    with fresh_accelerate():
        accelerator = accelerator_of({})
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        model[1].weight = model[0].weight
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        model(torch.ones(2, 6) + rank).square().sum().backward()
        optimizer.step()
        state = accelerator.get_state_dict(model)
        own = {p.data_ptr() for p in model.parameters()}
        copied = own.isdisjoint(value.data_ptr() for value in state.values())
        accelerator.save_model(model, folder)
        accelerator.end_training()
        return copied, state["0.weight"].data_ptr() == state["1.weight"].data_ptr(), model.state_dict()


def test_tied_weights_are_saved_once(pools, tmp_path):
    for copied, tied, state in pools(2).run(saves_tied_weights, str(tmp_path)):
        assert copied
        assert tied
        plain = load_file(tmp_path / "model.safetensors")
        assert len(plain) == 3
        assert all(torch.equal(value, state[name]) for name, value in plain.items())


def loaded(rank, folder, settings):
    with fresh_accelerate():
        return loaded_here(folder, settings)


def loaded_here(folder, settings):
    accelerator = accelerator_of(settings)
    model, *others = accelerator.prepare(*objects("adamw"))
    accelerator.load_state(folder)
    values = vector(model)
    train(accelerator, model, *others)
    return values, vector(model)


@pytest.mark.parametrize("settings", [{}, None], ids=["gossip", "ddp"])
def test_two_workers_load_what_four_have_saved(pools, tmp_path, settings):
    folder = str(tmp_path / "state")
    (mean, *_), *_ = pools(4).run(saved, folder, {"topology": "ring"}, 2)
    expected = torch.cat([value.double().flatten() for value in mean.values()])
    (first, trained), (second, _) = pools(2).run(loaded, folder, settings)
    assert torch.equal(first, second) == (settings is None)
    torch.testing.assert_close((first + second) / 2, expected, rtol=1e-6, atol=1e-7)
    assert not torch.equal(trained, first)


def ddp_saves(rank, folder):
    with fresh_accelerate():
        return ddp_saves_here(folder)


def ddp_saves_here(folder):
    accelerator = accelerator_of(None)
    prepared = accelerator.prepare(*objects("adamw"))
    train(accelerator, *prepared)
    accelerator.save_state(folder)
    return vector(prepared[0])


def gossip_loads(rank, folder):
    with fresh_accelerate():
        accelerator = accelerator_of({})
        model, *others = accelerator.prepare(*objects("adamw"))
        train(accelerator, model, *others)
        accelerator.load_state(folder)
        loaded = vector(model)
        train(accelerator, model, *others)
        return loaded, vector(model)


def test_loads_what_ddp_has_saved(pools, tmp_path):
    saved = pools(2).run(ddp_saves, str(tmp_path / "state"))
    for expected, (loaded, trained) in zip(saved, pools(2).run(gossip_loads, str(tmp_path / "state")), strict=True):
        assert torch.equal(loaded, expected)
        assert not torch.equal(trained, loaded)


def fails(rank, noticed):
    """Worker 1 raises in its third step, and its process ends as Python ends it, when worker 0 has noticed."""
    accelerator = accelerator_of({})
    model, optimizer, loader, scheduler = accelerator.prepare(*objects())
    try:
        for step, (x, y) in enumerate(loader):
            if rank == 1 and step == 2:
                atexit._run_exitfuncs()
                while not Path(noticed).exists():
                    time.sleep(0.01)
                os._exit(1)
            one_step(accelerator, model, optimizer, scheduler, x, y)
    except gossamer.PeerError:
        Path(noticed).touch()
        raise


def test_a_failing_worker_does_not_hang_the_others(tmp_path):
    with (
        WorkerPool(2, timeout=300, grace=60) as pool,
        pytest.raises(WorkerFailed, match="PeerError: worker 0 lost worker 1"),
    ):
        pool.run(fails, str(tmp_path / "noticed"))


def several(rank):
    """A frozen teacher, a model with two optimizers, and objects that are prepared again or too late."""
    told = []
    with fresh_accelerate():
        accelerator = accelerator_of({})
        teacher, model = seeded(1, mlp), seeded(0, mlp)
        optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (model[0], model[2])]
        teacher, model, *optimizers = accelerator.prepare(teacher, model, *optimizers)
        x = torch.ones(2, 6) * (rank + 1)
        nn.functional.mse_loss(model(x), teacher(x)).backward()
        for optimizer in optimizers:
            optimizer.step()
        told.append(accelerator.gossip.stats()["steps"])
        told.append(torch.equal(vector(teacher), vector(seeded(1, mlp))))
        told.append(accelerator.prepare(model) is model)  # as with DDP, a second call changes nothing
        told.append(error_of(accelerator.prepare, torch.optim.SGD(model.parameters(), 0.1)))
        told.append(error_of(accelerator_of({}).prepare, model, *optimizers))
        accelerator.free_memory()
        told.append(accelerator.gossip is None)
    return told


def refused(rank):
    with fresh_accelerate():
        models = seeded(0, mlp), seeded(1, mlp)
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in models]
        accelerator = accelerator_of({})
        many = error_of(accelerator.prepare, *models, *optimizers)
        wrapped = error_of(accelerator_of({}).prepare, nn.parallel.DistributedDataParallel(models[0]), optimizers[0])
        accelerator.wait_for_everyone()
        return many, wrapped


def error_of(call, *args):
    try:
        call(*args)
    except gossamer.InputError as error:
        return str(error)
    return None


def test_several_models_and_optimizers(pools):
    for steps, frozen, same, late, twice, freed in pools(2).run(several):
        assert (steps, frozen, same, freed) == (1, True, True, True)
        assert "prepared after gossip had begun" in late
        assert "earlier decentralize() call that is still open" in twice


def test_refuses_two_trained_models_and_a_model_in_ddp(pools):
    for many, wrapped in pools(2).run(refused):
        assert "trains one model, but the optimizers hold parameters of 2" in many
        assert "already wrapped in DistributedDataParallel; pass the bare module" in wrapped


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data().tensors[0])


def dispatched(rank, algorithm, loader):
    with fresh_accelerate():
        accelerator = accelerator_of({"algorithm": algorithm})
        model = seeded(0, mlp)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        if loader == "dispatched":
            return error_of(accelerator.prepare, DataLoader(Stream(), batch_size=4))
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=4))
        for x, y in loader:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        with accelerator.averaged():
            mean = vector(model)
        steps = accelerator.gossip.stats()["steps"]
        accelerator.end_training()
        return steps, mean, vector(model)


def test_asynchronous_algorithms_need_loaders_of_their_own(pools):
    for said in pools(2).run(dispatched, "ad-psgd", "dispatched"):
        assert "worker 0 reads all batches" in said
        assert "dispatch_batches=False" in said
    for steps, mean, model in pools(2).run(dispatched, "ad-psgd", "own"):
        assert steps == 8
        torch.testing.assert_close(model, mean)


def test_warns_of_batches_that_worker_0_sends(pools):
    with pytest.raises(WorkerFailed, match=r"GossamerWarning.*in every step all workers wait for worker 0"):
        pools(2).run(strict_dispatch)


def strict_dispatch(rank):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error", gossamer.GossamerWarning)
        return dispatched(rank, "awc", "dispatched")


def sharded(rank):
    """Accelerate chooses FSDP only on accelerators, so its choice is set by hand."""
    from accelerate import DistributedType

    from gossamer.integrations.accelerate import GossipAccelerator

    with fresh_accelerate():
        accelerator = accelerator_of(None)
        accelerator.state.distributed_type = DistributedType.FSDP
        return error_of(GossipAccelerator.of, accelerator, {})


def test_refuses_sharded_configurations(pools):
    for said in pools(2).run(sharded):
        assert "gossip replaces DDP, but this Accelerator is configured for FSDP" in said


def uneven(rank):
    """One worker has a batch more than the other, with Accelerate's context for that."""
    with fresh_accelerate():
        accelerator = accelerator_of({})
        model = seeded(0, mlp)
        loader = DataLoader(TensorDataset(*(t[:12] for t in data().tensors)), batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), loader)
        steps = 0
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for x, y in loader:
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
        accelerator.end_training()
        return steps, loader.batch_sampler.even_batches, vector(model)


def test_uneven_inputs_do_not_hang(pools):
    (first, even, a), (second, _, b) = pools(2).run(uneven)
    assert (first, second, even) == (2, 1, True)
    assert torch.equal(a, b)
