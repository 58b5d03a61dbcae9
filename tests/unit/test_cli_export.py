"""`gossamer export`: a plain state_dict of the consensus model, and clear errors."""

import json

import pytest
import torch

from gossamer.cli import main
from gossamer.recipes.task import make_task

TINY = ["--virtual", "4", "--batch", "4", "--evaluate-on", "16", "--steps", "3"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "run"
    command = ["train", "vision", *TINY, "--method", "dadam:ring", "--checkpoint-every", "2", "--out", str(folder)]
    assert main([*command, "--json"]) == 0
    return folder


def test_export_loads_into_the_plain_model_and_scores_what_the_run_said(trained, tmp_path, capsys):
    out = tmp_path / "model.pt"
    assert main(["export", str(trained), "-o", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["step"], said["workers"], said["file"]) == (3, 2, str(out))  # virtual workers: one per replica
    state = torch.load(out, weights_only=True)
    assert said["tensors"] == len(state)
    config = json.loads((trained / "config.json").read_text())["config"]
    task = make_task(config["task"], config["options"])
    model = task.model(0)
    model.load_state_dict(state)
    rows = [json.loads(line) for line in (trained / "metrics-00000.jsonl").read_text().splitlines()]
    last = [r["averaged"] for r in rows if "averaged" in r][-1]
    assert task.evaluate(model, final=True)["loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert main(["export", str(trained / "checkpoints"), "-o", str(out), "--step", "2"]) == 0
    assert "mean of 2 workers after step 2" in capsys.readouterr().out


def test_a_finished_run_has_a_model_to_export_and_can_be_extended(tmp_path, capsys):
    run, out = str(tmp_path / "run"), str(tmp_path / "model.pt")
    command = ["train", "vision", *TINY, "--method", "ddp", "--json"]
    assert main([*command, "--out", run]) == 0
    assert main(["export", run, "-o", out, "--json"]) == 0
    assert main(["train", "--resume", run, "--steps", "4", "--json"]) == 0
    capsys.readouterr()
    assert main([*command, "--out", f"{run}-2", "--no-save-final"]) == 0
    assert main(["export", f"{run}-2", "-o", out]) == 2
    assert "holds no complete checkpoint; save one first" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [False, True])
def test_a_comparison_keeps_models_only_if_asked(asked, tmp_path):
    command = ["compare", "vision", *TINY, "--methods", "dadam:ring", "--jobs", "1", "--json", "--out", str(tmp_path)]
    assert main([*command, *(["--save-final"] if asked else [])]) == 0
    assert bool(list(tmp_path.rglob("step-00000003/manifest.json"))) == asked


def test_resume_with_other_virtual_workers(trained, tmp_path, capsys):
    command = ["train", "--resume", str(trained), "--json"]
    assert main([*command, "--workers", "3"]) == 2
    assert "is a run with virtual; resume it with --virtual N, not with --workers" in capsys.readouterr().err
    assert main([*command, "--virtual", "3", "--steps", "5"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["step"] == 5
    content = json.loads((trained / "config.json").read_text())
    assert content["config"]["per_node"] == [1, 1, 1]
    assert content["resumed"] == [{"step": 3, "workers_before": 4}]
    rows = [json.loads(line) for line in (trained / "metrics-00000.jsonl").read_text().splitlines()]
    seconds = [r["seconds"] for r in rows if "loss" in r]
    assert len(seconds) == 5
    assert seconds == sorted(seconds)
    assert outcome["seconds"] == pytest.approx(seconds[2] + 2 * content["clock"]["step_seconds"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere", "-o", "m.pt"], "there is no folder /nowhere; pass the --out of gossamer train"),
        (["EMPTY", "-o", "m.pt"], "holds no complete checkpoint; save one first"),
        (["RUN", "-o", "/proc/none/m.pt"], "cannot write /proc/none/m.pt: Parent directory /proc/none does not exist"),
        (["RUN", "-o", "m.pt", "--step", "1"], "no checkpoint of step 1 in"),
        (["RUN"], "Missing option '--output' / '-o'"),
    ],
)
def test_errors_are_one_sentence(trained, tmp_path, capsys, arguments, message):
    places = {"RUN": str(trained), "EMPTY": str(tmp_path)}
    assert main(["export", *(places.get(a, a) for a in arguments)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("gossamer: error: ")
    assert message in said
    assert said.count("\n") == 1
