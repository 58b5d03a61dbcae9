"""What the training loop needs of a task: a model, batches, a loss and an evaluation."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Protocol

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from gossamer import InputError
from gossamer.recipes.options import TaskOptions, options_type


class Batches(Iterator[Any]):
    """The endless stream of batches of one worker.

    `batch(i)` returns the i-th batch and depends on i only, so the position is the whole state, and a resumed run
    gets the same next batch, augmentation included.
    """

    def __init__(self, batch: Callable[[int], Any]) -> None:
        self._batch = batch
        self._position = 0

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Any:
        batch = self._batch(self._position)
        self._position += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._position = int(state["position"])


class Task(Protocol):
    """Data and a model. The training loop decides how the model is trained."""

    name: str
    unit: str
    """What throughput counts: `images` or `tokens`."""
    metric: str
    """The quality that is compared: `accuracy`, `bleu` or `loss`."""
    higher_is_better: bool

    def model(self, seed: int) -> nn.Module:
        """Return a new model. Its weights depend on the seed only; torch's global generator does not change."""

    def batches(self, worker: int, workers: int, *, seed: int) -> Batches:
        """Return a worker's stream. All workers pass the same seed and together see each sample once per epoch."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the scalar training loss. It only calls `model(...)`, so that wrappers (DDP) and torch.func work."""

    def size(self, batch: Any) -> int:
        """Return the number of units in the batch."""

    def evaluate(self, model: nn.Module, *, final: bool = False) -> dict[str, float]:
        """Return at least `loss` (validation, without smoothing) and the metric; `final` uses the whole test set."""

    def describe(self) -> dict[str, Any]:
        """Return facts about data and model for the run's folder, as JSON values."""


def make_task(name: str, options: TaskOptions | Mapping[str, Any] | None = None) -> Task:
    """Make a task by name; raise `InputError` if an option or the data is wrong."""
    kind = options_type(name)
    if not isinstance(options, kind):
        values = options.model_dump(exclude_unset=True) if isinstance(options, TaskOptions) else dict(options or {})
        try:
            options = kind(**values)
        except ValidationError as error:
            raise InputError(_sentence(name, kind, error)) from None
    return import_module(f"gossamer.recipes.{name}").make(options)  # type: ignore[no-any-return]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the bare model in evaluation mode without gradients; afterwards every module has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    bare = getattr(bare, "_orig_mod", bare)  # what torch.compile wraps
    model.eval()
    try:
        with torch.no_grad():
            yield bare
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch inside the block; the generator of the caller does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _sentence(name: str, kind: type[TaskOptions], error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"task {name!r} has no option {key!r}: its options are {', '.join(kind.model_fields)}"
    return f"option {key!r} of task {name!r} is {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
