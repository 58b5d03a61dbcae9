"""Real processes and virtual workers train the same, step by step; a resumed job equals the uninterrupted one."""

import json

import pytest
import torch

from gossamer.checkpoint import consensus, files
from gossamer.comm.process_groups import join_world, leave_world
from gossamer.predict.methods import parse
from gossamer.recipes import graceful_stop as stop
from gossamer.recipes.config import make_config
from gossamer.recipes.run import run
from toy import Toy

STEPS = 6
SETTINGS = {
    "ddp": {},
    "dsgd:ring": {},
    "dadam:aer": {},
    "accumadam:ring": {},
    "dadam:complete": {"exact_inside": True},
    "gossipadam:ring": {"exact_inside": True, "micro_batches": 2},
    "accumadam:aer": {"combine": "atc", "average_every": 3, "micro_batches": 2},
}


def configured(method, virtual, **values):
    given = {"task": "toy", "method": method, "per_node": (2, 2), "steps": STEPS, "virtual": virtual, "lr": 0.02}
    return make_config({**given, "batched": "off", "eval_every": 4, "checkpoint_every": 1, "keep_last": 1000, **values})


def real(rank, folder, values, resume=False, stop_after=None, norm=False):
    """One worker of a job; `stop_after`: worker 1 asks for a stop after this many steps."""
    torch.set_num_threads(1)
    join_world()
    config = configured(**values)

    def watch(row):
        if "loss" in row and row["step"] == stop_after and rank == 1:
            stop.request(folder)

    task = Toy(dropout=0.2, norm=norm)
    progress = run(config, task, parse(config.method), folder, rank=rank, resume=resume, watch=watch)
    leave_world()
    return progress.stopped, progress.step


def saved(folder, step, worker, workers=4):
    """The parameters of a worker, or of the replica it has a share in."""
    manifest = files.read_manifest(folder, step)
    return files.read_part(folder, manifest, worker * manifest.workers // workers)["model"]


@pytest.mark.parametrize("method", list(SETTINGS))
def test_virtual_and_real_workers_have_the_same_parameters_after_every_step(tmp_path, pools, method):
    values = SETTINGS[method]
    pools(2, 2).run(real, tmp_path / "real", {"method": method, "virtual": False, **values})
    config = configured(method, True, **values)
    run(config, Toy(dropout=0.2), parse(method), tmp_path / "virtual")
    everywhere = [tmp_path / kind / "checkpoints" for kind in ("real", "virtual")]
    assert [files.steps_in(where) for where in everywhere] == [[*range(1, STEPS + 1)]] * 2
    for step in range(1, STEPS + 1):
        for worker in range(4):
            mine, theirs = (saved(where, step, worker) for where in everywhere)
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inside", [False, True])
def test_virtual_and_real_workers_have_the_same_consensus_model(tmp_path, pools, inside):
    """Running statistics included, of which every worker has its own."""
    values = {"method": "dadam:ring", "exact_inside": inside, "steps": 3}
    pools(2, 2).run(real, tmp_path / "real", {**values, "virtual": False}, norm=True)
    config = configured(virtual=True, **values)
    run(config, Toy(dropout=0.2, norm=True), parse(config.method), tmp_path / "virtual")
    mine, theirs = (consensus(tmp_path / kind / "checkpoints")[1] for kind in ("real", "virtual"))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    rows = [(tmp_path / kind / "metrics-00000.jsonl").read_text().splitlines() for kind in ("real", "virtual")]
    losses = [[r["averaged"]["loss"] for line in lines if "averaged" in (r := json.loads(line))] for lines in rows]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("method", ["ddp", "dadam:ring", "accumadam:aer"])
def test_workers_stop_after_the_same_step_and_resume_exactly(tmp_path, pools, method):
    per_node = (2,) if method == "ddp" else (2, 2)  # with more than 2 workers DDP's sums depend on its first buckets
    values = {"method": method, "virtual": False, "steps": 40, "checkpoint_every": 0, "per_node": per_node}
    answers = pools(*per_node).run(real, tmp_path / "cut", values, stop_after=3)
    assert len({step for _, step in answers}) == 1
    assert all(stopped for stopped, _ in answers)
    assert 3 <= answers[0][1] < 40
    stop.clear(tmp_path / "cut")
    values["checkpoint_every"] = 40
    pools(*per_node).run(real, tmp_path / "cut", values, resume=True)
    pools(*per_node).run(real, tmp_path / "whole", values)
    for worker in range(sum(per_node)):
        one, other = (saved(tmp_path / kind / "checkpoints", 40, worker, sum(per_node)) for kind in ("cut", "whole"))
        assert all(torch.equal(one[k], other[k]) for k in one)
