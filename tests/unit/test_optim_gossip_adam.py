"""GossipAdam against its equations, one number at a time, and how it learns the number of replicas."""

import copy
import math
from functools import partial

import pytest
import torch

import gossamer
from gossamer.errors import InputError
from gossamer.optim import GossipAdam, GossipAdamW
from measured import measured

STEPS = 25
LR, EPS = 0.01, 1e-6
START = [0.5, -1.0, 2.0, 0.0, 1e-3, 3.0]


def gradients(n: int, steps: int = STEPS) -> list[list[float]]:
    """Mostly noise, mostly signal, and rarely anything."""
    rows = torch.randn(steps, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows[:, 1 % n] = 1 + 0.1 * rows[:, 1 % n]
    rows[:, 2 % n] *= (torch.arange(steps) % 7 == 3).double()
    result: list[list[float]] = rows.tolist()
    return result


class Reference:
    """One coordinate; `m, v, t` may be those of an Adam that ran before, which has no q."""

    def __init__(self, x: float, m: float = 0.0, v: float = 0.0, t: int = 0):
        self.x, self.m, self.v, self.q, self.t, self.own = x, m, v, 0.0, t, 0

    def step(
        self, g: float, *, kappa: float, betas: tuple[float, float], decay: float = 0.0, decoupled: bool = False
    ) -> None:
        b1, b2 = betas
        self.t += 1
        self.own += 1
        if decoupled:
            self.x -= LR * decay * self.x
        else:
            g = g + decay * self.x
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        mean = self.m / (1 - b1**self.t)
        self.q = b2 * self.q + (1 - b2) * mean * mean
        V = self.v / (1 - b2**self.t)
        Q = self.q / (1 - b2**self.own)
        memory = (1 - b2**self.own) / (1 - b2**self.t)
        c = (1 - b1) / (1 + b1)
        noise = 0.0 if memory < 0.1 or b1 == 0 else min(max(memory * (V - Q) / (1 - c), 0.0), V)
        self.x -= LR * mean / (math.sqrt(V - (1 - 1 / kappa) * noise) + EPS)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize(("decay", "maximize"), [(0.0, False), (0.3, False), (0.3, True)])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.98), (0.5, 0.999), (0.95, 0.9), (0.0, 0.99), (0.9, 0.0)])
@pytest.mark.parametrize(("replicas", "discount"), [(1, 1), (2, 1), (16, 2.5), (1, 4), (1000, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_steps_follow_the_equations(dtype, replicas, discount, betas, decoupled, decay, maximize, fused):
    references = [Reference(x) for x in START]
    x = torch.nn.Parameter(torch.tensor(START, dtype=dtype))
    cls = GossipAdamW if decoupled else GossipAdam
    opt = cls([x], LR, betas, EPS, decay, discount=discount, maximize=maximize, fused=fused)
    opt.set_replicas(replicas)
    for row in gradients(len(START)):
        x.grad = torch.tensor(row, dtype=dtype)
        opt.step()
        for one, g in zip(references, row, strict=True):
            one.step(-g if maximize else g, kappa=replicas * discount, betas=betas, decay=decay, decoupled=decoupled)
    expected = torch.tensor([one.x for one in references], dtype=torch.float64)
    tolerance = {"rtol": 1e-11, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-6}
    torch.testing.assert_close(x.detach().double(), expected, **tolerance)


def test_the_second_moment_is_that_of_the_averaged_gradient():
    """What the optimizer is for: with noisy local gradients it steps as Adam does with the mean of 16 of them."""
    generator = torch.Generator().manual_seed(0)
    n, kappa, steps, betas = 20_000, 16, 400, (0.9, 0.98)
    signal = torch.full((n,), 0.3, dtype=torch.float64)
    x = torch.nn.Parameter(torch.zeros(n, dtype=torch.float64))
    opt = GossipAdam([x], 1.0, betas, replicas=kappa, discount=1.0)
    for _ in range(steps):
        x.grad = signal + torch.randn(n, generator=generator, dtype=torch.float64)
        before = x.detach().clone()
        opt.step()
    denominator = -opt.state[x]["exp_avg"] / (1 - betas[0] ** steps) / (x.detach() - before)
    assert denominator.square().mean() == pytest.approx(0.3**2 + 1 / kappa, rel=0.1)
    assert opt.noise_to_signal() == pytest.approx(1 / 0.3**2, rel=0.03)


@pytest.mark.parametrize("implementation", [{}, {"fused": False}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_checkpoint_of_torch_adam_at_step_10000(dtype, implementation):
    """q has a count of its own: Adam's steps until it has memory, then the correction fades in."""
    betas, kappa, steps = (0.9, 0.999), 16, 400
    rows = gradients(len(START), 400 + steps)
    x = torch.nn.Parameter(torch.tensor(START, dtype=dtype))
    adam = torch.optim.Adam([x], LR, betas, EPS)
    for row in rows[:400]:
        x.grad = torch.tensor(row, dtype=dtype)
        adam.step()
    state = adam.state[x]
    state["step"].fill_(10_000)
    references = [
        Reference(*values, 10_000)
        for values in zip(x.tolist(), state["exp_avg"].tolist(), state["exp_avg_sq"].tolist(), strict=True)
    ]

    y = torch.nn.Parameter(x.detach().clone())
    opt = GossipAdam([y], lr=123.0, replicas=kappa, discount=1.0, **implementation)
    opt.load_state_dict(copy.deepcopy(adam.state_dict()))
    assert opt.param_groups[0]["lr"] == LR
    assert opt.kappa(opt.param_groups[0]) == kappa
    adam_distance = []
    for row in rows[400:]:
        x.grad, y.grad = (torch.tensor(row, dtype=dtype) for _ in range(2))
        adam.step()
        opt.step()
        adam_distance.append(float((x - y).detach().abs().max()))
        for one, g in zip(references, row, strict=True):
            one.step(g, kappa=kappa, betas=betas)
    rounding = 1e-12 if dtype == torch.float64 else 1e-5
    assert max(adam_distance[:100]) < rounding
    assert adam_distance[-1] > 1e-2
    assert int(opt.state[y]["step"]) == 10_000 + steps
    expected = torch.tensor([one.x for one in references], dtype=torch.float64)
    torch.testing.assert_close(y.detach().double(), expected, rtol=1e-10 if dtype == torch.float64 else 1e-3, atol=1e-4)


def test_torch_adam_continues_from_a_checkpoint():
    x, y = (torch.nn.Parameter(torch.tensor(START)) for _ in range(2))
    ours, theirs = GossipAdamW([x], LR, replicas=4, weight_decay=0.1), torch.optim.AdamW([y], 1.0)
    for row in gradients(len(START)):
        x.grad = torch.tensor(row)
        ours.step()
    y.data.copy_(x.data)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    ours.param_groups[0]["replicas"] = 1
    for row in gradients(len(START)):
        x.grad, y.grad = torch.tensor(row), torch.tensor(row)
        ours.step()
        theirs.step()
    assert torch.equal(x, y)
    assert set(ours.state[x]) == {"step", "exp_avg", "exp_avg_sq"}


def test_alone_there_is_one_replica():
    opt = gossamer.GossipAdam([torch.nn.Parameter(torch.ones(1))])
    assert opt.replicas == 1
    assert opt.kappa(opt.param_groups[0]) == 1


def test_kappa_is_the_number_of_replicas_by_default():
    opt = GossipAdam([torch.nn.Parameter(torch.ones(1))])
    kappas = []
    for replicas in (1, 2, 16, 1):
        opt.set_replicas(replicas)
        kappas.append(opt.kappa(opt.param_groups[0]))
    assert kappas == [1, 2, 16, 1]


def test_groups_with_their_own_replicas_and_discount():
    a, b, c = (torch.nn.Parameter(torch.ones(1)) for _ in range(3))
    opt = GossipAdam([{"params": [a]}, {"params": [b], "replicas": 3}], discount=2.0)
    opt.add_param_group({"params": [c], "discount": 1.5})
    opt.set_replicas(8)
    assert [opt.kappa(g) for g in opt.param_groups] == [16, 6, 12]
    opt.set_replicas(4)
    assert [opt.kappa(g) for g in opt.param_groups] == [8, 6, 6]


def test_a_checkpoint_does_not_set_the_number_of_replicas():
    x, y = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    before = GossipAdam([x], replicas=16, discount=3.0)
    now = GossipAdam([y])
    now.set_replicas(4)
    now.load_state_dict(before.state_dict())
    assert now.param_groups[0]["discount"] == 3.0
    assert now.kappa(now.param_groups[0]) == 12


def test_copies_keep_the_number_of_replicas():
    opt = GossipAdam([torch.nn.Parameter(torch.ones(3))])
    opt.set_replicas(5)
    assert copy.deepcopy(opt).replicas == 5


def test_when_replicas_leave_and_come_back_q_starts_anew():
    x = torch.nn.Parameter(torch.tensor(START, dtype=torch.float64))
    opt = GossipAdam([x], LR, (0.9, 0.98), EPS)
    since = []
    for t, row in enumerate(gradients(len(START))):
        opt.set_replicas(1 if 8 <= t < 12 else 4)
        x.grad = torch.tensor(row, dtype=torch.float64)
        opt.step()
        since.append(opt.state[x].get("signal_since"))
    assert since == [0] * 8 + [None] * 4 + [12] * 13


def test_a_parameter_without_gradient_is_skipped():
    x, always = (torch.nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2))
    opt = GossipAdam([x, always], LR, (0.9, 0.98), EPS, replicas=8, discount=1.0)
    one = Reference(1.0)
    for t, (g,) in enumerate(gradients(1)):
        always.grad = torch.tensor([g], dtype=torch.float64)
        x.grad = None if t % 3 == 1 else always.grad.clone()
        opt.step()
        if t % 3 != 1:
            one.step(g, kappa=8, betas=(0.9, 0.98))
    assert x.item() == pytest.approx(one.x, rel=1e-12)


@pytest.mark.parametrize("replicas", [0, 0.5, -1, math.inf, math.nan, True, "4", None])
def test_a_bad_number_of_replicas_is_refused(replicas):
    opt = GossipAdam([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(InputError, match=r"replicas is .* finite number of at least 1"):
        opt.set_replicas(replicas)
    assert opt.replicas == 1


def test_noise_to_signal_without_state():
    assert GossipAdam([torch.nn.Parameter(torch.ones(1))]).noise_to_signal() is None


def test_noise_to_signal_of_nothing_but_noise_and_nothing_but_signal():
    x, y = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    noise, signal = GossipAdam([x], replicas=2), GossipAdam([y], replicas=2)
    for t in range(200):
        x.grad = torch.full((2,), (-1.0) ** t)
        y.grad = torch.ones(2)
        noise.step()
        signal.step()
    assert noise.noise_to_signal() > 30  # the first steps of an alternating gradient look like signal
    assert signal.noise_to_signal() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("beta2", [0.98, 0.999])
def test_noise_to_signal_is_right_from_the_first_steps_on(beta2):
    torch.manual_seed(0)
    x = torch.nn.Parameter(torch.zeros(20_000))
    opt = GossipAdam([x], lr=0.0, betas=(0.9, beta2), replicas=4)
    for t in range(1, 51):
        x.grad = 1 + 5 * torch.randn(20_000)
        opt.step()
        if t <= 3:
            assert opt.noise_to_signal() is None  # q is mostly noise
        if t in (10, 50):
            assert opt.noise_to_signal() == pytest.approx(25, rel=0.2)
    opt.param_groups[0]["betas"] = (0.0, beta2)
    assert opt.noise_to_signal() is None


@pytest.mark.parametrize("make", [GossipAdam, partial(measured, GossipAdam)])
@pytest.mark.parametrize("fused", [None, False])
def test_a_gradient_that_is_not_finite_reaches_the_parameter(fused, make):
    """As with torch's Adam: an overflow is seen in the parameters instead of vanishing in a clamp."""
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.nn.Parameter(torch.ones(2))
        opt = make([x], replicas=4, fused=fused)
        x.grad = torch.tensor([bad, 1.0])
        opt.step()
        assert torch.isnan(x[0])
        assert torch.isfinite(x[1])
