"""What a newcomer meets in the first hour on the command line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_report_runs import fake_run

from gossamer.cli import common, main, train
from gossamer.jobs import compare as comparing
from gossamer.jobs import progress

TINY = ["--virtual", "2", "--batch", "4", "--width", "2", "--evaluate-on", "16", "--jobs", "1", "--steps", "2"]


def test_a_table_in_a_pipe_is_not_cut(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    made = common.table(*(f"column {k}" for k in range(12)))
    made.add_row(*(f"{k}79-5432.123" for k in range(12)))
    common.print_rich(made)
    printed = capsys.readouterr().out
    assert all(f"{k}79-5432.123" in printed for k in range(12))
    assert "…" not in printed


def test_a_narrow_terminal_folds_numbers_instead_of_cutting_them(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["topology", "list", "--nodes", "4", "--per-node", "4"]) == 0
    assert "…" not in capsys.readouterr().out


@pytest.mark.parametrize("command", [["compare", "vision"], ["bench"], ["chaos"]])
def test_commands_that_start_workers_refuse_a_launcher(command, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(command) == 2
    assert "starts its own workers, but RANK is set" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["bench"], ["chaos"]])
def test_a_record_is_not_overwritten(command, tmp_path, capsys):
    (tmp_path / "record.json").write_text("{}")
    assert main([*command, "--out", str(tmp_path)]) == 2
    assert "already holds a record" in capsys.readouterr().err
    assert main([*command, "--out", "/proc/nowhere"]) == 2
    assert "cannot make the record's folder /proc/nowhere" in capsys.readouterr().err


def test_unknown_commands_and_options_name_the_nearest(capsys):
    assert main(["trian"]) == 2
    assert "did you mean train?" in capsys.readouterr().err
    assert main(["advise", "--clster", "x"]) == 2
    assert "did you mean cluster?" not in capsys.readouterr().err  # an argument is not an option


def test_paced_links_are_announced(monkeypatch, capsys):
    monkeypatch.setattr("gossamer.lab.why_unavailable", lambda: "shaped links need root")
    common.note_paced_links("20mbit")
    assert "paced by sleeping instead of shaped by the kernel: shaped links need root" in capsys.readouterr().err
    common.note_paced_links(None)
    assert capsys.readouterr().err == ""


def test_train_and_report_state_the_same_step_time(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "run"
    fake_run(folder, "dadam:aer", 0, loss=1.0, accuracy=0.9, step_seconds=0.025, simulated=False)
    rows = [json.loads(line) for line in (folder / "metrics-00000.jsonl").read_text().splitlines()[:-1]]
    for row in rows:
        row["seconds"] += 1.0 if row["step"] > 1 else 0.9  # a slow start: the mean is not the median
    (folder / "metrics-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = {"seconds": rows[-1]["seconds"], "step": 10, "averaged": {"loss": 1.0}, "stopped": False}

    class Config:
        virtual, method, steps = False, "dadam:aer", 10

    train._print(outcome, folder, Config(), False)
    said = re.search(r"([\d.]+) ms per step", capsys.readouterr().out)[1]
    assert main(["report", str(folder), "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)["methods"][0]["step_seconds"]
    assert float(said) == pytest.approx(1e3 * reported, abs=0.05)


def test_a_sweep_is_not_trained_twice_and_a_comparison_is_continued(tmp_path, capsys, monkeypatch):
    trained = []
    train_virtual = comparing._train_virtual
    monkeypatch.setattr(
        comparing, "_train_virtual", lambda c, f, *rest: trained.append((c.method, c.lr)) or train_virtual(c, f, *rest)
    )
    out = ["--out", str(tmp_path / "cmp")]
    assert main(["compare", "vision", *TINY, "--methods", "ddp", "--lr-sweep", "1e-3,4e-3", *out]) == 0
    first = capsys.readouterr()
    assert "2 runs of 2 steps" in first.err
    assert "that was tried: try rates beyond it" in first.out
    assert sorted(trained) == [("ddp", 0.001), ("ddp", 0.004)]
    best = json.loads((tmp_path / "cmp" / "ddp" / "seed-0" / "config.json").read_text())["lr"]

    both = ["--methods", "ddp,gossipadam:aer", "--lr", str(best)]
    assert main(["compare", "vision", *TINY, *both, *out]) == 2
    assert "pass --continue to add to it" in capsys.readouterr().err
    trained.clear()
    assert main(["compare", "vision", *TINY, *both, *out, "--continue", "--json"]) == 0
    assert trained == [("gossipadam:aer", best)]
    assert [row["method"] for row in json.loads(capsys.readouterr().out)["methods"]] == ["ddp", "gossipadam:aer"]

    other = [word if word != "2" else "3" for word in TINY]  # other numbers of workers and steps
    assert main(["compare", "vision", *other, *both, *out, "--continue"]) == 2
    assert "holds a run with" in capsys.readouterr().err


def test_many_runs_say_how_long_the_rest_takes(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    finished = progress.Finished(3, quiet=False)
    now[0] = 90.0
    finished._count = 1
    assert finished._left() == "  (about 3 min left)"
    finished._count = 3
    assert finished._left() == ""


def test_tab_completion_knows_commands_and_options():
    def completed(*words):
        asked = {
            "_GOSSAMER_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
        }
        code = "import sys; from gossamer.cli import main; sys.argv = ['gossamer']; main()"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **asked})

    assert completed("gossamer", "topo").stdout.split() == ["topology"]
    assert completed("gossamer", "train", "--worke").stdout.split() == ["--workers"]


def test_the_version_is_that_of_the_package():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    import gossamer

    assert f'version = "{gossamer.__version__}"' in text
