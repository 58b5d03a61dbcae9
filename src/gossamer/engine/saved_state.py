"""What a saved state says about the job that it is of, and whether another job can continue from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gossamer.engine.lane import Lane
from gossamer.errors import InputError

VERSION = 2  # of `Gossip.state_dict()`


@dataclass(frozen=True)
class Identity:
    """What must be the same in the job that saved a state and in the one that continues from it. `kind` is the name of
    an asynchronous algorithm."""

    workers: int
    replicas: int
    topology: str
    gradients: str
    kind: str | None
    lanes: Sequence[Lane]

    def state_dict(self) -> dict[str, Any]:
        """The state of the lanes, and whose it is."""
        return {
            "version": VERSION,
            "workers": self.workers,
            "replicas": self.replicas,
            "topology": self.topology,
            "lanes": [{**lane.state_dict(), **_cut(lane)} for lane in self.lanes],
        }

    def accepts(self, state: dict[str, Any]) -> bool:
        """Whether this job can continue from `state`."""
        if state.get("version") != VERSION:
            return False
        ours = (self.workers, self.replicas, self.topology, [self.kind] * len(self.lanes))
        theirs = (state["workers"], state["replicas"], state["topology"])
        same = ours == (*theirs, [lane.get("algorithm") for lane in state["lanes"]])
        return same and self._other_cut(state) is None

    def check(self, state: dict[str, Any]) -> None:
        """Raise InputError if `state` cannot be loaded here."""
        if state.get("version") != VERSION:
            raise InputError(
                f"this is not a state of Gossip.state_dict(): version {state.get('version')!r}, expected {VERSION}"
            )
        ours = (self.workers, self.topology, len(self.lanes))
        theirs = (state["workers"], state["topology"], len(state["lanes"]))
        if ours != theirs:
            raise InputError(
                f"the state was saved with {theirs[0]} workers, topology {theirs[1]!r} and {theirs[2]} optimizer(s), "
                f"this run has {ours[0]}, {ours[1]!r} and {ours[2]}; resume with the same, or load only the model and "
                "the optimizer"
            )
        if state["replicas"] != self.replicas:
            raise InputError(
                f"the state was saved with {state['replicas']} replicas of the model and this run has {self.replicas}, "
                f"because gradients={self.gradients!r} here; resume with the same gradients=, or load only the model "
                "and the optimizer"
            )
        other = self._other_cut(state)
        if other is not None:
            raise InputError(
                f"the state was saved with {_written(other[0])}, and this run has {_written(other[1])}; resume with "
                "the same fragments and Exchange(bucket_mib=), or load only the model and the optimizer"
            )

    def _other_cut(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The cut of the first lane that `state` has cut otherwise, and that of this run; None if all are the same.

        A state that an earlier revision saved does not say its cut.
        """
        for lane, saved in zip(self.lanes, state["lanes"], strict=True):
            if "buckets" in saved and any(saved[name] != value for name, value in _cut(lane).items()):
                return saved, _cut(lane)
        return None


def _cut(lane: Lane) -> dict[str, Any]:
    """How the parameters of a lane are cut: the state of its buckets fits no other cut."""
    return {"fragments": lane.schedule.fragments, "buckets": [b.x.numel() for b in lane.buckets]}


def _written(cut: dict[str, Any]) -> str:
    sizes = cut["buckets"]
    smallest, largest = min(sizes, default=0), max(sizes, default=0)
    elements = f"{smallest} to {largest}" if smallest < largest else f"{largest}"
    return f"fragments={cut['fragments']} and {len(sizes)} bucket(s) of {elements} elements"
