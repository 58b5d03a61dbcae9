"""Exchanges through the host on simulated devices whose streams are late: bit by bit as on virtual workers."""

from contextlib import contextmanager
from importlib import import_module

import pytest
import torch
from workers import decentralize, loss_of, mlp, process_group, seeded, vector

import gossamer
from elastic import PATIENCE, end_now, job, until
from late_device import LateDevice
from policies import policies

STEPS = 5
engine = import_module("gossamer.engine.decentralize")  # the function of this name hides the module


@contextmanager
def late(seed):
    """A late device that `decentralize` takes the parameters to be on."""
    device, real = LateDevice(seed), engine.accelerator_of
    engine.accelerator_of = lambda tensors: device
    try:
        yield device
    finally:
        engine.accelerator_of = real
        device.close()


def train(model, optimizer, rank, step):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def on_a_late_device(rank, **settings):
    with process_group(), late(rank) as device:
        model = seeded(0, mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        gossip = decentralize(model, optimizer, **settings)
        seen = []
        for step in range(STEPS):
            with device.training():
                train(model, optimizer, rank, step)
            if step == STEPS // 2:
                device.synchronize()
                with gossip.averaged():
                    seen.append(vector(model))
        device.synchronize()
        seen.append(vector(model))
        gossip.close()
        device.synchronize()
        return [*seen, vector(model)]


def on_virtual_workers(n, **settings):
    models = [seeded(0, mlp) for _ in range(n)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    seen = [[] for _ in range(n)]
    with gossamer.VirtualCluster(n) as cluster:
        cluster.decentralize(models, optimizers, **policies(**settings))
        for step in range(STEPS):
            for rank in range(n):
                train(models[rank], optimizers[rank], rank, step)
            if step == STEPS // 2:
                with cluster.averaged():
                    for rank in range(n):
                        seen[rank].append(vector(models[rank]))
        for rank in range(n):
            seen[rank].append(vector(models[rank]))
    return [[*values, vector(model)] for values, model in zip(seen, models, strict=True)]


@pytest.mark.parametrize(
    "settings",
    [
        {"topology": "ring", "wire": "int8", "bucket_mib": 0.0005},
        {"topology": "complete", "algorithm": "atc"},
        {"topology": "ring", "average_every": 2, "in_flight": 2, "bucket_mib": 0.0005},
        {"topology": "ring", "algorithm": "ad-psgd", "clock": "virtual", "wire": "bf16"},
        {"topology": "ring", "algorithm": "a2cid2", "clock": "virtual", "bucket_mib": 0.0005},
    ],
    ids=str,
)
def test_static_jobs_equal_virtual_workers(pools, one_thread, settings):
    found = pools(3).run(on_a_late_device, **settings)
    expected = on_virtual_workers(3, **settings)
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(a, b), f"worker {rank}, record {at}"


def train_late(monkeypatch, made, devices):
    """Let the workers of an elastic job train on these devices."""
    monkeypatch.setattr(engine, "accelerator_of", lambda tensors: devices[made.local.rank])
    plain = made.train

    def late_train(rank, step, model, optimizer):
        with devices[rank].training():
            plain(rank, step, model, optimizer)
        devices[rank].synchronize()

    made.train = late_train


def test_elastic_jobs_equal_virtual_workers_and_admit_a_replacement(monkeypatch):
    """Three workers as threads: parity until one dies; then a replacement takes its place."""
    devices = [LateDevice(rank) for rank in range(3)]
    options = {"topology": "ring", "soft_deadline": PATIENCE, "transport": "host"}
    with job(monkeypatch, 3, 1, **options) as made:
        plain = made.train
        train_late(monkeypatch, made, devices)
        workers = made.all(10**6, lambda gossip: gossip.stats(), pause=0.01)
        workers[1].until(10)
        workers[1].stopped.set()
        workers[1].gossip.members.close()  # the others see what the death of its process would show
        replacement = made.start(1, 10**6, lambda gossip: gossip.stats(), pause=0.01)
        for worker in (workers[0], replacement, workers[2]):
            worker.until(40)
        results = end_now([workers[0], replacement, workers[2]])
        assert replacement.gossip.stats()["joined"]
        assert all(stats["steps"] >= 40 for stats in results)
        parts = [made.make(rank) for rank in range(3)]
        for model, _ in parts[1:]:
            model.load_state_dict(parts[0][0].state_dict())
        models, optimizers = [m for m, _ in parts], [o for _, o in parts]
        with gossamer.VirtualCluster(3) as cluster:
            cluster.decentralize(models, optimizers, topology="ring")
            for step in range(8):
                for rank in range(3):
                    plain(rank, step, models[rank], optimizers[rank])
                for rank in range(3):
                    now = torch.cat([p.detach().flatten() for p in models[rank].parameters()])
                    assert torch.equal(workers[rank].values[step], now), f"worker {rank} differs after step {step}"
    for device in devices:
        device.close()


def test_asynchronous_elastic_jobs_through_the_host(monkeypatch):
    devices = [LateDevice(rank) for rank in range(2)]
    with job(monkeypatch, 2, 1, topology="ring", algorithm="a2cid2", transport="host") as made:
        train_late(monkeypatch, made, devices)
        workers = made.all(10**6, lambda gossip: gossip.consensus_distance(), 0.005)
        for worker in workers:
            worker.until(30)
        until(lambda: all(worker.gossip.stats()["rounds"] > 5 for worker in workers))
        distances = end_now(workers)
    assert all(distance < 1.0 for distance in distances)
    for device in devices:
        device.close()
