"""What the functions that run on real workers share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossamer
from policies import policies

# A store looks up the names of those who connect; a name server that does not answer must not hold up the tests.
QUICK_NAMES = {"RES_OPTIONS": "timeout:1 attempts:1"}

_seeding = threading.Lock()


class Disturbed(AssertionError):
    """A measured value is not what it would be on an idle machine."""


def measured(holds: bool, values: object) -> None:
    """Assert what depends on measured times. Inside `undisturbed` it may hold in a later attempt."""
    if not holds:
        raise Disturbed(f"measured {values}")


def undisturbed(attempt: Callable[[int], None], times: int = 10) -> None:
    """Call `attempt(k)` for k = 0, 1, ... until its `measured` values hold: on a busy machine a worker may stand still
    for longer than one that is slow on purpose. Its other assertions hold in every attempt."""
    for k in range(times):
        try:
            return attempt(k)
        except Disturbed:
            if k == times - 1:
                raise


@contextmanager
def process_group() -> Iterator[None]:
    """A gloo process group of this call's own."""
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def real(rank: int, scenario: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a scenario of `dense_reference` on this real worker."""
    with process_group():
        return scenario(rank, decentralize, *args, **kwargs)


def decentralize(model: nn.Module, optimizer: Any, **settings: Any) -> gossamer.Gossip:
    return gossamer.decentralize(model, optimizer, **policies(**{"timeout": 300, **settings}))


def error_of(rank: int, scenario: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str] | None:
    """The error that the scenario raises on this worker, as (type, message)."""
    try:
        real(rank, scenario, *args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """The module that `make` builds from `seed`; several threads may call it."""
    with _seeding, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def mlp(hidden: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3))


def batch(rank: int, step: int, size: int = 5) -> tuple[Tensor, Tensor]:
    """This worker's own batch."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)


def loss_of(model: nn.Module, rank: int, step: int, size: int = 5) -> Tensor:
    x, y = batch(rank, step, size)
    return nn.functional.mse_loss(model(x), y)


def vector(model: nn.Module) -> Tensor:
    """All parameters, as one vector in double precision."""
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def assert_close(ours: list[list[Tensor]], theirs: list[list[Tensor]], rtol: float = 2e-5, atol: float = 2e-6) -> None:
    """Equal on every worker at every record, within single precision."""
    for rank, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for at, (x, y) in enumerate(zip(a, b, strict=True)):
            torch.testing.assert_close(
                x, y, rtol=rtol, atol=atol, msg=lambda m, w=rank, t=at: f"worker {w}, record {t}: {m}"
            )
