"""Checkpoints of real workers: exact, at another size, with a full disk on one worker, and on a signal."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from workers import QUICK_NAMES, process_group

import gossamer
from elastic import until
from gossamer.checkpoint import consensus, files
from policies import policies

ROOT = Path(__file__).parents[2]


def trained(rank, folder, steps, resume=False, broken=None, fail=None, timeout=250, **settings):
    """A plain training script; `broken` cannot write its part of step 2, `fail` raises in its loop after step 2."""
    torch.set_num_threads(1)
    with process_group(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.2), nn.Linear(6, 2))
        optimizer = gossamer.AccumAdamW(model.parameters(), lr=0.05, accumulate=3)
        gossip = gossamer.decentralize(
            model, optimizer, timeout=timeout, **policies(**{"topology": "ring", **settings})
        )
        checkpoints = gossamer.Checkpoints(folder, keep_last=None)
        loaded = checkpoints.load(gossip, model, optimizer) if resume else None
        if rank == broken:
            files.write_part = _full_at(2)
        with gossip:
            for step in range(loaded.step if loaded else 0, steps):
                x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))
                (model(x) - rank).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if (step + 1) % 2 == 0:
                    checkpoints.save(gossip, model, optimizer)
                if rank == fail and step == 2:
                    raise ZeroDivisionError("in the user's loop")
            checkpoints.wait()
        return (
            [p.detach().clone() for p in model.parameters()],
            None if loaded is None else (loaded.step, loaded.workers, loaded.resized),
            [str(w.message) for w in warned if issubclass(w.category, gossamer.GossamerWarning)],
        )


def _full_at(step):
    plain = files.write_part

    def write(folder, at, *rest):
        if at == step:
            files.write_part = plain
            raise OSError(28, "No space left on device")
        plain(folder, at, *rest)

    return write


def test_a_resumed_job_equals_the_uninterrupted_one(tmp_path, pools):
    whole = pools(2, 2).run(trained, tmp_path / "whole", 8)
    pools(2, 2).run(trained, tmp_path / "cut", 4)
    again = pools(2, 2).run(trained, tmp_path / "cut", 8, resume=True)
    for (values, loaded, _), (expected, _, _) in zip(again, whole, strict=True):
        assert loaded == (4, 4, False)
        assert all(map(torch.equal, values, expected))
    assert files.steps_in(tmp_path / "cut") == [2, 4, 6, 8]


def test_a_job_resumes_with_fewer_workers_and_another_topology(tmp_path, pools):
    pools(2, 2).run(trained, tmp_path, 4)
    before = consensus(tmp_path)[1]
    answers = pools(2).run(trained, tmp_path, 4, resume=True, topology="complete")
    assert [loaded for _, loaded, _ in answers] == [(4, 4, True)] * 2
    means = [torch.stack(values).mean(0) for values in zip(*(a[0] for a in answers), strict=True)]
    for mean, old in zip(means, before.values(), strict=True):
        torch.testing.assert_close(mean, old, rtol=1e-5, atol=1e-6)


def test_one_workers_full_disk_costs_one_checkpoint(tmp_path, pools):
    answers = pools(2).run(trained, tmp_path, 6, broken=1)
    assert files.steps_in(tmp_path) == [4, 6]
    for _, _, warned in answers:
        assert len(warned) <= 1
        assert all("step 2 in" in w and "worker 1: No space left on device" in w for w in warned)
    assert answers[1][2]
    assert not list(tmp_path.glob(".step-*"))


def error_of(rank, *args, **kwargs):
    began = time.monotonic()
    try:
        trained(rank, *args, **kwargs)
    except Exception as error:
        return type(error).__name__, time.monotonic() - began
    return None, 0.0


def test_an_exception_on_one_worker_ends_all_and_leaves_the_last_checkpoint(tmp_path, pools):
    answers = pools(2).run(error_of, tmp_path, 50, fail=1, timeout=30)
    assert answers[1][0] == "ZeroDivisionError"
    assert answers[0][0] is not None, "the other worker trained on without its neighbor"
    until(lambda: files.steps_in(tmp_path))  # the workers' threads complete what the loops have begun to save
    assert files.steps_in(tmp_path)[0] == 2
    consensus(tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_the_job(tmp_path, number):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "gossamer", "train", "vision", "--workers", "2", "--method", "dadam:ring"]
    options = ["--batch", "2", "--steps", "100000", "--eval-every", "0", "--out", str(out), "--json"]
    job = subprocess.Popen(
        [*command, *options],
        env={**os.environ, **QUICK_NAMES, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    rows, deadline = out / "metrics-00000.jsonl", time.monotonic() + 250
    while not (rows.exists() and rows.read_text().count("\n") >= 3):
        assert job.poll() is None, job.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(number)
    printed, said = job.communicate(timeout=300)
    assert job.returncode == 130, said
    assert "stopping after this step with a checkpoint; press Ctrl-C again to quit immediately without saving" in said
    assert f"resume with: gossamer train --resume {out}" in said
    outcome = json.loads(printed)
    assert outcome["stopped"]
    assert files.latest_in(out / "checkpoints") == outcome["step"] >= 3
    consensus(out / "checkpoints")


def test_a_checkpoint_loads_after_kills_at_random_moments(tmp_path):
    script = [sys.executable, str(ROOT / "benchmarks" / "checkpoint_kill.py")]
    options = ["--kills", "2", "--workers", "2", "--width", "5000", "--within", "0.5", "--seed", "4"]
    done = subprocess.run([*script, *options], capture_output=True, text=True, timeout=300, check=True)
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["loadable"] == 2
    assert summary["went_backwards"] == 0
    assert summary["identical_to_the_undisturbed_run"]


def save_something_odd(rank, folder):
    """Worker 1 passes an `extra` that cannot be saved. Returns what save() and wait() say."""
    with process_group():
        model = nn.Linear(5, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gossamer.decentralize(model, optimizer, timeout=250) as gossip:
            checkpoints = gossamer.Checkpoints(folder)
            try:
                checkpoints.save(gossip, model, optimizer, extra={"odd": object()} if rank == 1 else None)
                checkpoints.wait()
            except gossamer.GossamerError as error:
                return str(error)
    return ""


def test_an_extra_that_one_worker_cannot_save_is_named_at_once(tmp_path, pools):
    # Checkpoints waits 600 s for a missing part, longer than the pool waits for its workers.
    errors = pools(2).run(save_something_odd, tmp_path / "checkpoints")
    assert "worker 1: a checkpoint cannot hold a builtins.object" in errors[0]
    assert "a checkpoint cannot hold a builtins.object" in errors[1]
