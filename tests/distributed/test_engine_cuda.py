"""The NCCL transport against virtual workers. Needs two CUDA devices; nobody has run it yet, hence experimental."""

import pytest
import torch
from torch import nn

import gossamer
from gossamer.lab import run_workers

pytestmark = [
    pytest.mark.requires_cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices and NCCL"),
]


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
    with gossamer.decentralize(model, optimizer, topology=topology, wire=wire, timeout=60):
        for step in range(5):
            trained(model, optimizer, rank, step)
    values = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu().tolist()
    torch.distributed.destroy_process_group()
    return values


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_two_gpus_equal_virtual_workers(topology, wire):
    models = [made(0), made(0)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    with gossamer.VirtualCluster(2) as cluster:
        cluster.decentralize(models, optimizers, topology=topology, wire=wire)
        for step in range(5):
            for rank in range(2):
                trained(models[rank], optimizers[rank], rank, step)
    found = run_workers(2, on_gpu, topology, wire)
    for rank, model in enumerate(models):
        expected = torch.cat([p.detach().flatten() for p in model.parameters()])
        torch.testing.assert_close(torch.tensor(found[rank]), expected, rtol=1e-4, atol=1e-5)
