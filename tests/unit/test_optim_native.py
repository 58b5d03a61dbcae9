"""The native kernels: equal to torch operations up to rounding, optional, and built only when a step needs them."""

import os
import subprocess
import sys

import pytest
import torch

from gossamer.native import library
from gossamer.optim import AccumAdam, AccumAdamW, GossipAdam, GossipAdamW, _native

OPTIMIZERS = [
    (GossipAdam, {"replicas": 8}),
    (GossipAdamW, {"replicas": 8, "discount": 2.0, "weight_decay": 0.2}),
    (GossipAdam, {"replicas": 8, "weight_decay": 0.2, "maximize": True}),
    (AccumAdam, {"accumulate": 3}),
    (AccumAdamW, {"accumulate": 2, "weight_decay": 0.2}),
    (AccumAdam, {"accumulate": 5, "weight_decay": 0.2, "maximize": True, "betas_per": "step"}),
]


@pytest.fixture
def built() -> None:
    if _native.kernels() is None:
        pytest.skip("no C compiler here")


@pytest.fixture
def fresh():
    """The search for the kernels runs anew, now and after the test."""
    _native.kernels.cache_clear()
    yield
    _native.kernels.cache_clear()


def train(
    optimizer, settings, *, steps: int = 12, shapes=((40, 30), (), (7,), (0, 3), (64, 2100))
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    opt = optimizer(params, 0.01, (0.9, 0.97), 1e-6, **settings)
    for t in range(steps):
        for i, p in enumerate(params):
            p.grad = None if (t + i) % 5 == 4 else torch.randn(p.shape, generator=generator) + 0.3
        opt.step()
    return [p.detach() for p in params]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(("optimizer", "settings"), OPTIMIZERS)
def test_native_and_torch_operations_agree(optimizer, settings):
    for native, plain in zip(train(optimizer, settings), train(optimizer, {**settings, "fused": False}), strict=True):
        torch.testing.assert_close(native, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(("optimizer", "settings"), OPTIMIZERS[:1] + OPTIMIZERS[3:4])
def test_the_number_of_threads_does_not_change_a_bit(optimizer, settings):
    before = torch.get_num_threads()
    shapes = ((300_000,), (5,), (100_003,), (70_001,))
    try:
        results = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(train(optimizer, settings, steps=4, shapes=shapes))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.usefixtures("built")
def test_the_default_and_fused_steps_are_native(monkeypatch):
    calls = []
    gossip_adam = _native.Kernels.gossip_adam
    monkeypatch.setattr(_native.Kernels, "gossip_adam", lambda *a: (calls.append(len(a[1])), gossip_adam(*a)))
    for mode in ({}, {"fused": True}, {"fused": False}, {"foreach": False}, {"foreach": True}):
        train(GossipAdam, {"replicas": 4, **mode}, steps=1, shapes=((3,), (4,)))
    assert calls == [2, 2]


@pytest.mark.parametrize(
    ("name", "value"), [("GOSSAMER_NATIVE", "0"), ("CC", "no-such-compiler"), ("CC", "false"), ("CC", "'")]
)
@pytest.mark.usefixtures("fresh")
def test_without_a_compiler_torch_operations_step(monkeypatch, tmp_path, name, value):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(name, value)
    assert _native.kernels() is None
    for a, b in zip(
        train(GossipAdam, {"replicas": 8}), train(GossipAdam, {"replicas": 8, "fused": False}), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("built", "fresh")
def test_the_library_is_built_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _native.kernels() is not None
    (library,) = (tmp_path / "gossamer").iterdir()
    modified = library.stat().st_mtime_ns
    _native.kernels.cache_clear()
    assert _native.kernels() is not None
    assert [p.stat().st_mtime_ns for p in (tmp_path / "gossamer").iterdir()] == [modified]


@pytest.mark.usefixtures("fresh")
def test_a_folder_that_others_can_write_is_not_trusted(monkeypatch, tmp_path):
    (tmp_path / "gossamer").mkdir()
    (tmp_path / "gossamer").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _native.kernels() is None


@pytest.mark.usefixtures("built", "fresh")
def test_a_damaged_library_is_not_fatal(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library(_native.SOURCE).write_bytes(b"not a library")
    assert _native.kernels() is None


def test_importing_and_constructing_build_nothing(tmp_path):
    code = "import torch, gossamer\ngossamer.GossipAdam([torch.nn.Parameter(torch.ones(2))]).set_replicas(4)"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert list(tmp_path.iterdir()) == []
