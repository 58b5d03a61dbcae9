"""What a worker of a chaos run does: train a small real task until the end of the run, and write down every step.

The task is that of `bench_task`: real data and gradients, and an accelerator's compute time as a sleep. The learning
rate follows the clock of the run rather than a count of steps, so a worker that joins late is where the others are.
What is written survives kill -9: a line a step, handed to the kernel at once.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gossamer
from gossamer.comm import baseline, world
from gossamer.lab.bench.time_to_loss import INPUTS, Student, teacher
from gossamer.lab.bench.worker import optimizer_of
from gossamer.predict.methods import Method

CENSUS = 1.0  # seconds between two looks at memory, descriptors and threads
UNSEEN = 4096  # samples that the final loss is measured on


@dataclass(frozen=True)
class ChaosJob:
    """One run. Times in its logs are time.monotonic(), one clock for all processes."""

    folder: str
    method: Method
    seconds: float  # from the moment when all have made their first step
    lr: float = 2e-3
    compute: float = 0.15
    width: int = 256
    batch: int = 32
    seed: int = 0
    timeout: float = 60.0
    soft: float = 0.5
    hard: float = 5.0

    def rate(self, seconds: float) -> float:
        """The learning rate so long after the beginning: a cosine over the run, down to a twentieth."""
        done = min(1.0, max(0.0, seconds / self.seconds))
        return self.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))

    def log(self, rank: int, generation: int) -> Path:
        return Path(self.folder) / f"worker-{rank:03d}-{generation:03d}.jsonl"

    @property
    def start_signal(self) -> Path:
        """The file in which the launcher writes when the run began."""
        return Path(self.folder) / "begin"

    def wish(self, rank: int, what: str) -> Path:
        """A file through which the launcher tells a worker to leave, or by which factor to be slow."""
        return Path(self.folder) / f"{what}-{rank:03d}"


def census() -> dict[str, int]:
    """What this process has: resident bytes, threads, open descriptors."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
        "threads": len(os.listdir("/proc/self/task")),
        "file_descriptors": len(os.listdir("/proc/self/fd")) - 1,  # without the one that lists
    }


class StepLog:
    """The lines of one process, appended and handed over one by one."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def __call__(self, **line: Any) -> None:
        self._file.write(json.dumps({"t": time.monotonic(), **line}).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


class RunClock:
    """Seconds since the beginning of the run, below 0 as long as somebody has yet to make a first step."""

    def __init__(self, job: ChaosJob) -> None:
        self._job = job
        self._begin: float | None = None

    def __call__(self) -> float:
        if self._begin is None:
            with contextlib.suppress(OSError):
                self._begin = float(self._job.start_signal.read_text())
        return -1.0 if self._begin is None else time.monotonic() - self._begin


class _Lesson:
    """The task of one worker: model, data, and a step without the optimizer."""

    def __init__(self, rank: int, generation: int, job: ChaosJob) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(job.seed)
        self.job, self.rank = job, rank
        self.model = Student(job.width)
        self.labels = teacher()
        # Another process in the same place sees other samples: its predecessor's are learnt already.
        self.data = torch.Generator().manual_seed(1_000_003 * (job.seed + 1) + 1009 * generation + rank)

    def gradients(self, forward: nn.Module) -> tuple[float, float]:
        """One forward and backward pass; its loss, and the compute time it stands for."""
        seconds = self.job.compute * self._slower()
        self.model.seconds = seconds
        x = torch.randn(self.job.batch, INPUTS, generator=self.data)
        loss = nn.functional.cross_entropy(forward(x), self.labels(x))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item(), seconds

    def _slower(self) -> float:
        try:
            return float(self.job.wish(self.rank, "slow").read_text())
        except (OSError, ValueError):
            return 1.0


def train(rank: int, job: ChaosJob, generation: int = 0) -> dict[str, Any]:
    """Train as a member that survives the others until the run ends or the launcher wishes otherwise."""
    lesson = _Lesson(rank, generation, job)
    optimizer = optimizer_of(job.method.optimizer, lesson.model.parameters(), job.lr)
    lesson.gradients(lesson.model)  # torch's own threads and buffers come with the first step
    optimizer.zero_grad()
    before = census()
    log = StepLog(job.log(rank, generation))
    log(event="started", pid=os.getpid(), **before)
    gossip = gossamer.decentralize(
        lesson.model,
        optimizer,
        topology=job.method.topology or "aer",
        algorithm=gossamer.algorithm(job.method.algorithm),
        wire=job.method.wire,
        timeout=job.timeout,
        on_failure=gossamer.Continue(soft_deadline=job.soft, hard_deadline=job.hard),
    )
    told = gossip.stats()
    log(event="ready", joined=bool(told.get("joined")), step=told["steps"])
    members: Any = None
    looked = -CENSUS
    leave = job.wish(rank, "leave")
    clock = RunClock(job)
    while (now := clock()) < job.seconds and not leave.exists():
        for group in optimizer.param_groups:
            group["lr"] = job.rate(now)
        loss, seconds = lesson.gradients(lesson.model)
        optimizer.step()
        optimizer.zero_grad()
        told = gossip.stats()
        line = {"step": told["steps"], "compute": seconds, "loss": loss}
        if (seen := [told.get("epoch"), told.get("members")]) != members:
            members = seen
            line |= {"epoch": seen[0], "members": seen[1]}
        log(**line)
        if now - looked >= CENSUS:
            looked = now
            log(**census())
    told = gossip.stats()
    flat = nn.utils.parameters_to_vector(lesson.model.parameters()).detach().clone()
    log(event="leaving", step=told["steps"])
    gossip.close()
    after = settled(before)
    log(event="left", **after)
    log.close()
    threads = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    return {"parameters": flat, "stats": _plain(told), "before": before, "after": after, "threads": threads}


def train_ddp(rank: int, job: ChaosJob, generation: int = 0) -> dict[str, Any]:
    """The same task under torch's DDP, for as long as that lasts."""
    lesson = _Lesson(rank, generation, job)
    log = StepLog(job.log(rank, generation))
    log(event="started", pid=os.getpid())
    world.join_world()
    forward = baseline.ddp(lesson.model)
    optimizer = optimizer_of(job.method.optimizer, lesson.model.parameters(), job.lr)
    log(event="ready", joined=False, step=0)
    step = 0
    clock = RunClock(job)
    while clock() < job.seconds:
        loss, seconds = lesson.gradients(forward)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        log(step=step, compute=seconds, loss=loss)
    return {"steps": step}


def settled(before: Mapping[str, int], patience: float = 2.0) -> dict[str, int]:
    """The census once it is back to what it was, or when patience ends: threads take a moment to leave."""
    deadline = time.monotonic() + patience
    while True:
        now = census()
        # the log itself was opened after the first look
        extra = max(now["threads"] - before["threads"], now["file_descriptors"] - 1 - before["file_descriptors"])
        if extra <= 0 or time.monotonic() > deadline:
            return {**now, "file_descriptors": now["file_descriptors"] - 1}
        time.sleep(0.05)


def final_loss(parameters: list[Tensor], width: int) -> float:
    """The loss of the mean of the members' models on samples that nobody has seen."""
    model = Student(width)
    nn.utils.vector_to_parameters(torch.stack(parameters).mean(0), model.parameters())
    model.eval()
    x = torch.randn(UNSEEN, INPUTS, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x), teacher()(x)))


def warm(rank: int) -> None:
    """Compute a little: torch starts threads that stay."""
    final_loss([nn.utils.parameters_to_vector(Student(8).parameters()).detach()], 8)


def _plain(stats: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON can hold of the statistics."""
    kept = {}
    for key, value in stats.items():
        with contextlib.suppress(TypeError, ValueError):
            json.dumps(value, allow_nan=False)
            kept[key] = value
    return kept
