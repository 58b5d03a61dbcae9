"""Gossip on Ray, with the real Ray: inside a TorchTrainer, and as an elastic job whose dead actors are replaced."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from workers import QUICK_NAMES, loss_of, mlp, seeded, vector

import gossamer
from gossamer.comm.launcher import node_name
from gossamer.integrations.ray import run_elastic

ray = pytest.importorskip("ray")

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs/integrations/ray.md").read_text(encoding="utf-8"), re.S | re.M
)
CPUS = 4
pytestmark = pytest.mark.timeout(900)  # Ray starts slowly on a loaded machine


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Ray on this machine. Its workers import what this process imports, and get this module's functions by value."""
    before = dict(os.environ)
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        **QUICK_NAMES,
    }
    try:
        ray.init(
            num_cpus=CPUS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=2**27,
        )
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        yield tmp_path_factory.mktemp("ray")
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
        ray.shutdown()
    finally:
        os.environ.clear()
        os.environ.update(before)


# -- Ray Train ----------------------------------------------------------------------------------------------------


def trained_with_ddp(steps):
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(seeded(3, mlp))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return vector(model.module)


def train_both_ways(folder):
    """Train with DDP and with exact gossip, and write down how far apart they are at most, and how far the starts were.

    Then worker 1 raises while worker 0 trains on.
    """
    theirs = trained_with_ddp(steps=10)
    rank = dist.get_rank()
    model = seeded(3 + rank, mlp)  # worker 0's parameters count
    start = vector(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gossip = gossamer.decentralize(model, optimizer, topology="complete", algorithm="atc")

    def step(at):
        loss_of(model, rank, at).backward()
        optimizer.step()
        optimizer.zero_grad()

    for at in range(10):
        step(at)
    apart = torch.stack([(vector(model) - theirs).abs().max(), -(start - theirs).abs().max()])
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    with gossip.averaged():
        mean = (vector(model) - theirs).abs().max()
    try:
        gossamer.decentralize(seeded(0, mlp), optimizer, on_failure="continue")
        refusal = ""
    except gossamer.InputError as error:
        refusal = str(error)
    if rank == 0:
        seen = {"apart": float(apart[0]), "moved": -float(apart[1]), "mean": float(mean)}
        (Path(folder) / "seen.json").write_text(json.dumps({**seen, "refusal": refusal, "node": node_name()}))
    dist.barrier()
    for at in range(10, 10**9):
        if rank == 1 and at == 15:
            raise ValueError("worker 1 has bad data")
        step(at)


@pytest.fixture(scope="module")
def trained(cluster):
    """What worker 0 wrote down, and the error with which the training ended."""
    from ray.train import RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        train_both_ways,
        train_loop_config=str(cluster),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(cluster)),
    )
    with pytest.raises(TrainingFailedError) as error:
        trainer.fit()
    return json.loads((cluster / "seen.json").read_text()), str(error.value)


def test_a_torch_trainer_equals_its_ddp(trained):
    seen, _ = trained
    assert seen["apart"] < 1e-6
    assert seen["mean"] < 1e-6
    assert seen["moved"] > 1e-2
    assert seen["node"].startswith("NODE_RANK=0 on ")


def test_an_elastic_job_is_refused_inside_ray_train(trained):
    assert trained[0]["refusal"] == (
        "on_failure='continue' cannot be used inside Ray Train, which ends all workers when one of them dies; start "
        "the workers with gossamer.integrations.ray.run_elastic, or use on_failure='raise'"
    )


def test_an_exception_on_one_worker_ends_the_training(trained):
    assert "worker 1 has bad data" in trained[1]


# -- elastic jobs ---------------------------------------------------------------------------------------------------


def train_until_replaced(folder):
    """Worker 1 kills itself at step 20. All train until its replacement has joined, and 30 steps more."""
    rank, end = int(os.environ["RANK"]), Path(folder) / "end"
    model = seeded(rank, mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gossip = gossamer.decentralize(model, optimizer, topology="ring", on_failure="continue")
    started_at = gossip.stats()["steps"]
    if gossip.joined:
        (Path(folder) / "new").write_text(str(started_at + 30))
        (Path(folder) / "new").rename(end)
    while (step := gossip.stats()["steps"]) < (int(end.read_text()) if end.exists() else sys.maxsize):
        if rank == 1 and step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
    with gossip.averaged():
        result = {
            "model": vector(model),
            "joined": gossip.joined,
            "started_at": started_at,
            "present": gossip.participation().workers,
        }
    gossip.close()
    return result


def test_a_killed_actor_is_replaced_and_all_end_with_one_model(cluster, tmp_path):
    told = []
    done = run_elastic(train_until_replaced, str(tmp_path), workers=3, tell=told.append)
    assert [death.rank for death in done.deaths] == [1]
    assert len(told) == 1
    assert told[0].startswith("worker 1 is gone (")
    assert told[0].endswith("; replaced (1 of at most 3)")
    assert sorted(done.values) == [0, 1, 2]
    assert [done.values[r]["joined"] for r in range(3)] == [False, True, False]
    assert done.values[1]["started_at"] >= 20
    for rank in (1, 2):
        assert torch.equal(done.values[rank]["model"], done.values[0]["model"])
    assert [done.values[r]["present"] for r in range(3)] == [3, 3, 3]


def train_badly(topology):
    if topology is None and os.environ["RANK"] == "1":
        raise ValueError("worker 1 is broken")
    model = mlp()
    gossamer.decentralize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), topology=topology or "ring", on_failure="continue"
    )


def test_bad_input_on_the_actors_is_raised_in_the_driver(cluster):
    with pytest.raises(gossamer.InputError, match="no-such-topology"):
        run_elastic(train_badly, "no-such-topology", workers=2)


def test_a_worker_lost_before_all_have_met_ends_the_job(cluster):
    with pytest.raises(gossamer.GossamerError, match=r"ValueError: worker 1 is broken.*had not met yet"):
        run_elastic(train_badly, None, workers=2, max_replacements=0)


# -- the page -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS, ids=["TorchTrainer", "elastic"])
def test_the_documented_program_runs(cluster, block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "block", "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"loss \d+\.\d+, saved .+|workers \[0, 1\] returned, 0 died", said)
