"""`gossamer train`, `compare` and `report` on virtual workers, and what they say to bad input."""

import json
import sys

import pytest

from gossamer.cli import main
from gossamer.jobs.clock import described_cluster, simulated
from gossamer.predict.methods import parse
from gossamer.recipes.config import make_config

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
    assert "has completed all 3 steps; pass a larger --steps" in capsys.readouterr().err
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
        (["train", "vision", "--virtual", "2", "--method", "dadm:ring"], "unknown method 'dadm:ring'"),
        (
            ["train", "vision", "--virtual", "2", "--steps", "0"],
            "steps: input should be greater than or equal to 1, got 0",
        ),
        (["train", "vision", "--virtual", "0"], "--virtual must be between 1 and 4096, got 0"),
        (["train", "vision", "--virtual", "2", "--workers", "2"], "pass one of them"),
        (["train", "vision", "--virtual", "4000"], "4000 workers"),
        (["train", "vision", "--virtual", "2", "--out", "/proc/none"], "cannot write to the run's folder /proc/none"),
        (["train", "vision", "--virtual", "2", "--colour", "red"], "there is no option --colour; see"),
        (["train", "vision", "--virtual", "2", "--metod", "ddp"], "no option --metod (did you mean --method?); see"),
        (["train", "vision", "--virtual", "2", "loose"], "nexpected extra argument"),
        (["train", "lm", "--virtual", "2", "--width", "4"], "--width is an option of vision, not of lm"),
        (["train", "vision", "--virtual", "2", "--batch", "0"], "batch"),
        (["train", "vision", "--virtual", "2", "--link", "20mbit"], "--link shapes the links of real workers"),
        (["train", "vision", "--workers", "2", "--cluster", "a40"], "--cluster supplies the clock of --virtual"),
        (["train", "vision", "--virtual", "2", "--cluster", "b40"], "unknown cluster 'b40'"),
        (["train", "--resume", "/proc/none"], "is not a run's folder"),
        (["train", "vision", "--resume", "runs/x"], "continues the run as it was configured"),
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


def pairs(folder, train=("a", "b"), target=("c", "d")):
    folder.mkdir()
    files = {"train.en": train, "train.de": target}
    for name in ("val.en", "val.de", "test.en", "test.de"):
        files[name] = ("a",)
    for name, lines in files.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    return ["translate", "--data", str(folder), "--src", "en", "--tgt", "de"]


def text(folder, content):
    folder.mkdir()
    (folder / "a.txt").write_text(content)
    return ["lm", "--data", str(folder)]


def images(folder, sizes):
    Image = pytest.importorskip("PIL.Image")
    for at, size in enumerate(sizes):
        (folder / "train" / f"class{at}").mkdir(parents=True)
        (folder / "test" / f"class{at}").mkdir(parents=True)
        for place in ("train", "test"):
            Image.new("RGB", (size, size)).save(folder / place / f"class{at}" / "0.png")
    return ["vision", "--data", str(folder)]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda f: ["vision", "--data", str(f)], "is not a directory: name the one that holds"),
        (lambda f: ["translate", "--data", str(f)], "is not a directory: name the directory that holds train.en"),
        (lambda f: ["lm", "--data", str(f)], "does not exist"),
        (lambda f: pairs(f, target=("c",)), "train.en has 2 lines"),
        (lambda f: pairs(f, train=(), target=()), "empty"),
        (lambda f: text(f, ""), "empty"),
        (lambda f: text(f, "x"), "too short"),
        (lambda f: images(f, (8, 9)), "image_size"),
        (lambda f: [*pairs(f), "--vocabulary", "9000"], "vocabulary"),
        (lambda f: [*pairs(f), "--virtual", "4"], "4 workers"),
        (lambda f: ["vision", "--virtual", "1500"], "1500 workers"),
    ],
)  # fmt: skip
def test_bad_data_is_one_sentence(make, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = make(tmp_path / "data")
    code = main(["train", *arguments, *([] if "--virtual" in arguments else ["--virtual", "2"]), "--out", "run"])
    said = capsys.readouterr().err
    assert code == 2
    assert sentence in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_tensorboard_files(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    assert main(["train", "vision", *TINY, "--method", "dadam:ring", "--out", str(out), "--tensorboard", "--json"]) == 0
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [1, 2, 3]
    assert events.Scalars("averaged/accuracy")[-1].step == 3


def test_tensorboard_missing_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    out = ["--out", str(tmp_path / "run")]
    assert main(["train", "vision", *TINY, "--method", "dadam:ring", *out, "--tensorboard"]) == 2
    assert "--tensorboard needs the package tensorboard; pip install tensorboard" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
