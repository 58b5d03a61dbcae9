"""A run that is watched: its files are read as they grow, and cut into frames, the states of all workers at a time."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossamer.report.watch.clock import RunClock
from gossamer.report.watch.facts import Facts
from gossamer.report.watch.frames import Frame, frame_at
from gossamer.report.watch.history import History
from gossamer.report.watch.tail import Row, Tail

FINEST = 0.25  # seconds between frames of a short run; doubled whenever there are MOST_FRAMES
MOST_FRAMES = 300
MOST_EVALUATIONS = 400
MOST_EVENTS = 200
QUIET = 20.0  # seconds without a row until the status says so


class WatchedRun:
    """The run in a folder. Nothing is read before `update` is called. Any thread may call it."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._lock = threading.Lock()
        self.facts = Facts.read(folder)
        self._written = self._modified()
        self.version = 1
        """Grows when the configuration was changed, by a resume with other workers or steps."""
        self._begin()

    def _configure(self) -> None:
        """Read the configuration if it was written since the last time, and begin anew if it is another one."""
        written = self._modified()
        if written == self._written:
            return
        facts = Facts.read(self._folder)
        self._written = written
        if facts.to_dict() != self.facts.to_dict():
            self.facts, self.version = facts, self.version + 1
            self._begin()

    def _modified(self) -> float:
        try:
            return (self._folder / "config.json").stat().st_mtime
        except OSError:
            return 0.0

    def _begin(self) -> None:
        processes = 1 if self.facts.virtual else self.facts.layout.n
        self._tails = [Tail(self._folder / f"metrics-{rank:05d}.jsonl") for rank in range(processes)]
        self._events_tail = Tail(self._folder / "events.jsonl")
        self.histories = [History() for _ in range(processes)]
        self.evaluations: dict[int, Row] = {}
        self._listed: tuple[int, list[dict[str, Any]]] = (0, [])
        self.events: list[Row] = []
        self.clock = RunClock()
        self.every = FINEST
        self._frames: list[Frame] = []
        self._plans: dict[str, dict[str, Any]] = {}

    def update(self, version: int = 0, every: float = 0.0, begin: int = 0) -> dict[str, Any]:
        """Read what is new and return the frames from number `begin` on, and the newest state as a frame of its own.

        All frames are returned if the run has another `version` by now, or if frames are no longer `every` seconds
        apart because the run has become longer. A plan is returned with the first frame that refers to it.
        """
        with self._lock:
            self._configure()
            self._read()
            self._extend()
            same = version == self.version and every == self.every and begin <= len(self._frames)
            first = begin if same else 0
            newest = self._newest()
            seen = [*self._frames[first:], *([newest] if newest else [])]
            plans = {f["plan"] for f in seen} - {f["plan"] for f in self._frames[:first]}
            return {
                "version": self.version,
                "every": self.every,
                "begin": first,
                "frames": self._frames[first:],
                "newest": newest,
                "plans": {key: self._plan(key) for key in sorted(plans)},
                "evaluations": self._evaluations(),
                "events": [
                    {**e, "time": round(max(0.0, self.clock.of(e["time"])), 2)} for e in self.events[-MOST_EVENTS:]
                ],
                "status": self.status(),
                "notes": self._notes(),
                "seconds": self.clock.end,
            }

    def status(self) -> dict[str, Any]:
        """Return whether the run is going on, and how it ended if it is not."""
        step = max((h.step[-1] for h in self.histories if h.step), default=0)
        facts = {"step": step, "steps": self.facts.steps}
        told = [e for e in self.events if e["event"] in ("started", "ended", "failed")]
        last: Mapping[str, Any] = told[-1] if told else {}
        if last.get("event") == "started":
            if _gone(last):
                return {**facts, "state": "dead", "text": f"its process is gone without a word, at step {step}"}
            quiet = time.time() - self.clock.latest
            text = "starting" if not step else "training" if quiet < QUIET else f"no step for {quiet:.0f} s"
            return {**facts, "state": "running", "text": text}
        if last.get("event") == "failed":
            return {**facts, "state": "failed", "text": f"failed at step {step}: {last.get('why', 'unknown')}"}
        if step >= self.facts.steps:
            return {**facts, "state": "ended", "text": f"finished all {step} steps"}
        text = f"stopped at step {step}" if step else "not started"
        return {**facts, "state": "ended", "text": text}

    def _read(self) -> None:
        looks = [tail.look() for tail in self._tails]
        if any(anew for anew, _ in looks):  # a worker was replaced, or the run resumed, and rewrote its file
            frames, every = self._frames, self.every
            self._begin()
            self._frames, self.every = frames, every  # what was seen stays: the rows that are gone were real
            looks = [tail.look() for tail in self._tails]
        rows = [(rank, row) for rank, (_, found) in enumerate(looks) for row in found]
        events = [e for e in self._events_tail.look()[1] if isinstance(e.get("event"), str) and _time(e) is not None]
        times = [t for _, row in rows if (t := _time(row)) is not None]
        # the time begins with the first step: starting processes is not worth watching
        self.clock.add([*times, *(e["time"] for e in events if e["event"] != "started")])
        self.events += events
        for rank, row in rows:
            if "averaged" in row:
                if isinstance(row.get("step"), int):
                    self.evaluations[row["step"]] = row
            else:
                self.histories[rank].add(row)

    def _extend(self) -> None:
        """Add the frames that are due; if there are too many, every other one is dropped."""
        if self.clock.end is None:
            return
        while self.clock.end / self.every > MOST_FRAMES:
            self.every *= 2
            self._frames = self._frames[1::2]
        for k in range(len(self._frames), int(self.clock.end / self.every)):
            self._frames.append(frame_at(self, (k + 1) * self.every, last=False))

    def _newest(self) -> Frame | None:
        """Return the frame of the latest row; None before there is any row."""
        over = self.status()["state"] != "running"
        return None if self.clock.end is None else frame_at(self, self.clock.end, last=over)

    def _plan(self, key: str) -> dict[str, Any]:
        if key not in self._plans:
            self._plans[key] = self.facts.plan([int(w) for w in key.split(",")] if key else None)
        return self._plans[key]

    def _evaluations(self) -> list[dict[str, Any]]:
        """Return the evaluations in order, thinned if there are very many."""
        if len(self.evaluations) == self._listed[0]:
            return self._listed[1]
        found: list[dict[str, Any]] = []
        for step, row in sorted(self.evaluations.items()):
            averaged = row["averaged"] if isinstance(row.get("averaged"), dict) else {}
            at = _time(row)
            found.append(
                {
                    "step": step,
                    "time": None if at is None else round(self.clock.of(at), 2),
                    "loss": averaged.get("loss"),
                    "metric": averaged.get(self.facts.content.get("metric", "loss")),
                    "consensus_distance": row.get("consensus_distance"),
                }
            )
        self._listed = (len(self.evaluations), found[:: -(-len(found) // MOST_EVALUATIONS) or 1])
        return self._listed[1]

    def _notes(self) -> list[str]:
        found = []
        for tail, history in zip(self._tails, self.histories, strict=True):
            bad = tail.damaged + history.damaged
            if bad:
                found.append(f"{bad} damaged line{'s' * (bad > 1)} of {tail.path.name} left out")
        if self._events_tail.damaged:
            found.append("damaged lines of events.jsonl left out")
        return found


def _time(row: Row) -> float | None:
    value = row.get("time", row.get("seconds"))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _gone(started: Mapping[str, Any]) -> bool:
    """Return whether the process that started the run is known to be gone: it was on this host and is not there."""
    pid = started.get("pid")
    if started.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False
