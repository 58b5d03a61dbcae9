"""Another number of workers, another topology: means are conserved, moments come along, training continues."""

import itertools
import json

import pytest
import torch
from torch import nn

import gossamer
from gossamer import Checkpoints
from gossamer.checkpoint import consensus, files
from gossamer.checkpoint.state import blend, shares
from gossamer.predict.methods import parse
from gossamer.recipes.config import make_config
from gossamer.recipes.run import make_strategy, run
from toy import Toy


class Workers:
    """n virtual workers with a normalization, a parameter of their own and one that is tied."""

    def __init__(self, n, topology="ring", algorithm="awc", optimizer=torch.optim.Adam, buffers="average"):
        self.models = [_Model() for _ in range(n)]
        self.optimizers = [optimizer(m.parameters(), lr=0.05) for m in self.models]
        self.cluster = gossamer.VirtualCluster(n)
        self.cluster.decentralize(
            self.models,
            self.optimizers,
            topology=topology,
            algorithm=algorithm,
            buffers=buffers,
            parameters=lambda name, _: name != "own",
        )

    def train(self, steps, first=0):
        for t, (i, model) in itertools.product(range(first, first + steps), enumerate(self.models)):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * t + i))
            model.zero_grad()
            (model(x) - i).square().mean().backward()
            self.optimizers[i].step()
        return self

    def mean(self):
        with self.cluster.averaged() as model:
            return {k: v.clone() for k, v in model.state_dict().items()}

    def moment(self, key="exp_avg"):
        """The mean over the workers of a mixed parameter's moment (number 0 is their own)."""
        return torch.stack([o.state_dict()["state"][1][key] for o in self.optimizers]).mean(0)


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)
        self.tied = self.last
        self.own = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return self.tied(self.last(self.norm(self.first(x)))) + self.own


def saved(folder, workers, algorithm="awc", **settings):
    before = Workers(workers, algorithm=algorithm, **settings).train(5)
    checkpoints = Checkpoints(folder)
    checkpoints.save(before.cluster, before.models, before.optimizers)
    checkpoints.wait()
    return before, checkpoints


@pytest.mark.parametrize("before", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("after", [1, 2, 3, 5, 8])
def test_every_old_worker_has_the_same_weight_over_all_new_ones(before, after):
    weights = torch.zeros(after, before, dtype=torch.float64)
    for j in range(after):
        for i, weight in shares([j], after, [(w,) for w in range(before)]):
            weights[j, i] = weight
    torch.testing.assert_close(weights.sum(1), torch.ones(after, dtype=torch.float64))
    torch.testing.assert_close(weights.sum(0), torch.full((before,), after / before, dtype=torch.float64))
    if after % before == 0:
        assert (weights.max(1).values == 1).all()  # clones


def test_a_node_that_shares_a_replica_takes_the_places_of_all_its_workers():
    nodes = [(0, 1), (2, 3)]
    assert shares([0, 1], 4, nodes) == [(0, 1.0)]
    assert shares([0, 1, 2], 6, nodes) == [(0, 1.0)]
    assert shares([0], 3, nodes) == [(0, 1.0)]
    assert shares([1], 3, nodes) == [(0, pytest.approx(0.5)), (2, pytest.approx(0.5))]
    assert shares([0, 1, 2], 3, nodes) == [(0, 0.5), (2, 0.5)]


@pytest.mark.parametrize("algorithm", ["awc", "atc", "a2cid2"])
@pytest.mark.parametrize("after", [1, 3, 5, 8])
def test_mean_and_moments_are_conserved(tmp_path, algorithm, after):
    before, checkpoints = saved(tmp_path, 4, algorithm)
    now = Workers(after, algorithm=algorithm)
    loaded = checkpoints.load(now.cluster, now.models, now.optimizers)
    assert loaded.resized
    assert loaded.workers == 4
    local = {"own"}
    mean, was = now.mean(), before.mean()
    for name in was.keys() - local:
        torch.testing.assert_close(mean[name], was[name], rtol=1e-5, atol=1e-6)
    for key in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(now.moment(key), before.moment(key), rtol=1e-5, atol=1e-7)
    assert {int(o.state_dict()["state"][0]["step"]) for o in now.optimizers} == {5}
    kept = [m.own.detach() for m in before.models]
    assert all(any(torch.equal(m.own, own) for own in kept) for m in now.models)
    assert now.cluster.gossips[0].lanes[0].metrics.steps == 5
    assert now.cluster.gossips[0].total_steps == 5 * after
    distance = now.cluster.consensus_distance()
    now.train(30, first=5)
    assert all(torch.isfinite(v).all() for v in now.mean().values())
    assert now.cluster.consensus_distance() < 10 * distance + 1


def test_twice_as_many_workers_are_clones(tmp_path):
    before, checkpoints = saved(tmp_path, 2)
    now = Workers(4)
    checkpoints.load(now.cluster, now.models, now.optimizers)
    for j, i in enumerate([0, 0, 1, 1]):
        theirs = before.models[i].state_dict()
        assert all(torch.equal(v, theirs[k]) for k, v in now.models[j].state_dict().items())


def test_another_topology_keeps_every_worker_as_it_was(tmp_path):
    before, checkpoints = saved(tmp_path, 4)
    now = Workers(4, topology="complete")
    assert checkpoints.load(now.cluster, now.models, now.optimizers).resized
    for mine, theirs in zip(now.models, before.models, strict=True):
        assert all(torch.equal(v, theirs.state_dict()[k]) for k, v in mine.state_dict().items())
    assert now.cluster.gossips[0].lanes[0].metrics.steps == 5


def test_accumulations_are_averaged_where_the_counts_agree():
    def state(value, count):
        own = {"exp_avg": torch.full((2,), value), "grad_sum": torch.full((2,), value), "accumulated": count}
        optimizer = {"state": {0: own | {"step": torch.tensor(3.0)}}, "param_groups": []}
        return {"model": {"w": torch.full((2,), value)}, "optimizer": [optimizer], "gossip": None, "mixed": None}

    same = blend([state(1.0, 2), state(4.0, 2)], [2 / 3, 1 / 3])["optimizer"][0]["state"][0]
    assert same["exp_avg"].tolist() == same["grad_sum"].tolist() == pytest.approx([2.0, 2.0])
    assert same["accumulated"] == 2
    other = blend([state(1.0, 2), state(4.0, 1)], [2 / 3, 1 / 3])
    assert other["optimizer"][0]["state"][0]["grad_sum"].tolist() == [1.0, 1.0]
    assert other["model"]["w"].tolist() == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize("algorithm", ["awc", "a2cid2"])
@pytest.mark.parametrize("buffers", ["average", "local"])
def test_the_consensus_model_of_the_files_is_that_of_the_engine(tmp_path, algorithm, buffers):
    before, _ = saved(tmp_path, 3, algorithm, buffers=buffers)
    manifest, model = consensus(tmp_path)
    assert (manifest.step, manifest.workers) == (5, 3)
    for name, value in before.mean().items():
        assert model[name].dtype == value.dtype
        torch.testing.assert_close(model[name], value, rtol=1e-5, atol=1e-6)


def config_for(method, workers, **values):
    given = {"virtual": True, "per_node": workers, "steps": 12, "lr": 0.02, "eval_every": 0, "checkpoint_every": 4}
    return make_config({"task": "toy", "method": method, "batched": "off", **given, **values})


@pytest.mark.parametrize("method", ["ddp", "dadam:ring", "accumadam:aer", "a2cid2:ring"])
@pytest.mark.parametrize("after", [(1,), (3,), (2, 2, 2)])
def test_recipes_continue_with_another_number_of_workers(tmp_path, method, after):
    run(config_for(method, (2, 2), steps=8), Toy(dropout=0.2), parse(method), tmp_path)
    where = tmp_path / "checkpoints"
    old = consensus(where)[1]
    config = config_for(method, after)
    strategy = make_strategy(config, Toy(), parse(method), tmp_path, 0, None)
    strategy.load(strategy.checkpoints(where, 3))
    with strategy.averaged() as model:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, old[name], rtol=1e-5, atol=1e-6)
    positions = {s.state_dict()["position"] for r in strategy.replicas for s in r.streams}
    assert positions == {round(8 * 4 / sum(after))}
    progress = run(config, Toy(dropout=0.2), parse(method), tmp_path, resume=True)
    assert progress.step == 12
    assert files.read_manifest(where, 12).workers == (1 if method == "ddp" else sum(after))
    rows = [json.loads(line) for line in (tmp_path / "metrics-00000.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if "loss" in r] == [*range(1, 13)]


def test_nodes_with_one_replica_continue_with_other_nodes(tmp_path):
    run(config_for("dadam:ring", (2, 2), steps=8, exact_inside=True), Toy(), parse("dadam:ring"), tmp_path)
    old = consensus(tmp_path / "checkpoints")[1]
    config = config_for("dadam:ring", (1, 1, 1), exact_inside=True)
    strategy = make_strategy(config, Toy(), parse("dadam:ring"), tmp_path, 0, None)
    strategy.load(strategy.checkpoints(tmp_path / "checkpoints", 3))
    with strategy.averaged() as model:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, old[name], rtol=1e-5, atol=1e-6)
