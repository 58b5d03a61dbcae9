"""A run's configuration: validated, from TOML and flags; learning-rate schedules."""

import math

import pytest
import torch

import gossamer
from gossamer import InputError
from gossamer.jobs.configure import build_config, per_node_from
from gossamer.predict.methods import parse
from gossamer.recipes.config import RunConfig, make_config, read_toml
from gossamer.recipes.methods import factor, gossip_settings, learning_rate, make_optimizer


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"stepz": 3}, "unknown key 'stepz'; it takes task, method, steps"),
        ({"steps": 0}, "steps: input should be greater than or equal to 1, got 0"),
        ({"lr": -1.0}, "lr: .*greater than 0"),
        ({"lr": math.nan}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas.1: .*less than 1, got 1.0"),
        ({"schedule": "linear"}, "schedule: .*'constant', 'cosine' or 'inverse-sqrt', got 'linear'"),
        ({"exact_inside": True, "per_node": (4,)}, "exact_inside gossips between nodes and needs two or more"),
        ({"per_node": ()}, "per_node"),
        ({"ema": 1.0}, "ema"),
        ({"soft_deadline": 0.0}, "soft_deadline: .*greater than 0"),
        (
            {"on_failure": "continue", "soft_deadline": 9.0, "hard_deadline": 5.0},
            "soft_deadline 9 .* must not be longer than hard_deadline 5",
        ),
    ],
)
def test_bad_values_are_one_sentence(values, sentence):
    with pytest.raises(InputError, match=sentence) as caught:
        make_config({"task": "vision", **values})
    assert "\n" not in str(caught.value)


def test_toml_then_flags(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('task = "vision"\nsteps = 7\nlr = 0.1\n[options]\nbatch = 3\nnorm = "group"\n')
    config = build_config(None, file, {"lr": 0.2, "steps": None, "batch": 5, "flip": True, "clip": 0.5, "crop": 2})
    assert (config.steps, config.lr, config.clip) == (7, 0.2, 0.5)
    assert config.options == {"batch": 5, "norm": "group", "flip": True, "crop": 2}
    assert build_config("vision", None, {"betas": "0.8,0.9"}).betas == (0.8, 0.9)
    defaults = {"steps": 1, "seed": 5, "save_final": False}
    config = build_config(None, file, {"seed": 6}, defaults=defaults)
    assert (config.steps, config.seed, config.save_final) == (7, 6, False), "defaults of a command come first"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("steps = ", "is not valid TOML"),
        ("stepz = 3", "unknown key 'stepz'; it takes .*table \\[options\\]"),
    ],
)
def test_bad_files(tmp_path, text, sentence):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=sentence):
        read_toml(file)
    with pytest.raises(InputError, match="cannot read configuration"):
        read_toml(tmp_path / "missing.toml")


def test_unknown_flags_and_tasks():
    with pytest.raises(InputError, match="vision has no option --colour; vision takes data, batch"):
        build_config("vision", None, {"colour": "red"})
    with pytest.raises(InputError, match="--context is an option of lm, not of vision; vision takes data, batch"):
        build_config("vision", None, {"context": 8})
    with pytest.raises(InputError, match="unknown task 'visions'"):
        build_config("visions", None, {})
    with pytest.raises(InputError, match="the task is missing"):
        build_config(None, None, {})


def test_workers_on_nodes():
    assert per_node_from(4, None, None) == (2, 2)
    assert per_node_from(None, 16, None) == (4, 4, 4, 4)
    assert per_node_from(None, 3, None) == (1, 1, 1)
    assert per_node_from(None, 8, "2") == (2, 2, 2, 2)
    assert per_node_from(None, None, "4,4,2") == (4, 4, 2)
    assert per_node_from(None, None, None) is None
    for given in ((4, 4, None), (0, None, None), (5, None, "2"), (None, 4, "3,3"), (4, None, "x")):
        with pytest.raises(InputError):
            per_node_from(*given)


def rates(**values):
    config = make_config({"task": "x", "steps": 100, **values})
    return [factor(config)(k) for k in range(100)]


def test_schedules():
    cosine = rates(schedule="cosine", warmup=10)
    assert cosine[:11] == pytest.approx([*((k + 1) / 10 for k in range(10)), 1.0])
    assert cosine[55] == pytest.approx(0.5)
    assert 0 < cosine[99] < 1e-3
    root = rates(schedule="inverse-sqrt", warmup=25)
    assert root[24] == root[99] * 2 == 1.0
    assert rates(schedule="constant", warmup=0) == [1.0] * 100
    assert rates(schedule="constant")[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_optimizers_and_gossip_of_a_method():
    def made(method, **values):
        return make_optimizer(parse(method), [torch.nn.Parameter(torch.ones(2))], RunConfig(task="x", **values))

    assert type(made("ddp")) is torch.optim.Adam
    assert type(made("dadam:aer", weight_decay=0.1)) is torch.optim.AdamW
    assert made("dsgd:ring", momentum=0.5).param_groups[0]["momentum"] == 0.5
    same = made("ddp", optimizer="gossipadam", discount=2)
    assert type(same) is gossamer.GossipAdam
    assert same.kappa(same.param_groups[0]) == 2
    assert learning_rate(parse("ddp"), RunConfig(task="x", optimizer="sgd")) == 0.05
    accum = made("accumadam:aer", accumulate=7, betas_per="accumulation", lr=0.3)
    assert {"accumulate": 7, "betas_per": "accumulation", "lr": 0.3}.items() <= accum.param_groups[0].items()
    assert learning_rate(parse("dsgd:ring"), RunConfig(task="x", lr=0.7)) == 0.7
    settings = gossip_settings(parse("dadam:ring:bf16"), RunConfig(task="x", combine="atc", average_every=4))
    assert settings == {
        "topology": "ring",
        "algorithm": gossamer.ATC(average_every=4),
        "wire": "bf16",
        "on_failure": "raise",
    }
    assert gossip_settings(parse("a2cid2:ring"), RunConfig(task="x"))["algorithm"] == gossamer.A2CiD2()


def test_the_deadlines_of_an_elastic_run_arrive_in_its_gossip():
    config = RunConfig(task="x", on_failure="continue", soft_deadline=0.25, hard_deadline=2.0)
    settings = gossip_settings(parse("dadam:ring"), config)
    assert settings["on_failure"] == gossamer.Continue(soft_deadline=0.25, hard_deadline=2.0)
