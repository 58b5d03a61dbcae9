"""What a timeline says: where the time goes, who waited for whom, and how two timelines differ."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from gossamer.errors import InputError
from gossamer.trace.log import Trace
from gossamer.trace.span import COLORS, Span


@dataclass(frozen=True)
class Summary:
    """Seconds a step and worker, by family (compute, communication, waiting), and the step time."""

    steps: int
    step_time: float
    seconds: dict[str, float]


def summarize(trace: Trace) -> Summary:
    """Mean over the workers of each one's steps. Communication overlaps compute, so families do not add up."""
    seconds = dict.fromkeys(COLORS, 0.0)
    per_worker: dict[int, list[Span]] = defaultdict(list)
    for s in trace.spans:
        per_worker[s.worker].append(s)
    if not per_worker:
        raise InputError("the trace is empty; record at least one step")
    counted, times = 0, []
    for spans in per_worker.values():
        own = [s for s in spans if s.category != "exchange"]
        steps = {s.attrs["step"] for s in own if s.family == "compute" and "step" in s.attrs}
        if not steps:
            raise InputError("the trace's compute spans carry no 'step'; record them with their step number")
        counted += len(steps)
        times.append((max(s.end for s in own) - min(s.start for s in own)) / len(steps))
        for s in spans:
            seconds[s.family] += s.seconds
    steps_each = round(counted / len(per_worker))
    return Summary(steps_each, sum(times) / len(times), {f: t / counted for f, t in seconds.items()})


@dataclass(frozen=True)
class Blame:
    """Waiting that one worker or one link caused: seconds in all, and as a share of all workers' time."""

    cause: str
    seconds: float
    share: float
    waits: int
    mostly: str  # who waited most for it


def stragglers(trace: Trace) -> list[Blame]:
    """Who waited for whom, dearest first.

    A wait for a peer is that peer's fault until the peer has launched the same exchange (same round and bucket); what
    remains is the link's, named by the two nodes it joins.
    """
    launched: dict[tuple[int, Any, Any], float] = {}
    for s in trace.spans:
        if s.category == "exchange":
            launched[s.worker, s.attrs.get("round"), s.attrs.get("bucket")] = s.start
    cost: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    by: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))

    def charge(cause: str, waiter: int, seconds: float) -> None:
        if seconds > 0:
            cost[cause] += seconds
            count[cause] += 1
            by[cause][waiter] += seconds

    for s in trace.spans:
        if s.category != "wait":
            continue
        peer = s.attrs.get("peer")
        if peer is None:
            link = s.attrs.get("link")
            charge(_link(str(link)) if link is not None else "unknown", s.worker, s.seconds)
            continue
        at = launched.get((peer, s.attrs.get("round"), s.attrs.get("bucket")), s.end)
        late = min(max(at, s.start), s.end)
        charge(f"worker {peer}", s.worker, late - s.start)
        ends = sorted((trace.node[s.worker], trace.node[peer]))
        charge(_link(f"{ends[0]}-{ends[1]}"), s.worker, s.end - late)
    total = summarize(trace)
    time = total.step_time * total.steps * trace.workers
    made = [
        Blame(
            cause,
            seconds,
            seconds / time if time else 0.0,
            count[cause],
            f"worker {max(by[cause], key=by[cause].__getitem__)}",
        )
        for cause, seconds in cost.items()
    ]
    return sorted(made, key=lambda b: -b.seconds)


def _link(ends: str) -> str:
    a, _, b = ends.partition("-")
    return f"inside node {a}" if a == b else f"link {ends}"


@dataclass(frozen=True)
class Row:
    """One line of a comparison: seconds a step in both timelines, and the error of the prediction."""

    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """How far the prediction is off, relative to the measurement."""
        return self.predicted / self.measured - 1 if self.measured else float("nan")


def diff(predicted: Trace, measured: Trace) -> list[Row]:
    """Step time and seconds by family, predicted beside measured."""
    if predicted.workers != measured.workers:
        raise InputError(
            f"the predicted trace has {predicted.workers} workers, the measured one {measured.workers}; "
            "compare timelines of the same layout"
        )
    a, b = summarize(predicted), summarize(measured)
    rows = [Row("step time", a.step_time, b.step_time)]
    return rows + [Row(f, a.seconds[f], b.seconds[f]) for f in COLORS]
