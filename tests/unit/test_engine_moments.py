"""The optimizer's moments in exact averages."""

import copy

import pytest
import torch

import gossamer
from gossamer import InputError, VirtualCluster
from gossamer.engine.policies import Settings

N = 3


def run(make, steps, still=None, **options):
    """Three workers with data of their own, `still` a step without a gradient; models, and states after every step."""
    models = []
    for _ in range(N):
        torch.manual_seed(1)
        models.append(torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 2, bias=False)))
    optimizers = [make(m.parameters()) for m in models]
    VirtualCluster(N).decentralize(models, optimizers, topology="ring", **options)
    seen = []
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            x = torch.randn(8, 5, generator=torch.Generator().manual_seed(31 * step + rank))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if step == still:
                for p in model.parameters():
                    p.grad.zero_()
            optimizer.step()
        seen.append([copy.deepcopy([o.state[p] for p in o.param_groups[0]["params"]]) for o in optimizers])
    return models, optimizers, seen


def moments(state):
    return {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim()}


@pytest.mark.parametrize(
    ("make", "decay"),
    [
        (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), {"momentum_buffer": 0.9}),
        (lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.8, 0.9)), {"exp_avg": 0.8, "exp_avg_sq": 0.9}),
    ],
    ids=["sgd", "adam"],
)
def test_after_an_exact_average_everybody_has_the_mean(make, decay):
    """The average is launched after step 4 and applied before step 5, which without a gradient only lets them decay."""
    _, _, seen = run(make, 5, still=4, average_every=4, average_moments=True)
    before, after = seen[3], seen[4]
    for at in range(3):
        assert set(moments(before[0][at])) == set(decay)
        for name, factor in decay.items():
            mean = torch.stack([worker[at][name] for worker in before]).mean(0)
            assert not torch.allclose(before[0][at][name], before[1][at][name], rtol=1e-3, atol=0)
            for worker in after:
                assert torch.allclose(worker[at][name], factor * mean, rtol=1e-5, atol=1e-8)


def test_without_it_moments_stay_local():
    _, _, seen = run(lambda p: torch.optim.SGD(p, lr=0.0, momentum=1.0, dampening=1.0), 6, average_every=4)
    assert not torch.allclose(seen[5][0][0]["momentum_buffer"], seen[5][1][0]["momentum_buffer"])


@pytest.mark.parametrize("algorithm", ["awc", "atc"])
def test_accumulated_gradients_and_every_algorithm(algorithm):
    make = lambda p: gossamer.AccumAdam(p, lr=1e-2, accumulate=2)  # noqa: E731
    models, _, _ = run(make, 9, average_every=4, average_moments=True, algorithm=algorithm)
    assert all(torch.isfinite(p).all() for m in models for p in m.parameters())


@pytest.mark.parametrize("options", [{}, {"average_every": 4, "staleness": 1}])
def test_it_needs_exact_averages(options):
    with pytest.raises(InputError, match="average_moments=True averages the optimizer's moments in the exact averages"):
        Settings(average_moments=True, **options)
