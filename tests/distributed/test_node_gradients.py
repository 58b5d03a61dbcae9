"""`gradients="node"`: what users of DDP do works as with the model wrapped in DDP, and the module stays what it was."""

import copy
import io
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from workers import batch, decentralize, error_of, loss_of, mlp, process_group, seeded, vector

import gossamer
from gossamer.engine.node_gradients import PrivateDDP

STEPS = 5


class Heads(nn.Module):
    """Two heads without a common trunk, and a tied weight in one of them."""

    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        self.left[2].weight = self.left[0].weight
        self.right = nn.Linear(6, 3)

    def forward(self, x):
        return self.left(x), self.right(x)


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(10, 6, sparse=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.words((x[:, 0].abs() * 3).long().clamp(max=9)))


def plain(run, step):
    loss_of(run.forward, run.rank, step).backward()
    run.optimizer.step()


def every_backward(run, step):
    for part in range(3):
        loss_of(run.forward, run.rank, 10 * step + part).backward()
    run.optimizer.step()


def accumulated(run, step):
    for part in range(3):
        with run.gossip.no_sync() if part < 2 else nullcontext():
            loss_of(run.forward, run.rank, 10 * step + part).backward()
    run.optimizer.step()


def closure(run, step):
    def evaluate():
        run.optimizer.zero_grad()
        loss = loss_of(run.forward, run.rank, step)
        loss.backward()
        return loss

    run.optimizer.step(evaluate)


def clipped(run, step):
    loss_of(run.forward, run.rank, step).backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    run.optimizer.step()


def scaled(run, step):
    """bfloat16 and a GradScaler; one worker overflows in one step, which its node skips."""
    scaler = run.kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=4.0))
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(run.forward, run.rank, step) * (float("inf") if (run.rank, step) == (1, 2) else 1)
    scaler.scale(loss).backward()
    scaler.unscale_(run.optimizer)
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    scaler.step(run.optimizer)
    scaler.update()


def compiled(run, step):
    forward = run.kept.setdefault("compiled", torch.compile(run.forward, backend="aot_eager"))
    loss_of(forward, run.rank, step).backward()
    run.optimizer.step()


def recomputed(run, step):
    x, y = batch(run.rank, step)
    nn.functional.mse_loss(checkpoint(run.forward, x, use_reentrant=False), y).backward()
    run.optimizer.step()


def both_heads(run, step):
    x, y = batch(run.rank, step)
    left, right = run.forward(x)
    nn.functional.mse_loss(left, y).backward()  # DDP counts the gradients of both backward passes
    nn.functional.mse_loss(right, y).backward()
    run.optimizer.step()


class Run:
    def __init__(self, rank, kind, make):
        self.rank, self.kept = rank, {}
        self.model = self.forward = seeded(rank, make)
        if kind == "ddp":
            self.forward = DistributedDataParallel(self.model, process_group=gossamer.node_group())
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.optimizer = sgd if make is Words else torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.gossip = decentralize(self.forward, self.optimizer, gradients="node")


def trained(rank, kind, make, one_step):
    with process_group():
        run, seen = Run(rank, kind, make), []
        with run.gossip:
            for step in range(STEPS):
                one_step(run, step)
                run.optimizer.zero_grad()
                seen.append(vector(run.model))
        return torch.stack(seen)


@pytest.mark.parametrize(
    ("make", "one_step"),
    [
        (mlp, plain),
        (mlp, every_backward),
        (mlp, accumulated),
        (mlp, closure),
        (mlp, clipped),
        (mlp, scaled),
        (mlp, compiled),
        (mlp, recomputed),
        (Heads, both_heads),
        (Words, plain),
    ],
    ids=lambda f: f.__name__,
)
def test_as_if_wrapped_in_ddp(pools, make, one_step):
    ours = pools(2, 2).run(trained, "node", make, one_step)
    ddp = pools(2, 2).run(trained, "ddp", make, one_step)
    for mine, theirs in zip(ours, ddp, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    assert torch.equal(ours[0], ours[1])  # a node is one replica
    assert not torch.equal(ours[0], ours[2])


def bypassing(rank):
    """The loss uses the layers, and never calls the model."""
    with process_group():
        model = seeded(rank, mlp)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        with decentralize(model, optimizer, gradients="node"):
            for step in range(STEPS):
                x, y = batch(rank, step)
                hidden = torch.tanh(model[0](x))
                nn.functional.mse_loss(nn.functional.linear(hidden, model[2].weight, model[2].bias), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            return vector(model)


def test_calls_that_bypass_the_module_are_averaged_too(pools):
    for mine, theirs in zip(pools(2, 2).run(bypassing), pools(2, 2).run(trained, "ddp", mlp, plain), strict=True):
        torch.testing.assert_close(mine, theirs[-1], rtol=1e-6, atol=1e-7)


def two_optimizers(rank):
    """One optimizer's parameters have gradients in a step, then the other's."""
    with process_group():
        model = seeded(rank, mlp)
        first, second = (torch.optim.SGD(model[at].parameters(), lr=0.1) for at in (0, 2))
        with decentralize(model, [first, second], gradients="node"):
            for step in range(STEPS):
                x, y = batch(rank, step)
                nn.functional.mse_loss(model[2](torch.tanh(model[0](x).detach())), y).backward()
                second.step()
                second.zero_grad()
                model[2].requires_grad_(False)
                loss_of(model, rank, step).backward()
                model[2].requires_grad_(True)
                first.step()
                first.zero_grad()
            return vector(model)


def test_each_optimizer_has_its_own_backward_passes(pools):
    ours = pools(2, 2).run(two_optimizers)
    assert torch.equal(ours[0], ours[1])
    assert torch.equal(ours[2], ours[3])
    assert not torch.equal(ours[0], ours[2])


def copied(rank):
    with process_group():
        model = seeded(rank, mlp)
        kind, hooks = type(model), len(model._forward_pre_hooks) + len(model._forward_hooks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        with decentralize(model, optimizer, gradients="node"):
            assert type(model) is kind
            assert len(model._forward_pre_hooks) + len(model._forward_hooks) <= hooks + 1  # the look at the first batch
            ema = AveragedModel(model)
            for step in range(2):
                loss_of(model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                ema.update_parameters(model)
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            apart = []
            for other in (copy.deepcopy(model), torch.load(file, weights_only=False), ema):
                loss_of(other, rank, 5).backward()  # on one worker's own data: nothing is averaged
                apart.append(torch.cat([p.grad.flatten() for p in other.parameters()]))
            loss_of(model, rank, 5).backward()
            node = torch.cat([p.grad.flatten() for p in model.parameters()])
            optimizer.zero_grad()
        loss_of(model, rank, 5).backward()  # after close()
        return apart, node, torch.cat([p.grad.flatten() for p in model.parameters()])


def test_copies_and_a_closed_handle_train_alone(pools):
    results = pools(2, 2).run(copied)
    for first, second in (results[:2], results[2:]):
        assert torch.equal(first[1], second[1])
        assert not torch.equal(first[2], second[2])
        for at in range(3):
            assert not torch.equal(first[0][at], second[0][at])
        for at in range(2):  # the copies had the model's parameters
            torch.testing.assert_close((first[0][at] + second[0][at]) / 2, first[1])


def choices(rank):
    with process_group():
        chosen = {}
        for asked in ("auto", "worker", "node"):
            model = seeded(rank, mlp)
            optimizer = gossamer.GossipAdam(model.parameters())
            with decentralize(model, optimizer, gradients=asked) as gossip:
                assert gossip.stats()["gradients"] == gossip.gradients
                chosen[asked] = gossip.gradients, optimizer.replicas, gossip.participation().replicas
                with gossip.no_sync():  # nothing to do
                    pass
        return chosen


def test_the_handle_says_what_was_chosen(pools):
    alone, nodes = ((0,), (1,), (2,), (3,)), ((0, 1), (2, 3))
    for chosen in pools(2, 2).run(choices):
        assert chosen == {"auto": ("node", 2, nodes), "worker": ("worker", 4, alone), "node": ("node", 2, nodes)}


def test_one_worker_per_node_is_plain_gossip(pools):
    alone = ((0,), (1,))
    for chosen in pools(1, 1).run(choices):
        assert chosen == dict.fromkeys(("auto", "worker", "node"), ("worker", 2, alone))


def partly_mixed(rank):
    with process_group():
        model = seeded(rank, mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mixed = {"gradients": "node", "topology": "complete", "parameters": lambda name, p: name.startswith("0.")}
        with decentralize(model, optimizer, **mixed):
            for step in range(3):
                loss_of(model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            return vector(model[2])


def test_parameters_that_are_not_mixed_belong_to_the_node(pools):
    a, b, c, d = pools(2, 2).run(partly_mixed)
    assert torch.equal(a, b)
    assert torch.equal(c, d)
    assert not torch.allclose(a, c)


def own_start(rank):
    with process_group():
        model = seeded(rank, mlp)
        before = vector(model)
        with decentralize(model, torch.optim.SGD(model.parameters(), lr=0.1), gradients="node", broadcast=False):
            return before, vector(model)


def test_a_node_starts_from_its_first_worker_without_broadcast(pools):
    results = pools(2, 2).run(own_start)
    assert all(torch.equal(after, results[rank // 2 * 2][0]) for rank, (_, after) in enumerate(results))


def part_of_the_workers(rank):
    with process_group():
        group = dist.new_group([1, 2, 4, 5])
        model = seeded(rank, mlp)
        if rank not in (0, 3):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            gossip = decentralize(model, optimizer, gradients="node", process_group=group)
            for step in range(3):
                loss_of(model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            gossip.close(average=False)
        dist.barrier()
        return vector(model)


def test_nodes_of_a_process_group(pools):
    _, a, b, _, c, d = pools(3, 3).run(part_of_the_workers)
    assert torch.equal(a, b)
    assert torch.equal(c, d)
    assert not torch.equal(a, c)


def overlapped(rank):
    """How many gradients are still to come when each bucket is sent, for three backward passes."""
    with process_group():
        model = seeded(0, lambda: nn.Sequential(*(nn.Linear(600, 600) for _ in range(4))))
        named = dict(model.named_parameters())
        inside = PrivateDDP(model, named, gossamer.node_group(), broadcast=False)
        sent = []

        def count(state, bucket):
            sent.append(len(inside._missing))
            return default_hooks.allreduce_hook(None, bucket)

        inside._ddp.register_comm_hook(None, count)
        sends = []
        for step in range(3):
            x = torch.randn(4, 600, generator=torch.Generator().manual_seed(10 * rank + step))
            local = torch.autograd.grad(model(x).square().mean(), named.values())  # is not averaged
            model(x).square().mean().backward()
            for p, expected in zip(named.values(), local, strict=True):
                dist.all_reduce(expected)
                torch.testing.assert_close(p.grad, expected / 2)
                p.grad = None
            sends.append([*sent])
            sent.clear()
        inside.close()
        return sends


def test_buckets_are_sent_during_the_backward_pass(pools):
    for sends in pools(2).run(overlapped):
        for left in sends[1:]:  # DDP cuts its buckets after the first backward pass
            assert len(left) > 1
            assert left[0] > 0  # gradients are still being computed
            assert left == sorted(left, reverse=True)


def statistics(rank):
    with process_group():
        model = seeded(rank, lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with decentralize(model, optimizer, gradients="node") as gossip:
            loss_of(model, rank, 0).backward()
            optimizer.step()
            own = model[0].running_mean.clone()
            with gossip.averaged():
                return own, model[0].running_mean.clone()


def test_batch_norm_statistics_stay_local_and_are_averaged(pools):
    results = pools(2, 2).run(statistics)
    mean = torch.stack([own for own, _ in results]).mean(0)
    for own, averaged in results:
        torch.testing.assert_close(averaged, mean)
        assert not torch.allclose(own, mean)


# -- bad input and bad use -------------------------------------------------------------------------------------


def starting(rank, decentralize, wrap=None, **settings):
    model = seeded(0, mlp)
    if wrap == "ddp":
        model = DistributedDataParallel(model, process_group=gossamer.node_group())
    elif wrap == "fsdp":
        fully_shard(model, mesh=DeviceMesh.from_group(gossamer.node_group(), "cpu"))
    elif wrap == "fsdp-world":
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    elif wrap == "tensor":  # over workers 0 and 2, and 1 and 3; workers 0 and 1 gossip, and so do 2 and 3
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
        model = parallelize_module(mlp(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        settings["process_group"] = mesh["dp"]
    decentralize(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings).close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"gradients": "nodes"}, "gradients must be one of auto, node, worker, got 'nodes'"),
        ({"gradients": "node", "algorithm": "ad-psgd"}, "algorithm 'ad-psgd' needs workers that do not wait"),
        ({"gradients": "node", "on_failure": "continue"}, "on_failure='continue' needs workers that do not wait"),
        ({"gradients": "node", "wrap": "fsdp-world"}, "sharded by FSDP2 over workers [0, 1, 2, 3], but this node's"),
        ({"gradients": "node", "wrap": "tensor"}, "gradients='node' cannot average the gradients of DTensors"),
        ({"gradients": "worker", "wrap": "ddp"}, "but the model is wrapped in DDP"),
        ({"gradients": "worker", "wrap": "fsdp"}, "but the model is sharded by FSDP2"),
    ],
    ids=str,
)
def test_refused(pools, settings, says):
    errors = pools(2, 2).run(error_of, starting, **settings)
    assert len(set(errors)) == 1
    assert errors[0][0] == "InputError"
    assert says in errors[0][1]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_a_model_that_averages_inside_already_is_accepted(pools, wrap):
    assert pools(2, 2).run(error_of, starting, wrap=wrap, gradients="node") == [None] * 4


def disagreeing(rank, decentralize):
    starting(rank, decentralize, gradients="node" if rank else "worker")


def test_workers_must_agree(pools):
    errors = pools(2, 2).run(error_of, disagreeing)
    assert len(set(errors)) == 1
    assert "workers disagree on" in errors[0][1]


def test_not_in_an_elastic_job_nor_among_virtual_workers_of_a_node():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(gossamer.InputError, match="on_failure='continue' needs workers that do not wait"):
        gossamer.VirtualCluster(1).decentralize([model], [optimizer], gradients="node", on_failure="continue")
    with pytest.raises(gossamer.InputError, match=r"needs real workers.* VirtualCluster\(1\)"):
        gossamer.VirtualCluster(per_node=[2]).decentralize([model] * 2, [optimizer] * 2, gradients="node")


def unused_head(rank, decentralize):
    model = seeded(0, Heads)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gossip = decentralize(model, optimizer, gradients="node")
    try:
        x, y = batch(rank, 0)
        nn.functional.mse_loss(model(x)[0], y).backward()
        optimizer.step()
    finally:
        dist.barrier()  # all workers fail alike
        gossip._stop(drain=0.0)


def test_the_error_of_unused_parameters_names_the_remedy(pools):
    remedy = "DDP(model, process_group=gossamer.node_group(), find_unused_parameters=True)"
    assert all(remedy in text for _, text in pools(2, 2).run(error_of, unused_head))


def head_of(rank, step):
    """The workers of a node use different heads in the first two steps, and the same one in the last."""
    return "left" if step == 2 else ("left", "right")[(rank + step) % 2]


def one_head(rank, lr=0.1, steps=3):
    """Each worker uses one head per step. Returns the parameters at the start and after each step."""
    with process_group():
        model = seeded(0, Heads)
        wrapped = DistributedDataParallel(model, process_group=gossamer.node_group(), find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        seen = [vector(model)]
        with decentralize(wrapped, optimizer, algorithm="atc", topology="complete") as gossip:
            assert (gossip.gradients, gossip.replicas) == ("node", 2)
            for step in range(steps):
                x, y = batch(rank, step)
                left, right = wrapped(x)
                nn.functional.mse_loss(left if head_of(rank, step) == "left" else right, y).backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(vector(model))
        return torch.stack(seen)


def test_ddp_that_looks_for_unused_parameters_averages_them(pools):
    """On the complete topology all workers take the mean of their gradients; an unused head's is zero."""
    results = pools(2, 2).run(one_head)
    model = seeded(0, Heads)
    expected = [vector(model)]
    for step in range(3):
        model.zero_grad()
        for rank in range(4):
            x, y = batch(rank, step)
            (nn.functional.mse_loss(getattr(model, head_of(rank, step))(x), y) / 4).backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
        expected.append(vector(model))
    for seen in results:
        torch.testing.assert_close(seen, torch.stack(expected), rtol=1e-5, atol=1e-6)


def second_gradient(rank, decentralize):
    model = seeded(0, Heads)
    gossip = decentralize(model, torch.optim.SGD(model.parameters(), lr=0.1), gradients="node")
    try:
        for _ in range(2):
            model(batch(rank, 0)[0])[0].square().mean().backward()
    finally:
        dist.barrier()
        gossip._stop(drain=0.0)


def only_no_sync(rank, decentralize):
    model = seeded(0, mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gossip = decentralize(model, optimizer, gradients="node")
    try:
        with gossip.no_sync():
            loss_of(model, rank, 0).backward()
        optimizer.step()
    finally:
        dist.barrier()
        gossip._stop(drain=0.0)


def beside_ddp(rank, decentralize):
    model = seeded(0, mlp)
    wrapped = DistributedDataParallel(model, process_group=gossamer.node_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gossip = decentralize(wrapped, optimizer)
    try:
        loss_of(model, rank, 0).backward()  # not the DDP module
        optimizer.step()
    finally:
        dist.barrier()
        gossip._stop(drain=0.0)


@pytest.mark.parametrize(
    ("scenario", "says"),
    [
        (unused_head, "parameters 'right.bias', 'right.weight' got no gradient in the backward pass"),
        (second_gradient, "got a second gradient before parameters 'right.bias', 'right.weight' got the first"),
        (only_no_sync, "comes from a backward pass inside gossip.no_sync()"),
        (beside_ddp, "the gradients of this node's workers differ"),
    ],
)
def test_gradients_that_are_not_averaged_are_an_error(pools, scenario, says):
    for kind, text in pools(2, 2).run(error_of, scenario):
        assert kind == "GossamerError"
        assert says in text
