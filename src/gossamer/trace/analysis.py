"""Analysis of timelines: where the time goes, which workers and links cause waits, and how two timelines differ."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from gossamer.errors import InputError
from gossamer.trace.log import Trace
from gossamer.trace.span import COLORS, Span


@dataclass(frozen=True)
class Summary:
    """Seconds per step and worker, by kind of time (compute, communication, waiting), and the step time."""

    steps: int
    step_time: float
    seconds: dict[str, float]


def summarize(trace: Trace) -> Summary:
    """Return means over all workers and steps. Communication overlaps compute, so the kinds do not add up."""
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
class WaitCause:
    """Waiting that one worker or one link caused: total seconds, and their share of all workers' time.

    `mutual` is the share in which both ends of a link waited alike: a slow link is waited for at both ends, while a
    worker that is late because of another link is waited for at one.
    """

    cause: str
    seconds: float
    share: float
    waits: int
    mostly: str  # the worker that waited most for it
    mutual: float = 0.0


def stragglers(trace: Trace) -> list[WaitCause]:
    """Return the causes of waiting, the most expensive one first.

    A wait for a peer counts for that peer until the peer has launched the same exchange (same round and bucket); the
    rest counts for the link, which is named by its two nodes.
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
        WaitCause(
            cause,
            seconds,
            seconds / time if time else 0.0,
            count[cause],
            f"worker {max(by[cause], key=by[cause].__getitem__)}",
            _mutual(trace, cause, by[cause]) / time if time else 0.0,
        )
        for cause, seconds in cost.items()
    ]
    return sorted(made, key=lambda b: -b.seconds)


def _mutual(trace: Trace, cause: str, waiters: dict[int, float]) -> float:
    """Seconds in which both ends of a link waited alike; 0 if the cause is no link between nodes."""
    if not cause.startswith("link ") or not cause[5:].replace("-", "").isdigit():
        return 0.0
    ends = [int(end) for end in cause[5:].split("-")]
    return len(ends) * min(sum(s for w, s in waiters.items() if trace.node[w] == end) for end in ends)


def _link(ends: str) -> str:
    a, _, b = ends.partition("-")
    return f"inside node {a}" if a == b else f"link {ends}"


@dataclass(frozen=True)
class DiffRow:
    """One line of a comparison: seconds per step in both timelines, and the error of the prediction."""

    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.predicted / self.measured - 1 if self.measured else float("nan")


def diff(predicted: Trace, measured: Trace) -> list[DiffRow]:
    """Compare step time and seconds by kind of time."""
    if predicted.workers != measured.workers:
        raise InputError(
            f"the predicted trace has {predicted.workers} workers, the measured one {measured.workers}; "
            "compare timelines of the same layout"
        )
    a, b = summarize(predicted), summarize(measured)
    rows = [DiffRow("step time", a.step_time, b.step_time)]
    return rows + [DiffRow(f, a.seconds[f], b.seconds[f]) for f in COLORS]
