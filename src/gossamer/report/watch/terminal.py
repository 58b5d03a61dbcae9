"""The terminal view of a watched run, by rich: for machines without a browser."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gossamer.report.watch.frames import Frame

PERIOD = 1.0  # seconds between two looks
BARS = "▁▂▃▄▅▆▇█"
SLOW = 1.3  # as on the page
STYLES = {"slow": "yellow", "gone": "red", "stopped": "red", "silent": "magenta", "done": "green"}
UNUSUAL = ("gone", "slow", "silent", "starting", "stopped", "training", "done")  # in this order if not all fit

Ask = Callable[[], dict[str, Any]]
Update = Callable[[int, float, int], dict[str, Any]]
"""`WatchedRun.update`, of a folder or over HTTP."""


class TerminalView:
    """Keeps the frames of a run and renders the newest one."""

    def __init__(self, ask_facts: Ask, update: Update):
        self._ask_facts, self._update = ask_facts, update
        self.facts: dict[str, Any] = {}
        self._version, self._every, self._frames = 0, 0.0, list[Frame]()
        self._newest: Frame | None = None
        self.latest: dict[str, Any] = {}

    def look(self) -> None:
        """Ask for new frames."""
        self.latest = found = self._update(self._version, self._every, len(self._frames))
        if found["version"] != self._version:
            self.facts, self._version = self._ask_facts(), found["version"]
        self._every = found["every"]
        self._frames = [*self._frames[: found["begin"]], *found["frames"]]
        self._newest = found["newest"]

    @property
    def over(self) -> bool:
        return bool(self.latest["status"]["state"] != "running")

    def run(self, console: Console, *, address: str = "") -> None:
        """Show the view until the run is over or Ctrl-C."""
        self.look()
        if not console.is_terminal:  # a file or a pipe gets the newest state once
            console.print(self.render(console.size.height, address))
            return
        with Live(console=console, auto_refresh=False, screen=False) as live:
            while True:
                live.update(self.render(console.size.height, address), refresh=True)
                if self.over:
                    return
                time.sleep(PERIOD)
                self.look()

    def render(self, height: int = 40, address: str = "") -> RenderableType:
        """Return the newest frame as text for a terminal of that many lines."""
        facts, status = self.facts, self.latest["status"]
        head = Text.assemble(
            (f"{facts['task']}, {facts['method']}, {facts['workers']} workers", "bold"),
            f"   {status['text']}   step {status['step']}/{status['steps']}",
            f"   {address}" if address else "",
        )
        frame = self._newest
        if frame is None:
            return head
        lines: list[RenderableType] = [head, *self._curves()]
        lines.append(_table(facts, frame, max(4, height - 8 - len(lines))))
        for event in self.latest["events"][-3:]:
            who = f"worker {event['worker']} " if "worker" in event else ""
            lines.append(Text(f"{event['time']:.1f} s: {who}{event['event']} {event.get('why', '')}".rstrip(), "dim"))
        lines += [Text(note, "yellow") for note in self.latest["notes"]]
        return Group(*lines)

    def _curves(self) -> list[Text]:
        losses = [
            statistics.fmean(k)
            for f in [*self._frames, self._newest]
            if f and (k := _known(_all(f, "loss", self.facts)))
        ]
        distances = [e["consensus_distance"] for e in self.latest["evaluations"] if e["consensus_distance"]]
        found = []
        for name, values in (("training loss", losses), ("consensus distance", distances)):
            if values:
                found.append(Text(f"{name:<19}{sparkline(values)}  {values[-1]:.4g}"))
        return found


def sparkline(values: Sequence[float], width: int = 50) -> str:
    """Return the values as a row of bars, logarithmic if they are positive and over a wide range."""
    size = -(-len(values) // width)
    means = [statistics.fmean(values[k : k + size]) for k in range(0, len(values), size)]
    if min(means) > 0 and max(means) > 8 * min(means):
        means = [math.log(v) for v in means]
    low, span = min(means), max(means) - min(means)
    return "".join(BARS[round((len(BARS) - 1) * (v - low) / span) if span else 0] for v in means)


def _table(facts: dict[str, Any], frame: Frame, most: int) -> Table:
    columns = {name: _all(frame, name, facts) for name in ("step", "own_ms", "step_ms", "waiting", "sent", "loss")}
    states = slow_or(frame, facts)
    order = list(range(facts["workers"]))
    left = max(0, len(order) - most)
    if left:
        order = sorted(sorted(order, key=lambda w: (UNUSUAL.index(states[w]), w))[:most])
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("worker", "node", "state", "step", "own ms", "waits", "sends", "loss"):
        made.add_column(name, justify="left" if name == "state" else "right")
    for w in order:
        own = columns["own_ms"][w] if columns["own_ms"][w] is not None else columns["step_ms"][w]
        waits, sent, loss = (columns[k][w] for k in ("waiting", "sent", "loss"))
        made.add_row(
            str(w), str(facts["node"][w]), Text(states[w], STYLES.get(states[w], "")), str(columns["step"][w]),
            "-" if own is None else f"{own:.3g}", "-" if waits is None else f"{waits:.0%}",
            "-" if sent is None else f"{sent / 1e6:.3g} MB/s", "-" if loss is None else f"{loss:.4g}",
        )  # fmt: skip
    if left:
        made.caption = f"and {left} more workers"
    return made


def slow_or(frame: Frame, facts: dict[str, Any]) -> list[str]:
    """Return each worker's state, "slow" for one that trains more slowly than the others."""
    own, states = _all(frame, "own_ms", facts), _all(frame, "state", facts)
    known = _known(own)
    usual = statistics.median(known) if known else 0.0
    slow = [
        s == "training" and v is not None and v > max(SLOW * usual, usual + 1) for s, v in zip(states, own, strict=True)
    ]
    return ["slow" if is_slow else state for is_slow, state in zip(slow, states, strict=True)]


def _all(frame: Frame, name: str, facts: dict[str, Any]) -> list[Any]:
    value = frame[name]
    return value if isinstance(value, list) else [value] * facts["workers"]


def _known(values: Sequence[float | None]) -> list[float]:
    return [v for v in values if v is not None]
