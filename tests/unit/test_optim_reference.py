"""AccumAdam against a plain-Python reading of the paper's equations, one number at a time."""

import math

import pytest
import torch

from gossamer.optim import AccumAdam, AccumAdamW

STEPS = 20
LR, BETAS, EPS = 0.01, (0.9, 0.98), 1e-6


def reference(
    x: list[float], grads: list[list[float]], *, s: int, per_step: bool, decay: float, decoupled: bool
) -> list[float]:
    """x after len(grads) steps; every coordinate follows the equations alone."""
    b1, b2 = (beta**s for beta in BETAS) if per_step else BETAS
    result = []
    for i, xi in enumerate(x):
        m_hat = v_hat = b = 0.0
        for t, row in enumerate(grads, start=1):
            t_hat = math.ceil(t / s)
            g = row[i]
            if decoupled:
                xi -= LR * decay * xi
            else:
                g += decay * xi
            m = b1 * m_hat + (1 - b1) * g
            v = b2 * v_hat + (1 - b2) * g * g
            xi -= LR * (m / (1 - b1**t_hat)) / (math.sqrt(v / (1 - b2**t_hat)) + EPS)
            b += g / s
            if t % s == 0:
                m_hat = b1 * m_hat + (1 - b1) * b
                v_hat = b2 * v_hat + (1 - b2) * b * b
                b = 0.0
        result.append(xi)
    return result


def gradients(n: int) -> list[list[float]]:
    return torch.randn(STEPS, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tolist()


@pytest.mark.parametrize("mode", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("betas_per", ["accumulation", "step"])
@pytest.mark.parametrize("s", [1, 2, 3, 8])
def test_twenty_steps_follow_the_equations(s, betas_per, decoupled, decay, mode):
    start, grads = [0.5, -1.0, 2.0, 0.0, 1e-3], gradients(5)
    expected = reference(start, grads, s=s, per_step=betas_per == "step", decay=decay, decoupled=decoupled)
    x = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
    cls = AccumAdamW if decoupled else AccumAdam
    opt = cls([x], LR, BETAS, EPS, decay, accumulate=s, betas_per=betas_per, **mode)
    for row in grads:
        x.grad = torch.tensor(row, dtype=torch.float64)
        opt.step()
    torch.testing.assert_close(x.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-13)


def test_betas_per_step_differs_from_betas_per_accumulation():
    grads = gradients(3)
    ends = [
        reference([1.0, 1.0, 1.0], grads, s=4, per_step=per_step, decay=0.0, decoupled=False)
        for per_step in (False, True)
    ]
    assert max(abs(a - b) for a, b in zip(*ends, strict=True)) > 1e-3


def test_maximize_is_the_step_on_the_negative_gradient():
    up, down = (torch.nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(2))
    climb = AccumAdam([up], accumulate=3, weight_decay=0.1, maximize=True)
    descend = AccumAdam([down], accumulate=3, weight_decay=0.1)
    for row in gradients(4):
        up.grad = torch.tensor(row, dtype=torch.float64)
        down.grad = -up.grad
        climb.step()
        descend.step()
    assert torch.equal(up, down)


def test_a_parameter_without_gradient_waits_and_then_goes_on():
    """Counters belong to a parameter: skipped steps do not count towards its accumulation."""
    grads = gradients(1)
    seen = [row for t, row in enumerate(grads) if t % 3 != 1]
    expected = reference([1.0], seen, s=4, per_step=False, decay=0.0, decoupled=False)
    x, always = (torch.nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2))
    opt = AccumAdam([x, always], LR, BETAS, EPS, accumulate=4)
    for t, row in enumerate(grads):
        always.grad = torch.tensor(row, dtype=torch.float64)
        x.grad = None if t % 3 == 1 else always.grad.clone()
        opt.step()
    torch.testing.assert_close(x.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_a_changed_length_waits_for_the_running_accumulation():
    x = torch.nn.Parameter(torch.ones(1))
    opt = AccumAdam([x], accumulate=2)
    finished = []
    for t in range(8):
        x.grad = torch.ones(1)
        if t == 1:
            opt.param_groups[0]["accumulate"] = 3
        opt.step()
        finished.append(int(opt.state[x]["step"]))
    assert finished == [0, 1, 1, 1, 2, 2, 2, 3]
