"""Staleness: a late exchange is applied later, against what was sent, at most `staleness` steps late."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import gossamer
from gossamer.comm.local import LocalChannel
from gossamer.topology import Layout, build
from policies import policies
from reference import Dense, distance, quadratic

SHAPES = [(5, 7), (7,)]
WAIT = LocalChannel.wait
TOPOLOGIES = ["one-peer-exponential", "ring-static", "complete", "aer"]


class Delayed:
    """Virtual workers whose exchanges are said to be late as the reference says they are."""

    def __init__(self, monkeypatch, layout, topology, late, staleness, lr=0.1, steps=20, **settings):
        n, dtype = layout.n, torch.float32
        generator = torch.Generator().manual_seed(0)
        self.models = []
        for _ in range(n):
            model = nn.ParameterList(
                [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in SHAPES]
            )
            self.models.append(model)
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=lr, momentum=0.9) for m in self.models]
        self.dense = Dense(
            topology,
            [torch.stack(ps) for ps in zip(*self.models, strict=True)],
            lambda ps: torch.optim.SGD(ps, lr=lr, momentum=0.9),
            bucket_bytes=96 * dtype.itemsize // 4,
            staleness=staleness,
            late=late,
            **settings,
        )
        self.gradient = quadratic(n, SHAPES, steps, dtype)
        self.cluster = gossamer.VirtualCluster(per_node=layout.per_node)
        self.gossips = self.cluster.decentralize(
            self.models,
            self.optimizers,
            topology=topology,
            broadcast=False,
            **policies(staleness=staleness, bucket_mib=96 * dtype.itemsize // 4 / 2**20, **settings),
        )
        self.t = 0

        def wait_late(channel, job, timeout):
            if timeout == 0 and (channel._transport.rank, self.t) in self.dense.was_late:
                return False
            return WAIT(channel, job, timeout)

        monkeypatch.setattr(LocalChannel, "wait", wait_late)

    def step(self):
        self.t = self.dense.steps
        self.dense.step(self.gradient)
        n = len(self.models)
        for i, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            values = [p.detach().expand(n, *p.shape) for p in model]
            for p, g in zip(model, self.gradient(self.t, values), strict=True):
                p.grad = g[i].clone()
            optimizer.step()

    def values(self):
        return np.stack([torch.cat([p.detach().double().flatten() for p in m]).numpy() for m in self.models])


def seldom(worker, step):
    """One worker late now and then."""
    return worker == 1 and step % 7 == 3


def all_late(worker, step):
    """Everybody late two steps out of three."""
    return step % 3 != 0


SCRIPTS = {"never": lambda worker, step: False, "seldom": seldom, "all": all_late}


@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.parametrize(
    ("topology", "script"),
    [(t, s) for t in TOPOLOGIES for s in SCRIPTS if (t, s) != ("aer", "all")],
)  # in AER some workers have nothing to wait for: all others late for ever is a script that cannot be performed
def test_parity_with_the_dense_reference(monkeypatch, topology, staleness, script):
    for per_node in ([4], [2, 2], [1, 2, 1]):
        layout = Layout.of(per_node)
        run = Delayed(monkeypatch, layout, build(topology, layout), SCRIPTS[script], staleness, steps=11)
        for t in range(11):
            run.step()
            want = run.dense.stacked()
            worst = np.abs(run.values() - want).max() / np.abs(want).max()
            assert worst < 3e-6, f"{per_node}, step {t}: off by {worst:.1e}"
        skipped = [g.stats()["skipped_mixes"] for g in run.gossips]
        assert [g.stats()["rounds"] for g in run.gossips] == run.dense.launched
        assert (sum(skipped) > 0) == (script != "never")


@pytest.mark.parametrize(("every", "average_every"), [(2, 0), (1, 3), (2, 4)])
def test_parity_with_every_and_average_every(monkeypatch, every, average_every):
    layout = Layout.flat(4)
    run = Delayed(
        monkeypatch, layout, build("ring", layout), all_late, 2, every=every, average_every=average_every, steps=16
    )
    for t in range(16):
        run.step()
        want = run.dense.stacked()
        assert np.abs(run.values() - want).max() < 3e-6 * np.abs(want).max(), t
    assert max(g.stats()["skipped_mixes"] for g in run.gossips) > 0


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_a_late_exchange_is_waited_for_after_staleness_steps(monkeypatch, staleness):
    """Rounds come every 1 + staleness steps: `staleness` skips, then the wait."""
    layout = Layout.flat(4)
    run = Delayed(monkeypatch, layout, build("complete", layout), lambda worker, step: True, staleness, steps=21)
    for _ in range(21):
        run.step()
    for gossip in run.gossips:
        stats = gossip.stats()
        mixes = (21 - 1) // (staleness + 1)
        assert stats["rounds"] == mixes + 1
        assert stats["skipped_mixes"] == 20 - mixes


@pytest.mark.parametrize("script", SCRIPTS)
def test_zero_learning_rate_is_stable_and_keeps_the_mean(monkeypatch, script):
    layout = Layout.flat(8)
    topology = build("one-peer-exponential", layout)
    run = Delayed(monkeypatch, layout, topology, SCRIPTS[script], 2, lr=0.0, steps=40)
    before = run.values()
    distances = [distance(before)]
    for _ in range(40):
        run.step()
        distances.append(distance(run.values()))
    assert all(b <= a * (1 + 1e-6) + 1e-6 for a, b in itertools.pairwise(distances))
    assert distances[-1] < 1e-5 * distances[0]
    assert np.abs(run.values().mean(axis=0) - before.mean(axis=0)).max() < 1e-6 * np.abs(before).max()


@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8"])
def test_zero_learning_rate_keeps_the_mean_on_lossy_wires(monkeypatch, wire):
    layout = Layout.flat(5)
    models = [nn.Linear(9, 7) for _ in range(5)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.0) for m in models]
    cluster = gossamer.VirtualCluster(5)
    cluster.decentralize(
        models, optimizers, topology=build("ring", layout), wire=wire, broadcast=False, **policies(staleness=2)
    )
    now = [0]
    monkeypatch.setattr(LocalChannel, "wait", lambda c, j, t: WAIT(c, j, t) and (t != 0 or now[0] % 2 == 0))
    before = torch.stack([m.weight.detach().clone() for m in models]).double().mean(dim=0)
    for step in range(20):
        now[0] = step
        for m, o in zip(models, optimizers, strict=True):
            m.weight.grad = torch.ones_like(m.weight)
            o.step()
    after = torch.stack([m.weight.detach() for m in models]).double().mean(dim=0)
    assert (after - before).abs().max() < 1e-6 * before.abs().max()
    assert cluster.gossips[0].stats()["skipped_mixes"] > 0


def test_a_worker_may_run_ahead_by_the_staleness():
    """Stepping one worker twice is a skip, three times is an error that names the workers it needs."""
    models = [nn.Linear(3, 2) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    cluster = gossamer.VirtualCluster(2)
    gossips = cluster.decentralize(models, optimizers, topology="complete", **policies(staleness=1))
    optimizers[0].step()
    optimizers[0].step()
    assert gossips[0].stats()["skipped_mixes"] == 1
    with pytest.raises(gossamer.PeerError, match=r"needs round 0 of worker\(s\) 1"):
        optimizers[0].step()
    optimizers[1].step()
    optimizers[0].step()
    assert gossips[0].stats()["rounds"] == 2
