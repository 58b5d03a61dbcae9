"""V = v / (1 − β^t) of GossipAdam is continuous, whatever β its v was built with, and checkpoints cross both ways."""

import copy
import io
import math

import pytest
import torch
from torch import nn

from gossamer.optim import GossipAdam, GossipAdamW

LR, BETAS = 0.01, (0.9, 0.999)
ADAM, OWN = "torch's Adam", "the own gradients"


def longer(kappa):
    return 1 - (1 - BETAS[1]) / math.sqrt(kappa)


def debiased(optimizer, at=0):
    """V as torch's Adam would compute it from the checkpoint."""
    state = optimizer.state_dict()["state"][at]
    return state["exp_avg_sq"].double() / (1 - BETAS[1] ** int(state["step"]))


def noise(p, t):
    return torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(t))


def steps(optimizer, p, times):
    for t in times:
        p.grad = noise(p, t)
        optimizer.step()


def measured(p, kappa, share=0.3, cls=GossipAdam, **settings):
    optimizer = cls([p], LR, BETAS, **settings)
    optimizer.set_replicas(kappa)
    optimizer.set_signal_shares({p: share})
    return optimizer


def saved(optimizer):
    """As a file on disk would have it."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("through_file", [False, True])
@pytest.mark.parametrize(
    "phases",
    [
        [ADAM, 16],
        [16, ADAM],
        [16, 4],
        [4, 64],
        [16, OWN, 16],
        [16, 1, 16],
        [OWN, 8, ADAM, 8, 2],
    ],
    ids=str,
)
def test_the_debiased_second_moment_is_continuous(phases, through_file):
    """A phase is torch's Adam, GossipAdam with q, or GossipAdam with a measured share and that many replicas."""
    p = nn.Parameter(torch.zeros(50, dtype=torch.float64))
    optimizer, expected, t, last = None, torch.zeros(50, dtype=torch.float64), 0, ADAM
    for phase in phases:
        before = optimizer
        if through_file or ADAM in (phase, last) or before is None:
            optimizer = torch.optim.Adam([p], LR, BETAS) if phase == ADAM else GossipAdam([p], LR, BETAS)
            if before is not None:
                optimizer.load_state_dict(saved(before))
                torch.testing.assert_close(debiased(optimizer), expected, rtol=1e-12, atol=0)
        if phase != ADAM:
            optimizer.set_replicas(16 if phase == OWN else phase)
            optimizer.set_signal_shares({} if phase == OWN else {p: 0.3})
        for _ in range(20):
            t += 1
            steps(optimizer, p, [t])
            beta = BETAS[1] if phase in (ADAM, OWN) else longer(phase)
            kept = beta * (1 - beta ** (t - 1)) / (1 - beta**t)
            expected = kept * expected + (1 - kept) * p.grad.square()
            torch.testing.assert_close(debiased(optimizer), expected, rtol=1e-10, atol=0)
        last = phase


def test_a_step_after_adams_checkpoint_is_as_large_as_the_measured_share_says():
    x = torch.zeros(9, dtype=torch.float64)
    p = nn.Parameter(x)
    adam = torch.optim.Adam([p], LR, BETAS, eps=0)
    steps(adam, p, range(1000))
    ours = measured(p, 16, share=1.0, eps=0)
    ours.load_state_dict(adam.state_dict())
    twin = nn.Parameter(p.detach().clone())
    theirs = torch.optim.Adam([twin], LR, BETAS, eps=0)
    theirs.load_state_dict(copy.deepcopy(adam.state_dict()))
    before = p.detach().clone()
    steps(ours, p, [1000])
    steps(theirs, twin, [1000])
    torch.testing.assert_close(p.detach() - before, twin.detach() - before, rtol=0.01, atol=0)


@pytest.mark.parametrize("cls", [GossipAdam, GossipAdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_a_resumed_run_is_bit_equal_and_saving_changes_nothing(dtype, cls):
    whole, stopped = (nn.Parameter(torch.zeros(40, 50, dtype=dtype)) for _ in range(2))
    plain, looked = measured(whole, 7, cls=cls), measured(stopped, 7, cls=cls)
    steps(plain, whole, range(30))
    steps(looked, stopped, range(11))
    live = looked.state[stopped]["exp_avg_sq"].clone()
    file = saved(looked)
    assert torch.equal(looked.state[stopped]["exp_avg_sq"], live)
    assert set(looked.state[stopped]) == {"step", "exp_avg", "exp_avg_sq"}
    longer_memory = dtype not in (torch.bfloat16, torch.float16)  # these keep the group's own
    assert torch.equal(file["state"][0]["exp_avg_sq"], live) is not longer_memory
    assert ("normalized" in file) is longer_memory

    again = nn.Parameter(stopped.detach().clone())
    resumed = measured(again, 7, cls=cls)
    for _ in range(2):  # loading does not change what is loaded
        resumed.load_state_dict(file)
        assert torch.equal(resumed.state[again]["exp_avg_sq"], live)
    steps(resumed, again, range(11, 30))
    steps(looked, stopped, range(11, 30))
    assert torch.equal(again, whole)
    assert torch.equal(stopped, whole)


def test_every_number_comes_back_exactly():
    """Also the smallest, 0, and numbers that are none."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 0x7E000000, (100_000,), generator=generator, dtype=torch.int32).view(torch.float32)
    values[:5] = torch.tensor([0.0, 1e-45, 3e-45, math.nan, -math.nan])
    p = nn.Parameter(torch.zeros(len(values)))
    for t in (1, 10, 400, 3000, 100_000):
        optimizer = measured(p, 16)
        steps(optimizer, p, [0])
        optimizer.state[p]["step"].fill_(t)
        optimizer.state[p]["exp_avg_sq"].copy_(values)
        back = measured(p, 16)
        back.load_state_dict(saved(optimizer))
        found = back.state[p]["exp_avg_sq"]
        torch.testing.assert_close(found, values, rtol=0, atol=0, equal_nan=True)


def test_torch_adam_goes_on_as_ours_does_alone():
    p = nn.Parameter(torch.zeros(9))
    ours = measured(p, 16)
    steps(ours, p, range(50))
    twin = nn.Parameter(p.detach().clone())
    theirs = torch.optim.Adam([twin])
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    ours.set_replicas(1)
    steps(ours, p, range(50, 60))
    steps(theirs, twin, range(50, 60))
    assert torch.equal(p, twin)
    assert torch.equal(ours.state[p]["exp_avg_sq"], theirs.state[twin]["exp_avg_sq"])
    assert "normalized" not in ours.state_dict()


def test_low_precision_that_was_saved_with_a_longer_memory_goes_on_with_the_groups_own():
    p = nn.Parameter(torch.zeros(9, dtype=torch.bfloat16))
    optimizer = measured(p, 16)
    steps(optimizer, p, range(40))
    file = saved(optimizer)
    factor = (1 - BETAS[1] ** 40) / (1 - longer(16) ** 40)
    ulps = torch.zeros(9, dtype=torch.int8)
    file["normalized"] = {0: {"beta2": longer(16), "step": 40, "factor": factor, "ulps": ulps}}
    optimizer.load_state_dict(file)
    torch.testing.assert_close(debiased(optimizer), debiased(measured_from(file)), rtol=0.02, atol=0)
    steps(optimizer, p, [40])
    assert "normalized" not in optimizer.state_dict()
    expected = debiased(measured_from(file)) * 0.975 + 0.025 * p.grad.double().square()  # about β2 after 40 steps
    torch.testing.assert_close(debiased(optimizer), expected, rtol=0.03, atol=0)


def measured_from(file):
    """An optimizer with the states of a file, as torch's Adam reads them."""
    adam = torch.optim.Adam([nn.Parameter(torch.zeros(9, dtype=torch.bfloat16))])
    adam.load_state_dict({key: file[key] for key in ("state", "param_groups")})
    return adam


def test_what_a_checkpoint_says_about_another_step_is_ignored():
    p = nn.Parameter(torch.zeros(9))
    ours = measured(p, 16)
    steps(ours, p, range(5))
    old = saved(ours)
    adam = torch.optim.Adam([p])
    adam.load_state_dict(copy.deepcopy(old))
    steps(adam, p, range(5, 8))
    ours.load_state_dict({**adam.state_dict(), "normalized": old["normalized"]})
    assert torch.equal(debiased(ours), debiased(adam))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: torch.load(_file(x), weights_only=False)])
def test_a_copy_knows_the_normalization(clone):
    p = nn.Parameter(torch.zeros(9))
    ours = measured(p, 16)
    steps(ours, p, range(5))
    _, other = clone((p, ours))
    assert torch.equal(debiased(other), debiased(ours))


def _file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_noise_to_signal_weighs_parameters_by_the_second_moment_that_was_loaded():
    a, b = (nn.Parameter(torch.zeros(9)) for _ in range(2))
    adam = torch.optim.Adam([a, b], LR, BETAS)
    for t in range(60):
        a.grad, b.grad = noise(a, t), noise(b, 100 + t) if t >= 50 else None
        adam.step()
    ours = GossipAdam([a, b], LR, BETAS, replicas=16)
    ours.load_state_dict(adam.state_dict())
    shares = {a: 0.8, b: 0.2}
    ours.set_signal_shares(shares)
    total = [float(debiased(adam, at).sum()) for at in (0, 1)]
    expected = (0.2 * total[0] + 0.8 * total[1]) / (0.8 * total[0] + 0.2 * total[1])
    assert ours.noise_to_signal() == pytest.approx(expected, rel=1e-6)
    ours.set_signal_shares(shares)
    a.grad, b.grad = noise(a, 60), None
    ours.step()
    total[0] = float(debiased(ours).sum())
    expected = (0.2 * total[0] + 0.8 * total[1]) / (0.8 * total[0] + 0.2 * total[1])
    assert ours.noise_to_signal() == pytest.approx(expected, rel=1e-6)


def test_a_state_that_starts_anew_is_not_scaled():
    p, twin = (nn.Parameter(torch.zeros(9)) for _ in range(2))
    ours, fresh = measured(p, 16), GossipAdam([twin], LR, BETAS)
    steps(ours, p, range(5))
    ours.state.clear()
    ours.set_replicas(1)
    p.data.zero_()
    steps(ours, p, range(5, 9))
    steps(fresh, twin, range(5, 9))
    assert torch.equal(p, twin)


def test_parameters_that_are_not_mixed_have_one_replica():
    mixed, local, other = (nn.Parameter(torch.zeros(9)) for _ in range(3))
    optimizer = GossipAdam([{"params": [mixed, local]}, {"params": [other], "replicas": 3}], LR, BETAS)
    optimizer.set_local_parameters([local, other])
    optimizer.set_replicas(8)
    first, second = optimizer.param_groups
    assert [optimizer.kappa(first), optimizer.kappa(first, mixed), optimizer.kappa(first, local)] == [8, 8, 1]
    assert optimizer.kappa(second, other) == 3  # the group fixes it
    twin = nn.Parameter(torch.zeros(9))
    adam = torch.optim.Adam([twin], LR, BETAS)
    for t in range(8):
        mixed.grad, local.grad, twin.grad = (noise(twin, t) for _ in range(3))
        optimizer.step()
        adam.step()
    assert torch.equal(local, twin)
    assert "signal_sq" in optimizer.state[mixed]
    assert "signal_sq" not in optimizer.state[local]
    optimizer.set_replicas(5)  # a member left
    assert optimizer.kappa(first, local) == 1
    other_params, clone = copy.deepcopy(([mixed, local], optimizer))
    assert clone.kappa(clone.param_groups[0], other_params[1]) == 1
