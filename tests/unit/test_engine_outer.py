"""Outer steps on virtual workers equal the dense reference in the form of their papers, and DiLoCo where exact."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import gossamer
from gossamer.engine.outer import OUTER
from gossamer.errors import InputError
from gossamer.topology import Layout, build, entries
from outer_reference import DenseOuter
from reference import quadratic

SHAPES = [(5, 7), (3,)]
BUCKET_BYTES = 96
LAYOUTS = [[1], [2], [5], [16], [4, 4, 2], [2, 2, 2, 2]]
KINDS = list(OUTER)


def policy(algorithm, outer, lr, momentum, every, average_every, **settings):
    kind = gossamer.AWC if algorithm == "awc" else gossamer.ATC
    rule = gossamer.outer_named(outer, lr, momentum)
    return kind(every=every, average_every=average_every, outer=rule, **settings)


class Workers:
    """n virtual workers on quadratics, from different starting points."""

    def __init__(self, layout, topology, algorithm, steps, dtype=torch.float64, **settings):
        self.n = layout.n
        self.models = []
        for seed in range(self.n):
            g = torch.Generator().manual_seed(seed)
            ps = [nn.Parameter(torch.randn(s, generator=g, dtype=torch.float64).to(dtype)) for s in SHAPES]
            self.models.append(nn.ParameterList(ps))
        self.start = [torch.stack([m[i].detach() for m in self.models]) for i in range(len(SHAPES))]
        self.optimizers = [self.optimizer(m.parameters()) for m in self.models]
        self.gradient = quadratic(self.n, SHAPES, steps, dtype)
        self.cluster = gossamer.VirtualCluster(per_node=layout.per_node)
        exchange = gossamer.Exchange(bucket_mib=BUCKET_BYTES * dtype.itemsize // 4 / 2**20)
        self.cluster.decentralize(
            self.models,
            self.optimizers,
            topology=topology,
            algorithm=algorithm,
            broadcast=False,
            exchange=exchange,
            **settings,
        )
        self.t = 0

    @staticmethod
    def optimizer(ps):
        return torch.optim.SGD(ps, lr=0.1, momentum=0.5)

    def step(self):
        for i, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            values = [p.detach().expand(self.n, *p.shape) for p in model]
            for p, g in zip(model, self.gradient(self.t, values), strict=True):
                p.grad = g[i].clone()
            optimizer.step()
        self.t += 1

    def stacked(self):
        return np.stack([torch.cat([p.detach().double().flatten() for p in m]).numpy() for m in self.models])


@pytest.mark.parametrize("per_node", LAYOUTS, ids=str)
@pytest.mark.parametrize("topology", [e.name for e in entries()])
def test_every_topology_equals_the_reference(topology, per_node):
    equals_the_reference(topology, per_node, steps=7)


@pytest.mark.parametrize("per_node", [[5], [2, 2]], ids=str)
@pytest.mark.filterwarnings("ignore:bucket_mib")
def test_fragments_equal_the_reference(per_node):
    equals_the_reference("aer", per_node, steps=14, fragments=2)


def equals_the_reference(topology, per_node, steps, fragments=1):
    layout = Layout.of(per_node)
    built = build(topology, layout)
    for at, outer in enumerate(KINDS):
        for algorithm in ("awc", "atc") if layout.n < 16 else (("awc", "atc")[(at + len(topology)) % 2],):
            lr, momentum = 0.6, 0.4
            every, average_every = (1, 3) if outer == "slowmo" else (2, 4 if at % 2 else 0)
            rounds = {"every": every, "average_every": average_every, "fragments": fragments}
            workers = Workers(layout, built, policy(algorithm, outer, lr, momentum, **rounds), steps)
            dense = DenseOuter(
                built,
                workers.start,
                Workers.optimizer,
                algorithm=algorithm,
                outer=outer,
                lr=lr,
                momentum=momentum,
                bucket_bytes=BUCKET_BYTES * 2,
                **rounds,
            )
            for t in range(steps):
                workers.step()
                dense.step(workers.gradient)
                want = dense.stacked()
                worst = np.abs(workers.stacked() - want).max() / np.abs(want).max()
                assert worst < 1e-12, f"{outer}, {algorithm}, step {t}: off by {worst:.2e}"
            workers.cluster.close()


@pytest.mark.parametrize("n", [1, 4])
def test_nesterov_with_an_exact_average_is_diloco(n):
    """torch's own SGD(nesterov=True) on the averaged drift, from one global model."""
    torch.manual_seed(0)
    every, rounds = 3, 5
    data = torch.randn(every * rounds, n, 8, 6)
    models = [nn.Linear(6, 3) for _ in range(n)]
    world = nn.Linear(6, 3)
    world.load_state_dict(models[0].state_dict())
    locals_ = [copy.deepcopy(world) for _ in range(n)]
    local_optimizers = [torch.optim.Adam(m.parameters(), lr=0.02) for m in locals_]
    outer = torch.optim.SGD(world.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02) for m in models]
    policy = gossamer.ATC(every=every, outer=gossamer.Nesterov(lr=0.7, momentum=0.9))
    with gossamer.VirtualCluster(n) as cluster:
        cluster.decentralize(models, optimizers, topology="complete", algorithm=policy)
        for t in range(every * rounds):
            for ms, os in ((models, optimizers), (locals_, local_optimizers)):
                for i in range(n):
                    os[i].zero_grad()
                    ms[i](data[t, i]).square().mean().backward()
                    os[i].step()
            if (t + 1) % every == 0:
                with torch.no_grad():
                    for p, *own in zip(world.parameters(), *(m.parameters() for m in locals_), strict=True):
                        p.grad = p - torch.stack(own).mean(0)
                outer.step()
                for m in locals_:
                    m.load_state_dict(world.state_dict())
                for m in models:
                    for got, want in zip(m.parameters(), world.parameters(), strict=True):
                        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)


def by_worker(t, values):
    """The gradient of worker i in step t is (t + 1) i / 100, wherever it is."""
    return [torch.stack([torch.full_like(own, (t + 1) * i / 100) for i, own in enumerate(v)]) for v in values]


@pytest.mark.parametrize("outer", KINDS)
def test_the_mean_takes_the_outer_step_of_an_all_reduce(outer):
    """Drift that does not depend on the parameters: the mean is that of the complete topology, on any topology."""
    average_every = 4 if outer == "slowmo" else 0
    means = []
    for topology in ("complete", "ring", "one-peer-exponential"):
        algorithm = policy("awc", outer, 0.5, 0.3, 2, average_every)
        workers = Workers(Layout.flat(8), build(topology, Layout.flat(8)), algorithm, 12)
        workers.gradient = by_worker
        for _ in range(12):
            workers.step()
        means.append(workers.stacked().mean(axis=0))
        workers.cluster.close()
    for mean in means[1:]:
        np.testing.assert_allclose(mean, means[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("algorithm", ["awc", "atc"])
@pytest.mark.parametrize("outer", ["nesterov", "slowmo"])
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.filterwarnings("ignore:bucket_mib")
def test_four_bits_conserve_the_mean_that_takes_the_outer_step(outer, algorithm, fragments):
    """The mean is that of full precision on the complete topology, although every worker is rounded."""
    layout, steps = Layout.flat(8), 24
    found = []
    for wire, topology in (("fp32", "complete"), ("fp32", "ring"), ("int4", "ring"), ("int4", "one-peer-exponential")):
        chosen = policy(algorithm, outer, 0.5, 0.3, 2, 8, fragments=fragments)
        workers = Workers(layout, build(topology, layout), chosen, steps, wire=wire)
        workers.gradient = by_worker
        for _ in range(steps - 1):  # the last exchange was not an exact average
            workers.step()
        found.append(workers.stacked())
        workers.cluster.close()
    for one in found[1:]:
        np.testing.assert_allclose(one.mean(axis=0), found[0].mean(axis=0), rtol=1e-12, atol=1e-12)
    assert np.abs(found[2] - found[1]).max() > 1e-4  # four bits were sent


@pytest.mark.parametrize("wire", ["fp32", "int4"])
@pytest.mark.parametrize("algorithm", ["awc", "atc"])
@pytest.mark.parametrize("outer", KINDS)
def test_resume_is_bit_exact_at_any_step(outer, algorithm, wire):
    every, average_every = (2, 4) if outer == "slowmo" else (3, 6 if wire == "int4" else 0)
    layout, steps = Layout.flat(4), 14
    chosen = policy(algorithm, outer, 0.5, 0.4, every, average_every)

    def made():
        return Workers(layout, build("ring", layout), chosen, steps, torch.float32, wire=wire)

    whole = made()
    for _ in range(steps):
        whole.step()
    for stop in (3, 5, 7):
        first = made()
        for _ in range(stop):
            first.step()
        saved = copy.deepcopy(
            (
                [m.state_dict() for m in first.models],
                [o.state_dict() for o in first.optimizers],
                first.cluster.state_dicts(),
            )
        )
        first.cluster.close()
        second = made()
        for m, o, model, optimizer in zip(second.models, second.optimizers, *saved[:2], strict=True):
            m.load_state_dict(model)
            o.load_state_dict(optimizer)
        second.cluster.load_state_dicts(saved[2])
        second.t = stop
        for _ in range(steps - stop):
            second.step()
        assert np.array_equal(second.stacked(), whole.stacked()), f"stopped after {stop}"
        second.cluster.close()
    whole.cluster.close()


def test_a_state_of_another_outer_step_is_refused():
    layout = Layout.flat(2)
    first = Workers(layout, "ring", policy("awc", "nesterov", 0.5, 0.4, 2, 0), 4)
    states = first.cluster.state_dicts()
    for other in (gossamer.AWC(every=2), policy("awc", "heavy-ball", 0.5, 0.4, 2, 0)):
        second = Workers(layout, "ring", other, 4)
        with pytest.raises(InputError, match="saved with the outer step 'nesterov'"):
            second.cluster.load_state_dicts(states)
    for _ in range(3):
        first.step()
    third = Workers(layout, "ring", policy("atc", "nesterov", 0.5, 0.4, 2, 0), 4)
    with pytest.raises(InputError, match="saved by algorithm 'awc', with an exchange in flight"):
        third.cluster.load_state_dicts(first.cluster.state_dicts())


def test_reset_and_averaged():
    """averaged() restores bit by bit; reset() continues from the parameters without velocity."""
    layout = Layout.flat(4)
    workers = Workers(layout, "ring", policy("awc", "nesterov", 0.5, 0.4, 2, 0), 12)
    plain = Workers(layout, "ring", policy("awc", "nesterov", 0.5, 0.4, 2, 0), 12)
    for _ in range(5):
        workers.step()
        plain.step()
        mean = workers.stacked().mean(axis=0)
        with workers.cluster.averaged():
            np.testing.assert_allclose(workers.stacked(), np.tile(mean, (4, 1)), rtol=1e-12)
    assert np.array_equal(workers.stacked(), plain.stacked())
    workers.cluster.reset()
    before = workers.stacked()
    state = workers.cluster.state_dicts()[0]["lanes"][0]["outer"]
    assert all(not v.any() for v in state["velocity"])
    np.testing.assert_array_equal(before, workers.stacked())
    workers.cluster.close()
    np.testing.assert_allclose(workers.stacked(), np.tile(before.mean(axis=0), (4, 1)), rtol=1e-12)


def test_loaded_parameters_are_the_new_outer_point():
    """model.load_state_dict() without reset(): neither the exchange in flight nor the old velocity reach the model."""
    layout = Layout.flat(2)
    workers = Workers(layout, "ring", policy("awc", "nesterov", 0.5, 0.4, 2, 0), 12)
    for _ in range(3):
        workers.step()
    zeros = {k: torch.zeros_like(v) for k, v in workers.models[0].state_dict().items()}
    workers.gradient = lambda t, values: [torch.zeros_like(v) for v in values]
    for m, o in zip(workers.models, workers.optimizers, strict=True):
        m.load_state_dict(zeros)
        o.state.clear()
    for _ in range(6):
        workers.step()
    assert not workers.stacked().any()
    workers.cluster.close()


def test_workers_that_skip_steps_meet():
    """A worker that runs out of data takes part in mix-only rounds with the drift that it has."""
    layout = Layout.flat(4)
    workers = Workers(layout, "ring", policy("awc", "heavy-ball", 0.5, 0.3, 2, 0), 12)
    for t in range(6):
        for i in range(4):
            if i == 3 and t > 2:
                continue
            for p in workers.models[i]:
                p.grad = torch.ones_like(p)
            if i != 3 and t == 3:
                workers.cluster.park(3)
            workers.optimizers[i].step()
    assert np.isfinite(workers.cluster.consensus_distance())
    rounds = {g.lanes[0].k for g in workers.cluster.gossips}
    assert len(rounds) == 1
    workers.cluster.close()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: gossamer.Nesterov(momentum=1.0), "outer momentum must be at least 0 and less than 1, got 1"),
        (lambda: gossamer.HeavyBall(momentum=-0.1), "got -0.1"),
        (lambda: gossamer.Nesterov(lr=0.0), "outer lr must be more than 0, got 0"),
        (lambda: gossamer.Nesterov(lr=float("nan")), "outer lr must be a finite number, got nan"),
        (lambda: gossamer.Nesterov(lr="1"), "must be a finite number, got '1'"),
        (lambda: gossamer.AWC(outer=gossamer.Nesterov()), "every=1 exchanges after each step"),
        (lambda: gossamer.AWC(every=4, outer="nesterov"), "outer must be a policy such as gossamer.Nesterov"),
        (lambda: gossamer.AWC(every=4, outer=gossamer.Nesterov(), staleness=1), "leave staleness out"),
        (lambda: gossamer.ATC(every=4, outer=gossamer.SlowMo()), "average_every=0 makes none"),
        (lambda: gossamer.ATC(average_every=1, outer=gossamer.SlowMo()), "makes every step one"),
        (lambda: gossamer.outer_named("newton"), "outer must be one of nesterov, heavy-ball, accelerated, slowmo"),
        (lambda: gossamer.algorithm("ad-psgd", outer=gossamer.Nesterov()), "no rounds, so outer does not apply"),
        (lambda: gossamer.algorithm("a2cid2", every=4), "use a rate below 1"),
    ],
)
def test_bad_input_is_named(make, text):
    with pytest.raises(InputError) as error:
        make()
    assert text in str(error.value)


def test_a_consensus_guard_is_refused_beside_an_outer_step():
    guarded = {"guard": gossamer.ConsensusGuard()}
    with pytest.raises(InputError, match="leave the guard out, or use SlowMo"):
        Workers(Layout.flat(2), "ring", policy("awc", "nesterov", 0.5, 0.4, 2, 0), 4, **guarded)
    Workers(Layout.flat(2), "ring", policy("awc", "slowmo", 0.5, 0.4, 1, 4), 4, **guarded).cluster.close()


def test_the_engine_refuses_what_would_diverge():
    layout = Layout.flat(16)
    chosen = policy("awc", "heavy-ball", 0.7, 0.9, 4, 0)
    with pytest.raises(InputError, match=r"grows by 1\.0\d+ per exchange; use momentum 0\.\d+ or less"):
        Workers(layout, "random-matching", chosen, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Workers(layout, "complete", policy("awc", "nesterov", 0.7, 0.9, 4, 0), 4).cluster.close()  # DiLoCo's values
