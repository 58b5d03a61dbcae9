"""Read the logs that the workers of a chaos run write, during the run and after it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Met(NamedTuple):
    """A collective call that a process has made."""

    ended: float  # time.monotonic()
    seconds: float
    number: int  # of the meeting
    ranks: tuple[int, ...]  # who took part
    alone: bool  # the directory did not answer
    size: float  # the norm of the averaged model


@dataclass
class ProcessLog:
    """What one process of a rank has logged; times are `time.monotonic()`."""

    rank: int
    generation: int
    steps: list[tuple[float, int, float, float]] = field(default_factory=list)  # time, step, compute seconds, loss
    members: list[tuple[float, int, tuple[int, ...]]] = field(default_factory=list)  # time, epoch, ranks: changes only
    census: list[tuple[float, int, int, int]] = field(default_factory=list)  # time, rss, file descriptors, threads
    meetings: list[Met] = field(default_factory=list)
    events: dict[str, float] = field(default_factory=dict)
    joined: bool = False  # the process joined a job that was already running

    @property
    def last(self) -> float | None:
        """The time of the last step, meeting or event."""
        times = [*self.events.values(), *(s[0] for s in self.steps[-1:]), *(m.ended for m in self.meetings[-1:])]
        return max(times) if times else None

    def add(self, line: dict[str, Any]) -> None:
        t = line["t"]
        if "event" in line:
            self.events[line["event"]] = t
            self.joined |= bool(line.get("joined"))
        elif "loss" in line:
            self.steps.append((t, line["step"], line["compute"], line["loss"]))
            if line.get("members") is not None:
                self.members.append((t, int(line["epoch"]), tuple(line["members"])))
        elif "meeting" in line:
            who = tuple(line["ranks"])
            self.meetings.append(Met(t, line["seconds"], line["meeting"], who, line["alone"], line["size"]))
        elif "rss" in line:
            self.census.append((t, line["rss"], line["file_descriptors"], line["threads"]))


class LogReader:
    """The logs of all processes in a folder; `update()` reads the lines that were added."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.logs: dict[tuple[int, int], ProcessLog] = {}  # by rank and generation

    def update(self) -> None:
        for path in sorted(self._folder.glob("worker-*.jsonl")):
            rank, generation = map(int, path.stem.split("-")[1:])
            log = self.logs.setdefault((rank, generation), ProcessLog(rank, generation))
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
            complete = new.rfind(b"\n") + 1  # a process may have been killed while it wrote a line
            self._read[path] = self._read.get(path, 0) + complete
            for line in new[:complete].splitlines():
                log.add(json.loads(line))

    def ordered(self) -> list[ProcessLog]:
        return [self.logs[key] for key in sorted(self.logs)]


def last_steps(logs: Iterable[ProcessLog]) -> dict[int, int]:
    """The last step of every rank; `logs` are ordered by rank and generation."""
    return {log.rank: log.steps[-1][1] for log in logs if log.steps}
