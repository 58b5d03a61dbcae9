"""Reading what the workers of a chaos run wrote down, during the run and after it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class ProcessLog:
    """One process in a rank's place: its steps as (time, step, compute seconds, loss), and what else it noted."""

    rank: int
    generation: int
    steps: list[tuple[float, int, float, float]] = field(default_factory=list)
    members: list[tuple[float, int, tuple[int, ...]]] = field(default_factory=list)  # time, epoch, ranks: at a change
    census: list[tuple[float, int, int, int]] = field(default_factory=list)  # time, rss, descriptors, threads
    events: dict[str, float] = field(default_factory=dict)
    joined: bool = False

    @property
    def last(self) -> float | None:
        """When it was last heard of."""
        times = [*self.events.values(), *(s[0] for s in self.steps[-1:])]
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
        elif "rss" in line:
            self.census.append((t, line["rss"], line["file_descriptors"], line["threads"]))


class LogReader:
    """Follows the files of a folder: `update()` reads what is new."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.lives: dict[tuple[int, int], ProcessLog] = {}

    def update(self) -> None:
        for path in sorted(self._folder.glob("worker-*.jsonl")):
            rank, generation = map(int, path.stem.split("-")[1:])
            life = self.lives.setdefault((rank, generation), ProcessLog(rank, generation))
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
            whole = new.rfind(b"\n") + 1  # a process may have been killed inside a line
            self._read[path] = self._read.get(path, 0) + whole
            for line in new[:whole].splitlines():
                life.add(json.loads(line))

    def ordered(self) -> list[ProcessLog]:
        return [self.lives[key] for key in sorted(self.lives)]


def last_steps(lives: Iterable[ProcessLog]) -> dict[int, int]:
    """The last step of every rank."""
    return {life.rank: life.steps[-1][1] for life in lives if life.steps}
