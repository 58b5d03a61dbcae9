"""Whose states this process saves and loads: one worker among others, all of them (virtual), or one without gossip."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gossamer.errors import InputError

_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@dataclass
class Participants:
    """`ranks` are this process's workers among `total`; those of one group hold one replica."""

    handle: Any  # a Gossip, a VirtualCluster or None
    ranks: list[int]
    total: int
    groups: list[tuple[int, ...]]
    models: list[nn.Module]
    optimizers: list[list[Optimizer]]
    extras: list[Any]
    meeting: Any = None  # where the job outlives its workers: of those who met, and whose checkpoint it is

    @classmethod
    def of(
        cls, handle: Any, model: Any, optimizer: Any, extra: Any, rank: int | None, workers: int | None
    ) -> Participants:
        if hasattr(handle, "gossips"):
            total = handle.layout.n
            models, each = list(model), [_several(o) for o in optimizer]
            extras = [None] * total if extra is None else list(extra)
            if not len(models) == len(each) == len(extras) == total:
                raise InputError(
                    f"{total} virtual workers need as many models, optimizers and extras, got {len(models)}, "
                    f"{len(each)} and {len(extras)}"
                )
            return cls(handle, [*range(total)], total, [(w,) for w in range(total)], models, each, extras)
        if handle is None:
            rank, workers = (0, 1) if rank is None or workers is None else (rank, workers)
            groups = [tuple(range(workers))]
            return cls(None, [rank], workers, groups, [model], [_several(optimizer)], [extra])
        if any(hasattr(p, "to_local") for p in model.parameters()):
            raise InputError(
                "a model sharded by FSDP2 is not saved by Checkpoints; use torch.distributed.checkpoint with a folder "
                "a node, and gossip.state_dict() beside it"
            )
        made = cls(handle, [0], 1, [(0,)], [model], [_several(optimizer)], [extra])
        made._look_around()
        return made

    def _look_around(self) -> None:
        """Who takes part: everybody; where the job outlives its workers, those who came to the last collective call."""
        control, inside = self.handle.control, self.handle.lanes[0].schedule.inside
        self.ranks, self.total = [control.place], control.layout.n
        self.groups = [(w,) for w in range(self.total)] if inside is None else [tuple(m) for m in inside.members]
        if self.survives:
            self.meeting = self.handle.met

    def gone(self) -> dict[int, str]:
        """Those who take part and are no longer members: by place, what is to be said of each."""
        if self.meeting is None:
            return {}
        left = self.meeting.gone(self.handle.members.record)
        return {place: f"worker {rank} is gone" for place, rank in enumerate(self.meeting.ranks) if rank in left}

    @property
    def alone(self) -> bool:
        """Whether this worker could not ask the others, who may be saving something else."""
        return self.meeting is not None and bool(self.meeting.alone)

    @property
    def under_way(self) -> bool:
        """Whether the others may have begun to write: they have met before the call of `save`."""
        return self.handle is not None and bool(self.handle.in_meeting)

    @property
    def name(self) -> str:
        """Whose parts belong together, where crews may differ from one checkpoint to the next."""
        return "" if self.meeting is None else f"{self.handle.members.run.hex()}/{self.meeting.number}"

    @property
    def survives(self) -> bool:
        """Whether the job outlives its workers: on_failure="continue"."""
        return hasattr(self.handle, "members")

    @property
    def joined(self) -> bool:
        """Whether this worker came into a running job, whose checkpoints are its own."""
        return bool(getattr(self.handle, "joined", False))

    @property
    def leads(self) -> bool:
        """Whether this process makes a checkpoint visible."""
        return 0 in self.ranks

    @property
    def virtual(self) -> bool:
        return hasattr(self.handle, "gossips")

    @property
    def gossips(self) -> list[Any]:
        return list(self.handle.gossips) if self.virtual else [self.handle]

    def steps(self) -> list[int]:
        """Optimizer steps that each worker of this process has taken."""
        return [0 if g is None else g.lanes[0].meter.steps for g in self.gossips]

    def share(self, text: str) -> list[str]:
        """Everybody's text, by rank."""
        if self.virtual or self.handle is None:
            return [text] * self.total
        call = _calls[self.handle] = _calls.get(self.handle, 0) + 1
        shared: list[str] = self.handle.transport.share(f"checkpoint/{call}", text)
        return shared

    def agree(self, step: int) -> int:
        """One step for a checkpoint, after `gossip_states`: the largest of all who take part."""
        if self.survives:
            return int(self.handle.met.steps)
        return max(int(s) for s in self.share(str(step)))

    def gossip_states(self) -> list[Any]:
        """Collective; to be called before the models are copied: it may bring workers to a later round."""
        if self.handle is None:
            return [None]
        if self.virtual:
            return list(self.handle.state_dicts())
        state = self.handle.state_dict()
        self._look_around()
        return [state]

    def fits(self, state: Any) -> bool:
        """Whether a saved gossip state can be gone on with: the same algorithm, workers and topology."""
        if self.handle is None or state is None or self.survives:
            return self.handle is None and state is None
        own = self.gossips[0]
        ours = (self.total, own.lanes[0].schedule.topology.name, len(own.lanes))
        theirs = (state["workers"], state["topology"], len(state["lanes"]))
        kind = own.settings.algorithm.name if own.settings.asynchronous else None
        return ours == theirs and all(lane.get("algorithm") == kind for lane in state["lanes"])

    def go_on(self, states: Sequence[Any], same: bool, steps: Sequence[int]) -> bool:
        """After the models were loaded: continue the saved gossip if it fits, else begin from these parameters, at the
        step count the workers have on average. Whether it fits. Collective."""
        if self.handle is None:
            return same
        same = same and all(self.fits(s) for s in states)
        if not same:
            taken = sum(steps) // len(steps)
            self.handle.reset()
            if self.survives:  # every lane counts for itself there
                for lane in self.handle.lanes:
                    lane.meter.steps = taken
                return False
            states = self.gossip_states()
            for lane in (lane for s in states for lane in s["lanes"]):
                lane["steps"] = taken
                if "counts" in lane:
                    lane["counts"].fill_(taken)
        if self.virtual:
            self.handle.load_state_dicts(states)
        else:
            self.handle.load_state_dict(states[0])
        return same


def _several(optimizer: Any) -> list[Optimizer]:
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
