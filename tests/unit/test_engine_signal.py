"""The share of the signal is measured between the workers, and GossipAdam steps by it."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

import gossamer
from gossamer.engine.signal import EVERY

LR = 0.05


class Job:
    """Virtual workers whose gradients the test sets."""

    def __init__(self, n=4, shapes=((6, 5), (40,)), make=gossamer.GossipAdam, start=0.0, **settings):
        torch.manual_seed(0)
        self.models = [nn.ParameterList([torch.full(s, start) for s in shapes]) for _ in range(n)]
        self.optimizers = [make(m.parameters(), lr=LR) for m in self.models]
        self.cluster = gossamer.VirtualCluster(n)
        self.gossips = self.cluster.decentralize(self.models, self.optimizers, **{"topology": "ring"} | settings)

    def step(self, gradients, only=None):
        """`gradients(worker)` makes the gradients of one worker's parameters."""
        for i, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            if only is not None and i not in only:
                continue
            for p, g in zip(model, gradients(i), strict=True):
                p.grad = g.clone()
            optimizer.step()
            optimizer.zero_grad()


def noisy(job, t, signal, noise):
    def gradients(worker):
        common = torch.Generator().manual_seed(t)
        own = torch.Generator().manual_seed(1000 * t + worker + 1)
        made = []
        for p in job.models[worker]:
            made.append(signal * torch.randn(p.shape, generator=common) + noise * torch.randn(p.shape, generator=own))
        return made

    return gradients


@pytest.mark.parametrize(
    ("decay", "maximize", "cls", "coupled"),
    [
        (0.0, False, gossamer.GossipAdam, 0.0),
        (0.5, False, gossamer.GossipAdam, 0.5),
        (0.5, True, gossamer.GossipAdam, -0.5),
        (0.5, False, gossamer.GossipAdamW, 0.0),
    ],
)
def test_the_first_measurement_is_the_ratio_of_the_averaged_square_to_the_own(decay, maximize, cls, coupled):
    job = Job(make=partial(cls, weight_decay=decay, maximize=maximize), start=3.0)
    first = [noisy(job, 0, 1.0, 0.5)(i) for i in range(4)]
    for t in range(EVERY // 2 + 1):
        assert set(job.optimizers[0]._shares.values()) == {None}  # the steps are Adam's
        job.step((lambda i: first[i]) if t == 0 else noisy(job, t, 1.0, 0.5))
        if t == 0:  # weight decay that the moments see is a part of the gradient
            seen = [
                [g + coupled * p.detach() for p, g in zip(model, gradients, strict=True)]
                for model, gradients in zip(job.models, first, strict=True)
            ]
    averaged = [torch.stack(same).mean(0).square().sum() for same in zip(*seen, strict=True)]
    own = [torch.stack(same).square().sum() / 4 for same in zip(*seen, strict=True)]
    pooled = sum(averaged) / sum(own)
    for at, (p, a, o) in enumerate(zip(job.models[0], averaged, own, strict=True)):
        ratio = (p.numel() * a / o + 16 * pooled) / (p.numel() + 16)
        expected = (ratio - 1 / 4) / (1 - 1 / 4)
        for model, optimizer in zip(job.models, job.optimizers, strict=True):
            assert optimizer._shares[model[at]] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("policy", [gossamer.AWC, gossamer.ATC])
@pytest.mark.parametrize(("every", "steps_apart"), [(1, 8), (2, 8), (3, 6), (4, 8), (5, 5), (8, 8), (20, 20)])
def test_local_steps_do_not_make_measurements_late_or_rare(every, steps_apart, policy):
    job = Job(algorithm=policy(every=every))
    meter = job.gossips[0].lanes[0].meter
    launched, known, t = [], None, 0
    meter.average.launch, launch = lambda k, vector: launched.append(t) or launch(k, vector), meter.average.launch
    for t in range(1, 4 * steps_apart + 1):
        job.step(noisy(job, t, 1.0, 1.0))
        if known is None and None not in job.optimizers[0]._shares.values():
            known = t
    assert known == (2 * every if every > 1 else 5)
    assert launched == list(range(every, 4 * steps_apart + 1, steps_apart))


@pytest.mark.parametrize("every", [4, 8])
def test_a_resumed_run_with_local_steps_continues_the_measurement_bit_by_bit(every):
    whole = Job(algorithm=gossamer.AWC(every=every))
    for t in range(40):
        whole.step(noisy(whole, t, 1.0, 1.0))
        if t == 20:  # a measurement is on its way
            assert whole.gossips[0].lanes[0].meter.average._job is not None
            models, optimizers = [m.state_dict() for m in whole.models], [o.state_dict() for o in whole.optimizers]
            saved = copy.deepcopy((models, optimizers, whole.cluster.state_dicts()))
    resumed = Job(algorithm=gossamer.AWC(every=every))
    for model, optimizer, *states in zip(resumed.models, resumed.optimizers, saved[0], saved[1], strict=True):
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    resumed.cluster.load_state_dicts(saved[2])
    for t in range(21, 40):
        resumed.step(noisy(resumed, t, 1.0, 1.0))
    for mine, theirs in zip(resumed.models, whole.models, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("algorithm", ["awc", "atc", "ad-psgd"])
def test_a_head_that_stays_local_steps_as_torchs_adam(algorithm):
    job = Job(algorithm=algorithm, parameters=lambda name, p: name != "1")
    heads = [nn.Parameter(m[1].detach().clone()) for m in job.models]
    adams = [torch.optim.Adam([head], lr=LR) for head in heads]
    for t in range(20):
        gradients = noisy(job, t, 1.0, 1.0)
        job.step(gradients)
        for worker, (head, adam) in enumerate(zip(heads, adams, strict=True)):
            head.grad = gradients(worker)[1]
            adam.step()
    assert job.optimizers[0].replicas == 4
    for model, head in zip(job.models, heads, strict=True):
        assert torch.equal(model[1], head)
    assert not torch.equal(job.models[0][1], job.models[1][1])


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("algorithm", ["awc", "ad-psgd"])
def test_after_close_the_optimizer_is_torchs_adam(algorithm, average):
    job = Job(algorithm=algorithm, parameters=lambda name, p: name != "1")
    for t in range(20):
        job.step(noisy(job, t, 1.0, 1.0))
    job.cluster.close(average=average)
    for worker, (model, optimizer) in enumerate(zip(job.models, job.optimizers, strict=True)):
        assert optimizer.replicas == 1
        assert not optimizer._shares
        assert not optimizer._local
        twins = [nn.Parameter(p.detach().clone()) for p in model]
        adam = torch.optim.Adam(twins)
        adam.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for t in range(20, 23):
            for p, q, g in zip(model, twins, noisy(job, t, 1.0, 1.0)(worker), strict=True):
                p.grad, q.grad = g.clone(), g.clone()
            optimizer.step()
            adam.step()
        assert all(torch.equal(p, q) for p, q in zip(model, twins, strict=True))


def test_after_close_groups_keep_the_replicas_that_they_fix():
    def make(parameters, lr):
        first, second = parameters
        return gossamer.GossipAdam([{"params": [first]}, {"params": [second], "replicas": 3}], lr=lr)

    job = Job(make=make)
    job.step(noisy(job, 0, 1.0, 1.0))
    job.cluster.close()
    assert [job.optimizers[0].kappa(g) for g in job.optimizers[0].param_groups] == [1, 3]


@pytest.mark.parametrize("algorithm", ["awc", "atc", gossamer.AWC(staleness=1), gossamer.AWC(every=2)])
def test_a_signal_that_changes_its_direction_in_every_step_is_told_from_noise(algorithm):
    # The common part of these gradients is new in every step, so no worker can see it by itself.
    job = Job(algorithm=algorithm)
    for t in range(120):
        job.step(noisy(job, t, 2.0, 1.0))
    for model, optimizer in zip(job.models, job.optimizers, strict=True):
        assert [optimizer._shares[p] for p in model] == pytest.approx([0.8, 0.8], abs=0.12)
        assert optimizer.noise_to_signal() == pytest.approx(0.25, abs=0.15)
        assert "signal_sq" not in optimizer.state[model[0]]
    assert job.gossips[0].lanes[0].meter.share == pytest.approx(0.8, abs=0.1)
    noise = Job(algorithm=algorithm)
    for t in range(120):
        noise.step(noisy(noise, t, 0.0, 1.0))
    assert max(noise.optimizers[0]._shares.values()) < 0.1


def test_large_parameters_are_sampled():
    job = Job(shapes=((300, 70),))
    for t in range(60):
        job.step(noisy(job, t, 1.0, 1.0))
    assert job.optimizers[0]._shares[job.models[0][0]] == pytest.approx(0.5, abs=0.1)
    meter = job.gossips[0].lanes[0].meter
    assert meter._sample.numel() == 256


def test_what_has_no_gradient_is_sampled_as_zero_and_every_layout_in_its_order():
    job = Job(shapes=((4, 3, 2, 2), (300, 7), (5,)))
    model, meter = job.models[0], job.gossips[0].lanes[0].meter
    image, table, _ = gradients = noisy(job, 0, 1.0, 0.5)(0)
    for p, g in zip(model, [image.to(memory_format=torch.channels_last), table, None], strict=True):
        p.grad = g
    meter.look(0)
    every = table.flatten()[::9]  # of 2100 coordinates at most 256
    expected = [image.flatten(), every, torch.zeros(256 - len(every)), torch.zeros(5)]
    assert torch.equal(meter._sample, torch.cat(expected))
    assert torch.equal(gradients[0], image)


IMPLEMENTATIONS = [{}, {"fused": False}, {"foreach": True}, {"fused": True}]


@pytest.mark.parametrize("mode", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("beta1", [0.9, 0.0])
@pytest.mark.parametrize("cls", [gossamer.GossipAdam, gossamer.GossipAdamW])
@pytest.mark.parametrize("replicas", [4, 16])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_step_with_a_measured_share_follows_the_equation(cls, replicas, share, beta1, maximize, mode):
    torch.manual_seed(1)
    x = torch.randn(7, 3)
    p = nn.Parameter(x.clone())
    settings = {"lr": LR, "betas": (beta1, 0.98), "eps": 1e-4, "weight_decay": 0.1, "maximize": maximize, **mode}
    optimizer = cls([p], replicas=replicas / 2, discount=2.0, **settings)
    optimizer.set_signal_shares({p: share})
    exact = share + (1 - share) / replicas
    factor = 2 ** (round(8 * math.log2(exact)) / 8)  # eighths of an octave
    assert factor == pytest.approx(exact, rel=0.045)
    x, m, v = x.double(), 0.0, 0.0
    forgets = 0.02 / math.sqrt(replicas)
    for t in range(1, 8):
        g = torch.randn(7, 3)
        p.grad = g.clone()
        optimizer.step()
        g = -g.double() if maximize else g.double()
        if cls is gossamer.GossipAdam:
            g = g + 0.1 * x
        else:
            x = x * (1 - LR * 0.1)
        m, v = beta1 * m + (1 - beta1) * g, (1 - forgets) * v + forgets * g * g
        step = LR * (m / (1 - beta1**t)) / ((factor * v / (1 - (1 - forgets) ** t)).sqrt() + 1e-4)
        x = x - step
        torch.testing.assert_close(p.detach().double(), x, rtol=1e-5, atol=1e-6)
    assert set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"}  # those of torch's Adam


def test_one_replica_is_adam_whatever_was_measured():
    torch.manual_seed(1)
    ours, theirs = (nn.Parameter(torch.ones(9)) for _ in range(2))
    mine, adam = gossamer.GossipAdam([ours], lr=LR), torch.optim.Adam([theirs], lr=LR)
    mine.set_signal_shares({ours: 0.2})
    for _ in range(5):
        ours.grad = torch.randn(9)
        theirs.grad = ours.grad.clone()
        mine.step()
        adam.step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("share", [-0.1, 1.5, math.nan])
def test_a_share_is_a_part_of_the_whole(share):
    p = nn.Parameter(torch.ones(1))
    with pytest.raises(gossamer.InputError, match="share of the signal"):
        gossamer.GossipAdam([p]).set_signal_shares({p: share})


def test_other_optimizers_send_nothing_more():
    job = Job(make=torch.optim.Adam)
    assert job.gossips[0].lanes[0].meter is None


def test_asynchronous_workers_tell_signal_by_their_own_gradients():
    job = Job(algorithm="ad-psgd")
    assert job.gossips[0].lanes[0].meter is None


def test_a_resumed_run_continues_the_measurement_bit_by_bit():
    whole = Job()
    for t in range(30):
        whole.step(noisy(whole, t, 1.0, 1.0))
        if t == 17:  # a measurement is on its way
            saved = copy.deepcopy(
                (
                    [m.state_dict() for m in whole.models],
                    [o.state_dict() for o in whole.optimizers],
                    whole.cluster.state_dicts(),
                )
            )
    resumed = Job()
    for model, state in zip(resumed.models, saved[0], strict=True):
        model.load_state_dict(state)
    for optimizer, state in zip(resumed.optimizers, saved[1], strict=True):
        optimizer.load_state_dict(state)
    resumed.cluster.load_state_dicts(saved[2])
    for t in range(18, 30):
        resumed.step(noisy(resumed, t, 1.0, 1.0))
    for mine, theirs in zip(resumed.models, whole.models, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))


def test_workers_that_take_fewer_steps_still_take_part():
    job = Job()
    for t in range(10):
        job.step(noisy(job, t, 1.0, 1.0))
    for t in range(10, 10 + 2 * EVERY):
        with job.cluster.averaged():
            pass
        job.step(noisy(job, t, 1.0, 1.0), only=[3])
        with job.cluster.averaged():
            pass
    shares = [[o._shares[p] for p in m] for m, o in zip(job.models, job.optimizers, strict=True)]
    assert shares[0] == shares[3]


def test_an_overflow_leaves_the_estimate_as_it_was():
    job = Job()
    for t in range(3 * EVERY):  # the next step is measured
        job.step(noisy(job, t, 1.0, 1.0))
    meter = job.gossips[0].lanes[0].meter
    before, seen = dict(job.optimizers[0]._shares), []
    meter.average.read, read = lambda k: seen.append(read(k)) or seen[-1], meter.average.read
    for p in job.models[2]:
        p.grad = torch.full(p.shape, math.inf)
    meters = [g.lanes[0].meter for g in job.gossips]
    meters[2].look(meters[2].average.every)
    meters[2].look = lambda k: None  # what is sent is the overflow
    for t in range(EVERY // 2 + 1):
        job.step(noisy(job, 99 + t, 1.0, 1.0))
    arrived = [found for found in seen if found is not None]
    assert len(arrived) == 1
    assert not arrived[0][1].isfinite().all()
    assert dict(job.optimizers[0]._shares) == before
