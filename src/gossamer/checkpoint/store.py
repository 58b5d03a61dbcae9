"""`Checkpoints`: save and load what all workers hold, from any training loop.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gossamer.checkpoint import files
from gossamer.checkpoint.participants import Participants
from gossamer.checkpoint.state import State, bare, blend, mixed_by, random_state, set_random_state, shares, snapshot
from gossamer.errors import GossamerError, GossamerWarning, InputError

POLL = 0.02  # seconds between looks for the other workers' parts
LEAVE_WITHIN = 10.0  # seconds that the end of the program waits for the other workers' parts

Extra = Mapping[str, Any] | None


@dataclass(frozen=True)
class Loaded:
    """What `load` found. `resized`: the number of workers (or their replicas) differs from the checkpoint's, or the
    topology does; `extra` is what the nearest worker had saved, objects with a state as that state."""

    step: int
    workers: int
    resized: bool
    extra: dict[str, Any]
    extras: list[dict[str, Any]]
    """The same for every worker of this process (virtual ones)."""


class Checkpoints:
    """The checkpoints in a folder that all workers see. `save` and `load` are collective where the gossip is.

    `save` copies on the training thread and writes on another one; at most one checkpoint is being written. One that
    cannot be written (disk full) is a warning, the ones before stay, and training goes on; `wait` raises it.
    Without gossip (`None`: DDP, or a single process) say `rank` and `workers`, and pass `step=` to `save`.
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
            raise InputError(f"rank and workers go together, 0 <= rank < workers; got {rank} and {workers}")
        self.folder, self.keep_last = Path(folder), keep_last
        self._rank, self._workers, self._timeout = rank, workers, timeout
        self._loaded: int | None = None  # the step that this run goes on from
        self._begun = False
        self._thread: threading.Thread | None = None
        self._writing: tuple[int, Participants] | None = None  # the step, and whose
        self._missed: int | None = None  # a step that was not saved, because only this worker was there
        self._told_missed = False
        self._written = threading.Event()  # nothing of this process is on its way to the disk
        self._written.set()
        self._failure: str | None = None
        self._give_up = math.inf  # when to leave without the other workers' parts
        if rank == 0:  # nobody can be writing yet
            files.sweep(self.folder)
        _open.add(self)

    # -- looking ------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, oldest first."""
        return files.steps_in(self.folder)

    def latest(self) -> int | None:
        """The newest complete checkpoint's step; None if there is none."""
        return max(self.steps(), default=None)

    # -- saving -------------------------------------------------------------------------------------------------

    def save(
        self,
        gossip: Any,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any,
        *,
        step: int | None = None,
        extra: Extra | Sequence[Extra] = None,
    ) -> int:
        """Begin to save; returns the checkpoint's step when everything is copied. Collective.

        `gossip` is the handle of `decentralize`, or a `VirtualCluster` with lists of models and optimizers. `extra`
        may hold tensors, numbers, text, lists and dictionaries, and objects with `state_dict()`. `step` is the largest
        number of steps that a worker has taken if you do not say.
        """
        crew = Participants.of(gossip, model, optimizer, extra, self._rank, self._workers)
        if not self._begun:
            self._begin(crew)
        # Whoever comes to the collective call has written its part of the checkpoint before: then that is complete, or
        # somebody is missing, and the call says so.
        self._written.wait()
        gossips = crew.gossip_states()
        self._collect()
        taken = crew.steps()
        if step is None:
            step = crew.agree(max(taken))
        self._missed = step if crew.alone else None
        if crew.alone:
            self._tell_missed()
            return step
        chance = random_state()
        parts = {}
        for at, rank in enumerate(crew.ranks):
            own = bare(crew.models[at])
            handle = crew.gossips[at]
            parts[rank] = snapshot(
                {
                    "model": own.state_dict(),
                    "optimizer": [o.state_dict() for o in crew.optimizers[at]],
                    "gossip": gossips[at],
                    "mixed": None if handle is None else mixed_by(handle, own, crew.optimizers[at]),
                    "random": chance,
                    "extra": {k: _state_of(v) for k, v in (crew.extras[at] or {}).items()},
                }
            )
        self._writing = (step, crew)
        self._written.clear()
        counts = dict(zip(crew.ranks, taken, strict=True))
        self._thread = threading.Thread(
            target=self._write, args=(step, parts, counts, crew), name="gossamer-checkpoint", daemon=True
        )
        self._thread.start()
        return step

    def wait(self, timeout: float | None = None) -> None:
        """Return when the checkpoint under way is complete; raises `GossamerError` if it cannot be."""
        if self._missed is not None:
            step, self._missed = self._missed, None
            raise GossamerError(self._sentence(step, "the directory does not answer"))
        if self._writing is None:
            return
        step, crew = self._writing
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            late = self._thread.is_alive()
            if not late and self._failure is None and not crew.leads:
                late = not self._visible(step, crew, deadline)
            if late:
                self._failure = f"it was not complete after {self._timeout if timeout is None else timeout:g} s"
        self._thread = self._writing = None
        if self._failure is not None:
            why, self._failure = self._failure, None
            raise GossamerError(self._sentence(step, why))

    def close(self, timeout: float = LEAVE_WITHIN) -> None:
        """Finish what is being written, without waiting long for workers that are gone; warn if that fails."""
        self._give_up = time.monotonic() + timeout
        self._collect()

    def _begin(self, crew: Participants) -> None:
        """Before the first save: a folder that can be written to, and no history that is not ours."""
        newest = None if crew.joined else self.latest()
        if newest is not None and newest > (-1 if self._loaded is None else self._loaded):
            raise InputError(
                f"{self.folder} holds a checkpoint of step {newest} that this run did not load; load it, choose "
                "another folder, or remove the folder of that step"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".probe-{crew.ranks[0]:05d}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise InputError(
                f"cannot write checkpoints to {self.folder}: {error.strerror or error}; choose another folder"
            ) from None
        if crew.leads and self._rank is None and not crew.joined and not crew.under_way:
            files.sweep(self.folder)  # the others wait in the call that follows
        self._begun = True

    def _write(self, step: int, parts: dict[int, State], counts: dict[int, int], crew: Participants) -> None:
        """In the background: this process's parts; the first worker then makes the checkpoint visible."""
        try:
            if crew.leads:
                files.sweep(self.folder, before=step)
            for rank in sorted(parts):
                files.write_part(self.folder, step, rank, parts.pop(rank), counts[rank], crew.name)
            self._written.set()
            if crew.leads:
                deadline = time.monotonic() + self._timeout
                while True:
                    why = files.abandoned(self.folder, step, crew.name)
                    gone = crew.gone()  # before the look: whoever leaves has written its part
                    ready = files.receipts(self.folder, step, crew.total, crew.name)
                    if len(ready) == crew.total:
                        break
                    why = why or next((said for place, said in gone.items() if place not in ready), None)
                    if why is None and time.monotonic() > min(deadline, self._give_up):
                        why = "a worker did not write its part; do all workers see this folder, and are they alive?"
                    if why is not None:
                        raise GossamerError(why)
                    time.sleep(POLL)
                files.commit(self.folder, step, crew.groups, [ready[place] for place in range(crew.total)])
                files.prune(self.folder, self.keep_last)
        except Exception as error:  # whatever it is, training goes on
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            if not isinstance(error, GossamerError):
                why = f"worker {crew.ranks[0]}: {why}"
            self._failure = why
            files.abandon(self.folder, step, why, crew.name)
        finally:
            self._written.set()

    def _visible(self, step: int, crew: Participants, deadline: float) -> bool:
        """Wait until the first worker has made it visible, gave it up, or is gone."""
        while True:
            gone = crew.gone().get(0)  # before the look: it may leave when all is done
            why = files.abandoned(self.folder, step, crew.name) or gone
            if step in self.steps():
                return True
            if why is not None:
                self._failure = why
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL)

    def _tell_missed(self) -> None:
        """The others may be saving at the same step, and parts of two crews must not meet in one folder."""
        if not self._told_missed:
            self._told_missed = True
            warnings.warn("no checkpoint: the directory does not answer", GossamerWarning, stacklevel=3)

    def _collect(self) -> None:
        """The checkpoint before is written, or could not be: then say so."""
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None and self._writing is not None:
            step, why = self._writing[0], self._failure
            self._failure = None
            warnings.warn(self._sentence(step, why) + "; training goes on", GossamerWarning, stacklevel=3)
        self._thread = self._writing = None

    def _sentence(self, step: int, why: str) -> str:
        newest = self.latest()
        kept = "there is none before it" if newest is None else f"the one of step {newest} is complete"
        return f"the checkpoint of step {step} in {self.folder} could not be written ({why}); {kept}"

    # -- loading ------------------------------------------------------------------------------------------------

    def load(
        self,
        gossip: Any,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any,
        *,
        step: int | None = None,
        extra: Extra | Sequence[Extra] = None,
    ) -> Loaded:
        """Go on from a checkpoint (the newest, or that of `step`), whatever the number of workers then was. Collective.

        At the same size and topology everything is as it was, random numbers too. Else parameters and moments are
        averaged or cloned (see `gossamer.checkpoint.state`), gossip starts from there, and random numbers go on as
        they are. Objects in `extra` with `load_state_dict()` get theirs back.
        """
        crew = Participants.of(gossip, model, optimizer, extra, self._rank, self._workers)
        self._collect()
        newest = self.latest()
        chosen = crew.share(str(-1 if newest is None else newest) if step is None else str(step))[0]
        problem: GossamerError | None = None
        same, states, manifest = False, [], None
        try:
            if chosen == "-1":
                files.latest_in(self.folder)
            manifest = files.read_manifest(self.folder, int(chosen))
            same = manifest.groups == tuple(tuple(g) for g in crew.groups)
            states = [self._state_for(crew, rank, manifest, same) for rank in crew.ranks]
            for at, state in enumerate(states):
                _put(state, crew.models[at], crew.optimizers[at])
        except GossamerError as error:
            problem = error
        everywhere = crew.share("" if problem is None else str(problem))  # or the others would wait for this worker
        if problem is not None:
            raise problem
        for worker, said in enumerate(everywhere):
            if said:
                raise GossamerError(f"worker {worker}: {said}")
        assert manifest is not None
        same = crew.go_on([s["gossip"] for s in states], same, [p.steps for p in manifest.files])
        if same:
            set_random_state(states[0]["random"])
        for at, state in enumerate(states):
            for key, target in (crew.extras[at] or {}).items():
                if key in state["extra"] and hasattr(target, "load_state_dict"):
                    target.load_state_dict(state["extra"][key])
        self._loaded = manifest.step
        extras = [s["extra"] for s in states]
        return Loaded(manifest.step, manifest.workers, not same, extras[0], extras)

    def _state_for(self, crew: Participants, rank: int, manifest: files.Manifest, same: bool) -> State:
        if same:
            state = files.read_part(self.folder, manifest, rank)
            if crew.fits(state["gossip"]):
                return state
            return blend([state], [1.0])
        group = next(g for g in crew.groups if rank in g)
        found = shares(group, crew.total, manifest.groups)
        return blend([files.read_part(self.folder, manifest, w) for w, _ in found], [weight for _, weight in found])


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _put(state: State, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    if len(state["optimizer"]) != len(optimizers):
        raise InputError(
            f"the checkpoint holds {len(state['optimizer'])} optimizer(s) and this run has {len(optimizers)}; load it "
            "with the same"
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
    """Where the user forgot wait(): the last checkpoint is worth a moment, less so after an error of this program."""
    for checkpoints in list(_open):
        checkpoints.close(1.0 if hasattr(sys, "last_value") else LEAVE_WITHIN)
