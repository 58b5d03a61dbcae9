"""Clipping as all-reduce would: the averaged norm is estimated from one replica's own gradients."""

import math

import pytest
import torch
from torch import nn

import gossamer
from gossamer.engine.clipping import GradientClipper, _sample

SIZE = 20_000


def parameters(sizes=(SIZE,)):
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


def clip(clipper, params, gradient, max_norm=1.0, replicas=16):
    """Clip `gradient` and return the factor by which it was scaled."""
    for p, part in zip(params, gradient.split([p.numel() for p in params]), strict=True):
        p.grad = part.clone()
    norm = clipper.clip(params, max_norm, replicas)
    torch.testing.assert_close(norm, gradient.norm())
    clipped = torch.cat([p.grad for p in params])
    return float(clipped.norm() / gradient.norm())


def test_signal_is_clipped_at_the_threshold_itself():
    clipper, params = GradientClipper(), parameters()
    gradient = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    gradient *= 3 / gradient.norm()
    assert [clip(clipper, params, gradient) for _ in range(6)] == pytest.approx([1 / 3] * 6, rel=1e-3)
    assert clip(clipper, params, gradient / 4) == 1


@pytest.mark.parametrize("replicas", [2, 4, 16])
def test_noise_is_clipped_where_its_average_would_be(replicas):
    source = torch.Generator().manual_seed(1)
    clipper, params = GradientClipper(), parameters()
    for _ in range(20):  # the norm is 4, that of the average of `replicas` is 4 / √replicas
        last = clip(clipper, params, 4 * torch.randn(SIZE, generator=source) / SIZE**0.5, replicas=replicas)
    assert last == pytest.approx(replicas**0.5 / 4, rel=0.05)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_the_estimate_is_the_norm_of_the_average_of_all_replicas(share):
    """Sixteen replicas with signal and noise of their own, against the average of their gradients."""
    source, replicas = torch.Generator().manual_seed(2), 16
    signal = torch.randn(SIZE, generator=source) * (share / SIZE) ** 0.5
    clippers, params = [GradientClipper() for _ in range(replicas)], parameters()
    for _ in range(25):
        noise = torch.randn(replicas, SIZE, generator=source) * ((1 - share) / SIZE) ** 0.5
        gradients = signal + noise
        averaged = gradients.mean(0).norm()
        ours = [clip(c, params, g, max_norm=1e-3, replicas=replicas) for c, g in zip(clippers, gradients, strict=True)]
    assert sum(ours) / replicas == pytest.approx(1e-3 / float(averaged), rel=0.05)
    assert ours == pytest.approx([1e-3 / float(averaged)] * replicas, rel=0.2)  # where noise is 50 times the signal


def test_a_spike_that_all_replicas_share_is_clipped_and_soon_forgotten():
    source = torch.Generator().manual_seed(3)
    clipper, params = GradientClipper(), parameters()

    def noise():
        return 2 * torch.randn(SIZE, generator=source) / SIZE**0.5

    for _ in range(20):
        assert clip(clipper, params, noise()) == 1 or float(clipper._weight) < 0.2
    spike = torch.zeros(SIZE)
    spike[::2] = 1
    assert clip(clipper, params, noise() + 40 * spike / spike.norm()) == pytest.approx(1 / 40, rel=0.05)
    assert [clip(clipper, params, noise()) for _ in range(3)] == [1, 1, 1]


def test_one_replica_is_torchs_clipping_bit_by_bit():
    for seed in range(3):
        ours, theirs = parameters((7, 5)), parameters((7, 5))
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
            q.grad = p.grad.clone()
        norm = GradientClipper().clip(ours, 0.5, 1)
        assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs, 0.5))
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(ours, theirs, strict=True))


def test_gradients_that_are_not_finite_leave_the_estimate_as_it_was():
    source = torch.Generator().manual_seed(4)
    clipper, params = GradientClipper(), parameters((100, 50))
    for _ in range(5):
        clip(clipper, params, torch.randn(150, generator=source))
    noise = clipper._noise / clipper._weight
    params[0].grad[0] = math.inf
    clipper.clip(params, 1.0, 16)
    assert torch.isfinite(clipper._before).all()
    assert float(clipper._noise / clipper._weight) == pytest.approx(float(noise), rel=1e-6)
    with pytest.raises(RuntimeError, match="non-finite"):
        clipper.clip(params, 1.0, 16, error_if_nonfinite=True)


@pytest.mark.parametrize("first", [["inf", "inf"], ["good", "inf"], ["zero", "zero"], ["same", "same", "same"]])
def test_odd_first_gradients_do_not_spoil_the_estimate(first):
    """Overflows of a gradient scaler, gradients of 0, and one gradient clipped several times."""
    source = torch.Generator().manual_seed(5)
    kinds = {"inf": torch.full((SIZE,), math.inf), "zero": torch.zeros(SIZE)}
    kinds["good"] = kinds["same"] = 4 * torch.randn(SIZE, generator=source) / SIZE**0.5
    clipper, params = GradientClipper(), parameters()
    for kind in first:
        params[0].grad = kinds[kind].clone()
        clipper.clip(params, 1.0, 16)
    for _ in range(200):
        last = clip(clipper, params, 4 * torch.randn(SIZE, generator=source) / SIZE**0.5)
    assert last == pytest.approx(1.0, rel=0.05)  # the average of 16 has norm 1


def test_other_tensors_than_before_start_a_new_estimate():
    clipper = GradientClipper()
    for size in (30, 40, 40):
        (p,) = parameters((size,))
        p.grad = torch.ones(size)
        assert float(clipper.clip([p], 1.0, 4)) == pytest.approx(size**0.5)


def test_the_sample_of_a_wide_matrix_is_of_all_columns():
    weight = nn.Parameter(torch.zeros(4096, 512))
    weight.grad = torch.arange(512.0).expand(4096, 512).contiguous()
    sample = _sample([weight], torch.device("cpu"))
    assert len(sample.unique()) == 512
    assert len(sample) <= 65536


def test_parameters_without_a_gradient_take_part_as_zeros():
    clipper, params = GradientClipper(), parameters((40, 60))
    for step in range(4):
        params[0].grad = torch.ones(40)
        params[1].grad = None if step % 2 else torch.ones(60)
        norm = clipper.clip(params, 1.0, 4)
        assert float(norm) == pytest.approx(math.sqrt(40 if step % 2 else 100))
    clipper.clip([nn.Parameter(torch.ones(3))], 1.0, 4)  # no gradient at all: nothing to do


def start(n=2):
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)) for _ in range(n)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    cluster = gossamer.VirtualCluster(n)
    return cluster, cluster.decentralize(models, optimizers, topology="complete"), models, optimizers


def train(gossips, models, optimizers, steps):
    for step in steps:
        for worker, (g, m, o) in enumerate(zip(gossips, models, optimizers, strict=True)):
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + worker))
            m(x).square().sum().backward()
            g.clip_grad_norm_(0.3, m[0].parameters())
            g.clip_grad_norm_(0.2, m[1].parameters())
            o.step()
            o.zero_grad()


def test_a_resumed_run_clips_bit_by_bit_as_the_uninterrupted_one():
    cluster, gossips, models, optimizers = start()
    train(gossips, models, optimizers, range(4))
    states, values = cluster.state_dicts(), [{k: v.clone() for k, v in m.state_dict().items()} for m in models]
    train(gossips, models, optimizers, range(4, 8))
    resumed, again, others, fresh = start()
    for model, value in zip(others, values, strict=True):
        model.load_state_dict(value)
    resumed.load_state_dicts(states)
    train(again, others, fresh, range(4, 8))
    for ours, theirs in zip(models, others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_single_tensor_is_clipped_as_a_list_of_one():
    _, gossips, models, _ = start()
    weights = [m[0].weight for m in models]
    for weight in weights:
        weight.grad = torch.ones(5, 6)
    norms = [gossips[0].clip_grad_norm_(0.3, weights[0]), gossips[1].clip_grad_norm_(0.3, [weights[1]])]
    assert [float(n) for n in norms] == pytest.approx([30**0.5] * 2)
    assert torch.equal(weights[0].grad, weights[1].grad)
    assert float(weights[0].grad.norm()) == pytest.approx(0.3, rel=1e-3)
    assert set(gossips[0]._clippers) == set(gossips[1]._clippers)


def test_parts_of_the_model_have_estimates_of_their_own():
    _, gossips, models, optimizers = start()
    train(gossips, models, optimizers, range(3))
    assert set(gossips[0]._clippers) == {"0+35", "2+24"}
    with pytest.raises(gossamer.InputError, match="no parameters"):
        gossips[0].clip_grad_norm_(1.0, [])
