"""`Checkpoints`: save and load the state of all workers, from any training loop.

checkpoints = gossamer.Checkpoints("runs/a/checkpoints", keep_last=3)
if checkpoints.latest() is not None:
    checkpoints.load(gossip, model, optimizer, extra={"scheduler": scheduler, "loader": loader})
for ...:
    ...
    if step % 100 == 0:
        checkpoints.save(gossip, model, optimizer, extra={"scheduler": scheduler, "loader": loader})
checkpoints.wait()
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gossamer import GossamerError, GossamerWarning, GossipHandle, InputError
from gossamer.checkpoint import files
from gossamer.checkpoint.participants import Extra, Optimizers, Participants
from gossamer.checkpoint.state import (
    State,
    bare,
    blend,
    describe_mixed,
    random_state,
    set_random_state,
    shares,
    snapshot,
)

POLL = 0.02  # seconds between looks for the other workers' parts
LEAVE_WITHIN = 10.0  # seconds that the end of the program waits for the other workers' parts


@dataclass(frozen=True)
class Loaded:
    """What `load` has loaded."""

    step: int
    """The checkpoint's step."""
    workers: int
    """The number of workers that saved the checkpoint."""
    resized: bool
    """Whether the number of workers, their replicas or the topology differs from the checkpoint's."""
    extra: dict[str, Any]
    """The `extra` of the nearest saved worker; objects with `state_dict()` as that state."""
    extras: list[dict[str, Any]]
    """`extra` for each (virtual) worker of this process."""


class Checkpoints:
    """The checkpoints in a folder that all workers can access. `save` and `load` are collective.

    `save` copies the state on the training thread and writes it on another thread; at most one checkpoint is being
    written at a time. If a checkpoint cannot be written (disk full), a warning says so, older checkpoints are kept and
    training continues; `wait` raises the error instead. Without gossip (`None`: DDP, or a single process) pass `rank`
    and `workers`, and pass `step=` to `save`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int | None = 3,
        rank: int | None = None,
        workers: int | None = None,
        timeout: float = 600.0,
    ):
        if keep_last is not None and keep_last < 1:
            raise InputError(f"keep_last must be 1 or more, got {keep_last}; pass None to keep all")
        if (rank is None) != (workers is None) or (rank is not None and not 0 <= rank < (workers or 0)):
            raise InputError(f"pass both rank and workers, with 0 <= rank < workers; got {rank} and {workers}")
        self.folder, self.keep_last = Path(folder), keep_last
        self._rank, self._workers, self._timeout = rank, workers, timeout
        self._loaded: int | None = None  # the step that this run continues from
        self._begun = False
        self._thread: threading.Thread | None = None
        self._writing: tuple[int, Participants] | None = None  # the step and the workers that save it
        self._missed: int | None = None  # a step that was not saved because the others could not be reached
        self._warned_missed = False
        self._written = threading.Event()  # set while this process writes nothing
        self._written.set()
        self._failure: str | None = None
        self._give_up = math.inf  # when to stop waiting for the other workers' parts
        if rank == 0:  # no worker is writing yet
            files.sweep(self.folder)
        _open.add(self)

    # -- reading ------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, oldest first."""
        return files.steps_in(self.folder)

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    # -- saving -------------------------------------------------------------------------------------------------

    def save(
        self,
        gossip: GossipHandle | None,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizers | Sequence[Optimizers],
        *,
        step: int | None = None,
        extra: Extra | Sequence[Extra] = None,
    ) -> int:
        """Start saving and return the checkpoint's step once everything is copied. Collective.

        Args:
            gossip: the handle of `decentralize`, or a `VirtualCluster` with lists of models and optimizers.
            extra: tensors, numbers, text, lists and dictionaries, and objects with `state_dict()`, by name.
            step: by default the largest number of steps that a worker has taken.
        """
        workers = self._participants(gossip, model, optimizer, extra)
        if not self._begun:
            self._begin(workers)
        # A worker that takes part in the collective call has written its part of the previous checkpoint: either that
        # checkpoint is complete, or a worker is missing and the call raises.
        self._written.wait()
        gossips = workers.gossip_states()
        self._collect()
        taken = workers.steps()
        if step is None:
            step = workers.agree_on_step(max(taken))
        self._missed = step if workers.alone else None
        if workers.alone:
            self._warn_missed()
            return step
        try:
            parts = _copies(workers, gossips)
        except Exception as error:  # the other workers must not wait for this worker's part
            files.abandon(self.folder, step, f"worker {workers.places[0]}: {error}", workers.meeting)
            raise
        self._writing = (step, workers)
        self._written.clear()
        counts = dict(zip(workers.places, taken, strict=True))
        self._thread = threading.Thread(
            target=self._write, args=(step, parts, counts, workers), name="gossamer-checkpoint", daemon=True
        )
        self._thread.start()
        return step

    def _participants(
        self,
        gossip: GossipHandle | None,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizers | Sequence[Optimizers],
        extra: Extra | Sequence[Extra],
    ) -> Participants:
        return Participants(gossip, model, optimizer, extra, rank=self._rank or 0, workers=self._workers or 1)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the checkpoint that is being written; raise `GossamerError` if it cannot be completed."""
        if self._missed is not None:
            step, self._missed = self._missed, None
            raise GossamerError(self._sentence(step, "the directory does not answer"))
        if self._writing is None:
            return
        step, workers = self._writing
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            late = self._thread.is_alive()
            if not late and self._failure is None and not workers.leads:
                late = not self._visible(step, workers, deadline)
            if late:
                self._failure = f"it was not complete after {self._timeout if timeout is None else timeout:g} s"
        self._thread = self._writing = None
        if self._failure is not None:
            why, self._failure = self._failure, None
            raise GossamerError(self._sentence(step, why))

    def close(self, timeout: float = LEAVE_WITHIN) -> None:
        """Complete the checkpoint that is being written; after `timeout` seconds warn and leave it incomplete."""
        self._give_up = time.monotonic() + timeout
        self._collect()

    def _begin(self, workers: Participants) -> None:
        """Before the first save: check that the folder is writable and holds no later checkpoint of another run."""
        newest = None if workers.joined else self.latest()
        if newest is not None and newest > (-1 if self._loaded is None else self._loaded):
            raise InputError(
                f"{self.folder} holds a checkpoint of step {newest} that this run did not load; load it, choose "
                "another folder, or remove the folder of that step"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".probe-{workers.places[0]:05d}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise InputError(
                f"cannot write checkpoints to {self.folder}: {error.strerror or error}; choose another folder"
            ) from None
        if workers.leads and self._rank is None and not workers.joined and not workers.in_meeting:
            files.sweep(self.folder)  # the other workers wait in the collective call that follows
        self._begun = True

    def _write(self, step: int, parts: dict[int, State], counts: dict[int, int], workers: Participants) -> None:
        """Write this process's parts, on the background thread; the first worker then makes the checkpoint visible."""
        try:
            if workers.leads:
                files.sweep(self.folder, before=step)
            for place in sorted(parts):
                files.write_part(self.folder, step, place, parts.pop(place), counts[place], workers.meeting)
            self._written.set()
            if workers.leads:
                deadline = time.monotonic() + self._timeout
                while True:
                    why = files.abandoned(self.folder, step, workers.meeting)
                    departed = workers.departed()  # before the receipts: a worker writes its part before it leaves
                    ready = files.receipts(self.folder, step, workers.total, workers.meeting)
                    if len(ready) == workers.total:
                        break
                    why = why or next((reason for place, reason in departed.items() if place not in ready), None)
                    if why is None and time.monotonic() > min(deadline, self._give_up):
                        why = "a worker did not write its part; do all workers see this folder, and are they alive?"
                    if why is not None:
                        raise GossamerError(why)
                    time.sleep(POLL)
                files.commit(self.folder, step, workers.groups, [ready[place] for place in range(workers.total)])
                files.prune(self.folder, self.keep_last)
        except Exception as error:  # any error: training continues
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            if not isinstance(error, GossamerError):
                why = f"worker {workers.places[0]}: {why}"
            self._failure = why
            files.abandon(self.folder, step, why, workers.meeting)
        finally:
            self._written.set()

    def _visible(self, step: int, workers: Participants, deadline: float) -> bool:
        """Wait until the first worker has made the checkpoint visible, has abandoned it, or has left."""
        while True:
            left = workers.departed().get(0)  # before the look at the folder: it may leave when all is done
            why = files.abandoned(self.folder, step, workers.meeting) or left
            if step in self.steps():
                return True
            if why is not None:
                self._failure = why
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL)

    def _warn_missed(self) -> None:
        """Warn once that nothing is saved: the others may save the same step, and parts must not be mixed."""
        if not self._warned_missed:
            self._warned_missed = True
            warnings.warn("no checkpoint: the directory does not answer", GossamerWarning, stacklevel=3)

    def _collect(self) -> None:
        """Wait for the previous checkpoint; warn if it could not be written."""
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None and self._writing is not None:
            step, why = self._writing[0], self._failure
            self._failure = None
            warnings.warn(self._sentence(step, why) + "; training continues", GossamerWarning, stacklevel=3)
        self._thread = self._writing = None

    def _sentence(self, step: int, why: str) -> str:
        newest = self.latest()
        kept = "there is none before it" if newest is None else f"the one of step {newest} is complete"
        return f"the checkpoint of step {step} in {self.folder} could not be written ({why}); {kept}"

    # -- loading ------------------------------------------------------------------------------------------------

    def load(
        self,
        gossip: GossipHandle | None,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizers | Sequence[Optimizers],
        *,
        step: int | None = None,
        extra: Extra | Sequence[Extra] = None,
    ) -> Loaded:
        """Load a checkpoint, the newest or that of `step`, saved by any number of workers. Collective.

        With the same number of workers and the same topology everything is restored exactly, random numbers too.
        Otherwise parameters and moments are averaged or cloned (see `gossamer.checkpoint.state`), gossip restarts from
        them, and random numbers are not restored. Objects in `extra` with `load_state_dict()` get their state back.
        """
        workers = self._participants(gossip, model, optimizer, extra)
        self._collect()
        newest = self.latest()
        said = workers.share(str(-1 if newest is None else newest) if step is None else str(step))
        chosen = next(filter(None, said))  # empty: of a worker that has died
        problem: GossamerError | None = None
        same, states, manifest = False, [], None
        try:
            if chosen == "-1":
                files.latest_in(self.folder)
            manifest = files.read_manifest(self.folder, int(chosen))
            same = manifest.groups == workers.groups
            states = [self._state_for(workers, place, manifest, same) for place in workers.places]
            for at, state in enumerate(states):
                _put(state, workers.models[at], workers.optimizers[at])
        except GossamerError as error:
            problem = error
        everywhere = workers.share("" if problem is None else str(problem))  # all raise, so that none waits for another
        if problem is not None:
            raise problem
        for worker, reason in enumerate(everywhere):
            if reason:
                raise GossamerError(f"worker {worker}: {reason}")
        assert manifest is not None
        same = workers.continue_gossip([s["gossip"] for s in states], same, [p.steps for p in manifest.files])
        if same:
            set_random_state(states[0]["random"])
        for at, state in enumerate(states):
            for key, target in (workers.extras[at] or {}).items():
                if key in state["extra"] and hasattr(target, "load_state_dict"):
                    target.load_state_dict(state["extra"][key])
        self._loaded = manifest.step
        extras = [s["extra"] for s in states]
        return Loaded(manifest.step, manifest.workers, not same, extras[0], extras)

    def _state_for(self, workers: Participants, place: int, manifest: files.Manifest, same: bool) -> State:
        if same:
            state = files.read_part(self.folder, manifest, place)
            if workers.accepts(state["gossip"]):
                return state
            return blend([state], [1.0])
        group = next(g for g in workers.groups if place in g)
        found = shares(group, workers.total, manifest.groups)
        return blend([files.read_part(self.folder, manifest, w) for w, _ in found], [weight for _, weight in found])


def _copies(workers: Participants, gossips: Sequence[dict[str, Any] | None]) -> dict[int, State]:
    """Copies of all that is saved of this process's workers, by their numbers."""
    generators, parts = random_state(), {}
    for at, (place, mixed) in enumerate(zip(workers.places, workers.mixed(), strict=True)):
        own, optimizers = bare(workers.models[at]), workers.optimizers[at]
        parts[place] = snapshot(
            {
                "model": own.state_dict(),
                "optimizer": [o.state_dict() for o in optimizers],
                "gossip": gossips[at],
                "mixed": None if mixed is None else describe_mixed(mixed, own, optimizers),
                "random": generators,
                "extra": {k: _state_of(v) for k, v in (workers.extras[at] or {}).items()},
            }
        )
    return parts


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _put(state: State, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    if len(state["optimizer"]) != len(optimizers):
        raise InputError(
            f"the checkpoint holds {len(state['optimizer'])} optimizer(s) and this run has {len(optimizers)}; build "
            "the same optimizers first"
        )
    try:
        bare(model).load_state_dict(state["model"])
        for own, saved in zip(optimizers, state["optimizer"], strict=True):
            own.load_state_dict(saved)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        said = " ".join(str(error).split())[:300]
        raise InputError(f"the checkpoint is not of this model and optimizer: {said}; build the same first") from None


_open: weakref.WeakSet[Checkpoints] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """If the program did not call wait(): let the last checkpoint complete, for a shorter time after an error."""
    for checkpoints in list(_open):
        checkpoints.close(1.0 if hasattr(sys, "last_value") else LEAVE_WITHIN)
