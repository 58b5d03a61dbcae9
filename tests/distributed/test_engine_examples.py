"""The examples run, under torchrun or on workers of a pool, and do what they say."""

import contextlib
import difflib
import importlib.util
import io
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from workers import QUICK_NAMES, measured, undisturbed

from gossamer.lab.workers.placement import Node, reserved_port

EXAMPLES = Path(__file__).parents[2] / "examples"


def torchrun(workers: int, script: str, *arguments: str, launcher: Sequence[str] = ("--standalone",)) -> str:
    """What the example prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(workers), *launcher]
    done = subprocess.run(
        [*command, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **QUICK_NAMES, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def last_epoch(script: str) -> tuple[float, float]:
    """Test loss and accuracy after two epochs on two workers."""
    printed = torchrun(2, script, "--epochs", "2")
    loss, accuracy = re.findall(r"test loss ([\d.]+)  accuracy ([\d.]+)", printed)[-1]
    return float(loss), float(accuracy)


def test_both_examples_run_under_torchrun_and_learn_alike():
    ddp_loss, ddp_accuracy = last_epoch("ddp.py")
    our_loss, our_accuracy = last_epoch("ddp_to_gossamer.py")
    assert ddp_accuracy > 0.95
    assert our_accuracy > 0.95
    assert abs(our_loss - ddp_loss) < 0.1


def test_the_examples_differ_in_few_lines():
    before, after = ((EXAMPLES / f).read_text().splitlines() for f in ("ddp.py", "ddp_to_gossamer.py"))
    changed = [line for line in difflib.ndiff(before[1:], after[1:]) if line[0] == "+" and line[2:].strip()]
    assert len(changed) <= 6, changed


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call_example(rank, name, arguments):
    """What the example prints on this worker."""
    printed = io.StringIO()
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(printed):
        load_example(name).main(**arguments)
    return printed.getvalue()


def test_fsdp2_inside_and_gossip_between_learns_saves_and_resumes(pools, tmp_path):
    arguments = {"steps": 60, "per_node": 2, "out": tmp_path, "resume": False}
    printed = pools(2, 2).run(call_example, "fsdp2_inside", arguments)[0]
    assert printed.startswith("2 nodes of 2: steps 0 to 60, test loss ")
    loss = printed.split()[-1]
    assert float(loss) < 0.5  # ln 16 = 2.8 at the start
    resumed = pools(2, 2).run(call_example, "fsdp2_inside", {**arguments, "resume": True})[0]
    assert resumed == f"2 nodes of 2: steps 30 to 60, test loss {loss}\n"

    example = load_example("fsdp2_inside")
    model = example.network()
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    with torch.no_grad():
        plain = example.loss_of(model, torch.Generator().manual_seed(0), size=256)
    assert abs(float(plain) - float(loss)) < 1e-5


def number(printed: str, pattern: str) -> float:
    """The number that follows `pattern` in what an example printed."""
    found = re.search(pattern + r" ?([\d.]*\d)", printed)
    assert found, printed
    return float(found[1])


def test_the_language_model_learns(pools):
    printed = pools(4).run(call_example, "language_model", {"text": None, "steps": 40})[0]
    assert number(printed, "test loss") < 2.2  # ln 19 = 2.9 at the start


def test_the_gan_learns_with_two_optimizers(pools):
    printed = pools(4).run(call_example, "gan", {"steps": 300})[0]
    assert number(printed, "the points lie") < 0.6  # about 1 at the start


def test_a_slow_worker_takes_fewer_steps(pools):
    def attempt(k):
        printed = pools(4).run(call_example, "asynchronous", {"steps": 120, "seconds": 0.02})[0]
        steps = [int(text) for text in re.findall(r"\d+", printed.split(";")[0])]
        assert len(steps) == 4
        assert sum(steps) >= 120
        measured(sum(steps) < 140, steps)
        measured(steps[0] < min(steps[1:]), steps)
        assert number(printed, "test loss") < number(printed, "at the start") / 2

    undisturbed(attempt)


def test_own_topologies_are_used(pools):
    printed = pools(4).run(call_example, "own_topology", {"steps": 10})[0]
    assert [line.split(":")[0] for line in printed.splitlines()] == ["halves", "custom"]
    assert number(printed, "period") == 3


def test_the_trace_names_the_late_worker(pools, tmp_path):
    def attempt(k):
        out = tmp_path / str(k)
        printed = pools(4).run(call_example, "tracing", {"steps": 20, "out": out})[0]
        assert printed.startswith("20 steps of ")
        measured("waited for worker 1" in printed, printed)
        assert (out / "trace.json").stat().st_size > 1000

    undisturbed(attempt)


def test_an_elastic_job_replaces_a_killed_worker():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "elastic.py"), "--steps", "1800"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **QUICK_NAMES, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ended = dict(re.findall(r"worker (\d): steps (\d+) to 1800", done.stdout))
    assert sorted(ended) == ["0", "1", "2", "3"], done.stdout
    assert ended["1"] == ended["2"] == ended["3"] == "0"
    assert int(ended["0"]) >= 450  # it joined where the others were


def test_a_worker_that_is_asked_to_leave_leaves_and_is_replaced():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "leaving.py"), "--steps", "1800"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **QUICK_NAMES, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    left = re.search(r"worker 1: steps 0 to (\d+), left\nworker 1 ended with code 143", done.stdout)
    assert left, done.stdout
    ended = dict(re.findall(r"worker (\d): steps (\d+) to 1800, done", done.stdout))
    assert sorted(ended) == ["0", "1", "2"], done.stdout
    assert ended["0"] == ended["2"] == "0"
    assert int(ended["1"]) >= int(left[1]) >= 450


def test_workers_that_are_all_asked_to_leave_save_together_and_continue_later(tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "reclaimed.py"), "--steps", "400", "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **QUICK_NAMES, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    saved = re.findall(r"worker (\d): steps 0 to \d+, left, saved step (\d+)\n", done.stdout)
    assert sorted(rank for rank, _ in saved) == ["0", "1", "2"], done.stdout
    assert len({step for _, step in saved}) == 1, "they save one checkpoint"
    assert "exit codes: 143 143 143\n" in done.stdout, "a launcher starts them again"
    ended = dict(re.findall(r"worker (\d): steps (\d+) to 400, done", done.stdout))
    assert sorted(ended) == ["0", "1", "2"], done.stdout
    assert all(0 < int(first) <= int(saved[0][1]) for first in ended.values())
    assert "exit codes: 0 0 0\n" in done.stdout


@pytest.mark.parametrize("rendezvous", ["--rdzv-backend=static", "--standalone"])
def test_a_job_that_torchrun_restarts_continues_from_its_checkpoint(rendezvous, tmp_path):
    with reserved_port(Node()) as port:
        launcher = [
            rendezvous,
            "--max-restarts",
            "1",
            *(["--master-port", str(port)] if "static" in rendezvous else []),
        ]
        options = ["--steps", "20", "--every", "5", "--fail-at", "12", "--folder", str(tmp_path)]
        printed = torchrun(2, "restarts.py", *options, launcher=launcher)
    assert "attempt 2: steps 10 to 20" in printed


def test_examples_are_short_and_described():
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        assert text.count("\n") < 80, path.name
        assert f"examples/{path.name}" in text.split('"""')[1], path.name
