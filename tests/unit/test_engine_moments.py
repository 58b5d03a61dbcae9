"""The optimizer's moments stay local, also when the parameters are averaged exactly."""

import torch

from gossamer import AWC, VirtualCluster


def test_exact_averages_leave_the_moments_local():
    models = []
    for _ in range(3):
        torch.manual_seed(1)
        models.append(torch.nn.Linear(5, 4))
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9) for m in models]
    VirtualCluster(3).decentralize(models, optimizers, topology="ring", algorithm=AWC(average_every=4))
    for step in range(6):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            x = torch.randn(8, 5, generator=torch.Generator().manual_seed(31 * step + rank))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    moments = [o.state[m.weight]["momentum_buffer"] for m, o in zip(models, optimizers, strict=True)]
    assert not torch.allclose(moments[0], moments[1], rtol=1e-3, atol=0)
