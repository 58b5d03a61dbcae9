"""Everything a DDP user relies on, on real workers: equal to the dense mathematics, step by step."""

import shutil
import time

import pytest
import torch
from dense_reference import DenseCluster
from torch import nn
from torch.utils.checkpoint import checkpoint
from workers import assert_close, batch, loss_of, mlp, real, seeded, vector

STEPS = 6


def compare(pools, scenario, *, per_node=(3,), pair=None, **kwargs):
    """The scenario on real workers against the dense reference (`pair`: arguments that differ there)."""
    ours = pools(*per_node).run(real, scenario, **kwargs)
    theirs = DenseCluster(per_node).run(scenario, **{**kwargs, **(pair or {})})
    assert_close(ours, theirs)
    return ours


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


# Scenarios: scenario(rank, decentralize, ...) -> a record of vectors.


def accumulation(rank, decentralize):
    model = seeded(0, mlp)
    optimizer = sgd(model)
    seen = []
    with decentralize(model, optimizer):
        for step in range(3 * STEPS):
            (loss_of(model, rank, step) / 3).backward()
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
                seen.append(vector(model))
    return seen


def clipping(rank, decentralize):
    model = seeded(0, mlp)
    optimizer = sgd(model)
    seen = []
    with decentralize(model, optimizer, topology="ring"):
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            seen += [vector(model), norm.double()]
    return seen


def overflow(rank, decentralize, fused, where):
    """A gradient scaler whose gradients overflow on the (worker, step) pairs of `where`, and only there."""
    model = seeded(0, mlp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    seen = []
    with decentralize(model, optimizer, topology="ring") as gossip:
        for step in range(STEPS + 3):
            loss = loss_of(model, rank, step)
            if (rank, step) in where:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append(vector(model))
        with gossip.averaged():
            seen.append(vector(model))
        seen.append(vector(model))
    return seen


def scheduler(rank, decentralize):
    model = seeded(0, mlp)
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 3),
        ],
        [3],
    )
    seen = []
    with decentralize(model, optimizer):
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            seen += [vector(model), torch.tensor(optimizer.param_groups[0]["lr"])]
    return seen


def groups(rank, decentralize):
    model = seeded(0, mlp)
    biases = [p for p in model.parameters() if p.ndim == 1]
    weights = [p for p in model.parameters() if p.ndim > 1]
    optimizer = torch.optim.AdamW(
        [{"params": biases, "weight_decay": 0.0, "lr": 0.05}, {"params": weights, "weight_decay": 0.3}], lr=0.02
    )
    seen = []
    with decentralize(model, optimizer):
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(vector(model))
    return seen


def two_optimizers(rank, decentralize, skips=(), topology="ring", steps=STEPS):
    """`skips`: (worker, lane, step) that do not happen."""
    model = seeded(0, mlp)
    lanes = [sgd(model[0]), torch.optim.Adam(model[2].parameters(), lr=0.02)]
    seen = []
    with decentralize(model, lanes, topology=topology) as gossip:
        for step in range(steps):
            loss_of(model, rank, step).backward()
            for lane, optimizer in enumerate(lanes):
                if (rank, lane, step) not in skips:
                    optimizer.step()
            model.zero_grad()
            seen.append(vector(model))
        with gossip.averaged():
            seen.append(vector(model))
        rounds = torch.tensor([float(lane.k) for lane in gossip.lanes])
    return [*seen, rounds]


def closure(rank, decentralize, passed):
    model = seeded(0, mlp)
    optimizer = sgd(model)
    seen = []

    with decentralize(model, optimizer):
        for step in range(STEPS):

            def evaluate(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, rank, step)
                loss.backward()
                return loss

            if passed == "positional":
                loss = optimizer.step(evaluate)
            elif passed == "keyword":
                loss = optimizer.step(closure=evaluate)
            else:
                loss = evaluate()
                optimizer.step()
            seen += [vector(model), loss.detach().double()]
    return seen


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(torch.tanh(self.embed(x)))


def tied(rank, decentralize):
    model = seeded(0, Tied)
    optimizer = sgd(model)
    seen = []
    with decentralize(model, optimizer):
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(50 * rank + step)
            tokens = torch.randint(7, (9,), generator=generator)
            nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert model.head.weight is model.embed.weight
            seen.append(vector(model))
    return seen


def frozen(rank, decentralize):
    """The frozen layer differs at the start: it is taken from worker 0 and then left alone."""
    model = seeded(rank, lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), mlp()))
    model[0].to(memory_format=torch.channels_last).requires_grad_(False)
    optimizer = sgd(model)
    seen = []
    with decentralize(model, optimizer):
        for step in range(STEPS):
            loss_of(model[2], rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(vector(model))
    return seen


def unused(rank, decentralize):
    """Worker `step % 3` does not use the first branch in that step."""
    model = seeded(0, lambda: nn.ModuleList([mlp(), mlp()]))
    optimizer = sgd(model)
    seen = []
    with decentralize(model, optimizer):
        for step in range(STEPS):
            loss = loss_of(model[1], rank, step)
            if rank != step % 3:
                loss = loss + loss_of(model[0], rank, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(vector(model))
    return seen


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 8).to(torch.bfloat16)
        self.c = nn.Linear(8, 3).double()
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("empty", torch.empty(0))

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)).bfloat16())).double()).float()


def dtypes(rank, decentralize):
    model = seeded(rank, Mixed)
    optimizer = sgd(model)
    seen = []
    with decentralize(model, optimizer, topology="ring"):
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(
                torch.cat([p.detach().double().flatten() for p in (*model.a.parameters(), *model.c.parameters())])
            )
            seen.append(torch.cat([p.detach().float().flatten() for p in model.b.parameters()]).bfloat16())
    return seen


def conv():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def image_loss(model, rank, step, memory_format=torch.contiguous_format):
    generator = torch.Generator().manual_seed(77 * rank + step)
    images = torch.randn(4, 2, 6, 6, generator=generator).to(memory_format=memory_format)
    return nn.functional.mse_loss(model(images), torch.randn(4, 3, generator=generator))


def channels_last(rank, decentralize):
    model = seeded(0, conv).to(memory_format=torch.channels_last)
    optimizer = sgd(model)
    seen = []
    with decentralize(model, optimizer):
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        for step in range(STEPS):
            image_loss(model, rank, step, torch.channels_last).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(vector(model))
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    return seen


def compiled(rank, decentralize, backend):
    model = seeded(0, mlp)
    run = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    optimizer = sgd(model)
    seen = []
    with decentralize(model, optimizer):
        for step in range(STEPS):
            x, y = batch(rank, step)
            nn.functional.mse_loss(run(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(vector(model))
    torch._dynamo.reset()
    return seen


def compiled_first(rank, decentralize, backend):
    """The compiled module itself is what the user passes."""
    model = seeded(0, mlp)
    model = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    optimizer = sgd(model)
    seen = []
    with decentralize(model, optimizer):
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(vector(model))
    torch._dynamo.reset()
    return seen


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.a, self.b = mlp(), nn.Linear(3, 3)
        self.reentrant = reentrant

    def forward(self, x):
        hidden = x.detach().requires_grad_() if self.reentrant else x
        if self.reentrant is None:
            return self.b(self.a(x))
        return self.b(checkpoint(self.a, hidden, use_reentrant=self.reentrant))


def checkpointing(rank, decentralize, reentrant):
    model = seeded(0, lambda: Checkpointed(reentrant))
    optimizer = sgd(model)
    seen = []
    with decentralize(model, optimizer):
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(vector(model))
    return seen


def autocast(rank, decentralize):
    model = seeded(0, mlp)
    optimizer = sgd(model)
    seen = []
    with decentralize(model, optimizer):
        for step in range(STEPS):
            x, y = batch(rank, step)
            with torch.autocast("cpu", torch.bfloat16):
                out = model(x)
                assert out.dtype == torch.bfloat16
            nn.functional.mse_loss(out.float(), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(vector(model))
    return seen


def two_losses(rank, decentralize):
    model = seeded(0, mlp)
    optimizer = sgd(model)
    seen = []
    with decentralize(model, optimizer):
        for step in range(STEPS):
            hidden = model(batch(rank, step)[0])
            hidden.square().mean().backward(retain_graph=True)
            (hidden - batch(rank, step)[1]).abs().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(vector(model))
    return seen


def evaluation_between(rank, decentralize):
    model = seeded(0, mlp)
    optimizer = sgd(model)
    seen = []
    with decentralize(model, optimizer) as gossip:
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen.append(loss_of(model.eval(), 9, 9).double())
            model.train()
            if step % 2:
                before = vector(model)
                with gossip.averaged() as mean:
                    assert mean is model
                    seen += [vector(model), loss_of(model, 9, 9).detach().double()]
                assert torch.equal(vector(model), before)
                seen.append(torch.tensor(gossip.consensus_distance(), dtype=torch.float64))
    return seen


def batch_sizes(rank, decentralize):
    model = seeded(0, mlp)
    optimizer = sgd(model)
    seen = []
    with decentralize(model, optimizer):
        for step in range(STEPS):
            loss_of(model, rank, step, size=1 + 4 * rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(vector(model))
    return seen


def uneven_lengths(rank, decentralize, lengths, algorithm="awc", every=1, average_every=0, topology="ring"):
    """Each worker has its own number of batches; afterwards they average, train on, and close."""
    model = seeded(0, mlp)
    optimizer = sgd(model)
    seen = []
    options = {"topology": topology, "algorithm": algorithm, "every": every, "average_every": average_every}
    with decentralize(model, optimizer, gradients="worker", **options) as gossip:
        for epoch in range(2):
            for step in range(lengths[(rank + epoch) % len(lengths)]):
                loss_of(model, rank, step + 100 * epoch).backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(vector(model))
            with gossip.averaged():
                seen.append(vector(model))
            seen.append(vector(model))
            seen.append(torch.tensor(float(gossip.lanes[0].k)))
    seen.append(vector(model))
    return seen


def local_parameters(rank, decentralize):
    """Only the first layer is mixed; the others stay local."""
    model = seeded(0, mlp)
    optimizer = sgd(model)
    seen = []
    with decentralize(model, optimizer, parameters=lambda name, _: name.startswith("0.")):
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(vector(model))
    return seen


@pytest.mark.parametrize(
    "scenario",
    [accumulation, clipping, scheduler, groups, tied, frozen, unused, channels_last, autocast, two_losses,
     evaluation_between, batch_sizes, local_parameters],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_equals_the_dense_reference(pools, scenario):
    records = compare(pools, scenario)
    assert all(torch.isfinite(x).all() for record in records for x in record)
    assert not torch.equal(records[0][0], records[1][0])  # they train on different data


def test_mixed_dtypes(pools):
    ours = pools(3).run(real, dtypes)
    theirs = DenseCluster((3,)).run(dtypes)
    assert_close([r[::2] for r in ours], [r[::2] for r in theirs], rtol=2e-2, atol=2e-3)  # bf16 in the middle
    assert_close([r[1::2] for r in ours], [r[1::2] for r in theirs], rtol=2e-2, atol=2e-3)
    assert_close([r[:1] for r in ours], [r[:1] for r in theirs])  # before rounding can feed back


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("where", [[(1, 2)], [(1, 2), (1, 3), (1, 4)], [(0, 1), (1, 2), (2, 2), (2, 3)]])
def test_gradient_overflow_on_one_worker(pools, fused, where):
    compare(pools, overflow, fused=fused, where=where)


@pytest.mark.parametrize(
    "skips",
    [
        (),
        [(1, 0, 2)],
        [(1, 0, 2), (1, 0, 3), (1, 0, 4)],  # three in a row, of one optimizer only
        [(1, 0, s) for s in range(1, 8)],
        [(1, 0, 1), (1, 0, 2), (1, 0, 3), (0, 1, 2), (0, 1, 3), (2, 1, 4), (2, 0, 4)],
    ],
)
def test_two_optimizers_one_of_them_skipping(pools, skips):
    ours = pools(3).run(real, two_optimizers, skips=skips, steps=10)
    rounds = [r[-1].tolist() for r in ours]
    assert rounds[0] == rounds[1] == rounds[2]
    assert torch.equal(ours[0][-2], ours[1][-2])  # the averaged model
    if not skips:
        assert_close(ours, DenseCluster((3,)).run(two_optimizers, steps=10))


@pytest.mark.parametrize("passed", ["positional", "keyword"])
def test_closure(pools, passed):
    compare(pools, closure, passed=passed, pair={"passed": None})


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(pools, reentrant):
    compare(pools, checkpointing, per_node=(2,), reentrant=reentrant, pair={"reentrant": None})


@pytest.mark.parametrize("scenario", [compiled, compiled_first])
def test_compile_without_graph_breaks(pools, scenario):
    compare(pools, scenario, per_node=(2,), backend="aot_eager", pair={"backend": None})


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compile_with_inductor(pools):
    ours = pools(2).run(real, compiled, backend="inductor", timeout=300)
    assert_close(ours, DenseCluster((2,)).run(compiled, backend=None))


@pytest.mark.parametrize("algorithm", ["awc", "atc"])
@pytest.mark.parametrize("every", [1, 2])
def test_uneven_numbers_of_batches(pools, algorithm, every):
    ours = compare(pools, uneven_lengths, lengths=[3, 8, 5], algorithm=algorithm, every=every, average_every=4 * every)
    assert torch.equal(ours[0][-4], ours[1][-4])  # the averaged model is one and the same everywhere


def test_uneven_numbers_of_batches_between_nodes(pools):
    compare(pools, uneven_lengths, per_node=(2, 2), lengths=[3, 7, 0, 5], topology="aer")


# BatchNorm: what averaged() does to buffers.


def batch_norm(rank, decentralize, buffers="average", extra=0):
    model = seeded(0, conv)
    optimizer = sgd(model)
    with decentralize(model, optimizer, buffers=buffers) as gossip:
        for step in range(STEPS + extra * rank):
            image_loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        own = {k: v.clone() for k, v in model.named_buffers()}
        with gossip.averaged():
            mean = {k: v.clone() for k, v in model.named_buffers()}
        after = {k: v.clone() for k, v in model.named_buffers()}
    return own, mean, after


def test_batch_norm_buffers_are_averaged_and_counts_take_the_maximum(pools):
    results = pools(3).run(real, batch_norm, extra=2)
    own = [r[0] for r in results]
    assert [int(o["1.num_batches_tracked"]) for o in own] == [STEPS, STEPS + 2, STEPS + 4]
    for _, mean, _ in results:
        for name in ("1.running_mean", "1.running_var"):
            expected = torch.stack([o[name].double() for o in own]).mean(0).float()
            torch.testing.assert_close(mean[name], expected, rtol=1e-6, atol=1e-7)
        assert int(mean["1.num_batches_tracked"]) == STEPS + 4
        assert mean["1.num_batches_tracked"].dtype == torch.int64
    for mine, _, after in results:
        assert all(torch.equal(mine[k], after[k]) for k in mine)


def test_local_buffers_are_left_alone(pools):
    for own, mean, _ in pools(3).run(real, batch_norm, buffers="local"):
        assert all(torch.equal(own[k], mean[k]) for k in own)


# A long evaluation on one worker: the others wait for it, no worker gives up, the result is the same.


def long_evaluation(rank, decentralize, seconds):
    model = seeded(0, mlp)
    optimizer = sgd(model)
    seen = []
    with decentralize(model, optimizer, topology="ring"):
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(vector(model))
            if rank == 0 and step == 2:
                time.sleep(seconds)
    return seen


def test_long_evaluation_on_one_worker(pools):
    compare(pools, long_evaluation, seconds=1.5, pair={"seconds": 0})
