"""AccumAdam with accumulate=1, and GossipAdam with one replica, are torch's Adam (AdamW), bit by bit.

So is GossipAdam where everything was measured to be signal, with a longer memory.
"""

import copy
import math
from functools import partial

import pytest
import torch

from gossamer.errors import InputError
from gossamer.optim import AccumAdam, AccumAdamW, GossipAdam, GossipAdamW
from measured import measured

PAIRS = [
    pytest.param(partial(AccumAdam, accumulate=1), torch.optim.Adam, id="AccumAdam"),
    pytest.param(partial(AccumAdamW, accumulate=1), torch.optim.AdamW, id="AccumAdamW"),
    pytest.param(GossipAdam, torch.optim.Adam, id="GossipAdam"),
    pytest.param(GossipAdamW, torch.optim.AdamW, id="GossipAdamW"),
    pytest.param(partial(measured, GossipAdam), torch.optim.Adam, id="GossipAdam-measured-alone"),
    pytest.param(partial(measured, GossipAdamW), torch.optim.AdamW, id="GossipAdamW-measured-alone"),
]
REPLICAS = 16


def remembering(cls, ps, **settings):
    """torch's optimizer with the second moment's memory, and the default implementation, of the measured path."""
    if not {"foreach", "fused"} & set(settings):
        settings["fused"] = not any(p.is_complex() for g in ps for p in (g["params"] if isinstance(g, dict) else [g]))
    optimizer = cls(ps, **settings)
    for group in optimizer.param_groups:
        if group["params"][0].dtype not in (torch.bfloat16, torch.float16):
            group["betas"] = (group["betas"][0], 1 - (1 - group["betas"][1]) / math.sqrt(REPLICAS))
    return optimizer


MEASURED = [
    pytest.param(
        partial(measured, ours, replicas=REPLICAS, shares=(1.0, None)),
        partial(remembering, theirs),
        id=f"{ours.__name__}-measured",
    )
    for ours, theirs in ((GossipAdam, torch.optim.Adam), (GossipAdamW, torch.optim.AdamW))
]
MODES = [{}, {"foreach": False}, {"foreach": True}, {"fused": True}]


def params(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    gen = torch.Generator().manual_seed(3)
    shapes = [(7, 5), (33,), (), (0, 4), (2, 3, 4, 5)]
    return [torch.nn.Parameter(torch.randn(s, generator=gen, dtype=torch.float64).to(dtype)) for s in shapes]


def give_gradients(ps: list[torch.nn.Parameter], t: int) -> None:
    gen = torch.Generator().manual_seed(100 + t)
    for i, p in enumerate(ps):
        g = torch.randn(p.shape, generator=gen, dtype=torch.float64).to(p.dtype)
        p.grad = None if (t + i) % 4 == 1 else g


def groups(ps: list[torch.nn.Parameter]) -> list[dict]:
    return [
        {"params": ps[:2], "lr": 0.03, "weight_decay": 0.1},
        {"params": ps[2:4], "betas": (0.7, 0.9), "eps": 1e-5},
        {"params": ps[4:], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("ours", "theirs"), PAIRS + MEASURED)
def test_bit_equal(ours, theirs, mode, maximize, dtype):
    a, b = params(dtype), params(dtype)
    opt_a = ours(groups(a), lr=0.01, eps=1e-4, maximize=maximize, **mode)
    opt_b = theirs(groups(b), lr=0.01, eps=1e-4, maximize=maximize, **mode)
    for t in range(8):
        give_gradients(a, t)
        give_gradients(b, t)
        opt_a.step()
        opt_b.step()
    assert any(not torch.equal(x, y) for x, y in zip(a, params(dtype), strict=True))
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(opt_a.state[x][key], opt_b.state[y][key])


@pytest.mark.parametrize(("ours", "theirs"), PAIRS + MEASURED)
def test_bit_equal_with_all_defaults(ours, theirs):
    a, b = params(torch.float32), params(torch.float32)
    opt_a, opt_b = ours(a), theirs(b)
    for t in range(5):
        give_gradients(a, t)
        give_gradients(b, t)
        opt_a.step()
        opt_b.step()
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("mode", [{"foreach": False}, {"foreach": True}])
@pytest.mark.parametrize(("ours", "theirs"), PAIRS + MEASURED)
def test_complex_parameters(ours, theirs, mode):
    a, b = (torch.nn.Parameter(torch.arange(6).to(torch.complex64).view(2, 3)) for _ in range(2))
    opt_a, opt_b = ours([a], **mode), theirs([b], **mode)
    for t in range(4):
        gen = torch.Generator().manual_seed(t)
        a.grad = torch.randn(2, 3, dtype=torch.complex64, generator=gen)
        b.grad = a.grad.clone()
        opt_a.step()
        opt_b.step()
    assert torch.equal(a, b)


@pytest.mark.parametrize("mode", [{"foreach": False}, {"fused": True}])
@pytest.mark.parametrize(("ours", "theirs"), PAIRS + MEASURED)
def test_a_tensor_learning_rate(ours, theirs, mode):
    a, b = params(torch.float32), params(torch.float32)
    opt_a = ours(a, lr=torch.tensor(0.02), **mode)
    opt_b = theirs(b, lr=torch.tensor(0.02), **mode)
    for t in range(4):
        give_gradients(a, t)
        give_gradients(b, t)
        opt_a.step()
        opt_b.step()
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_checkpoint_of_torch_adam_loads(ours, theirs):
    a, b = params(torch.float32), params(torch.float32)
    theirs, ours = theirs(a, lr=0.01), ours(b, lr=0.5)
    for t in range(6):
        if t == 3:
            for x, y in zip(a, b, strict=True):
                y.data.copy_(x.data)
            ours.load_state_dict(copy.deepcopy(theirs.state_dict()))  # loading shares tensors
        give_gradients(a, t)
        theirs.step()
        if t >= 3:
            give_gradients(b, t)
            ours.step()
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert ours.param_groups[0]["lr"] == 0.01


def test_settings_that_a_checkpoint_lacks_keep_their_values():
    theirs = torch.optim.AdamW([{"params": [p]} for p in params(torch.float32)[:2]])
    first, second = params(torch.float32)[:2]
    ours = AccumAdamW([{"params": [first], "accumulate": 2}, {"params": [second], "accumulate": 7}])
    ours.load_state_dict(theirs.state_dict())
    assert [group["accumulate"] for group in ours.param_groups] == [2, 7]


@pytest.mark.parametrize("ours", [AccumAdam, GossipAdam])
def test_a_checkpoint_with_amsgrad_is_refused(ours):
    a, b = params(torch.float32), params(torch.float32)
    theirs, opt = torch.optim.Adam(a, amsgrad=True), ours(b, lr=0.5)
    with pytest.raises(InputError, match="amsgrad=True"):
        opt.load_state_dict(theirs.state_dict())
    assert opt.param_groups[0]["lr"] == 0.5
