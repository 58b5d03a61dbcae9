"""Virtual asynchronous workers equal a dense simulation of the event sequence, bit by bit."""

import copy

import pytest
import torch
from torch import nn

from async_reference import AsyncReference, padded
from gossamer import VirtualCluster
from policies import policies

SHAPES = [(5, 7), (7,), (3,)]
ALGORITHMS = ["ad-psgd", "a2cid2"]


def adamw_groups(ps):
    ps = list(ps)
    return torch.optim.AdamW(
        [{"params": ps[:1], "weight_decay": 0.1}, {"params": ps[1:], "weight_decay": 0.0, "lr": 0.02}], lr=0.05
    )


OPTIMIZERS = {
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.05),
    "adamw-groups": adamw_groups,
}


class Model(nn.Module):
    def __init__(self, seed):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.ps = nn.ParameterList([torch.randn(s, generator=g, dtype=torch.float64) for s in SHAPES])


class Pair:
    """The engine and the reference from the same start, on f_i(y) = |y - c_i|^2 / 2 with noise."""

    def __init__(self, topology, n, algorithm, optimizer, **settings):
        self.models = [Model(i) for i in range(n)]
        make = OPTIMIZERS[optimizer]
        self.dense = AsyncReference(topology, [list(m.ps) for m in self.models], make, algorithm=algorithm, **settings)
        self.optimizers = [make(m.parameters()) for m in self.models]
        self.cluster = VirtualCluster(n)
        self.gossips = self.cluster.decentralize(
            self.models,
            self.optimizers,
            topology=topology,
            broadcast=False,
            **policies(algorithm=algorithm, **settings),
        )

    def gradients(self, i, step):
        g = torch.Generator().manual_seed(1000 * i + step)
        return [p.detach() - i + torch.randn(p.shape, generator=g, dtype=p.dtype) for p in self.models[i].ps]

    def step(self, i, duration=1.0):
        gradients = self.gradients(i, self.dense.steps[i])
        self.dense.step(i, gradients, duration)
        for p, g in zip(self.models[i].ps, gradients, strict=True):
            p.grad = g
        self.optimizers[i].step()

    def check(self):
        for i, gossip in enumerate(self.gossips):
            state = gossip.lanes[0].state
            assert torch.equal(torch.cat(state.x), self.dense.x[i])
            assert torch.equal(padded(self.models[i].ps), padded(self.dense.y[i]))
            if state.x_tilde is not None:
                assert torch.equal(torch.cat(state.x_tilde), self.dense.x_tilde[i])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("topology", ["ring", "star", "complete", "torus"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equals_the_dense_event_sequence(algorithm, topology, optimizer):
    for n in range(1, 10):
        pair = Pair(topology, n, algorithm, optimizer, seed=n)
        for _ in range(4):
            for i in range(n):
                pair.step(i)
            pair.check()
        pair.cluster.close()


@pytest.mark.parametrize("settings", [{"rate": 0.3}, {"rate": 2.5, "seed": 9}, {"gaps": "fixed", "rate": 1.5}])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rates_and_gaps(algorithm, settings):
    pair = Pair("ring", 6, algorithm, "momentum", **settings)
    for _ in range(12):
        for i in range(6):
            pair.step(i)
        pair.check()


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_workers_of_different_speed_take_turns(algorithm, optimizer):
    def durations(rank, step):
        return (4.0 if rank == 2 else 1.0) * (0.9 + 0.05 * ((rank + 3 * step) % 5))

    pair = Pair("ring", 5, algorithm, optimizer, seed=4)
    order = pair.dense.order(60, durations)
    for i in pair.cluster.turns(60, durations):
        assert i == next(order)
        pair.step(i, durations(i, pair.dense.steps[i]))
        pair.check()
    assert min(pair.dense.steps) == pair.dense.steps[2] <= 5
    assert sum(pair.dense.steps) == 60


def test_turns_go_on_after_a_collective_call():
    pair = Pair("ring", 4, "a2cid2", "momentum")

    def durations(rank, step):
        return 1.0 + 0.3 * rank

    order = pair.dense.order(40, durations)
    for _ in range(4):
        for i in pair.cluster.turns(10, durations):
            assert i == next(order)
            pair.step(i, durations(i, 0))
        pair.cluster.consensus_distance()
        with pair.cluster.averaged() as model:
            mean = torch.stack(pair.dense.x).mean(dim=0)
            torch.testing.assert_close(padded(model.ps), mean, rtol=0, atol=1e-14)
        pair.check()


def test_a_worker_that_fell_behind_in_turns_is_refused_with_a_sentence():
    pair = Pair("ring", 3, "ad-psgd", "momentum")
    for _ in range(3):
        pair.step(0)
    with pytest.raises(Exception, match=r"a virtual worker stepped at time 1 after others had reached 3; step the"):
        pair.step(1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_optimizers_have_event_sequences_of_their_own(algorithm):
    n, models = 4, [Model(i) for i in range(4)]
    halves = [(list(m.ps[:1]), list(m.ps[1:])) for m in models]
    dense = [
        AsyncReference("ring", [h[k] for h in halves], OPTIMIZERS["adam"], algorithm=algorithm, seed=7919 * k)
        for k in range(2)
    ]
    optimizers = [[OPTIMIZERS["adam"](ps) for ps in h] for h in halves]
    cluster = VirtualCluster(n)
    cluster.decentralize(models, optimizers, topology="ring", algorithm=algorithm, broadcast=False)
    for step in range(8):
        for i in range(n):
            for k in range(2):
                g = torch.Generator().manual_seed(100 * step + 10 * i + k)
                gradients = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in halves[i][k]]
                dense[k].step(i, gradients)
                for p, gradient in zip(halves[i][k], gradients, strict=True):
                    p.grad = gradient
                optimizers[i][k].step()
                assert torch.equal(padded(halves[i][k]), padded(dense[k].y[i]))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_resumed_run_equals_the_uninterrupted_one(algorithm):
    def run(pair, steps):
        for _ in range(steps):
            for i in range(5):
                pair.step(i)

    whole = Pair("ring", 5, algorithm, "adam")
    run(whole, 7)
    states = whole.cluster.state_dicts()
    models = [{k: v.clone() for k, v in m.state_dict().items()} for m in whole.models]
    optimizers = [o.state_dict() for o in whole.optimizers]
    resumed = Pair("ring", 5, algorithm, "adam")
    resumed.dense = whole.dense
    for i in range(5):
        resumed.models[i].load_state_dict(models[i])
        resumed.optimizers[i].load_state_dict(copy.deepcopy(optimizers[i]))
    resumed.cluster.load_state_dicts(states)
    run(resumed, 7)
    resumed.check()


def test_a_step_that_raises_changes_nothing():
    class Failing(torch.optim.SGD):
        fail = False

        def step(self, closure=None):
            if self.fail:
                self.param_groups[0]["params"][0].data.add_(7.0)
                raise RuntimeError("boom")
            return super().step(closure)

    model = Model(0)
    optimizer = Failing(model.parameters(), lr=0.1)
    cluster = VirtualCluster(1)
    cluster.decentralize([model], [optimizer], topology="ring", algorithm="a2cid2")
    for p in model.ps:
        p.grad = torch.ones_like(p)
    before = padded(model.ps)
    optimizer.step()
    optimizer.fail = True
    with pytest.raises(RuntimeError, match="boom"):
        optimizer.step()
    optimizer.fail = False
    optimizer.step()
    mask = padded([torch.ones_like(p) for p in model.ps])
    torch.testing.assert_close(padded(model.ps), before - 0.2 * mask, rtol=0, atol=1e-15)
    cluster.close()
