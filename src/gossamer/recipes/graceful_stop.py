"""Stopping all workers after the same step, so that they can save a checkpoint when the user asks them to stop.

A file `request` in the run's folder asks. Workers look for the file before each step:
- In lockstep (DDP) worker 0 decides: after k steps it writes k + 1 and continues. No worker can finish step k + 1
  without worker 0, so every worker has seen the decision by then.
- Gossiping workers may be some steps apart. Each posts a step that lies ahead, trains to it, and waits there until all
  have posted; all then continue to the largest step. See Note [Why a stop does not deadlock].

Note [Why a stop does not deadlock]
All workers must reach a look at the file after the request: then all have posted. A worker whose last look was before
the request may be in a step that waits for others: for an exchange of their next round, or for their gradients, which
are averaged inside a node. So a worker does not wait at the step where it sees the request. It first takes the `ahead`
steps up to its next round, and has then sent all that the others need to end the step that they are in. A worker that
is about to make a collective call posts first, for workers that wait outside of the call. A worker that fails says so,
and the others do not wait for it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Protocol

from gossamer import GossamerError

POLL = 0.02  # seconds
TOGETHER = 1.0  # seconds, beyond two steps, within which all members of an elastic job get SIGTERM or none but one
OF_GRACE = 0.25  # part of the grace period that a member waits for the others to be asked, at most


def folder_of(run: Path) -> Path:
    """Return the folder in which the workers of a run agree to stop."""
    return run / "stop"


def request(run: Path) -> None:
    """Ask all workers of a run to stop."""
    with suppress(OSError):
        folder_of(run).mkdir(exist_ok=True)
        (folder_of(run) / "request").touch()


def clear(run: Path) -> None:
    """Forget an earlier request."""
    shutil.rmtree(folder_of(run), ignore_errors=True)


class Stop(Protocol):
    """How a worker learns that it is to stop."""

    def __call__(self, step: int) -> bool:
        """Return whether to stop now, after `step` steps."""

    def meeting(self, step: int) -> AbstractContextManager[None]:
        """Enclose a collective call."""

    def done(self, steps: int) -> None:
        """This worker has taken all its steps, so the others need not wait for it to stop."""

    def failed(self) -> None:
        """This worker leaves with an error."""


class StopTogether:
    """One worker among others: all stop after the same step.

    Args:
        lockstep: No worker can finish a step that another worker has not started.
        ahead: Steps within which a gossiping worker surely takes part in its next round.
    """

    def __init__(self, run: Path, rank: int, workers: int, *, lockstep: bool, ahead: int = 1):
        self._folder, self._rank, self._workers, self._lockstep = folder_of(run), rank, workers, lockstep
        self._request, self._decision = self._folder / "request", self._folder / "decision"
        self._ahead = ahead
        self._posted: int | None = None  # since the request
        self._at: int | None = None

    def __call__(self, step: int) -> bool:
        if self._at is None and self._request.exists():
            if self._lockstep:
                self._follow(step)
            else:
                self._agree(step)
        return self._at is not None and step >= self._at

    def _agree(self, step: int) -> None:
        if self._posted is None:
            self._posted = step + self._ahead
            self._post(self._posted)
        if step >= self._posted:
            self._at = self._latest()

    @contextmanager
    def meeting(self, step: int) -> Iterator[None]:
        if self._lockstep:
            yield
            return
        if self._posted is None:
            self._post(step + self._ahead)  # what it posts after the call if there is a request by then
        yield
        if not self._request.exists():
            self._vote(self._rank).unlink(missing_ok=True)

    def done(self, steps: int) -> None:
        if not self._lockstep:
            self._post(steps)

    def failed(self) -> None:
        with suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            (self._folder / f"failed-{self._rank:05d}").touch()

    def _follow(self, step: int) -> None:
        if self._rank == 0:
            self._write(self._decision, step + 1)
            self._at = step + 1
        elif self._decision.exists():
            self._at = int(self._decision.read_text())

    def _latest(self) -> int:
        votes = [self._vote(r) for r in range(self._workers)]
        while True:
            with suppress(FileNotFoundError):
                return max(int(v.read_text()) for v in votes)
            for mark in self._folder.glob("failed-*"):
                worker = int(mark.name.removeprefix("failed-"))
                raise GossamerError(
                    f"worker {worker} has left the run with an error, so no checkpoint is saved now; resume from the "
                    "last complete one"
                )
            time.sleep(POLL)

    def _vote(self, rank: int) -> Path:
        return self._folder / f"worker-{rank:05d}"

    def _post(self, step: int) -> None:
        self._write(self._vote(self._rank), step)

    def _write(self, path: Path, step: int) -> None:
        self._folder.mkdir(exist_ok=True)
        beside = path.with_name(f".{path.name}")
        beside.write_text(str(step))
        beside.replace(path)


class StopHere:
    """The workers of this process: all stop when `asked` is set."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, step: int) -> bool:
        return self.asked

    def meeting(self, step: int) -> AbstractContextManager[None]:
        return nullcontext()

    def done(self, steps: int) -> None:
        pass

    def failed(self) -> None:
        pass


class StopAlone(StopHere):
    """A member of an elastic job: every member stops at its own step.

    The members stop, and save together, if the launcher asks them to, or if each of them has been asked to leave:
    nobody would continue. A member that is asked to leave says so in the folder, and waits a little for the others.

    Args:
        leaving: Returns whether this worker has been asked to leave.
        members: Returns the ranks of the members.
        grace: Seconds between that request and the end of the process.
    """

    def __init__(
        self, run: Path, rank: int, leaving: Callable[[], bool], members: Callable[[], Sequence[int]], grace: float
    ) -> None:
        super().__init__()
        self._folder, self._rank, self._leaving, self._members = folder_of(run), rank, leaving, members
        self._grace, self._called = grace, time.monotonic()
        self._mark(rank).unlink(missing_ok=True)  # of an earlier process of this rank

    def __call__(self, step: int) -> bool:
        before, self._called = self._called, time.monotonic()
        if self._asked():
            return True
        if not self._leaving():
            return False
        return self._all_leave(min(TOGETHER + 2 * (self._called - before), OF_GRACE * self._grace))

    def _all_leave(self, seconds: float) -> bool:
        """Say that this worker leaves; return whether all other members do within so many seconds."""
        deadline = time.monotonic() + seconds
        self._folder.mkdir(exist_ok=True)
        self._mark(self._rank).touch()
        while not (self._asked() or all(self._mark(rank).exists() for rank in self._members())):
            if time.monotonic() > deadline:
                self._mark(self._rank).unlink(missing_ok=True)
                return False
            time.sleep(POLL)
        return True

    def _asked(self) -> bool:
        return (self._folder / "request").exists()

    def _mark(self, rank: int) -> Path:
        return self._folder / f"leaving-{rank:05d}"
