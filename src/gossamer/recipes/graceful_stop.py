"""Stopping all workers after the same step, so that a checkpoint can be taken when the user asks for it.

A file `request` asks. Workers look for it before each step:
- In lockstep (DDP) worker 0 decides: after k steps it writes k + 1 and goes on. Nobody can finish step k + 1 without
  it, so everybody has seen the decision by then.
- Gossiping workers may be some steps apart. Each posts its step and waits until all have; the latest is where all go
  on to. Nobody waits in vain: what a waiting worker has sent is all that the others need to come to their next look.
  A worker about to meet all others (to evaluate, say) posts its step before, for those that wait outside. One that
  fails says so, and nobody waits for its step.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gossamer import GossamerError

POLL = 0.02  # seconds


def folder_of(run: Path) -> Path:
    return run / "stop"


def request(run: Path) -> None:
    """Ask all workers of a run to stop."""
    with suppress(OSError):
        folder_of(run).mkdir(exist_ok=True)
        (folder_of(run) / "request").touch()


def clear(run: Path) -> None:
    shutil.rmtree(folder_of(run), ignore_errors=True)


class Stop:
    """One worker's view."""

    def __init__(self, run: Path, rank: int, workers: int, *, lockstep: bool):
        self._folder, self._rank, self._workers, self._lockstep = folder_of(run), rank, workers, lockstep
        self._request, self._decision = self._folder / "request", self._folder / "decision"
        self._at: int | None = None

    def __call__(self, step: int) -> bool:
        """Whether to stop now, `step` steps being done."""
        if self._at is None and self._request.exists():
            if self._lockstep:
                self._follow(step)
            else:
                self._post(step)
                self._at = self._latest()
        return self._at is not None and step >= self._at

    @contextmanager
    def meeting(self, step: int) -> Iterator[None]:
        """Around calls that need all workers."""
        if self._lockstep:
            yield
            return
        self._post(step)
        yield
        if not self._request.exists():
            self._vote(self._rank).unlink(missing_ok=True)

    def done(self, steps: int) -> None:
        """This worker has done all its steps: whoever asks for a stop now need not wait for it."""
        if not self._lockstep:
            self._post(steps)

    def left(self) -> None:
        """This worker leaves with an error."""
        with suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            (self._folder / f"left-{self._rank:05d}").touch()

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
            for gone in self._folder.glob("left-*"):
                raise GossamerError(
                    f"worker {int(gone.name[5:])} has left the run with an error, so no checkpoint is taken now; "
                    "resume from the last complete one"
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
    """For workers that are all in this process."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, step: int) -> bool:
        return self.asked

    @contextmanager
    def meeting(self, step: int) -> Iterator[None]:
        yield

    def done(self, steps: int) -> None:
        pass

    def left(self) -> None:
        pass


class StopAlone(StopHere):
    """For a worker that survives the others, and they it: everybody stops when asked, at its own step."""

    def __init__(self, run: Path) -> None:
        super().__init__()
        self._request = folder_of(run) / "request"

    def __call__(self, step: int) -> bool:
        return self._request.exists()
