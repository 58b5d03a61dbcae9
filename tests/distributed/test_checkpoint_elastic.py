"""Checkpoints of an elastic job: saved by the members that are alive, loaded by any number of workers."""

import threading
import time

import pytest
import torch

from elastic import finish, job
from gossamer import Checkpoints
from gossamer.checkpoint import consensus, files


def saved(folder):
    def end(gossip):
        checkpoints = Checkpoints(folder)
        step = checkpoints.save(gossip, gossip.model, gossip.lanes[0].optimizer)
        checkpoints.wait()
        with gossip.averaged() as model:
            return step, {k: v.clone() for k, v in model.state_dict().items()}

    return end


def loaded(folder):
    def end(gossip):
        found = Checkpoints(folder).load(gossip, gossip.model, gossip.lanes[0].optimizer)
        with gossip.averaged() as model:
            mean = {k: v.clone() for k, v in model.state_dict().items()}
        return found.step, found.workers, gossip.stats()["steps"], mean

    return end


@pytest.mark.parametrize("victim", [None, 0])
def test_living_members_save_and_all_workers_load(monkeypatch, tmp_path, victim):
    with job(monkeypatch, 3, topology="ring", soft_deadline=5.0) as made:
        made.deaths = {} if victim is None else {victim: 10}
        workers = made.all(40, saved(tmp_path), pause=0.01)
        results = finish([w for w in workers if w.rank != victim])
    steps = {step for step, _ in results}
    assert len(steps) == 1
    step = steps.pop()
    assert step == 40
    manifest, model = consensus(tmp_path)
    assert (manifest.step, manifest.workers) == (40, 3 if victim is None else 2)
    for name, value in results[0][1].items():
        torch.testing.assert_close(model[name], value, rtol=1e-5, atol=1e-6)
    with job(monkeypatch, 3, topology="ring", soft_deadline=5.0) as made:
        results = finish(made.all(0, loaded(tmp_path)))
    for at, workers, taken, mean in results:
        assert (at, workers, taken) == (40, manifest.workers, 40)
        for name, value in mean.items():
            torch.testing.assert_close(value, model[name], rtol=1e-5, atol=1e-6)
    assert files.steps_in(tmp_path) == [40]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_worker_that_dies_while_all_load_is_not_waited_for(monkeypatch, tmp_path, victim):
    with job(monkeypatch, 3, topology="ring", soft_deadline=5.0) as made:
        finish(made.all(10, saved(tmp_path)))
    load = loaded(tmp_path)

    def end(gossip):
        if gossip.members.rank == victim:
            threading.Thread(target=workers[victim].kill).start()
            time.sleep(3600)
        return load(gossip)

    with job(monkeypatch, 3, topology="ring", soft_deadline=5.0, timeout=3600.0) as made:
        workers = made.all(3, end)
        results = finish([w for w in workers if w.rank != victim])
    assert [(at, count, steps) for at, count, steps, _ in results] == [(10, 3, 10)] * 2
    first, second = (torch.cat([v.flatten() for v in mean.values()]) for *_, mean in results)
    assert torch.equal(first, second)
