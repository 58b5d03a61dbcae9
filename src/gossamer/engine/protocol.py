"""What recipes, checkpoints and integrations need of a handle, as a typed protocol, and of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class ScalesWithReplicas(Protocol):
    """An optimizer whose update depends on how many replicas gossip, such as `GossipAdam`."""

    def set_replicas(self, replicas: float) -> None:
        """Set the number of replicas; called at the start and whenever the number changes."""


@runtime_checkable
class KnowsLocalParameters(Protocol):
    """An optimizer whose update is another one where a parameter is not mixed, such as `GossipAdam`."""

    def set_local_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Set the parameters that stay local: each replica trains its own, by its own gradients."""


@runtime_checkable
class UsesSignal(Protocol):
    """An optimizer whose update depends on how much of a replica's gradient is signal, such as `GossipAdam`."""

    def set_signal_shares(self, shares: Mapping[Tensor, float | None]) -> None:
        """Set, by parameter, the share of the squared gradient that all replicas share; None: it is not yet known."""


@dataclass(frozen=True)
class Participation:
    """The workers that took part in the latest collective call; in a static job, all workers."""

    workers: int
    """How many took part."""
    places: tuple[int, ...]
    """The numbers of this process's workers among them."""
    replicas: tuple[tuple[int, ...], ...]
    """Workers that hold the same parameters, as groups of numbers."""
    steps: int | None = None
    """The largest number of steps of any of them, if the call has agreed on it."""
    meeting: str = ""
    """Identifies the collective call in an elastic job, whose workers differ from call to call."""
    alone: bool = False
    """Other members exist but could not be reached, so this process met by itself."""
    departed: Callable[[], dict[int, str]] = dict
    """Returns the participants that have left the job since, as {number: reason}."""


@dataclass(frozen=True)
class MixedParameters:
    """Which parameters of a worker are mixed, and where their values lie in the state of each lane."""

    lanes: tuple[tuple[tuple[int, tuple[tuple[nn.Parameter, int], ...]], ...], ...]
    """Per lane and flat buffer: its number of elements, and each parameter with its first element."""
    buffers: str
    """What `averaged()` does with module buffers: "average" or "local"."""


class GossipHandle(Protocol):
    """What `Gossip`, `ElasticGossip` and `VirtualCluster` have in common.

    One process may have several (virtual) workers, so states and step counts are lists with one entry per worker of
    this process.
    """

    @property
    def elastic(self) -> bool:
        """Whether members may die, leave and join (`on_failure="continue"`)."""

    @property
    def joined(self) -> bool:
        """Whether this worker joined a job that was already training."""

    @property
    def in_meeting(self) -> bool:
        """Whether this worker is inside `averaged()`, so that calls there belong to the same meeting."""

    @property
    def steps(self) -> list[int]:
        """Optimizer steps that each worker of this process has taken."""

    def participation(self) -> Participation:
        """The workers that took part in the latest collective call."""

    def averaged(self) -> AbstractContextManager[nn.Module]:
        """Hold the mean of all workers inside the block. Collective."""

    def consensus_distance(self) -> float:
        """RMS distance of the workers' parameters to their mean. Collective."""

    def scalars(self, prefix: str = "gossip/") -> dict[str, float]:
        """Plain numbers for an experiment tracker, each name with `prefix`. Local."""

    def share(self, text: str) -> list[str]:
        """The texts of all participants, by number. Collective."""

    def state_dicts(self) -> list[dict[str, Any]]:
        """What a resumed run needs besides models and optimizers. Collective."""

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue where the states were taken. Collective."""

    def accepts(self, state: dict[str, Any]) -> bool:
        """Whether `load_state_dicts` can continue from this state: same algorithm, workers, topology and optimizers."""

    def restart(self, steps: int) -> None:
        """Continue from the parameters as they are now, with `steps` steps counted. Collective."""

    def mixed_parameters(self) -> list[MixedParameters]:
        """Which parameters are mixed, for each worker of this process."""

    def close(self, *, average: bool = ...) -> None:
        """Stop gossip and free its threads, sockets and buffers. `average`: keep the mean of all workers, which is the
        default unless the job is elastic."""
