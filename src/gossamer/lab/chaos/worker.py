"""A worker of a chaos run: train a small real task until the end of the run, and log every step.

The task is that of `lab.bench.time_to_loss`: real data and gradients, with a sleep for an accelerator's compute time.
The learning rate depends on the time since the start of the run and not on the step, so a worker that joins late uses
the same rate as the others. Every line of the log is written to the kernel at once, so kill -9 does not lose it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gossamer
from gossamer.comm import baseline, process_groups
from gossamer.lab.bench.time_to_loss import INPUTS, Student, teacher
from gossamer.lab.bench.worker import optimizer_of
from gossamer.predict.methods import Method

CENSUS = 1.0  # seconds between two measurements of memory, file descriptors and threads
UNSEEN = 4096  # samples for the final loss
GRACE = 20.0  # seconds that a worker has to leave after SIGTERM
# Seconds between two meetings: at least so many that a fault delays one meeting and not several, and at most so many
# that a worker that has missed a meeting, and waits for the next one, does not count as hung.
LEAST_BETWEEN, MOST_BETWEEN = 6.0, 15.0
# Learning rates by optimizer at which the loss of this task clearly falls within a minute.
LEARNING_RATES = {"adam": 2e-3, "gossipadam": 2e-3, "accumadam": 2e-3, "sgd": 0.1}


@dataclass(frozen=True)
class ChaosJob:
    """The settings of one run, and the files through which launcher and workers communicate."""

    folder: str
    method: Method
    seconds: float  # counted from the moment when all workers have made their first step
    lr: float
    compute: float = 0.15
    width: int = 256
    batch: int = 32
    seed: int = 0
    timeout: float = 60.0
    soft: float | None = None  # seconds; None: learned
    hard: float | None = None
    meet_every: int = 20  # steps; 0: never

    @property
    def between_meetings(self) -> float:
        """Seconds between two meetings, 0 if there are none: the compute time of `meet_every` steps, within limits."""
        return min(max(LEAST_BETWEEN, self.meet_every * self.compute), MOST_BETWEEN) if self.meet_every else 0.0

    def rate(self, seconds: float) -> float:
        """The learning rate `seconds` after the start: a cosine over the run, down to a twentieth of `lr`."""
        done = min(1.0, max(0.0, seconds / self.seconds))
        return self.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))

    def log(self, rank: int, generation: int) -> Path:
        return Path(self.folder) / f"worker-{rank:03d}-{generation:03d}.jsonl"

    @property
    def start_signal(self) -> Path:
        """The file into which the launcher writes the time.monotonic() at which the run began."""
        return Path(self.folder) / "begin"

    def request(self, rank: int, what: str) -> Path:
        """The file by which the launcher asks a worker to leave, or to compute slower by the factor in the file."""
        return Path(self.folder) / f"{what}-{rank:03d}"


def census() -> dict[str, int]:
    """Resident bytes, threads and open file descriptors of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
        "threads": len(os.listdir("/proc/self/task")),
        "file_descriptors": len(os.listdir("/proc/self/fd")) - 1,  # listdir opens one itself
    }


class StepLog:
    """The log of one process: JSON lines with a time.monotonic(), written without a buffer."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def __call__(self, **line: Any) -> None:
        self._file.write(json.dumps({"t": time.monotonic(), **line}).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


class RunClock:
    """Seconds since the start of the run; negative until all workers have made their first step."""

    def __init__(self, job: ChaosJob) -> None:
        self._job = job
        self._begin: float | None = None

    def __call__(self) -> float:
        if self._begin is None:
            with contextlib.suppress(OSError):
                self._begin = float(self._job.start_signal.read_text())
        return -1.0 if self._begin is None else time.monotonic() - self._begin


class _Training:
    """The task of one worker: model, data, and forward and backward passes."""

    def __init__(self, rank: int, generation: int, job: ChaosJob) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(job.seed)
        self.job, self.rank = job, rank
        self.model = Student(job.width)
        self.labels = teacher()
        # A replacement gets other samples than the worker before it.
        self.data = torch.Generator().manual_seed(1_000_003 * (job.seed + 1) + 1009 * generation + rank)

    def gradients(self, forward: nn.Module) -> tuple[float, float]:
        """Run one forward and backward pass; return its loss and its emulated compute time."""
        seconds = self.job.compute * self._slower()
        self.model.seconds = seconds
        x = torch.randn(self.job.batch, INPUTS, generator=self.data)
        loss = nn.functional.cross_entropy(forward(x), self.labels(x))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item(), seconds

    def _slower(self) -> float:
        try:
            return float(self.job.request(self.rank, "slow").read_text())
        except (OSError, ValueError):
            return 1.0


class Meetings:
    """Has the members of an elastic job average their models again and again.

    Note [When members meet]
        Members take different numbers of steps: a slow one takes few, and one that was stopped lacks some. If each met
        the others after so many steps of its own, they would wait long for the slowest. So the time of the run says
        when they meet, which is the same for all, and nobody waits for longer than another one's step. `slot` counts
        the meetings that were due. It is a buffer of the model: a worker that joins gets the count of the member whose
        state it takes, and inside `averaged()` everybody sees the largest count of those who came.
    """

    def __init__(self, job: ChaosJob, model: nn.Module) -> None:
        self._every = job.between_meetings
        self._slot = torch.zeros((), dtype=torch.long)
        model.register_buffer("slot", self._slot)

    def _due(self, now: float) -> int:
        return int(max(0.0, now) / self._every) if self._every else 0

    def after_step(self, gossip: gossamer.ElasticGossip, clock: RunClock, log: StepLog) -> None:
        """Meet the others if it is time, and log it."""
        slot, joined = self._due(clock()), gossip.acknowledge_join()
        if slot <= int(self._slot):
            return
        self._slot.fill_(slot)
        if joined:  # the meeting became due while this worker joined
            gossip.skip_meeting()
            return
        began = time.monotonic()
        with gossip.averaged() as model:
            furthest, size = int(self._slot), float(nn.utils.parameters_to_vector(model.parameters()).norm())
        met = gossip.met
        assert met is not None
        self._slot.fill_(max(furthest, self._due(clock())) if met.alone else furthest)
        seconds = time.monotonic() - began
        log(meeting=met.number, seconds=seconds, ranks=met.ranks, alone=met.alone, size=size)


def train(rank: int, job: ChaosJob, generation: int = 0) -> dict[str, Any]:
    """Train as a member of an elastic job until the run ends or this worker is asked to leave, by a file or SIGTERM."""
    training = _Training(rank, generation, job)
    meetings = Meetings(job, training.model)
    optimizer = optimizer_of(job.method.optimizer, training.model.parameters(), job.lr)
    training.gradients(training.model)  # torch starts threads and allocates buffers in the first step
    optimizer.zero_grad()
    before = census()
    log = StepLog(job.log(rank, generation))
    log(event="started", pid=os.getpid(), **before)
    gossip = gossamer.decentralize(
        training.model,
        optimizer,
        topology=job.method.topology or "aer",
        algorithm=gossamer.algorithm(job.method.algorithm),
        wire=job.method.wire,
        timeout=job.timeout,
        on_failure=gossamer.Continue(soft_deadline=job.soft, hard_deadline=job.hard),
    )
    assert isinstance(gossip, gossamer.ElasticGossip)
    gossip.leave_on(signal.SIGTERM, grace=GRACE)
    stats = gossip.stats()
    log(event="ready", joined=bool(stats.get("joined")), step=stats["steps"])
    members: Any = None
    counted = -CENSUS
    leave = job.request(rank, "leave")
    clock = RunClock(job)
    while (now := clock()) < job.seconds and not (leave.exists() or gossip.leaving):
        for group in optimizer.param_groups:
            group["lr"] = job.rate(now)
        loss, seconds = training.gradients(training.model)
        optimizer.step()
        optimizer.zero_grad()
        stats = gossip.stats()
        line = {"step": stats["steps"], "compute": seconds, "loss": loss}
        if (seen := [stats.get("epoch"), stats.get("members")]) != members:
            members = seen
            line |= {"epoch": seen[0], "members": seen[1]}
        log(**line)
        if now - counted >= CENSUS:
            counted = now
            log(**census())
        meetings.after_step(gossip, clock, log)
    stats = gossip.stats()
    flat = nn.utils.parameters_to_vector(training.model.parameters()).detach().clone()
    log(event="leaving", step=stats["steps"])
    gossip.close()
    after = settled(before)
    log(event="left", **after)
    log.close()
    threads = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    return {"parameters": flat, "stats": _plain(stats), "before": before, "after": after, "threads": threads}


def train_ddp(rank: int, job: ChaosJob, generation: int = 0) -> dict[str, Any]:
    """Train the same task with torch's DDP until the run ends or DDP fails."""
    training = _Training(rank, generation, job)
    log = StepLog(job.log(rank, generation))
    log(event="started", pid=os.getpid())
    process_groups.join_world()
    forward = baseline.ddp(training.model)
    optimizer = optimizer_of(job.method.optimizer, training.model.parameters(), job.lr)
    log(event="ready", joined=False, step=0)
    step = 0
    clock = RunClock(job)
    while clock() < job.seconds:
        loss, seconds = training.gradients(forward)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        log(step=step, compute=seconds, loss=loss)
    return {"steps": step}


def settled(before: Mapping[str, int], seconds: float = 10.0) -> dict[str, int]:
    """The census after waiting up to `seconds` until it is no larger than `before`: threads take a moment to end."""
    deadline = time.monotonic() + seconds
    while True:
        now = census()
        # the log file was opened after `before`
        extra = max(now["threads"] - before["threads"], now["file_descriptors"] - 1 - before["file_descriptors"])
        if extra <= 0 or time.monotonic() > deadline:
            return {**now, "file_descriptors": now["file_descriptors"] - 1}
        time.sleep(0.05)


def final_loss(parameters: list[Tensor], width: int) -> float:
    """The loss of the mean of the models on samples that no worker trained on."""
    model = Student(width)
    nn.utils.vector_to_parameters(torch.stack(parameters).mean(0), model.parameters())
    model.eval()
    x = torch.randn(UNSEEN, INPUTS, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x), teacher()(x)))


def warm(rank: int) -> None:
    """Compute a little, so that torch starts the threads that it keeps."""
    final_loss([nn.utils.parameters_to_vector(Student(8).parameters()).detach()], 8)


def _plain(stats: Mapping[str, Any]) -> dict[str, Any]:
    """The statistics that can be written as JSON."""
    kept = {}
    for key, value in stats.items():
        with contextlib.suppress(TypeError, ValueError):
            json.dumps(value, allow_nan=False)
            kept[key] = value
    return kept
