"""Counters and trace spans of a lane: steps, rounds, bytes, and time waited by peer."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any

from gossamer.comm import Job, clock
from gossamer.topology import Layout
from gossamer.trace import TraceWriter

RECENT = 50  # steps over which the pace is measured


class Metrics:
    """Counters and spans of one lane. Only the training thread writes to it, except for `refuse`."""

    def __init__(self, worker: int, layout: Layout, writer: TraceWriter | None):
        self.worker, self.layout, self.writer = worker, layout, writer
        self._zero = clock() - writer.now() if writer is not None else 0.0
        self.steps = 0
        self.rounds = 0
        self.mix_only = 0
        self.skipped = 0
        self.averages = 0
        self.guard_averages = 0
        self.sent: Counter[int] = Counter()  # bytes by peer
        self.waited: defaultdict[int, float] = defaultdict(float)  # seconds by peer
        self.waited_total = 0.0
        self.refused: Counter[int] = Counter()  # exchanges not mixed in, by whose values
        self.last_refusal = ""
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT + 1)  # after each step: time, seconds waited

    def stepped(self) -> None:
        """Count a step."""
        self.steps += 1
        self._recent.append((clock(), self.waited_total))

    def pace(self) -> tuple[float, float] | None:
        """Seconds per step, and the share of them spent waiting for peers, over the last steps; None before two."""
        if len(self._recent) < 2:
            return None
        (began, waited_before), (ended, waited) = self._recent[0], self._recent[-1]
        seconds = ended - began
        return seconds / (len(self._recent) - 1), (waited - waited_before) / seconds if seconds else 0.0

    def refuse(self, peer: int, why: str) -> None:
        """Count values of `peer` that were not mixed in. Called by communication threads."""
        self.refused[peer] += 1
        self.last_refusal = f"worker {peer}: {why}"

    def waited_for(self, job: Job, since: float, until: float) -> None:
        """Charge a wait of the training thread, from `since` to `until`, to the peers that the exchange waited for."""
        self.waited_total += until - since
        for peer, start, stop in job.blocked:
            seconds = min(stop, until) - max(start, since)
            if seconds > 0:
                self.waited[peer] += seconds
                self.span("wait", max(start, since), min(stop, until), peer=peer, round=job.round, bucket=job.bucket)

    def exchanged(self, job: Job) -> None:
        self.sent.update(job.sent)
        if job.started is not None and job.finished is not None:
            sent = sum(job.sent.values())
            self.span("exchange", job.started, job.finished, round=job.round, bucket=job.bucket, bytes=sent)

    def beside(self, job: Job) -> None:
        """Count, once, the bytes of a side average. It is no exchange of a bucket, and has no span."""
        self.sent.update(job.sent)
        job.sent = {}

    def span(self, category: str, start: float, end: float, **attrs: Any) -> None:
        if self.writer is not None:
            self.writer.record(category, start - self._zero, end - self._zero, **attrs)

    def summary(self) -> dict[str, Any]:
        node = self.layout.node
        inside = sum(b for p, b in self.sent.items() if node[p] == node[self.worker])
        links: defaultdict[str, float] = defaultdict(float)
        for peer, seconds in self.waited.items():
            a, b = sorted((node[self.worker], node[peer]))
            links[f"node {a}" if a == b else f"node {a} - node {b}"] += seconds
        return {
            "steps": self.steps,
            "rounds": self.rounds,
            "mix_only_rounds": self.mix_only,
            "skipped_mixes": self.skipped,
            "exact_averages": self.averages,
            "guard_averages": self.guard_averages,
            "bytes_sent": sum(self.sent.values()),
            "bytes_sent_intra": inside,
            "bytes_sent_inter": sum(self.sent.values()) - inside,
            "bytes_sent_by_peer": dict(sorted(self.sent.items())),
            "refused_by_peer": dict(sorted(self.refused.items())),
            "seconds_waited": self.waited_total,
            "seconds_waited_by_peer": dict(sorted(self.waited.items())),
            "seconds_waited_by_link": dict(sorted(links.items())),
        }


class UsualStep:
    """How long a worker usually takes for a step by itself: the median over its last steps, without waits for peers.

    A mean would follow a single evaluation, checkpoint or compilation. With the waits in it, deadlines that depend on
    the step would grow by the very waits that they bound.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._last: tuple[int, float, float] | None = None  # steps, time and seconds waited at the last look

    def look(self, lanes: Sequence[Metrics]) -> float | None:
        """Return the seconds of a usual step, None before two. Call it once per step, with all lanes of the worker;
        a call without a step in between changes nothing."""
        steps, now, waited = lanes[0].steps, clock(), sum(lane.waited_total for lane in lanes)
        if self._last is None or self._last[0] != steps:
            if self._last is not None:
                _, before, waited_before = self._last
                self._seconds.append(max(0.0, now - before - (waited - waited_before)))
            self._last = steps, now, waited
        return statistics.median_low(self._seconds) if self._seconds else None
