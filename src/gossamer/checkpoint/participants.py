"""The workers that save or load a checkpoint together: one worker per process, virtual workers, or no gossip at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gossamer import GossipHandle, InputError, MixedParameters, Participation

Optimizers = Optimizer | Sequence[Optimizer]
Extra = Mapping[str, Any] | None


class Participants:
    """The models, optimizers and extras of this process's workers, and how the workers of all processes communicate.

    Without gossip (`handle` None: DDP, or a single process) all workers hold one replica.
    """

    def __init__(
        self,
        handle: GossipHandle | None,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizers | Sequence[Optimizers],
        extra: Extra | Sequence[Extra],
        *,
        rank: int = 0,
        workers: int = 1,
    ):
        self._handle, self._alone = handle, Participation(workers, (rank,), (tuple(range(workers)),))
        optimizers = _several(optimizer)
        self.models = [model] if isinstance(model, nn.Module) else list(model)
        self.optimizers = [optimizers] if isinstance(model, nn.Module) else [_several(o) for o in optimizers]
        self.extras: list[Extra] = (
            [extra] if isinstance(extra, Mapping) else [None] * len(self.models) if extra is None else list(extra)
        )
        self._participation = self._look()
        counts = len(self.models), len(self.optimizers), len(self.extras)
        if set(counts) != {len(self.places)}:
            raise InputError(
                f"{len(self.places)} virtual workers need as many models, optimizers and extras, got {counts[0]}, "
                f"{counts[1]} and {counts[2]}"
            )
        if handle is not None and any(hasattr(p, "to_local") for m in self.models for p in m.parameters()):
            raise InputError(
                "Checkpoints cannot save a model sharded by FSDP2; use torch.distributed.checkpoint with one folder "
                "per node, and gossip.state_dict() beside it"
            )

    def _look(self) -> Participation:
        return self._alone if self._handle is None else self._handle.participation()

    # -- the workers -------------------------------------------------------------------------------------------

    @property
    def places(self) -> tuple[int, ...]:
        """The numbers of this process's workers among all participants."""
        return self._participation.places

    @property
    def total(self) -> int:
        """Number of participants."""
        return self._participation.workers

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Participants that hold the same parameters."""
        return self._participation.replicas

    @property
    def leads(self) -> bool:
        """Whether this process makes the checkpoint visible."""
        return 0 in self.places

    @property
    def meeting(self) -> str:
        """Identifies the parts of one checkpoint in an elastic job, whose participants may differ between two."""
        return self._participation.meeting

    @property
    def alone(self) -> bool:
        """Whether this process could not reach the others, which may be saving another checkpoint."""
        return self._participation.alone

    @property
    def joined(self) -> bool:
        """Whether this worker joined a running job, whose checkpoints are its own."""
        return self._handle is not None and self._handle.joined

    @property
    def in_meeting(self) -> bool:
        """Whether the other participants may already be writing: all of them met before they called `save`."""
        return self._handle is not None and self._handle.in_meeting

    def departed(self) -> dict[int, str]:
        """Participants that left the job, as {number: reason}."""
        return self._participation.departed()

    # -- their state -------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Optimizer steps that each worker of this process has taken."""
        return [0] * len(self.models) if self._handle is None else self._handle.steps

    def mixed(self) -> Sequence[MixedParameters | None]:
        """Which parameters are mixed, for each worker of this process."""
        return [None] * len(self.models) if self._handle is None else self._handle.mixed_parameters()

    def share(self, text: str) -> list[str]:
        """Return the texts of all participants, by number. Collective."""
        return [text] * self.total if self._handle is None else self._handle.share(text)

    def agree_on_step(self, step: int) -> int:
        """Return the largest step of all participants, after `gossip_states`. Collective."""
        agreed = self._participation.steps
        return max(int(s) for s in self.share(str(step))) if agreed is None else agreed

    def gossip_states(self) -> Sequence[dict[str, Any] | None]:
        """Return the gossip state of each worker of this process. Collective.

        Call it before the models are copied, because it may bring workers to a later round.
        """
        if self._handle is None:
            return [None] * len(self.models)
        states = self._handle.state_dicts()
        self._participation = self._look()
        return states

    def accepts(self, state: dict[str, Any] | None) -> bool:
        """Whether gossip can continue from a saved state: same algorithm, workers and topology."""
        if self._handle is None or state is None:
            return self._handle is None and state is None
        return self._handle.accepts(state)

    def continue_gossip(self, states: Sequence[dict[str, Any] | None], same: bool, steps: Sequence[int]) -> bool:
        """After the models were loaded: continue the saved gossip if all states are accepted. Collective.

        Otherwise gossip restarts from these parameters, at the workers' mean number of steps. Returns whether the
        saved gossip continues.
        """
        if self._handle is None:
            return same
        accepted = [state for state in states if state is not None and self._handle.accepts(state)]
        if not same or len(accepted) < len(states):
            self._handle.restart(sum(steps) // len(steps))
            return False
        self._handle.load_state_dicts(accepted)
        return True


def _several(optimizer: Any) -> list[Optimizer]:
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
