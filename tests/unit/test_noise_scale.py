"""The noise scale: measured on a task whose noise is known, written, printed, and what is predicted from it."""

import json
import math
import statistics

import pytest
import torch
from torch import nn

from gossamer import InputError
from gossamer.cli import main
from gossamer.predict.gaps import GAPS
from gossamer.predict.methods import parse
from gossamer.predict.quality import REGIMES, predict_quality
from gossamer.recipes.config import make_config
from gossamer.recipes.run import prepare, run
from gossamer.recipes.task import Batches
from gossamer.report.noise import measured, noise_line
from gossamer.report.page import write_csv, write_html, write_markdown
from gossamer.report.runs import grouped, load_run, load_runs, summary

SIZE, BATCH, SCALE = 4000, 3, 50.0
CONTROL = {"method": "ddp", "optimizer": "gossipadam", "discount": 2.0}


class Known:
    """The gradient of a sample is 1 plus noise of variance SCALE: SCALE samples hold as much noise as signal."""

    name, unit, metric, higher_is_better = "known", "samples", "loss", False

    def __init__(self, scale=SCALE, batch=BATCH):
        self.scale, self.batch = scale, batch

    def model(self, seed):
        model = nn.Linear(SIZE, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def batches(self, worker, workers, *, seed):
        def batch(i):
            generator = torch.Generator().manual_seed(7919 * seed + i * workers + worker)
            return 1 + self.scale**0.5 * torch.randn(self.batch, SIZE, generator=generator)

        return Batches(batch)

    def loss(self, model, batch):
        return model(batch).mean()

    def size(self, batch):
        return len(batch)

    def evaluate(self, model, *, final=False):
        return {"loss": 1.0}

    def describe(self):
        return {}


def trained(folder, task=None, **values):
    given = {"virtual": True, "per_node": (2, 2), "steps": 120, "lr": 1e-9, "clip": 0.0, "batched": "off"}
    config = make_config({"task": "known", "method": "gossipadam:aer", **given, **values})
    method, task = parse(config.method), task or Known()
    clock = {"kind": "simulated", "cluster": "a40", "layout": "", "model_mb": 1, "step_seconds": 0.1, "waiting": 0.0}
    prepare(folder, config, method, task, {"method": str(method), "clock": clock})
    return run(config, task, method, folder, clock=lambda steps: 0.1 * steps)


def rows(folder):
    lines = [json.loads(line) for line in (folder / "metrics-00000.jsonl").read_text().splitlines()]
    return [row for row in lines if "averaged" in row]


@pytest.mark.parametrize(
    ("values", "replica"),
    [({}, 1), ({"exact_inside": True}, 2), (CONTROL, 4), ({"micro_batches": 2}, 2)],
    ids=["gossip", "exact inside", "all-reduce", "micro-batches"],
)
def test_the_noise_scale_does_not_depend_on_how_the_task_is_trained(values, replica, tmp_path):
    last = trained(tmp_path / "run", **values).evaluation
    assert last["noise_scale"] == pytest.approx(SCALE, rel=0.15)
    assert last["replica_batch"] == replica * BATCH
    assert last["global_batch"] == 4 * BATCH * values.get("micro_batches", 1)
    assert last["noise_share"] == pytest.approx(SCALE / (SCALE + replica * BATCH), rel=0.05)
    assert len(rows(tmp_path / "run")) == 5
    assert rows(tmp_path / "run")[-1]["noise_scale"] == last["noise_scale"]


def test_unequal_nodes_are_averaged(tmp_path):
    last = trained(tmp_path / "run", per_node=(1, 3), exact_inside=True).evaluation
    assert last["noise_scale"] == pytest.approx(SCALE, rel=0.15)
    assert (last["replica_batch"], last["global_batch"]) == (2 * BATCH, 4 * BATCH)


@pytest.mark.parametrize("values", [{"method": "dadam:aer"}, {"method": "ddp"}, {"method": "dsgd:aer"}, {"steps": 1}])
def test_not_measured_is_null_and_the_line_says_how(values, tmp_path):
    trained(tmp_path / "run", **{"steps": 20, **values})
    assert rows(tmp_path / "run")[-1]["noise_scale"] is None
    groups = grouped(load_runs(tmp_path))
    assert measured(groups) == []
    line = noise_line(groups)
    assert line.startswith("noise scale not measured")
    assert "gossipadam:aer" in line
    assert "ddp with --optimizer gossipadam --discount 2" in line
    (row,) = summary(groups)
    assert row["noise_scale"] is None


def test_gradients_without_signal_are_told_from_gradients_that_were_not_measured(tmp_path):
    class Alternating(Known):
        def batches(self, worker, workers, *, seed):
            return Batches(lambda i: torch.full((1, SIZE), (-1.0) ** (i + worker)))

    trained(tmp_path / "run", Alternating(), eval_every=60)
    assert [(r["noise_scale"], r["noise_share"]) for r in rows(tmp_path / "run")] == [(None, 1.0)] * 2
    groups = grouped(load_runs(tmp_path))
    (noise,) = measured(groups)
    assert math.isinf(noise.scale)
    assert noise_line(groups).startswith("noise scale too large to measure, in samples: one replica's batch has 1, ")
    assert noise.to_dict()["noise_scale"] is None
    assert {p["regime"] for p in noise.to_dict()["predictions"]} == {REGIMES[0].name}


def test_a_run_has_the_median_of_its_evaluations_and_a_method_that_of_its_runs(tmp_path):
    for seed, scales in enumerate([(1.0, 9.0, 4.0), (6.0, None, 8.0), (None, None, 5.0)]):
        folder = tmp_path / f"seed-{seed}"
        trained(folder, steps=6, eval_every=2, seed=seed)
        lines = [json.loads(line) for line in (folder / "metrics-00000.jsonl").read_text().splitlines()]
        for row, scale in zip([r for r in lines if "averaged" in r], scales, strict=True):
            row |= {"noise_scale": scale, "noise_share": 1.0 if scale is None else 0.5}
        (folder / "metrics-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    assert [load_run(tmp_path / f"seed-{s}").noise_scale for s in range(3)] == [4.0, 8.0, math.inf]
    (noise,) = measured(grouped(load_runs(tmp_path)))
    assert (noise.scale, noise.runs) == (8.0, 3)


def test_gossip_is_preferred_to_all_reduce_and_settings_are_told_apart(tmp_path):
    trained(tmp_path / "control", steps=40, **CONTROL)
    (noise,) = measured(grouped(load_runs(tmp_path)))
    assert noise.method.startswith("ddp")
    assert "one worker's batch has 3, all workers together 12, so" in noise.line()
    trained(tmp_path / "gossip", steps=40)
    trained(tmp_path / "inside", steps=40, exact_inside=True)
    found = measured(grouped(load_runs(tmp_path)))
    assert sorted(n.replica_batch for n in found) == [3, 6]
    assert not any(n.method.startswith("ddp") for n in found)
    lines = noise_line(grouped(load_runs(tmp_path)))
    assert "gossipadam:aer discount=1.0: noise scale about" in lines
    assert "gossipadam:aer discount=1.0 exact-inside: noise scale about" in lines


def test_workers_with_different_data_are_mentioned(tmp_path):
    trained(tmp_path / "run", steps=20, options={"partition": "dirichlet:0.1"})
    (noise,) = measured(grouped(load_runs(tmp_path)))
    assert "does not see how the data of the workers differ (partition dirichlet:0.1)" in noise.sentence()


def test_reports(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    trained(tmp_path / "runs" / "a")
    line = noise_line(grouped(load_runs(tmp_path / "runs")))
    assert line.startswith("noise scale about ")
    assert " samples: one replica's batch has 3, all replicas together 12, so " in line
    for write, file in ((write_html, "r.html"), (write_markdown, "r.md")):
        text = write(tmp_path / "runs", tmp_path / file).read_text().replace("&#x27;", "'")
        assert line[1:] in text
        assert "noise scale, samples" in text
    assert "noise_scale" in write_csv(tmp_path / "runs", tmp_path / "r.csv").read_text().splitlines()[0]
    assert main(["report", str(tmp_path / "runs"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["noise"] == line
    assert said["methods"][0]["noise_scale"] == pytest.approx(SCALE, rel=0.2)


def test_compare_train_and_advise_say_it(tmp_path, capsys):
    tiny = ["--virtual", "2", "--batch", "4", "--width", "2", "--evaluate-on", "16", "--steps", "12"]
    out = str(tmp_path / "compared")
    assert main(["compare", "vision", *tiny, "--methods", "ddp,gossipadam:aer", "--jobs", "1", "--out", out]) == 0
    said = capsys.readouterr().out
    (line,) = [text for text in said.splitlines() if text.startswith("noise scale")]
    assert "images: one replica's batch has 4, all replicas together 8, so " in line
    content = json.loads((tmp_path / "compared" / "compare.json").read_text())
    assert content["noise"] == line
    assert content["methods"][0]["noise_scale"] is None
    assert main(["advise", "--run", out]) == 0
    said = capsys.readouterr().out
    assert line in said
    assert "gossip of all 2 workers" in said
    assert "benchmarks/records/" in said
    assert "rule of thumb" in said
    expanded = sorted(str(path) for path in (tmp_path / "compared").iterdir())  # as the shell expands --run DIR/*
    assert any(path.endswith("compare.json") for path in expanded)
    assert main(["advise", "--run", *expanded]) == 0
    assert line in capsys.readouterr().out
    one = str(tmp_path / "one")
    assert (
        main(["train", "vision", *tiny, "--method", "gossipadam:aer", "--no-save-final", "--out", one, "--json"]) == 0
    )
    got = json.loads(capsys.readouterr().out)
    assert got["noise"].startswith("noise scale ")
    assert got["replica_batch"] == 4
    assert main(["advise", "--run", one, "--json"]) == 0
    (advice,) = json.loads(capsys.readouterr().out)["advice"]
    assert advice["noise"] == got["noise"]
    assert [p["setting"] for p in advice["predictions"]] == ["gossip of all 2 workers"]
    assert main(["advise", "--run", *sorted(map(str, (tmp_path / "one").iterdir())), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["advice"] == [advice]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "nothing to advise on; pass a cluster"),
        ("--json", "nothing to advise on; pass a cluster"),
        ("--run {empty}", "holds no run"),
        ("--run {empty}/missing", "is not a folder"),
        ("--run {adam}", "noise scale not measured"),
        ("--run {alone}", "single worker"),
        ("a40 --run {adam}", "noise scale not measured"),
        ("a40 a100", "takes one cluster, got a40, a100"),
        ("a40 --worth 2", "--worth is a share"),
        ("--run {adam} --model-mb 3", "--model-mb describes a cluster, but only --run"),
    ],
)
def test_bad_input_of_advise_is_one_sentence(words, message, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    if "{adam}" in words:
        trained(tmp_path / "adam", method="dadam:aer", steps=2)
    if "{alone}" in words:
        trained(tmp_path / "alone", per_node=(1,), steps=20, **CONTROL)
    line = words.format(**{name: tmp_path / name for name in ("empty", "adam", "alone")})
    assert main(["advise", *line.split()]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.count("\n") == 1
    assert message in said.err


# -- the rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "regime"),
    [
        (math.inf, "noise everywhere"),
        (160.0, "noise everywhere"),
        (159.0, "noise in every replica"),
        (16.0, "noise in every replica"),
        (15.0, "signal in all-reduce"),
        (1.0, "signal in all-reduce"),
        (0.9, "signal everywhere"),
        (0.0, "signal everywhere"),
    ],
)
def test_regimes(scale, regime):
    assert predict_quality(scale, 1.0, 16.0).regime.name == regime


def test_the_range_of_the_present_records_has_their_gaps_and_the_others_include_it(request):
    def gap(replicas):
        means = [g.mean for g in GAPS if (g.replicas, g.topology, g.algorithm) == (replicas, "aer", "awc")]
        return (round(min(means), 2), round(max(means), 2))

    (present,) = [regime for regime in REGIMES if regime.recorded]
    assert (present.workers.gap, present.nodes.gap) == (gap(16), gap(4))
    for regime in REGIMES:
        for own, known in ((regime.workers.gap, gap(16)), (regime.nodes.gap, gap(4))):
            assert own is None or (own[0] <= known[0] and own[1] >= known[1])
    for name in present.records:  # their runs measured the noise scale
        file = request.config.rootpath / "benchmarks" / "records" / name / "record.json"
        results = json.loads(file.read_text(encoding="utf-8"))["results"]
        for setting in ("gossipadam:aer", "gossipadam:aer inside"):
            rows = [[row[1] or math.inf for row in run["noise"]] for run in results[setting]["runs"]]
            _, _, replica, everyone = results[setting]["runs"][0]["noise"][0]
            scale = statistics.median(statistics.median(row) for row in rows)
            assert predict_quality(scale, replica, everyone).regime is present


def test_one_replica_is_all_reduce():
    assert predict_quality(5.0, 8.0, 8.0).rate_of_adam == 1


def test_the_rate_of_adam_grows_from_1_to_the_root_of_the_replicas():
    rates = [predict_quality(scale, 1.0, 16.0).rate_of_adam for scale in (0, 1, 10, 100, math.inf)]
    assert rates == sorted(rates)
    assert rates[0] == 1
    assert rates[1] == pytest.approx((2 / (1 + 1 / 16)) ** 0.5)
    assert rates[-1] == 4


@pytest.mark.parametrize("numbers", [(-1, 1, 2), (math.nan, 1, 2), (1, 0, 2), (1, 3, 2), (1, 1, math.inf)])
def test_impossible_numbers_are_refused(numbers):
    with pytest.raises(InputError, match="pass a noise scale of at least 0"):
        predict_quality(*numbers)


def test_every_record_that_the_rule_names_exists(request):
    records = request.config.rootpath / "benchmarks" / "records"
    for regime in REGIMES:
        assert regime.records
        for name in regime.records:
            assert (records / name / "README.md").exists(), name
