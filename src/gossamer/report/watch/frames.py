"""Frames: the states of all workers of a run at one time."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gossamer.report.watch.clock import RunClock
from gossamer.report.watch.facts import Facts
from gossamer.report.watch.history import History, Observation

Frame = dict[str, Any]

WINDOW = (2.0, 30.0)  # seconds over which rates are taken: three frames, within these limits
MOST_LINKS = 128  # of a frame, the busiest ones
RECENT = 20  # steps whose time says how long a step takes
SILENT = (5.0, 8.0)  # a worker is silent after so many seconds and so many steps' times without a step


class Sources(Protocol):
    """What a frame is made of: `gossamer.report.watch.run.WatchedRun`."""

    facts: Facts
    histories: list[History]
    events: list[dict[str, Any]]
    clock: RunClock
    every: float


def frame_at(run: Sources, seconds: float, *, last: bool) -> Frame:
    """Return the frame at a time of the run; `last` says that the run is over.

    Values of workers are lists by rank, or one value if all workers have the same.
    """
    time = run.clock.wall(seconds)
    window = min(max(WINDOW[0], 3 * run.every), WINDOW[1])
    rows = [_of_process(history, time, window) for history in run.histories]
    observed = [h.observation(w, time, window) for w, h in _workers(run)]
    awaited, spent = _awaited(observed)
    waits = run.facts.kind in ("synchronous", "elastic") and not run.facts.virtual  # training itself waits for peers
    workers: dict[str, list[Any]] = defaultdict(list)
    for worker, history in _workers(run):
        row = rows[worker if len(rows) > 1 else 0]
        pair = observed[worker]
        if len(rows) == 1 and pair is not None:  # a virtual worker has no rows of its own
            row = {**row, "loss": pair[1].loss, "sent": _rate(pair)}
        if run.facts.virtual:
            row = _simulated(row, run.facts, worker)
        row["state"] = _state(run, worker, history, time, last)
        row["awaited"] = awaited[worker] / spent if spent and waits else None
        for name, value in row.items():
            workers[name].append(_short(value))
    leading = _leading(observed, workers["state"])
    return {
        "time": round(seconds, 2),
        **{name: _same(values) for name, values in workers.items()},
        "round": _round(run, leading, workers["step"]),
        "plan": _plan_key(run.facts, leading, workers["state"]),
        "links": _links(run.facts, observed),
    }


def _workers(run: Sources) -> list[tuple[int, History]]:
    """Return every worker with the history of its process."""
    one = len(run.histories) == 1
    return [(w, run.histories[0 if one else w]) for w in range(run.facts.layout.n)]


def _simulated(row: dict[str, Any], facts: Facts, worker: int) -> dict[str, Any]:
    """Return the row with what was predicted for the simulated cluster."""
    waiting, step, sent = facts.predicted_waiting[worker], row["step_ms"], row["sent"]
    own = step if waiting is None or step is None else step * (1 - waiting)
    return {**row, "waiting": waiting, "own_ms": own, "sent": None if sent is None else sent * facts.byte_scale}


def _of_process(h: History, time: float, window: float) -> dict[str, Any]:
    """Return step, loss, step time, own time of a step, and rates over the window."""
    end = h.at(time)
    if end < 0:
        return dict.fromkeys(("step", "loss", "step_ms", "own_ms", "waiting", "sent"), None) | {"step": 0}
    begin = h.since(end, time - window)
    steps, seconds = h.step[end] - h.step[begin], h.seconds[end] - h.seconds[begin]
    losses = [x for x in h.loss[max(begin, end - RECENT // 2) : end + 1] if x is not None]
    found: dict[str, Any] = {
        "step": h.step[end],
        "loss": statistics.fmean(losses) if losses else None,
        "step_ms": 1e3 * seconds / steps if steps > 0 else None,
        "own_ms": None,
        "waiting": None,
        "sent": (h.bytes[end] - h.bytes[begin]) / seconds if seconds > 0 else None,
    }
    before, after = h.waited[begin], h.waited[end]
    if before is not None and after is not None and seconds > 0 and steps > 0:
        found["waiting"] = min(1.0, (after - before) / seconds)
        found["own_ms"] = max(0.0, 1e3 * (seconds - (after - before)) / steps)
    return found


def _state(run: Sources, worker: int, h: History, time: float, last: bool) -> str:
    """Return "starting", "training", "silent" (no step for long), "gone" (died), "done" or "stopped"."""
    at = h.at(time)
    told = [e for e in run.events if e.get("worker") == worker and e["time"] <= time and e["event"] == "gone"]
    if told and (at < 0 or h.time[at] <= told[-1]["time"]):
        return "gone"
    if at < 0:
        return "starting"
    if h.step[at] >= run.facts.steps:
        return "done"
    if last:
        return "stopped"
    first = max(0, at - RECENT)
    step = (h.time[at] - h.time[first]) / (at - first) if at > first else 0.0
    return "silent" if time - h.time[at] > max(SILENT[0], SILENT[1] * step) else "training"


def _leading(observed: Sequence[tuple[Observation, Observation] | None], states: Sequence[str]) -> Observation | None:
    """Return the latest observation of a worker that is there."""
    alive = [p[1] for p, state in zip(observed, states, strict=True) if p is not None and state != "gone"]
    return max(alive, key=lambda o: o.time, default=None)


def _round(run: Sources, leading: Observation | None, steps: Sequence[int]) -> int | None:
    """Return the number of the round that was launched last, None if there are no rounds."""
    if leading is None or leading.round is None or run.facts.kind == "asynchronous":
        return None
    further = max(steps) - leading.step
    return max(0, leading.round - 1 + max(0, further) // run.facts.every)


def _plan_key(facts: Facts, leading: Observation | None, states: Sequence[str]) -> str:
    """Return the members of an elastic job that lacks some of its workers; empty if all are there."""
    if leading is None or leading.members is None:
        return ""
    there = [w for w in sorted(leading.members) if w < len(states) and states[w] != "gone"]  # noted once a second
    return "" if len(there) == facts.layout.n else ",".join(map(str, there))


def _rate(pair: tuple[Observation, Observation]) -> float | None:
    before, after = pair
    seconds = after.seconds - before.seconds
    return (sum(after.sent.values()) - sum(before.sent.values())) / seconds if seconds > 0 else None


def _awaited(
    observed: Sequence[tuple[Observation, Observation] | None],
) -> tuple[Mapping[int, float], float]:
    """Return the seconds that the others waited for each worker in the window, and the mean seconds of all."""
    found: dict[int, float] = defaultdict(float)
    spent = []
    for pair in observed:
        if pair is None or pair[1].seconds <= pair[0].seconds:
            continue
        spent.append(pair[1].seconds - pair[0].seconds)
        for peer, seconds in pair[1].waited.items():
            found[peer] += max(0.0, seconds - pair[0].waited.get(peer, 0.0))
    return found, statistics.fmean(spent) if spent else 0.0


def _links(facts: Facts, observed: Sequence[tuple[Observation, Observation] | None]) -> list[list[float]]:
    """Return [from, to, bytes per second] between workers or nodes, the busiest first."""
    node = facts.layout.node
    found: dict[tuple[int, int], float] = defaultdict(float)
    for worker, pair in enumerate(observed):
        if pair is None or pair[1].seconds <= pair[0].seconds:
            continue
        for peer, sent in pair[1].sent.items():
            more = sent - pair[0].sent.get(peer, 0.0)
            if more > 0 and peer < len(node):
                ends = (worker, peer) if facts.by_worker else (node[worker], node[peer])
                found[ends] += facts.byte_scale * more / (pair[1].seconds - pair[0].seconds)
    busiest = sorted(found.items(), key=lambda item: -item[1])[:MOST_LINKS]
    return [[a, b, _short(rate)] for (a, b), rate in busiest]


def _same(values: list[Any]) -> Any:
    """Return the value that all workers have, or else the list."""
    return values[0] if all(v == values[0] for v in values) else values


def _short(value: Any) -> Any:
    """Return a number with four digits: a page holds many."""
    return float(f"{value:.4g}") if isinstance(value, float) else value
