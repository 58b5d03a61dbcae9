"""Optimizers wrapped by Accelerate, Lightning and Fabric: gossip follows the steps of the optimizer inside."""

import pytest
import torch
from torch import nn

import gossamer
from gossamer.errors import InputError


def by_accelerate(optimizer):
    return pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(optimizer)


def by_lightning(optimizer):
    """As `LightningModule.optimizers()` gives it to manual optimization."""
    lightning = pytest.importorskip("lightning.pytorch")
    module = lightning.LightningModule()
    module.trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module.trainer.strategy.connect(module)
    wrapped = lightning.core.optimizer.LightningOptimizer(optimizer)
    wrapped._strategy = module.trainer.strategy
    return wrapped


def by_fabric(optimizer):
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    return fabric.setup_optimizers(optimizer)


def trained(wrap, several=False):
    """Two workers of which one sees other data; returns their parameters and the handles."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 2) for _ in range(2)]
    optimizers = [wrap(torch.optim.SGD(m.parameters(), lr=0.1)) for m in models]
    given = [[o] for o in optimizers] if several else optimizers
    with gossamer.VirtualCluster(2) as cluster:
        gossips = cluster.decentralize(models, given, topology="ring")
        for step in range(3):
            for worker, (m, o) in enumerate(zip(models, optimizers, strict=True)):
                m(torch.full((1, 4), float(worker + step))).sum().backward()
                o.step()
                o.zero_grad()
        assert [g.stats()["steps"] for g in gossips] == [3, 3]
    return torch.cat([p.detach().flatten() for m in models for p in m.parameters()]), gossips


@pytest.mark.parametrize("wrap", [by_accelerate, by_lightning, by_fabric])
@pytest.mark.parametrize("several", [False, True])
def test_a_wrapped_optimizer_is_the_one_inside(wrap, several):
    bare, _ = trained(lambda optimizer: optimizer)
    wrapped, gossips = trained(wrap, several)
    assert torch.equal(wrapped, bare)
    assert type(gossips[0].lanes[0].optimizer) is torch.optim.SGD


@pytest.mark.parametrize("wrap", [by_accelerate, by_lightning, by_fabric])
def test_an_optimizer_that_is_refused_is_refused_inside_a_wrapper(wrap):
    with pytest.raises(InputError, match="LBFGS evaluates its closure several times"):
        wrapped_lbfgs(wrap)


def wrapped_lbfgs(wrap):
    models = [nn.Linear(4, 2) for _ in range(2)]
    gossamer.VirtualCluster(2).decentralize(models, [wrap(torch.optim.LBFGS(m.parameters())) for m in models])
