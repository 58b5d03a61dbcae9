"""`gossamer train`, `compare` and `report` on virtual workers, and what they say to bad input."""

import json

import pytest

from gossamer.cli import main
from gossamer.cli.predicted import described_cluster, simulated
from gossamer.recipes.config import make_config
from gossamer.runtime.methods import parse

TINY = ["--virtual", "2", "--steps", "3", "--batch", "4", "--width", "4", "--evaluate-on", "16", "--threads", "1"]


def test_train_stop_and_resume(tmp_path, capsys):
    out = tmp_path / "run"
    assert (
        main(
            ["train", "vision", *TINY, "--method", "dadam:ring", "--checkpoint-every", "2", "--out", str(out), "--json"]
        )
        == 0
    )
    said = json.loads(capsys.readouterr().out)
    assert said["step"] == 3
    assert {"loss", "accuracy"} <= set(said["averaged"])
    content = json.loads((out / "config.json").read_text())
    assert content["clock"]["kind"] == "simulated"
    assert content["clock"]["cluster"] == "a40"
    assert said["seconds"] == pytest.approx(3 * content["clock"]["step_seconds"])
    assert main(["train", "--resume", str(out), "--json"]) == 2
    assert "has done all its 3 steps; pass --steps with more" in capsys.readouterr().err
    assert main(["train", "--resume", str(out), "--steps", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 5


def test_compare_and_report(tmp_path, capsys):
    out = tmp_path / "cmp"
    arguments = ["--methods", "ddp,dadam:ring", "--lr-sweep", "1e-3,2e-3", "--seeds", "2", "--jobs", "1", "--json"]
    assert main(["compare", "vision", *TINY, *arguments, "--out", str(out)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(m["method"], m["seeds"]) for m in said["methods"]] == [("ddp", 2), ("dadam:ring", 2)]
    assert {name: set(tried) for name, tried in said["lr_sweep"].items()} == {
        name: {"0.001", "0.002"} for name in ("ddp", "dadam:ring")
    }
    assert said["verdict"].startswith("dadam:ring is ")
    assert main(["report", str(out), "--html", str(tmp_path / "r.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == said["verdict"]
    assert main(["compare", "vision", *TINY, *arguments, "--out", str(out)]) == 2
    assert "already holds a comparison" in capsys.readouterr().err


def test_exact_inside_costs_about_a_ddp_step_of_a_node():
    """Simulated time: nothing is slower than all-reduce over all nodes, nothing faster than the compute."""
    config = make_config({"task": "vision", "per_node": (4, 4, 4, 4), "virtual": True, "exact_inside": True})
    cluster = described_cluster("a40", config.per_node)
    ddp, _ = simulated(parse("ddp"), config, cluster)
    inside, trace = simulated(parse("accumadam:aer"), config, cluster)
    assert cluster.compute.means(16).mean() < inside["step_seconds"] < ddp["step_seconds"]
    assert trace.workers == 4  # nodes


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "visoin", "--virtual", "2"], "unknown task 'visoin'"),
        (["train", "--width", "4", "vision"], "--width comes before the task; write the task's name first"),
        (["train", "vision", "--virtual", "2", "--method", "dadm:ring"], "unknown method 'dadm:ring'"),
        (
            ["train", "vision", "--virtual", "2", "--steps", "0"],
            "steps: input should be greater than or equal to 1, got 0",
        ),
        (["train", "vision", "--virtual", "0"], "--virtual must be between 1 and 4096, got 0"),
        (["train", "vision", "--virtual", "2", "--workers", "2"], "pass one of them"),
        (["train", "vision", "--virtual", "4000"], "4000 workers"),
        (["train", "vision", "--virtual", "2", "--out", "/proc/none"], "cannot write to the run's folder /proc/none"),
        (["train", "vision", "--virtual", "2", "--colour", "red"], "there is no option --colour"),
        (["train", "vision", "--virtual", "2", "--batch", "0"], "batch"),
        (["train", "vision", "--virtual", "2", "--link", "20mbit"], "--link shapes the links of real workers"),
        (["train", "vision", "--workers", "2", "--cluster", "a40"], "--cluster supplies the clock of --virtual"),
        (["train", "vision", "--virtual", "2", "--cluster", "b40"], "unknown cluster 'b40'"),
        (["train", "--resume", "/proc/none"], "is not a run's folder"),
        (["train", "vision", "--resume", "runs/x"], "goes on as the run was configured"),
        (["compare", "vision", "--virtual", "2", "--methods", "ddp,ddp"], "each once"),
        (["compare", "vision", "--virtual", "2", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["compare", "vision", "--virtual", "2", "--lr-sweep", "fast"], "learning rates must be positive numbers"),
        (["report", "/proc/none"], "is not a folder"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())  # nothing was begun
