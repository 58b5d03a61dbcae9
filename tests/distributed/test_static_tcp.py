"""transport="tcp" in static jobs: as gloo in results, errors and what it leaves behind. Synchronous parity with virtual
workers is in test_engine_processes.py, deaths are in test_engine_startup.py."""

import os
import socket
import threading
import time

import pytest
import torch
from workers import decentralize, loss_of, mlp, process_group, seeded, vector

import gossamer
from policies import policies


def train(model, optimizer, rank, steps):
    for step in range(steps):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def asynchronous(rank, settings):
    with process_group():
        model = seeded(0, mlp)
        optimizer = sgd(model)
        with decentralize(model, optimizer, transport="tcp", **settings):
            train(model, optimizer, rank, 8)
        return vector(model)


@pytest.mark.parametrize("algorithm", ["ad-psgd", "a2cid2"])
def test_asynchronous_jobs_equal_virtual_workers(pools, one_thread, algorithm):
    settings = {"topology": "ring", "algorithm": algorithm, "clock": "virtual", "bucket_mib": 0.0005}
    found = pools(3).run(asynchronous, settings)
    models = [seeded(0, mlp) for _ in range(3)]
    optimizers = [sgd(m) for m in models]
    with gossamer.VirtualCluster(3) as cluster:
        cluster.decentralize(models, optimizers, **policies(**settings))
        for step in range(8):
            for rank in range(3):
                loss_of(models[rank], rank, step).backward()
                optimizers[rank].step()
                optimizers[rank].zero_grad()
    for rank in range(3):
        assert torch.equal(found[rank], vector(models[rank]))


def ours():
    return {t.name for t in threading.enumerate() if t.name.startswith("gossamer")}


def sockets():
    links = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(path) and os.readlink(path).startswith("socket:") for path in links)


def uneven_twice(rank):
    """Workers with different numbers of batches; and nothing is left after close()."""
    with process_group():
        counted = []
        for _ in range(2):
            model = seeded(0, mlp)
            optimizer = sgd(model)
            with decentralize(model, optimizer, topology="complete", transport="tcp") as gossip:
                train(model, optimizer, rank, 4 + 3 * rank)
                steps = gossip.stats()["steps"]
            deadline = time.monotonic() + 120
            while (ours() or sockets() > min(counted, default=1000)) and time.monotonic() < deadline:
                time.sleep(0.01)
            counted.append(sockets())
        return steps, sorted(ours()), counted


def test_uneven_data_ends_and_leaves_nothing_behind(pools):
    for rank, (steps, threads, counted) in enumerate(pools(3).run(uneven_twice)):
        assert steps == 4 + 3 * rank
        assert threads == []
        assert counted[1] <= counted[0]


def strangers(rank):
    """Bytes of a stranger at the port of worker 0 end only the stranger's connection."""
    with process_group():
        model = seeded(0, mlp)
        optimizer = sgd(model)
        with decentralize(model, optimizer, topology="ring", transport="tcp") as gossip:
            train(model, optimizer, rank, 2)
            links = gossip.transport._links.links
            if rank == 1:
                with socket.create_connection(links.peer(0).address, timeout=300) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 300)
            train(model, optimizer, rank, 5)
            return True


def test_strangers_are_refused_and_nobody_is_harmed(pools):
    assert pools(3).run(strangers) == [True] * 3
