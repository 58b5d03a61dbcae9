"""Exact averages inside nodes in `train` and `compare`: where they are the default, how they are turned on and off."""

import json

import pytest
import torch
from torch import nn

import gossamer
from gossamer import InputError
from gossamer.cli import main
from gossamer.engine import build
from gossamer.engine.policies import Settings
from gossamer.jobs.configure import build_config
from gossamer.predict.methods import parse
from gossamer.recipes.config import make_config
from gossamer.recipes.methods import gossip_settings
from gossamer.recipes.run import make_strategy
from gossamer.topology import Layout, register, registry
from toy import Toy

TINY = ["--batch", "4", "--width", "2", "--evaluate-on", "16", "--steps", "2", "--json"]


@pytest.fixture
def for_four(monkeypatch):
    """A topology of exactly four workers."""
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    monkeypatch.setattr(registry, "_NAMES", dict(registry._NAMES))

    @register("for-four")
    def _(layout):
        """The complete graph of four workers."""
        if layout.n != 4:
            raise InputError(f"for-four is for four workers, got {layout.n}")
        return gossamer.topology.build("complete", layout)


def auto(config):
    """Whether `decentralize(..., gradients="auto")` averages exactly inside nodes with the settings of a run."""
    model, layout = nn.Linear(2, 2), Layout.of(config.per_node)
    settings = gossip_settings(parse(config.method), config)
    topology, policy = settings.pop("topology"), Settings.of(gradients="auto", **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return build.prepare(model, optimizer, topology, policy, None, layout, 0, range(layout.n)).gradients == "node"


@pytest.mark.parametrize(
    ("method", "per_node", "values", "expected"),
    [
        ("gossipadam:aer", (2, 2), {}, True),
        ("dadam:one-peer-exponential:bf16", (4, 4, 4, 4), {}, True),
        ("dsgd:ring", (3, 3), {"combine": "atc"}, True),
        ("dadam:ring", (2, 2), {"every": 4, "outer": "nesterov"}, True),
        ("gossipadam:aer", (4,), {}, False),  # one node
        ("gossipadam:aer", (1, 1, 1), {}, False),
        ("gossipadam:aer", (2, 1), {}, False),  # unequal nodes
        ("gossipadam:aer", (2, 2), {"on_failure": "continue"}, False),
        ("ad-psgd:aer", (2, 2), {}, False),
        ("a2cid2:ring", (2, 2), {}, False),
        ("dadam:for-four", (2, 2), {}, False),  # a topology of workers
        ("dadam:for-four", (2, 2, 2, 2), {}, True),  # of nodes
    ],
)
def test_a_run_decides_as_the_engine(for_four, monkeypatch, method, per_node, values, expected):
    monkeypatch.setattr(build, "averaged_devices", lambda: {"cpu"})
    config = build_config("vision", None, {"method": method, **values}, per_node=per_node)
    assert config.exact_inside is expected
    assert auto(config) is expected


@pytest.mark.parametrize("method", ["ddp", "ddp:bf16", "diloco", "localsgd"])
def test_exact_methods_have_no_gradients_of_nodes(method):
    assert build_config("vision", None, {"method": method}, per_node=(2, 2)).exact_inside is False


def test_flags_and_files_override_the_default(tmp_path):
    def inside(given, text=""):
        file = tmp_path / "run.toml"
        file.write_text(text)
        return build_config("vision", file, given, per_node=(2, 2)).exact_inside

    assert inside({}) is True
    assert inside({}, "exact_inside = false") is False
    assert inside({"exact_inside": True}, "exact_inside = false") is True
    assert inside({"exact_inside": False}) is False


def test_without_a_decision_all_workers_gossip(tmp_path):
    """Records and libraries that make a configuration themselves say what they mean."""
    config = make_config({"task": "toy", "per_node": (2, 2), "virtual": True})
    assert config.exact_inside is None
    assert len(make_strategy(config, Toy(), parse(config.method), tmp_path, 0, None).replicas) == 4


def configured(folder):
    return json.loads((folder / "config.json").read_text())["config"]


@pytest.mark.parametrize(("flags", "replicas"), [([], 2), (["--exact-inside"], 2), (["--no-exact-inside"], 4)])
def test_train_writes_what_it_does(flags, replicas, tmp_path, capsys):
    out = tmp_path / "run"
    words = ["--virtual", "4", "--method", "dadam:ring", "--out", str(out)]
    assert main(["train", "vision", *TINY, *words, *flags]) == 0
    assert configured(out)["exact_inside"] is (replicas == 2)
    said = json.loads(capsys.readouterr().out)
    assert said["global_batch"] == replicas * said["replica_batch"] == 16


def test_compare_decides_for_each_method_and_names_what_differs(tmp_path, capsys):
    methods = ["--methods", "ddp,diloco,dadam:ring,ad-psgd:ring", "--jobs", "1", "--no-exact-inside"]
    for flags, labels in (
        (methods, {"ddp", "diloco", "dadam:ring", "ad-psgd:ring"}),
        (methods[:-1], {"ddp", "diloco", "dadam:ring exact-inside", "ad-psgd:ring"}),
    ):
        out = str(tmp_path / str(len(flags)))
        assert main(["compare", "vision", *TINY, "--virtual", "4", *flags, "--out", out]) == 0
        assert {row["method"] for row in json.loads(capsys.readouterr().out)["methods"]} == labels


@pytest.mark.parametrize(
    ("workers", "inside"),
    [
        (["--virtual", "2", "--per-node", "2"], False),  # one node is left
        (["--virtual", "1"], False),
        (["--virtual", "3"], False),  # one worker per node
        (["--virtual", "3", "--per-node", "2,1"], True),
        (["--virtual", "6"], True),
    ],
)
def test_resume_with_other_nodes(workers, inside, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "vision", *TINY, "--virtual", "4", "--method", "dadam:ring", "--out", str(out)]) == 0
    assert configured(out)["exact_inside"] is True
    capsys.readouterr()
    assert main(["train", "--resume", str(out), *workers, "--steps", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 4
    assert configured(out)["exact_inside"] is inside


def test_a_run_of_all_workers_stays_one_when_it_is_resumed(tmp_path):
    out = tmp_path / "run"
    words = ["--virtual", "2", "--method", "dadam:ring", "--out", str(out)]
    assert main(["train", "vision", *TINY, *words]) == 0
    assert main(["train", "--resume", str(out), "--virtual", "4", "--steps", "4", "--json"]) == 0
    assert configured(out)["per_node"] == [2, 2]
    assert configured(out)["exact_inside"] is False
