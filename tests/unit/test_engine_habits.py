"""Habits of DDP users that other gossip libraries break: clipping, weight decay, late gradients, evaluation."""

import copy

import pytest
import torch
from torch import nn

import gossamer
from policies import policies


def start(n=3, make=lambda ps: torch.optim.SGD(ps, lr=0.1), model=lambda: nn.Linear(4, 3), **settings):
    torch.manual_seed(0)
    models = [model() for _ in range(n)]
    optimizers = [make(m.parameters()) for m in models]
    cluster = gossamer.VirtualCluster(n)
    gossips = cluster.decentralize(models, optimizers, **policies(**settings))
    return cluster, gossips, models, optimizers


def test_clipping_is_global():
    """Many buckets, one norm: the first step of a worker is the plain loop's."""
    _, _, models, optimizers = start(2, bucket_mib=64 / 2**20)
    plain = copy.deepcopy(models[0])
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for m, o in ((models[0], optimizers[0]), (plain, plain_optimizer)):
        (m(torch.ones(2, 4)) * 100).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        assert norm > 1
        total = torch.cat([p.grad.flatten() for p in m.parameters()]).norm()
        assert float(total) == pytest.approx(1.0, rel=1e-5)
        o.step()
    assert torch.equal(models[0].weight, plain.weight)
    assert torch.equal(models[0].bias, plain.bias)


def test_clipping_can_refuse_gradients_that_are_not_finite():
    _, gossips, models, _ = start(2)
    for p in models[0].parameters():
        p.grad = torch.full_like(p, torch.inf)
    with pytest.raises(RuntimeError, match="non-finite"):
        gossips[0].clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_weight_decay_acts_on_the_groups_it_was_given_to():
    torch.manual_seed(0)
    models = [nn.Linear(4, 3) for _ in range(2)]
    optimizers = [
        torch.optim.AdamW(
            [{"params": [m.weight], "weight_decay": 0.5}, {"params": [m.bias], "weight_decay": 0.0}], lr=0.1
        )
        for m in models
    ]
    gossamer.VirtualCluster(2).decentralize(models, optimizers, topology="complete")
    weight, bias = models[0].weight.detach().clone(), models[0].bias.detach().clone()
    for _ in range(2):
        for m, o in zip(models, optimizers, strict=True):
            for p in m.parameters():
                p.grad = torch.zeros_like(p)
            o.step()
    torch.testing.assert_close(models[0].weight.detach(), weight * 0.95**2)
    torch.testing.assert_close(models[0].bias.detach(), bias)


@pytest.mark.parametrize("topology", ["aer", "ring", "one-peer-exponential", "complete"])
@pytest.mark.parametrize("per_node", [[1], [1, 1], [1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1, 1]], ids=str)
def test_one_worker_per_node_and_a_single_worker(topology, per_node):
    n = sum(per_node)
    models = [nn.Linear(4, 3) for _ in range(n)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.0) for m in models]
    mean = torch.stack([m.weight.detach() for m in models]).mean(dim=0)
    cluster = gossamer.VirtualCluster(per_node=per_node)
    cluster.decentralize(models, optimizers, topology=topology, broadcast=False)
    for _ in range(90):  # AER on five nodes contracts by 0.86 a round
        for m, o in zip(models, optimizers, strict=True):
            m.weight.grad = torch.ones_like(m.weight)
            o.step()
    for m in models:
        torch.testing.assert_close(m.weight.detach(), mean, rtol=1e-4, atol=1e-5)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.early, self.late = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x, use_late):
        return self.late(x) if use_late else self.early(x)


def test_a_parameter_without_gradient_at_first_trains_later():
    _, _, models, optimizers = start(2, model=Branches, topology="complete")
    first = models[0].late.weight.detach().clone()
    for t in range(4):
        for m, o in zip(models, optimizers, strict=True):
            o.zero_grad()
            m(torch.ones(2, 4), use_late=t >= 2).square().sum().backward()
            o.step()
        assert torch.equal(models[0].late.weight, first) == (t < 2)
    assert torch.equal(models[0].late.weight, models[1].late.weight)


def test_evaluation_and_extra_forwards_do_not_advance_the_schedule():
    _, gossips, models, optimizers = start(3)
    twin = start(3)
    for t in range(4):
        for i in range(3):
            for (m, o), look in (((models[i], optimizers[i]), True), ((twin[2][i], twin[3][i]), False)):
                if look:
                    m(torch.ones(2, 4))  # in training mode, as a learning-rate finder does
                    m.eval()
                    with torch.no_grad():
                        m(torch.ones(2, 4))
                    m.train()
                o.zero_grad()
                m(torch.full((2, 4), float(i + t))).square().mean().backward()
                o.step()
    assert [g.stats()["rounds"] for g in gossips] == [4, 4, 4]
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(models, twin[2], strict=True))


def test_gradient_accumulation_mixes_once_per_step():
    _, gossips, models, optimizers = start(2)
    for _ in range(3):
        for m, o in zip(models, optimizers, strict=True):
            o.zero_grad(set_to_none=True)
            for _ in range(4):
                m(torch.ones(2, 4)).square().mean().backward()
            o.step()
    assert [g.stats()["rounds"] for g in gossips] == [3, 3]


def test_schedulers_and_state_dict_keys_are_untouched():
    _, _, models, optimizers = start(2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 1, gamma=0.5)
    for _ in range(2):
        for m, o in zip(models, optimizers, strict=True):
            o.zero_grad()
            m(torch.ones(2, 4)).square().mean().backward()
            o.step()
        scheduler.step()
    assert optimizers[0].param_groups[0]["lr"] == pytest.approx(0.025)
    assert list(models[0].state_dict()) == ["weight", "bias"]
    assert type(models[0]) is nn.Linear


def test_an_overflow_under_a_scaler_skips_the_whole_step_of_that_worker():
    """Not fused: no hook runs, the worker's exchange stays for its next step."""
    cluster, gossips, models, optimizers = start(2, topology="complete")
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in models]
    before = models[1].weight.detach().clone()
    for i, (m, o, s) in enumerate(zip(models, optimizers, scalers, strict=True)):
        o.zero_grad()
        loss = m(torch.ones(2, 4)).square().mean() * (float("inf") if i == 1 else 1.0)
        s.scale(loss).backward()
        s.step(o)
        s.update()
    assert [g.stats()["steps"] for g in gossips] == [1, 0]
    assert torch.equal(models[1].weight, before)
    cluster.catch_up()
    assert [g.lanes[0].k for g in gossips] == [1, 1]


def test_copies_of_the_model_take_no_part_in_gossip():
    """A copy has storage of its own and is no part of the gossip."""
    _, _, models, optimizers = start(2, topology="complete")
    copied = copy.deepcopy(models[0])
    value = copied.weight.detach().clone()
    for _ in range(2):
        for m, o in zip(models, optimizers, strict=True):
            o.zero_grad()
            m(torch.ones(2, 4)).square().mean().backward()
            o.step()
    assert torch.equal(copied.weight, value)
    assert not torch.equal(models[0].weight, value)


@pytest.mark.parametrize("algorithm", ["awc", "atc"])
def test_a_step_hook_that_writes_before_the_exchange_is_part_of_the_step(algorithm):
    """docs/engine.md: a clamp in a post-hook that was registered before decentralize() is what the neighbors get."""
    bound, lr = 0.2, 0.1

    def make(parameters):
        optimizer = torch.optim.SGD(parameters, lr=lr)

        @torch.no_grad()
        def clamp(optimizer, *_):
            for p in optimizer.param_groups[0]["params"]:
                p.clamp_(-bound, bound)

        optimizer.register_step_post_hook(clamp)
        return optimizer

    _, _, models, optimizers = start(3, make, topology="complete", algorithm=algorithm)
    x, clamped = [m.weight.detach().clone() for m in models], False
    for t in range(4):
        gradients = [torch.full((3, 4), float((-1) ** t * (i + 1))) for i in range(3)]
        for m, o, g in zip(models, optimizers, gradients, strict=True):
            m.weight.grad = g.clone()
            o.step()
        mixed = [sum(x) / 3] * 3 if algorithm == "awc" and t > 0 else x
        x = [(value - lr * g).clamp(-bound, bound) for value, g in zip(mixed, gradients, strict=True)]
        clamped |= any(value.abs().eq(bound).any() for value in x)
        if algorithm == "atc":
            x = [sum(x) / 3] * 3
        for m, value in zip(models, x, strict=True):
            torch.testing.assert_close(m.weight.detach(), value)
    assert clamped
