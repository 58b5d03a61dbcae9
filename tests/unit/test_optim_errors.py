"""Bad input to the optimizers: one sentence, and no parameter moves."""

import pytest
import torch

from gossamer.errors import InputError
from gossamer.optim import AccumAdam, AccumAdamW, GossipAdam, GossipAdamW

EVERY = [AccumAdam, AccumAdamW, GossipAdam, GossipAdamW]


@pytest.mark.parametrize(
    ("kwargs", "word"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": torch.ones(2)}, "2 elements"),
        ({"lr": torch.tensor(0.1), "foreach": True}, "foreach=True takes a float"),
        ({"betas": (0.9, 1.0)}, "betas are"),
        ({"betas": (0.9,)}, "betas are"),
        ({"eps": -1e-8}, "eps is"),
        ({"weight_decay": -0.1}, "weight_decay is"),
        ({"foreach": True, "fused": True}, "both True"),
        ({"amsgrad": True}, "amsgrad is True.*leave amsgrad out"),
    ],
)
@pytest.mark.parametrize("cls", EVERY)
def test_settings_are_checked(cls, kwargs, word):
    check(cls, kwargs, word)


@pytest.mark.parametrize(
    ("kwargs", "word"),
    [
        ({"accumulate": 0}, "accumulate is 0"),
        ({"accumulate": 2.0}, "accumulate is 2.0"),
        ({"accumulate": True}, "accumulate is True"),
        ({"betas_per": "epoch"}, "betas_per is 'epoch'"),
    ],
)
@pytest.mark.parametrize("cls", [AccumAdam, AccumAdamW])
def test_settings_of_accum_adam_are_checked(cls, kwargs, word):
    check(cls, kwargs, word)


@pytest.mark.parametrize(
    ("kwargs", "word"),
    [
        ({"replicas": 0.5}, "replicas is 0.5"),
        ({"replicas": float("nan")}, "replicas is nan"),
        ({"replicas": float("inf")}, "replicas is inf"),
        ({"replicas": True}, "replicas is True"),
        ({"discount": 0.9}, "discount is 0.9"),
        ({"discount": float("inf")}, "discount is inf"),
        ({"discount": "2"}, "discount is '2'"),
    ],
)
@pytest.mark.parametrize("cls", [GossipAdam, GossipAdamW])
def test_settings_of_gossip_adam_are_checked(cls, kwargs, word):
    check(cls, kwargs, word)


def check(cls, kwargs, word):
    with pytest.raises(InputError, match=word):
        cls([torch.nn.Parameter(torch.ones(2))], **kwargs)
    if "foreach" not in kwargs:
        with pytest.raises(InputError, match=word):
            cls([{"params": [torch.nn.Parameter(torch.ones(2))], **kwargs}])


@pytest.mark.parametrize("cls", EVERY)
def test_a_sparse_gradient_is_refused_before_anything_moves(cls):
    dense = torch.nn.Parameter(torch.ones(2))
    table = torch.nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    dense.grad = torch.ones(2)
    opt = cls([dense, table.weight])
    with pytest.raises(InputError, match=r"shape \(4, 3\) is sparse.*sparse=False"):
        opt.step()
    assert torch.equal(dense.detach(), torch.ones(2))
    assert not opt.state


@pytest.mark.parametrize("cls", EVERY)
def test_fused_refuses_complex(cls):
    z = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    z.grad = torch.ones_like(z)
    with pytest.raises(InputError, match=r"complex64.*fused=False"):
        cls([z], fused=True).step()
