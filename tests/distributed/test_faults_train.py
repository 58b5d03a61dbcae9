"""`gossamer train --on-failure continue`: the launcher replaces a worker that dies, and the run finishes."""

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from gossamer import Checkpoints, GossamerError
from gossamer.checkpoint.files import read_manifest
from gossamer.cli import main
from gossamer.jobs import elastic
from gossamer.jobs.elastic import _watch_over, run_member
from gossamer.jobs.events import RunEvents
from gossamer.lab import WorkerPool
from gossamer.recipes.config import make_config
from gossamer.recipes.metrics import Metrics
from gossamer.recipes.run import read_config

TRAIN = "train vision --workers 3 --per-node 3 --method dadam:aer --on-failure continue --json"


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def member(rank, folder, resume, *, signals, replacement):
    """`run_member` of a worker that gets a signal after a step. If it is replaced, the others take their time until
    then: on a busy machine they would have done all steps before the replacement has joined."""
    joined, write, signals = Path(folder).parent / "joined", Metrics.write, list(signals)
    replaced = read_config(Path(folder))[0].max_replacements > 0 and bool(signals)
    least = min((step for _, step, _ in signals), default=0)

    def written(self, row):
        write(self, row)
        if "loss" not in row:
            return
        if replacement:
            joined.touch()
        for due in [] if replacement else [s for s in signals if rank in s[0] and row["step"] >= s[1]]:
            signals.remove(due)
            os.kill(os.getpid(), due[2])
        if replaced and row["step"] > least and not joined.exists():
            time.sleep(0.5)

    Metrics.write = written
    return run_member(rank, folder, resume)


@pytest.fixture
def kills(monkeypatch):
    """Have workers killed: append (rank or ranks, step[, signal]) before the command is called."""
    wanted = []
    start = WorkerPool.start

    def watched(self, rank, fn, *args):
        signals = [([r] if isinstance(r, int) else list(r), step, *how) for r, step, *how in wanted]
        signals = [s if len(s) == 3 else (*s, signal.SIGKILL) for s in signals]
        return start(self, rank, partial(fn, signals=signals, replacement=self.current(rank) is not None), *args)

    monkeypatch.setattr(WorkerPool, "start", watched)
    monkeypatch.setattr(elastic, "run_member", member)
    return wanted


def test_a_dead_worker_is_replaced_and_the_run_ends_as_planned(tmp_path, kills, capsys):
    folder = tmp_path / "run"
    kills.append((0, 5))
    assert main([*TRAIN.split(), "--steps", "150", "--eval-every", "50", "--out", str(folder)]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["step"] == 150
    assert result["deaths"] == [{"worker": 0, "why": "killed by SIGKILL"}]
    assert "worker 0 is gone (killed by SIGKILL); replaced (1 of at most 3)" in err
    assert result["averaged"]["accuracy"] > 0.5
    last = []  # step of each worker; on a busy machine one may be so late that it skips to the others' step
    for rank in range(3):
        steps = [row["step"] for row in rows(folder / f"metrics-{rank:05d}.jsonl") if "loss" in row]
        assert steps == sorted(set(steps)), "no step is done twice"
        last.append(steps[-1])
    assert max(last) == 150
    assert last[0] > 50, "the replacement trains"
    rates = {row["step"]: row["lr"] for row in rows(folder / "metrics-00001.jsonl") if "loss" in row}
    replaced = {row["step"]: row["lr"] for row in rows(folder / "metrics-00000.jsonl") if "loss" in row}
    common = rates.keys() & replaced.keys()
    assert max(common) > 50
    assert all(rates[k] == pytest.approx(replaced[k]) for k in common), "the schedule goes on where the others are"


@pytest.mark.parametrize("method", ["ad-psgd:ring", "a2cid2:ring"])
def test_a_dead_worker_of_an_asynchronous_run_is_replaced(tmp_path, kills, capsys, method):
    folder = tmp_path / "run"
    kills.append((1, 5))
    words = TRAIN.replace("dadam:aer", method).split()
    assert main([*words, "--steps", "900", "--eval-every", "900", "--out", str(folder)]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["deaths"] == [{"worker": 1, "why": "killed by SIGKILL"}]
    assert "worker 1 is gone (killed by SIGKILL); replaced (1 of at most 3)" in err
    assert result["averaged"]["accuracy"] > 0.5
    trained = [row["step"] for row in rows(folder / "metrics-00001.jsonl") if "loss" in row]
    assert trained == sorted(set(trained)), "no step is done twice"
    assert trained[-1] > 50, "the replacement trains"


def test_a_worker_that_gets_sigterm_leaves_in_good_order_and_is_replaced(tmp_path, kills, capsys):
    folder = tmp_path / "run"
    kills.append((1, 5, signal.SIGTERM))
    assert main([*TRAIN.split(), "--steps", "150", "--eval-every", "50", "--out", str(folder)]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["step"] == 150
    assert result["deaths"] == [{"worker": 1, "why": "it left after SIGTERM"}]
    assert "worker 1 is gone (it left after SIGTERM); replaced (1 of at most 3)" in err
    assert result["averaged"]["accuracy"] > 0.5
    waits = json.loads((folder / "waits-00000.json").read_text())
    assert waits["deadlines"]
    assert all(0 < seconds < 60 for seconds in waits["deadlines"].values())
    assert result["held_up"][0]["deadline_seconds"]


def test_the_last_worker_that_gets_sigterm_saves_a_checkpoint(tmp_path, kills, capsys):
    folder = tmp_path / "run"
    kills.append((0, 3, signal.SIGKILL))
    kills.append((1, 400, signal.SIGTERM))
    command = "train vision --workers 2 --per-node 2 --method dadam:ring --on-failure continue --json --steps 100000"
    assert main([*command.split(), "--eval-every", "0", "--max-replacements", "0", "--out", str(folder)]) == 130
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["stopped"]
    assert result["step"] >= 400
    assert "resume with: gossamer train --resume" in err
    assert Checkpoints(folder / "checkpoints", rank=0, workers=1).latest() == result["step"]


def test_workers_that_all_get_sigterm_save_a_checkpoint_together_and_resume(tmp_path, kills, capsys):
    folder = tmp_path / "run"
    kills.append((range(3), 20, signal.SIGTERM))
    command = [*TRAIN.split(), "--steps", "100000", "--eval-every", "0", "--max-replacements", "0"]
    assert main([*command, "--out", str(folder)]) == 130
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["stopped"]
    assert result["step"] >= 20
    assert "resume with: gossamer train --resume" in err
    saved = read_manifest(folder / "checkpoints", result["step"])
    # a worker that noticed the signal much later than the others, on a busy machine, has saved alone or not at all
    assert saved.workers == 3 - len(result["deaths"])
    kills.clear()
    again = ["train", "--resume", str(folder), "--steps", str(result["step"] + 20), "--json"]
    assert main(again) == 0
    assert json.loads(capsys.readouterr().out)["step"] == result["step"] + 20


def test_without_replacements_the_other_workers_continue_and_evaluate(tmp_path, kills, capsys):
    folder = tmp_path / "run"
    kills.append((0, 3))
    assert (
        main([*TRAIN.split(), "--steps", "20", "--eval-every", "10", "--max-replacements", "0", "--out", str(folder)])
        == 0
    )
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["step"] == 20
    assert result["final"]
    assert 0 <= result["averaged"]["accuracy"] <= 1
    assert result["unsaved"] == ""
    assert "the others continue without it: 0 were replaced already" in err
    assert [row["step"] for row in rows(folder / "metrics-00001.jsonl") if "averaged" in row][-1] == 20


def test_a_run_that_lost_a_worker_is_saved_and_resumed(tmp_path, kills, capsys):
    folder = tmp_path / "run"
    kills.append((1, 12))
    command = [*TRAIN.split(), "--steps", "60", "--eval-every", "25", "--checkpoint-every", "10", "--max-replacements"]
    assert main([*command, "0", "--out", str(folder)]) == 0
    capsys.readouterr()
    kills.clear()
    checkpoints = Checkpoints(folder / "checkpoints", rank=0, workers=1)
    assert checkpoints.latest() == 60
    assert read_manifest(folder / "checkpoints", 60).workers == 2, "of those who were there"
    resumed = ["train", "--resume", str(folder), "--steps", "80", "--json"]
    assert main(resumed) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["step"] == 80
    assert result["averaged"]["accuracy"] > 0.5
    assert read_manifest(folder / "checkpoints", 80).workers == 3
    steps = [row["step"] for row in rows(folder / "metrics-00000.jsonl") if "lr" in row]
    assert steps == list(range(1, 81)), "it went on where it was"


def test_a_worker_that_dies_before_the_job_begins_and_is_not_replaced_ends_the_run(tmp_path, monkeypatch, capsys):
    start = WorkerPool.start

    def killed(self, rank, fn, *args, **kwargs):
        worker = start(self, rank, fn, *args, **kwargs)
        if rank == 1:
            self.kill(1)
        return worker

    monkeypatch.setattr(WorkerPool, "start", killed)
    folder = str(tmp_path / "run")
    assert main([*TRAIN.split(), "--steps", "20", "--max-replacements", "0", "--out", folder]) == 2
    assert "before the job had begun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--exact-inside --per-node 1,2", "on_failure 'continue' cannot be combined with exact_inside"),
        ("--on-failure perhaps", "on_failure"),
        ("--max-replacements -1", "max_replacements"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(words, sentence, tmp_path, capsys):
    assert main([*TRAIN.split(), *words.split(), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


class Endings:
    """A pool whose workers end as listed."""

    def __init__(self, *endings):
        self.endings, self.started = list(endings), []

    @property
    def running(self):
        return self.endings

    def start(self, rank, fn, folder, resume):
        self.started.append((rank, resume))

    def poll(self, seconds):
        self.polled = self.endings.pop(0)
        return [self.polled]

    def current(self, rank):
        return self.polled


def ended(rank, **outcome):
    value = {"step": 20, "stopped": False, "unsaved": "", **outcome}
    return SimpleNamespace(rank=rank, generation=0, ending="returned", value=value)


def watched(tmp_path, pool, resume=False):
    messages = []
    config = make_config({"task": "vision", "method": "dadam:aer", "per_node": (2,), "on_failure": "continue"})
    return _watch_over(pool, config, tmp_path, resume, messages.append, RunEvents(tmp_path)), messages


def test_the_outcome_is_that_of_the_worker_with_the_final_evaluation(tmp_path):
    outcome, messages = watched(tmp_path, Endings(ended(0, averaged=1), ended(2), ended(1, averaged=2, final=True)))
    assert (outcome["averaged"], outcome["unsaved"], messages) == (2, "", [])


def test_a_missing_last_checkpoint_is_reported(tmp_path):
    lost = "the checkpoint of step 20 could not be written"
    outcome, messages = watched(tmp_path, Endings(ended(0), ended(1, unsaved=lost)))
    assert (outcome["unsaved"], messages) == (lost, [lost])
    with pytest.raises(GossamerError, match=lost):
        watched(tmp_path, Endings(ended(0, stopped=True, unsaved=lost)))
    for step in (20, 21):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-{step:08d}" / "manifest.json").touch()
        assert watched(tmp_path, Endings(ended(0, stopped=True, unsaved=lost)))[1] == [], "the others have written it"


def test_a_replacement_resumes_if_the_job_has_not_begun(tmp_path):
    dead = SimpleNamespace(rank=1, generation=0, ending="died", why="killed", error=None)
    for resume in (True, False):
        pool = Endings(dead, ended(0))
        watched(tmp_path, pool, resume)
        assert pool.started == [(0, resume), (1, resume), (1, resume)]
