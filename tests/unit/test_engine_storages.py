"""Every parameter has a storage of its own, over its part of the flat buffer: what users' tools see of it."""

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing  # registers how tensors are sent to other processes
from torch import nn

import gossamer
from gossamer.engine.flat import flatten
from gossamer.errors import GossamerError, InputError


class Tied(nn.Module):
    """Tied weights, a convolution in channels_last, and an empty parameter."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 8), nn.Linear(8, 50)
        self.out.weight = self.embed.weight
        self.conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        self.nothing = nn.Parameter(torch.empty(0, 3))


def gossiping(make=Tied, n=2, **settings):
    models = [make() for _ in range(n)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    cluster = gossamer.VirtualCluster(n)
    cluster.decentralize(models, optimizers, **settings)
    return cluster, models, optimizers


def step_all(models, optimizers):
    for m, o in zip(models, optimizers, strict=True):
        for p in m.parameters():
            p.grad = torch.ones_like(p)
        o.step()


def test_each_storage_covers_its_parameter_in_the_buffer():
    cluster, models, _ = gossiping()
    for m, gossip in zip(models, cluster.gossips, strict=True):
        (flat,) = gossip.lanes[0].flats
        start, end = flat.buffer.data_ptr(), flat.buffer.data_ptr() + flat.buffer.nbytes
        parameters = [p for p in m.parameters() if p.numel()]
        assert len({p.untyped_storage().data_ptr() for p in parameters}) == len(parameters) == 4
        for p in parameters:
            assert start <= p.data_ptr() < end
            assert p.untyped_storage().nbytes() == p.nbytes
            assert p.storage_offset() == 0
        assert m.conv.weight.is_contiguous(memory_format=torch.channels_last)
        assert m.out.weight is m.embed.weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_every_dtype_has_storages(dtype):
    def make():
        module = nn.Module()
        module.a, module.b = (nn.Parameter(torch.ones(5, 3).to(dtype)) for _ in range(2))
        return module

    module = make()
    (flat,) = flatten(list(module.named_parameters()))
    flat.buffer.copy_(torch.full(flat.buffer.shape, 2.0))
    for p in (module.a, module.b):
        assert p.untyped_storage().nbytes() == 15 * dtype.itemsize
        assert p.detach().float().eq(2.0).all()


def test_a_saved_parameter_is_as_large_as_itself():
    _, (model, _), _ = gossiping(lambda: nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 8)))
    for saved in (torch.save, lambda value, file: file.write(pickle.dumps(value))):
        file = io.BytesIO()
        saved(model[1].weight, file)
        assert model[1].weight.nbytes <= len(file.getvalue()) < 2 * model[1].weight.nbytes


def test_a_loaded_file_has_the_ties_of_the_model():
    _, (model, _), _ = gossiping()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert loaded["out.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    assert len({v.data_ptr() for v in loaded.values() if v.numel()}) == 4
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name], value)
        assert loaded[name].stride() == value.stride()


def test_a_copy_has_memory_of_its_own():
    _, (model, _), _ = gossiping()
    duplicate = copy.deepcopy(model)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in duplicate.parameters():
            p.add_(1.0)
    assert duplicate.out.weight is duplicate.embed.weight
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("use", ["step", "averaged"])
@pytest.mark.parametrize(
    "share", [lambda m: m.share_memory(), lambda m: ForkingPickler.dumps(m.embed.weight)], ids=["share", "send"]
)
def test_shared_memory_is_noticed(share, use):
    """Sharing moves a parameter out of the buffer: exchanges would no longer reach it."""
    cluster, models, optimizers = gossiping()
    share(models[0])
    call = optimizers[0].step if use == "step" else cluster.averaged().__enter__
    with pytest.raises(GossamerError, match=r"'embed.weight' was moved to shared memory .* copy.deepcopy\(model\)"):
        call()


def test_a_copy_may_be_shared():
    cluster, models, optimizers = gossiping()
    shared = copy.deepcopy(models[0]).share_memory()
    assert shared.embed.weight.is_shared()
    step_all(models, optimizers)
    cluster.close()
    assert not models[0].embed.weight.is_shared()


def test_parameters_outlive_the_buffer():
    """A parameter that is still used after everything else is gone keeps its memory."""
    cluster, models, _ = gossiping()
    kept = models[0].conv.weight.data
    value = kept.clone()
    cluster.close()
    del cluster, models
    torch.randn(1000)
    assert torch.equal(kept, value)


def test_memory_that_overlaps_across_storages_is_refused():
    def make():
        base, module = torch.zeros(40), nn.Module()
        module.a = nn.Parameter(base[:20])
        module.b = nn.Parameter(torch.from_dlpack(base[10:30]))
        return module

    with pytest.raises(InputError, match=r"parameters 'a' and 'b' share memory without being one object"):
        gossiping(make)
