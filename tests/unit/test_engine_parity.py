"""The engine on virtual workers equals the dense reference X <- W(k) X + d(grad f(X)), step by step."""

import numpy as np
import pytest
import torch
from torch import nn

import gossamer
from gossamer.topology import Layout, build, entries
from policies import policies
from reference import Dense, quadratic

FLAT = [[n] for n in (1, 2, 3, 4, 5, 7, 8, 16)]
NODES = [[4, 4, 2], [1, 2, 1], [3, 3], [1, 1, 1, 1], [2, 2, 2, 2]]
SHAPES = [(5, 7), (7,), (3,)]
BUCKET_BYTES = 96  # three buckets of the fp32 parameters, and the first parameter is cut


def adamw_groups(ps):
    return torch.optim.AdamW(
        [{"params": ps[:1], "weight_decay": 0.1}, {"params": ps[1:], "weight_decay": 0.0, "lr": 0.02}], lr=0.05
    )


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.05),
    "adamw": adamw_groups,
    "accumadamw": lambda ps: gossamer.AccumAdamW(ps, lr=0.05, accumulate=2),
}


class Model(nn.Module):
    """One set of parameters for each optimizer."""

    def __init__(self, dtype, seed, names):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        for name in names:
            ps = [nn.Parameter(torch.randn(s, generator=g, dtype=torch.float64).to(dtype)) for s in SHAPES]
            setattr(self, name, nn.ParameterList(ps))


def check(case, layout, topology, names, dtype, steps, **settings):
    """Train both and compare after every step."""
    n = layout.n
    cluster = gossamer.VirtualCluster(per_node=layout.per_node)
    models = [Model(dtype, seed, names) for seed in range(n)]  # every worker starts elsewhere
    optimizers = [[OPTIMIZERS[name](list(getattr(m, name))) for name in names] for m in models]
    dense_settings = {k: v for k, v in settings.items() if k != "hierarchical"}
    lanes = {
        name: Dense(
            topology,
            [torch.stack(ps) for ps in zip(*(getattr(m, name) for m in models), strict=True)],
            OPTIMIZERS[name],
            bucket_bytes=BUCKET_BYTES * dtype.itemsize // 4,
            **dense_settings,
        )
        for name in names
    }
    cluster.decentralize(
        models,
        optimizers,
        topology=topology,
        broadcast=False,
        **policies(bucket_mib=BUCKET_BYTES * dtype.itemsize // 4 / 2**20, **settings),
    )
    gradient = quadratic(n, SHAPES, steps, dtype)
    tolerance = 2e-6 if dtype == torch.float32 else 1e-12
    for t in range(steps):
        for i in range(n):
            for name, optimizer in zip(names, optimizers[i], strict=True):
                ps = list(getattr(models[i], name))
                values = [p.detach().expand(n, *p.shape) for p in ps]
                for p, g in zip(ps, gradient(t, values), strict=True):
                    p.grad = g[i].clone()
                optimizer.step()
        for name, dense in lanes.items():
            dense.step(gradient)
            got = np.stack(
                [torch.cat([p.detach().double().flatten() for p in getattr(m, name)]).numpy() for m in models]
            )
            want = dense.stacked()
            worst = np.abs(got - want).max() / np.abs(want).max()
            assert worst < tolerance, f"{case}, {name}, step {t}: off by {worst:.2e}"
    cluster.close()


@pytest.mark.parametrize("algorithm", ["awc", "atc"])
@pytest.mark.parametrize("per_node", FLAT + NODES, ids=str)
@pytest.mark.parametrize("topology", [e.name for e in entries()])
def test_every_topology(topology, per_node, algorithm):
    layout = Layout.of(per_node)
    built = build(topology, layout)
    large = layout.n > 8
    for stagger in (True, False):
        names = list(OPTIMIZERS)
        if layout.n > 6:  # two of the four each time
            names = ["sgd", "accumadamw"] if stagger else ["adam", "adamw"]
        names = names[:1] if large else names
        # every pair of stagger, hierarchical and algorithm; all eight would cost twice as much
        for hierarchical in [stagger == (algorithm == "awc")] if layout.nodes > 1 else [True]:
            case = f"stagger={stagger}, hierarchical={hierarchical}"
            check(
                case,
                layout,
                built,
                names,
                torch.float32 if stagger else torch.float64,
                3 if large else 4,
                algorithm=algorithm,
                stagger=stagger,
                hierarchical=hierarchical,
            )


@pytest.mark.parametrize("algorithm", ["awc", "atc"])
@pytest.mark.parametrize(("every", "average_every"), [(2, 0), (3, 6), (1, 4), (2, 2)])
def test_every_and_average_every(every, average_every, algorithm):
    for per_node in ([5], [2, 2], [1, 2, 1]):
        layout = Layout.of(per_node)
        check(
            str(per_node),
            layout,
            build("aer", layout),
            ["sgd", "accumadamw"],
            torch.float32,
            14,
            algorithm=algorithm,
            every=every,
            average_every=average_every,
        )


def test_complete_atc_and_sgd_is_data_parallel():
    """Averaging parameters after one SGD step from a common point is averaging gradients."""
    torch.manual_seed(0)
    n, steps = 4, 6
    data = torch.randn(steps, n, 8, 6)
    models = [nn.Linear(6, 3) for _ in range(n)]
    plain = nn.Linear(6, 3)
    plain.load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with gossamer.VirtualCluster(n) as cluster:
        cluster.decentralize(models, optimizers, topology="complete", algorithm="atc")
        for t in range(steps):
            for i in range(n):
                optimizers[i].zero_grad()
                models[i](data[t, i]).square().mean().backward()
                optimizers[i].step()
            plain_optimizer.zero_grad()
            plain(data[t].flatten(0, 1)).square().mean().backward()
            plain_optimizer.step()
            for m in models:
                torch.testing.assert_close(m.weight, plain.weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("algorithm", ["awc", "atc"])
def test_one_worker_trains_like_the_plain_loop_bit_by_bit(algorithm):
    torch.manual_seed(0)
    data = torch.randn(5, 8, 6)
    model, plain = nn.Linear(6, 3), nn.Linear(6, 3)
    plain.load_state_dict(model.state_dict())
    optimizer, plain_optimizer = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, plain))
    with gossamer.VirtualCluster(1) as cluster:
        cluster.decentralize([model], [optimizer], topology="aer", algorithm=algorithm)
        for batch in data:
            for m, o in ((model, optimizer), (plain, plain_optimizer)):
                o.zero_grad()
                m(batch).square().mean().backward()
                o.step()
            assert torch.equal(model.weight, plain.weight)
            assert torch.equal(model.bias, plain.bias)
        with cluster.averaged():
            assert torch.equal(model.weight, plain.weight)
        assert cluster.consensus_distance() == 0.0


def test_gradients_of_a_network_are_taken_at_the_unmixed_point():
    """The same with forward and backward of a real network, against a hand-written loop over plain copies."""
    torch.manual_seed(0)
    n, steps = 5, 5
    layout = Layout.flat(n)
    ring = build("ring", layout)
    data = torch.randn(steps, n, 4, 6)

    def network():
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    models, plain = [network() for _ in range(n)], [network() for _ in range(n)]
    for p in plain:
        p.load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02) for m in models]
    plain_optimizers = [torch.optim.Adam(m.parameters(), lr=0.02) for m in plain]
    with gossamer.VirtualCluster(n) as cluster:
        cluster.decentralize(models, optimizers, topology=ring)
        for t in range(steps):
            for i in range(n):
                optimizers[i].zero_grad()
                models[i](data[t, i]).square().sum().backward()
                optimizers[i].step()
            for i in range(n):
                plain_optimizers[i].zero_grad()
                plain[i](data[t, i]).square().sum().backward()
            if t > 0:
                w = torch.from_numpy(ring.matrix(t - 1)).float()
                with torch.no_grad():
                    for ps in zip(*(m.parameters() for m in plain), strict=True):
                        mixed = torch.einsum("ij,j...->i...", w, torch.stack(ps))
                        for p, value in zip(ps, mixed, strict=True):
                            p.copy_(value)
            for o in plain_optimizers:
                o.step()
            for m, p in zip(models, plain, strict=True):
                for a, b in zip(m.parameters(), p.parameters(), strict=True):
                    torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
