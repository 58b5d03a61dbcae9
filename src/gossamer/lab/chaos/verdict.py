"""Compute the verdict of a chaos run from its record: stalls, rejoins, leaks, growth of memory, final loss."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from gossamer.lab.chaos.job import FaultRecord, JobRecord
from gossamer.lab.chaos.log import ProcessLog

AWAY = ("kill", "stop", "cut", "join")  # stalls of a victim of these do not count until the victim is back
LATE = 2.0  # seconds after a fault within which the others may still drop its victim
SHORTEST = 0.2  # seconds: shorter stalls are noise and are not listed
WARM_UP = 0.25  # the first part of a process's life, in which buffers and caches fill, is left out
GROWTH_MB, GROWTH_SHARE = 4.0, 0.02  # allowed growth of memory after the warm-up: the larger of the two
STALL = 4.0  # a worker without a fault may stall for this many soft deadlines,
STALL_LEARNED = 2.0  # or seconds, where deadlines are learned
NOISE = 0.1  # allowed relative error of the loss if fewer than three calm runs show its spread


def back_at(record: JobRecord, done: FaultRecord, rank: int) -> float | None:
    """When a victim trained with the others again, in seconds since the start; None if it did not.

    A victim is back when it has made a step after the end of the fault and all workers that had dropped it from their
    members list it again.
    """
    over = record.begin + (done.until if done.until is not None else record.seconds)
    step = next((t for log in _logs_of(record, rank) for t, *_ in log.steps if t > over), None)
    if step is None:
        return None
    seen = []
    for log in record.logs:
        if log.rank in done.fault.victims or not log.steps or log.steps[0][0] > record.begin + done.at:
            continue
        lists = [m for m in log.members if m[0] >= record.begin + done.at]
        dropped = next((k for k, m in enumerate(lists) if rank not in m[2]), None)
        if dropped is None or lists[dropped][0] > over + LATE:
            continue
        again = next((t for t, _, members in lists[dropped:] if rank in members and t > over), None)
        if again is not None:
            seen.append(again)
        elif log.steps[-1][0] > over + LATE:  # this worker continued without the victim
            return None
    return max([step, *seen]) - record.begin


def false_drops(record: JobRecord) -> list[dict[str, Any]]:
    """Workers that the others dropped although no fault affected them. Such workers rejoin by themselves."""
    epochs: dict[int, tuple[float, frozenset[int]]] = {}
    for log in record.logs:
        for t, epoch, ranks in log.members:
            if epoch not in epochs or t < epochs[epoch][0]:
                epochs[epoch] = (t, frozenset(ranks))
    found = []
    for before, after in pairwise(sorted(epochs)):
        at = epochs[after][0] - record.begin
        for rank in epochs[before][1] - epochs[after][1]:
            own = any(
                rank in f.fault.victims and f.at <= at <= (record.seconds if f.until is None else f.until) + LATE
                for f in record.faults
            )
            if not own and at <= record.seconds:
                found.append({"worker": rank, "at": at, "epoch": after})
    return found


def rejoins(record: JobRecord) -> list[dict[str, Any]]:
    """Every victim that had to rejoin; `seconds` is the time from the end of its fault until it was back."""
    found = []
    for done in record.faults:
        if done.fault.kind not in AWAY or done.until is None:
            continue
        for rank in done.fault.victims:
            back = back_at(record, done, rank)
            found.append(
                {
                    "worker": rank,
                    "kind": done.fault.kind,
                    "at": done.at,
                    "until": done.until,
                    "back": back,
                    "seconds": None if back is None else back - done.until,
                }
            )
    return found


def stalls(record: JobRecord, least: float = SHORTEST) -> list[dict[str, Any]]:
    """Gaps between two steps, beyond the compute time, of workers that no fault kept away; longest first."""
    away = [(r["worker"], r["at"], r["back"] if r["back"] is not None else record.seconds) for r in rejoins(record)]
    found = []
    for log in record.logs:
        own = [(begin, end) for rank, begin, end in away if rank == log.rank]
        for t0, t1, seconds in _gaps(log):
            start, end = t0 - record.begin, t1 - record.begin
            if seconds >= least and end <= record.seconds and not any(a < end and start < b for a, b in own):
                found.append({"worker": log.rank, "from": start, "to": end, "seconds": seconds})
    return sorted(found, key=lambda s: -s["seconds"])


def _gaps(log: ProcessLog) -> Iterator[tuple[float, float, float]]:
    for before, after in pairwise(log.steps):
        yield before[0], after[0], after[0] - before[0] - after[2]


def _logs_of(record: JobRecord, rank: int) -> list[ProcessLog]:
    return [log for log in record.logs if log.rank == rank]


def leaks(record: JobRecord) -> dict[str, int]:
    """Processes that could not be ended, and threads and file descriptors that workers still had after `close()`."""
    kept = {"processes": record.orphans, "threads": 0, "file_descriptors": 0}
    for value in record.values.values():
        for what in ("threads", "file_descriptors"):
            kept[what] += max(0, value["after"][what] - value["before"][what])
    return kept


def flatness(record: JobRecord) -> dict[str, Any]:
    """Growth of memory and file descriptors of every process after its warm-up: slope, growth and allowed growth."""
    workers = []
    for log in record.logs:
        if len(log.census) < 8:
            continue
        begin, end = log.census[0][0], log.census[-1][0]
        kept = [c for c in log.census if c[0] >= begin + WARM_UP * (end - begin)]
        times = [c[0] for c in kept]
        megabytes, descriptors = [c[1] / 1e6 for c in kept], [float(c[2]) for c in kept]
        span = times[-1] - times[0]
        rss, fds = slope(times, megabytes), slope(times, descriptors)
        bound = max(GROWTH_MB, GROWTH_SHARE * statistics.median(megabytes))
        workers.append(
            {
                "worker": log.rank,
                "generation": log.generation,
                "seconds": span,
                "rss_mb": statistics.median(megabytes),
                "rss_mb_per_minute": 60 * rss,
                "rss_growth_mb": rss * span,
                "rss_bound_mb": bound,
                "descriptors": statistics.median(descriptors),
                "descriptors_growth": fds * span,
                "flat": rss * span <= bound and fds * span < 1.0,
                "samples": [[c[0] - record.begin, c[1] / 1e6, c[2], c[3]] for c in log.census],
            }
        )
    return {"flat": bool(workers) and all(w["flat"] for w in workers), "workers": workers}


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """The slope of the least-squares line; 0 if there are fewer than two times."""
    if len(times) < 2 or times[0] == times[-1]:
        return 0.0
    return float(statistics.linear_regression(times, values).slope)


def loss_bound(calm: Sequence[float]) -> float | None:
    """The largest final loss that passes: the largest of the calm runs plus their spread.

    With fewer than three calm runs the spread is unknown, and the bound is 10 % above the largest.
    """
    if not calm:
        return None
    if len(calm) < 3:
        return max(calm) * (1 + NOISE)
    return max(calm) + (max(calm) - min(calm))


def problems(verdict: Mapping[str, Any], *, soft: float | None) -> list[str]:
    """The reasons why a run did not pass, as sentences; empty if it passed."""
    found = []
    if verdict["hangs"]:
        found.append(f"{verdict['hangs']} workers hung")
    if verdict["restarts"]:
        found.append(f"{verdict['restarts']} workers ended unexpectedly and had to be started again")
    if verdict["not_rejoined"]:
        found.append(f"{verdict['not_rejoined']} victims did not come back")
    allowed = STALL_LEARNED if soft is None else STALL * soft
    if verdict["longest_stall_s"] is not None and verdict["longest_stall_s"] > allowed:
        limit = f"{allowed:g} s" if soft is None else f"{STALL:g} soft deadlines of {soft:g} s"
        found.append(f"a worker without a fault stalled for {verdict['longest_stall_s']:.2f} s, longer than {limit}")
    if verdict["final_loss"] is None:
        found.append("no worker reached the end, so there is no final loss")
    bound = loss_bound(verdict["calm_final_losses"])
    if bound is not None and verdict["final_loss"] is not None and verdict["final_loss"] > bound:
        found.append(f"the final loss {verdict['final_loss']:.4f} is above {bound:.4f}, the bound from calm runs")
    left = {what: count for what, count in verdict["leaks"].items() if count}
    if left:
        found.append("left behind: " + ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in left.items()))
    return found
