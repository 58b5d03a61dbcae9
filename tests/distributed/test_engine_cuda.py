"""Real accelerators against virtual workers. Nobody has run these tests yet: docs/gpu-checklist.md.

NCCL needs two CUDA or ROCm devices. The host transport needs one accelerator of any kind, which the workers share.
"""

import os
import time

import pytest
import torch
from torch import nn

import gossamer
from gossamer.comm import PeerError
from gossamer.comm.tcp import HostedDirectory
from gossamer.lab import run_workers
from policies import policies

pytestmark = pytest.mark.requires_cuda
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices and NCCL")
one_device = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * rank + step)
    batch = torch.randn(8, 16, generator=generator).to(next(model.parameters()).device)
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def made(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def on_gpu(rank: int, topology: str, wire: str) -> list[float]:
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl")
    model = made(0).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gossamer.decentralize(model, optimizer, topology=topology, wire=wire, timeout=300):
        for step in range(5):
            trained(model, optimizer, rank, step)
    values = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu().tolist()
    torch.distributed.destroy_process_group()
    return values


def assert_like_virtual_workers(found: list[list[float]], **settings: str) -> None:
    models = [made(0), made(0)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    with gossamer.VirtualCluster(2) as cluster:
        cluster.decentralize(models, optimizers, **policies(**settings))
        for step in range(5):
            for rank in range(2):
                trained(models[rank], optimizers[rank], rank, step)
    for rank, model in enumerate(models):
        expected = torch.cat([p.detach().flatten() for p in model.parameters()])
        torch.testing.assert_close(torch.tensor(found[rank]), expected, rtol=1e-4, atol=1e-5)


@two_devices
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_nccl_equals_virtual_workers(topology, wire):
    assert_like_virtual_workers(run_workers(2, on_gpu, topology, wire), topology=topology, wire=wire)


def unequal(rank: int) -> int:
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl")
    model = made(0).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gossamer.decentralize(model, optimizer, topology="ring", timeout=300) as gossip:
        for step in range(10 - 5 * rank):
            trained(model, optimizer, rank, step)
        steps = gossip.stats()["steps"]
    torch.distributed.destroy_process_group()
    return steps


@two_devices
def test_nccl_with_unequal_data_does_not_hang():
    assert run_workers(2, unequal) == [10, 5]


def with_two_optimizers(rank: int) -> tuple[float, list[float]]:
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl")
    model = made(rank).cuda()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)]
    with gossamer.decentralize(model, optimizers, topology="ring", timeout=300) as gossip:
        generator = torch.Generator().manual_seed(rank)
        model(torch.randn(8, 16, generator=generator).cuda()).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        distance = gossip.consensus_distance()
        with gossip.averaged():
            values = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu().tolist()
    torch.distributed.destroy_process_group()
    return distance, values


@two_devices
def test_nccl_averages_the_parameters_of_two_optimizers():
    """The exchanges of both lanes are waited for on the first one's channel."""
    (distance, first), (other, second) = run_workers(2, with_two_optimizers)
    assert distance == other
    assert first == second


def left_alone(rank: int) -> str:
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl")
    model = made(0).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gossamer.decentralize(model, optimizer, topology="ring", timeout=5)
    trained(model, optimizer, rank, 0)
    if rank == 1:
        time.sleep(15)  # takes no further step, and is in no collective call
        return ""
    try:
        trained(model, optimizer, rank, 1)
        trained(model, optimizer, rank, 2)
    except PeerError as error:
        return str(error)
    return "no error"


@two_devices
def test_nccl_names_a_peer_that_does_not_come():
    assert "worker 1" in run_workers(2, left_alone)[0]


def through_the_host(rank: int, settings: dict[str, str]) -> list[float]:
    device = torch.accelerator.current_accelerator()
    torch.distributed.init_process_group("gloo")
    model = made(0).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gossamer.decentralize(model, optimizer, **policies(transport="host", timeout=300, **settings)):
        for step in range(5):
            trained(model, optimizer, rank, step)
    values = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu().tolist()
    torch.distributed.destroy_process_group()
    return values


@one_device
@pytest.mark.parametrize(
    "settings",
    [
        {"topology": "ring"},
        {"topology": "complete", "wire": "int8"},
        {"topology": "ring", "algorithm": "ad-psgd", "clock": "virtual"},
        {"topology": "ring", "algorithm": "a2cid2", "clock": "virtual"},
    ],
    ids=str,
)
def test_host_equals_virtual_workers(settings):
    assert_like_virtual_workers(run_workers(2, through_the_host, settings), **settings)


def elastic_through_the_host(rank: int, port: int) -> list[float]:
    os.environ["GOSSAMER_DIRECTORY"] = f"127.0.0.1:{port}"
    model = made(0).to(torch.accelerator.current_accelerator())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    continued = gossamer.Continue(soft_deadline=20, hard_deadline=20)
    gossip = gossamer.decentralize(model, optimizer, topology="ring", on_failure=continued, timeout=300)
    for step in range(5):
        trained(model, optimizer, rank, step)
    with gossip.averaged():
        values = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu().tolist()
    gossip.close()
    return values


@one_device
def test_host_carries_elastic_jobs():
    directory = HostedDirectory()
    first, second = run_workers(2, elastic_through_the_host, directory.port)
    assert first == second
    directory.close()
