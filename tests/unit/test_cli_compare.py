"""`gossamer compare` and `train --resume`: Ctrl-C, divergence, learning rates, and what is refused before it begins."""

import json
import math
import os
import signal
import threading
import time

import pytest

from gossamer.cli import main
from gossamer.jobs.clock import described_cluster, simulated
from gossamer.jobs.compare import best, sweep
from gossamer.predict.methods import parse
from gossamer.recipes.config import make_config
from gossamer.recipes.vision import Vision

TINY = ["--virtual", "2", "--batch", "4", "--width", "2", "--evaluate-on", "16"]
TWO = ["--methods", "ddp,dadam:ring", "--jobs", "1"]


def test_ctrl_c_ends_the_comparison(tmp_path, capsys, monkeypatch):
    loss, calls = Vision.loss, []

    def interrupted(self, model, batch):
        calls.append(batch)
        if len(calls) == 3:  # in the second step of two workers
            signal.raise_signal(signal.SIGINT)
        return loss(self, model, batch)

    monkeypatch.setattr(Vision, "loss", interrupted)
    out = tmp_path / "cmp"
    assert main(["compare", "vision", *TINY, "--steps", "5", *TWO, "--out", str(out), "--batched", "off"]) == 130
    folder = out / "ddp" / "seed-0"
    said = capsys.readouterr()
    assert "stopped; 0 of 2 runs are done, which gossamer report reads" in said.err
    assert f"with --continue, or first resume with: gossamer train --resume {folder}\n" in said.err
    assert not said.out, "no table of what is not there"
    assert sorted(f.name for f in out.iterdir()) == ["ddp"], "the second method was not begun"
    assert main(["train", "--resume", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 5
    assert len([line for line in (folder / "metrics-00000.jsonl").read_text().splitlines() if '"lr"' in line]) == 5


@pytest.mark.slow
def test_ctrl_c_ends_runs_side_by_side(tmp_path, capsys):
    out = tmp_path / "cmp"

    def press():
        deadline = time.monotonic() + 300
        while len(list(out.glob("*/*/metrics-00000.jsonl"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    words = ["--methods", "ddp,dadam:ring,dsgd:ring", "--jobs", "2", "--steps", "1000000", "--eval-every", "0"]
    assert main(["compare", "vision", *TINY, *words, "--out", str(out)]) == 130
    said = capsys.readouterr().err
    assert "stopped; 0 of 3 runs are done" in said
    begun = {out / name / "seed-0" for name in ("ddp", "dadam-ring")}
    assert {folder.parent for folder in out.glob("*/*/checkpoints")} == begun, "the third was not begun"
    assert all(f"gossamer train --resume {folder}" in said for folder in begun)


@pytest.mark.parametrize("evaluated", [True, False])
def test_runs_that_all_diverge_are_one_sentence(evaluated, tmp_path, capsys):
    often = ["--eval-every", "1" if evaluated else "0"]
    how = ["--lr", "1e18", "--schedule", "constant", "--clip", "0", *often]
    assert main(["compare", "vision", *TINY, *TWO, "--steps", "9", *how, "--out", str(tmp_path / "cmp"), "--json"]) == 2
    said = capsys.readouterr().err
    assert "every run diverged (ddp seed 0, dadam:ring seed 0); lower --lr" in said
    assert said.count("\n") == 1


def test_a_rate_whose_model_is_not_finite_in_the_end_has_diverged(tmp_path, capsys):
    words = ["--methods", "ddp", "--jobs", "1", "--steps", "1", "--clip", "0", "--lr-sweep", "1e18,1e-3"]
    assert main(["compare", "vision", *TINY, *words, "--out", str(tmp_path / "cmp"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    tried = said["lr_sweep"]["ddp"]
    assert tried["1e+18"] is None
    assert 0 <= tried["0.001"] <= 1
    assert said["methods"][0]["lr"] == 0.001


def test_the_best_rate_is_finite_and_judged_by_the_metric():
    tried = {"0.1": math.nan, "0.01": 3.0, "0.001": 2.0, "1": None}
    assert best(tried, "ddp", higher_is_better=False) == 0.001
    assert best(tried, "ddp", higher_is_better=True) == 0.01
    with pytest.raises(Exception, match=r"ddp diverged at every rate of the sweep \(0.1\)"):
        best({"0.1": math.nan}, "ddp", higher_is_better=True)


class Recorded:
    """A trainer whose runs ended before: it writes their last rows."""

    def __init__(self, losses):
        self.losses = losses

    def run(self, wanted):
        for config, folder in wanted:
            folder.mkdir(parents=True)
            content = {"config": config.model_dump(mode="json"), "method": config.method, "lr": config.lr}
            content |= {"metric": "loss", "higher_is_better": False}
            (folder / "config.json").write_text(json.dumps(content))
            last = {"step": 1, "seconds": 0.1, "averaged": {"loss": self.losses[config.lr]}}
            step = {"step": 1, "seconds": 0.1, "loss": 1.0, "units": 1, "bytes": 0.0}
            (folder / "metrics-00000.jsonl").write_text(f"{json.dumps(step)}\n{json.dumps(last)}\n")
        return {}


def test_the_sweep_of_a_loss_shows_the_loss(tmp_path):
    def configured(method, rate):
        return make_config({"task": "lm", "method": method, "lr": rate})

    losses = {0.01: 5.0, 0.001: 4.0}
    found = sweep(Recorded(losses), ["dadam:ring"], list(losses), configured, tmp_path / "sweep")
    assert found == {"dadam:ring": {"0.01": 5.0, "0.001": 4.0}}


VISION = ["compare", "vision", *TINY]
GOSSIP = [*VISION, "--methods", "ddp,dadam:ring"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([*GOSSIP, "--lr", "dadam=1e-1"], "dadam:aer is not among the methods ddp, dadam:ring"),
        ([*GOSSIP, "--lr", "ddp=1e-1,ddp=2e-1"], "ddp is named twice"),
        ([*GOSSIP, "--lr", "ddp=1e-1,5"], "unknown method '5'"),
        ([*GOSSIP, "--lr", "ddp=x"], "learning rates must be positive numbers"),
        ([*GOSSIP, "--lr", "1e-3,5"], "--lr takes one rate for all methods"),
        ([*GOSSIP, "--lr", "1e-3", "--lr-sweep", "1e-3,1e-2"], "pass one of them"),
        ([*GOSSIP, "--lr-sweep", "1e-3,0.001"], "each once"),
        ([*GOSSIP, "--lr-sweep", "1e-3,nan"], "learning rates must be positive numbers"),
        ([*GOSSIP, "--method", "dadam:ring"], "there is no option --method (did you mean --methods?)"),
        ([*GOSSIP, "--jobs", "-1"], "--jobs must be at least 1, got -1"),
        ([*VISION, "--methods", "ddp,decent-dp:ring"], "not with decent-dp"),
        ([*VISION, "--methods", "ddp,ad-psgd:aer", "--every", "2"], "so every does not apply"),
        ([*VISION, "--methods", "dadam:ring,ddp:bf16"], "ddp:bf16 would train as ddp"),
        ([*VISION, "--methods", "ddp,dadam:base(q=1)"], "base"),
        (["compare", "vision", "--methods", "dadam:ring", "--on-failure", "continue"], "leave it out"),
        (["train", "vision", "--method", "ad-psgd:aer", "--every", "2"], "so every does not apply"),
        (["train", "vision", "--method", "ad-psgd:aer", "--exact-inside"], "ad-psgd needs one per worker"),
        (["train", "vision", "--method", "dadam:ring", "--every", "2", "--average-every", "3"], "multiple of every=2"),
        (["train", "vision", "--method", "ddp", "--on-failure", "continue"], "needs gossip"),
        (
            ["train", "--resume", "x", "--config", "a", "--out", "b", "--cluster", "c", "--link", "1mbit"],
            "without --cluster, --link, --config, --out; pass at most --steps",
        ),
        (
            ["train", "vision", "--virtual", "2", "--model", "resnet50", "--width", "2", "--batch", "1"],
            "resnet50 shrinks 8 x 8 images to one pixel",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_it_begins(arguments, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_options_must_be_a_table(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text('task = "vision"\noptions = 3\n')
    assert main(["train", "--config", str(file)]) == 2
    assert "options must be a table of the task's keys, got 3" in capsys.readouterr().err


CLUSTER = """
nodes = 2
per_node = 1
links = { inter = { bandwidth_gbps = 10 } }
compute = { seconds = 0.05 }
model = { mb = 100 }
"""


def test_a_refused_size_leaves_the_run_unchanged(tmp_path, capsys):
    out, file = tmp_path / "run", tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    words = ["--steps", "2", "--checkpoint-every", "2", "--cluster", str(file), "--out", str(out), "--json"]
    assert main(["train", "vision", *TINY, "--method", "dadam:ring", *words]) == 0
    before = (out / "config.json").read_text()
    assert main(["train", "--resume", str(out), "--virtual", "2000", "--steps", "4"]) == 2
    assert main(["train", "--resume", str(out), "--steps", "0"]) == 2
    assert (out / "config.json").read_text() == before
    file.unlink()  # the run knows its cluster
    capsys.readouterr()
    assert main(["train", "--resume", str(out), "--virtual", "4", "--steps", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 4
    clock = json.loads((out / "config.json").read_text())["clock"]
    assert (clock["layout"], clock["model_mb"]) == (str(described_cluster("a40", (2, 2)).layout), 100)


def step_seconds(method, **values):
    config = make_config({"task": "vision", "virtual": True, "per_node": (2, 2), **values})
    clock, _ = simulated(parse(method), config, described_cluster("a40", config.per_node))
    return clock["step_seconds"]


def test_the_clock_uses_the_largest_node():
    small, large = (step_seconds("dadam:ring", exact_inside=True, per_node=p) for p in ((1, 3), (3, 1)))
    assert small == large
    assert large > step_seconds("dadam:ring", exact_inside=True, per_node=(2, 2))


@pytest.mark.parametrize("method", ["ddp", "dadam:ring"])
def test_the_clock_counts_micro_batches(method):
    one, three = step_seconds(method), step_seconds(method, micro_batches=3)
    compute = float(described_cluster("a40", (2, 2)).compute.means(4).mean())
    assert three > max(one, 3 * compute * 0.99)
    assert three < 3 * one  # what is sent does not grow
