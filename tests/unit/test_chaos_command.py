"""`gossamer chaos`: bad input is one sentence, and nothing is started."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gossamer import InputError
from gossamer.cli import main
from gossamer.lab.chaos import ChaosConfig
from gossamer.lab.chaos.calm import calm_loss
from gossamer.report.chaos import markdown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seconds", "30", "--faults", "20"], "20 faults do not fit into 30 seconds; pass --seconds"),
        (["--seconds", "1"], "seconds must be from 10 to a day"),
        (["--faults", "-1"], "the number of faults must be at least 0"),
        (["--nodes", "1", "--per-node", "1"], "needs at least 2 workers"),
        (["--seed", "-1"], "the seed must be at least 0"),
        (["--calm-runs", "99"], "calm runs must be 0 to 20"),
        (["--compute", "0"], "compute must be from 0.01"),
        (["--soft-deadline", "9", "--hard-deadline", "5"], "deadlines must satisfy 0 < soft < hard < timeout"),
        (["--lr", "0"], "the learning rate must be above 0"),
        (["--method", "ddp"], "does not continue when a worker fails"),
        (["--method", "dadm:aer"], "unknown method"),
        (["--network", "moon"], "--network must be namespaces or loopback"),
        (["--link", "fast"], "a link rate is a number"),
        (["--plot", "x.doc"], "cannot draw to"),
        (["--per-node", "zwei"], "--per-node must be a positive number"),
    ],
)
def test_bad_input(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--help"]) == 0
    assert "gossamer chaos --nodes 4 --per-node 2" in " ".join(capsys.readouterr().out.split())


CALM = {
    "final_loss": 0.9,
    "faults": [],
    "seconds": 60.0,
    "cluster": {"per_node": [2, 2]},
    "job": {"method": "dadam", "lr": 2e-3, "compute": 0.4, "meet_every": 20, "soft": None, "hard": None},
}
SAME = {"per_node": (2, 2), "seconds": 60.0, "compute": 0.4}


def test_a_calm_run_of_the_same_job_is_compared(tmp_path):
    (tmp_path / "record.json").write_text(json.dumps(CALM))
    assert calm_loss(tmp_path, ChaosConfig(**SAME)) == 0.9


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "a2cid2:ring"}, "its method is dadam:aer, and that of this run is a2cid2:ring"),
        ({"per_node": (4,)}, "its number of workers per node is 2,2, and that of this run is 4"),
        ({"seconds": 120.0}, "its length in seconds is 60, and that of this run is 120"),
        ({"compute": 0.15}, "its compute time is 0.4, and that of this run is 0.15"),
        ({"meet_every": 5}, "its number of steps between meetings is 20, and that of this run is 5"),
        ({"lr": 0.01}, "its learning rate is 0.002, and that of this run is 0.01"),
        ({"soft": 0.5}, "its soft deadline is learned, and that of this run is 0.5"),
        ({"hard": 5.0}, "its hard deadline is learned, and that of this run is 5"),
    ],
)
def test_a_calm_run_of_another_job_is_refused(change: dict[str, Any], words: str, tmp_path):
    (tmp_path / "record.json").write_text(json.dumps(CALM))
    with pytest.raises(InputError, match="cannot be compared") as error:
        calm_loss(tmp_path, ChaosConfig(**{**SAME, **change}))
    assert words in str(error.value)


def test_a_calm_run_without_meetings_is_refused(tmp_path):
    older = {**CALM, "job": {name: value for name, value in CALM["job"].items() if name != "meet_every"}}
    (tmp_path / "record.json").write_text(json.dumps(older))
    with pytest.raises(InputError, match="its number of steps between meetings is 0, and that of this run is 20"):
        calm_loss(tmp_path, ChaosConfig(**SAME))
    assert calm_loss(tmp_path, ChaosConfig(**SAME, meet_every=0)) == 0.9
    with pytest.raises(InputError, match="meet_every must be at least 0"):
        ChaosConfig(**SAME, meet_every=-1)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (None, "there is no record of a run in"),
        ({"final_loss": 0.9, "faults": []}, "there is no record of a run in"),
        ({**CALM, "faults": [{"kind": "kill"}]}, "had 1 faults and is not calm"),
    ],
)
def test_calm_from_needs_a_calm_record(record: Any, words: str, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    if record is not None:
        (tmp_path / "record.json").write_text(json.dumps(record))
    assert main(["chaos", "--nodes", "2", "--per-node", "2", "--calm-from", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


def test_every_method_has_a_learning_rate_of_its_optimizer():
    rates = {m: ChaosConfig(method=m).learning_rate for m in ("dadam", "gossipadam", "accumadam", "ad-psgd", "a2cid2")}
    assert rates["dadam"] == rates["gossipadam"] == rates["accumadam"] == 2e-3
    assert rates["ad-psgd"] == rates["a2cid2"] > 10 * rates["dadam"]
    assert ChaosConfig(method="a2cid2", lr=0.5).learning_rate == 0.5


def test_the_record_has_the_stall_and_the_memory_of_a_run_with_faults():
    grown = {"rss_mb": 300.0, "rss_growth_mb": 9.0, "rss_bound_mb": 6.0}
    counts = {"descriptors": 12, "descriptors_growth": 2, "threads": 15.0, "threads_growth": 0.0}
    worker = {"worker": 3, "generation": 1, "seconds": 400.0, **grown, **counts, "flat": False}
    fault = {"at": 5.0, "kind": "kill", "how": "", "victim": [3], "until": 7.0}
    data = {
        **dict.fromkeys(("hangs", "restarts", "calm_longest_stalls_s", "rejoined", "rejoin_s", "final_loss")),
        **dict.fromkeys(("calm_final_losses", "leaks", "valid", "cpu_use", "ddp")),
        "longest_stall_s": 1.2,
        "meetings": 31,
        "longest_meeting_s": 0.4,
        "stall_limit_s": 1.0,
        "saturated": False,
        "passed": False,
        "problems": ["it grew"],
        "faults": [fault],
        "rejoins": [],
        "memory": {"flat": False, "workers": [worker]},
    }
    text = markdown(data)
    assert "The longest stall of a worker without a fault was 1.20 s, ABOVE the limit of 1 s." in text
    assert "flat in 0 of 1 processes" in text
    assert "| meetings | 31 |" in text
    assert "| 3 (replacement 1) | 400 | 300.0 | +9.00 | 6.0 | 12 | +2 | 15 | +0 | NO |" in text
    assert "| 5.0 | kill | 3 |" in text
    assert "INVALID and not compared with the limit of 1 s" in markdown({**data, "saturated": True})
