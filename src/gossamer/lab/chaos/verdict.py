"""Compute the verdict of a chaos run from its record: stalls, rejoins, leaks, growth of memory, final loss."""

from __future__ import annotations

import statistics
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from gossamer.lab.chaos.job import FaultRecord, JobRecord
from gossamer.lab.chaos.log import ProcessLog

# Stalls of a victim of these do not count until the victim is back.
AWAY = ("kill", "stop", "cut", "join", "pair", "term")
LATE = 2.0  # seconds after a fault within which the others may still drop its victim
SHORTEST = 0.2  # seconds: shorter stalls are noise and are not listed
LIFE = 0.5  # processes that lived for a smaller part of the run are not judged by their memory
GROWTH_MB, GROWTH_SHARE = 4.0, 0.02  # allowed growth of memory: the larger of the two
GROWTH_COUNT = 0  # allowed growth of the number of descriptors, and of threads
# The same with faults: a process serves its state or joins again for the first time at some point (up to 9 MB were
# seen), and two peers are connected by one or two connections, depending on who called whom.
CHURN_MB, CHURN_COUNT = 12.0, 4
LONG = 300.0  # seconds: in a shorter run with faults the caches still fill, so its growth is shown and not judged
STALL = 4.0  # a worker without a fault may stall for this many soft deadlines,
STALL_LEARNED = 1.0  # or seconds, where deadlines are learned
FEW = 50  # exchanges: a process with fewer is not judged by the share of them that it lost
LOST = 0.5  # allowed share: faults cost a part of the exchanges; clocks or plans that do not fit cost nearly all
EQUAL = 1e-4  # allowed relative difference of the mean between the participants of a meeting
NOISE = 0.1  # allowed relative error of the loss if fewer than three calm runs show its spread


def back_at(record: JobRecord, done: FaultRecord, rank: int) -> float | None:
    """When a victim trained with the others again, in seconds since the start; None if it did not.

    A victim is back when it has made a step after the end of the fault and all workers that had dropped it from their
    members list it again. If it waits in a collective call by then, it is back: it mixes with them, and makes its next
    step after their next meeting.
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
        dropped = [k for k, m in enumerate(lists) if rank not in m[2] and m[0] <= over + LATE]
        if not dropped:
            continue
        again = next((t for t, _, members in lists[dropped[-1] :] if rank in members), None)
        if again is not None:
            seen.append(max(again, over))
        elif log.steps[-1][0] > over + LATE:  # this worker continued without the victim
            return None
    listed = max(seen, default=over)
    calls = [met for log in _logs_of(record, rank) for met in log.meetings if not met.alone]
    waits = any(met.ended - met.seconds <= listed <= met.ended for met in calls)
    return (listed if waits else max(step, listed)) - record.begin


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
    """Gaps between two steps, beyond compute and meetings, of workers that no fault kept away; longest first."""
    found = [
        {"worker": rank, "from": start, "to": end, "seconds": seconds}
        for rank, start, end, seconds in _healthy(record, _gaps)
        if seconds >= least
    ]
    return sorted(found, key=lambda s: -s["seconds"])


def _healthy(
    record: JobRecord, spans: Callable[[ProcessLog], Iterable[tuple[float, float, float]]]
) -> Iterator[tuple[int, float, float, float]]:
    """Rank, begin, end and seconds of the spans of all processes in which no fault kept them away; times are since the
    start of the run."""
    away = [(r["worker"], r["at"], record.seconds if r["back"] is None else r["back"]) for r in rejoins(record)]
    for log in record.logs:
        own = [(a, b) for rank, a, b in away if rank == log.rank]
        for t0, t1, seconds in spans(log):
            start, end = t0 - record.begin, t1 - record.begin
            if end <= record.seconds and not any(a < end and start < b for a, b in own):
                yield log.rank, start, end, seconds


def _gaps(log: ProcessLog) -> Iterator[tuple[float, float, float]]:
    ended = [met.ended for met in log.meetings]
    for before, after in pairwise(log.steps):
        inside = log.meetings[bisect(ended, before[0]) : bisect(ended, after[0])]
        yield before[0], after[0], after[0] - before[0] - after[2] - sum(met.seconds for met in inside)


def _calls(log: ProcessLog) -> Iterator[tuple[float, float, float]]:
    for met in log.meetings:
        yield met.ended - met.seconds, met.ended, met.seconds


def meetings(record: JobRecord) -> dict[str, Any]:
    """How many meetings of several members there were, the longest time that a worker without a fault (and a victim)
    spent in one, and in how many of them the participants held different means."""
    norms: dict[int, list[float]] = {}
    for log in record.logs:
        for met in log.meetings:
            if len(met.ranks) > 1 and not met.alone:
                norms.setdefault(met.number, []).append(met.size)
    calm = list(_healthy(record, _calls))
    away = {s for log in record.logs for *_, s in _calls(log)} - {seconds for *_, seconds in calm}
    return {
        "meetings": len(norms),
        "longest_meeting_s": max((seconds for *_, seconds in calm), default=None),
        "longest_meeting_of_a_victim_s": max(away, default=None),
        "meetings_that_differ": sum(max(found) - min(found) > EQUAL * max(found) for found in norms.values()),
    }


def _logs_of(record: JobRecord, rank: int) -> list[ProcessLog]:
    return [log for log in record.logs if log.rank == rank]


def lost_shares(stats: Mapping[int, Mapping[str, Any] | None]) -> dict[int, float]:
    """The part of its exchanges that each worker lost, of those that were there at the end and had enough of them."""
    shares = {}
    for rank, found in stats.items():
        if found is None or "lost_exchanges" not in found:
            continue
        rounds, lost = found["rounds"], found["lost_exchanges"]
        # An asynchronous worker counts the events that were carried out, a synchronous one rounds of so many buckets.
        tried = rounds + lost if "unit_seconds_by_lane" in found else rounds * max(1, found["buckets"])
        if tried >= FEW:
            shares[rank] = lost / tried
    return shares


def leaks(record: JobRecord) -> dict[str, int]:
    """Processes that could not be ended, and threads and file descriptors that workers still had after `close()`."""
    kept = {"processes": record.orphans, "threads": 0, "file_descriptors": 0}
    for value in record.values.values():
        for what in ("threads", "file_descriptors"):
            kept[what] += max(0, value["after"][what] - value["before"][what])
    return kept


def flatness(record: JobRecord) -> dict[str, Any]:
    """Growth of memory, descriptors and threads of the processes that lived for at least half of the run.

    Growth is the difference of the medians in the second and in the last quarter of a process's life; buffers and
    caches fill in the first. Samples while another member was away are left out, because its connections are missing.
    `flat` is None if there is no process to judge.
    """
    megabytes, count = (CHURN_MB, CHURN_COUNT) if record.faults else (GROWTH_MB, GROWTH_COUNT)
    workers = []
    for log in record.logs:
        if len(log.census) < 8 or log.census[-1][0] - log.census[0][0] < LIFE * record.seconds:
            continue
        begin, end = log.census[0][0], log.census[-1][0]
        whole = _while_whole(log)
        early = [c for c in whole if 0.25 <= (c[0] - begin) / (end - begin) < 0.5]
        late = [c for c in whole if (c[0] - begin) / (end - begin) >= 0.75]
        if min(len(early), len(late)) < 2:
            continue
        rss, files, threads = (statistics.median(c[what] for c in late) for what in (1, 2, 3))
        before = [statistics.median(c[what] for c in early) for what in (1, 2, 3)]
        rss_growth, files_growth, threads_growth = rss - before[0], files - before[1], threads - before[2]
        bound = max(megabytes, GROWTH_SHARE * rss / 1e6)
        workers.append(
            {
                "worker": log.rank,
                "generation": log.generation,
                "seconds": end - begin,
                "rss_mb": rss / 1e6,
                "rss_growth_mb": rss_growth / 1e6,
                "rss_bound_mb": bound,
                "descriptors": files,
                "descriptors_growth": files_growth,
                "threads": threads,
                "threads_growth": threads_growth,
                "count_bound": count,
                "flat": rss_growth / 1e6 <= bound and max(files_growth, threads_growth) <= count,
                "samples": [[c[0] - record.begin, c[1] / 1e6, c[2], c[3]] for c in log.census],
            }
        )
    return {"flat": all(w["flat"] for w in workers) if workers else None, "workers": workers}


def _while_whole(log: ProcessLog) -> list[tuple[float, int, int, int]]:
    """The samples of a process while as many members as ever were there, in its own view."""
    most = max((len(ranks) for _, _, ranks in log.members), default=0)
    kept, changes, members = [], list(log.members), most
    for sample in log.census:
        while changes and changes[0][0] <= sample[0]:
            members = len(changes.pop(0)[2])
        if members == most:
            kept.append(sample)
    return kept


def growth_problem(memory: Mapping[str, Any], faults: int, seconds: float) -> list[str]:
    """Why a soak or a long run with faults did not pass because of `flatness`, as at most one sentence."""
    if faults and (seconds < LONG or memory["flat"] is None):
        return []
    if memory["flat"] is None:
        return ["no worker lived long enough to judge its memory; pass a longer --seconds"]
    grew = [w for w in memory["workers"] if not w["flat"]]
    if not grew:
        return []
    return [f"memory, descriptors or threads of {len(grew)} of {len(memory['workers'])} workers grew during the run"]


def loss_bound(calm: Sequence[float]) -> float | None:
    """The largest final loss that passes: the largest of the calm runs plus their spread.

    With fewer than three calm runs the spread is unknown, and the bound is 10 % above the largest.
    """
    if not calm:
        return None
    if len(calm) < 3:
        return max(calm) * (1 + NOISE)
    return max(calm) + (max(calm) - min(calm))


def stall_limit(soft: float | None) -> float:
    """The seconds for which a worker without a fault may stall, by the soft deadline (None: learned)."""
    return STALL_LEARNED if soft is None else STALL * soft


def problems(verdict: Mapping[str, Any], *, soft: float | None) -> list[str]:
    """The reasons why a run did not pass, as sentences; empty if it passed."""
    found = []
    if verdict["hangs"]:
        found.append(f"{verdict['hangs']} workers hung")
    if verdict["restarts"]:
        found.append(f"{verdict['restarts']} workers ended unexpectedly and had to be started again")
    if verdict["not_rejoined"]:
        found.append(f"{verdict['not_rejoined']} victims did not come back")
    allowed, stall = stall_limit(soft), verdict["longest_stall_s"]
    if stall is not None and stall > allowed and not verdict["saturated"]:  # saturated cores stall any worker
        limit = f"{allowed:g} s" if soft is None else f"{STALL:g} soft deadlines of {soft:g} s"
        found.append(f"a worker without a fault stalled for {stall:.2f} s, longer than {limit}")
    if verdict.get("meetings_that_differ"):
        found.append(f"the participants of {verdict['meetings_that_differ']} meetings held different means")
    apart = [rank for rank, share in verdict["lost_shares"].items() if share > LOST]
    if apart:
        found.append(f"workers {apart} lost more than {LOST:.0%} of their exchanges")
    if verdict["final_loss"] is None:
        found.append("no worker reached the end, so there is no final loss")
    bound = loss_bound(verdict["calm_final_losses"])
    if bound is not None and verdict["final_loss"] is not None and verdict["final_loss"] > bound:
        found.append(f"the final loss {verdict['final_loss']:.4f} is above {bound:.4f}, the bound from calm runs")
    left = {what: count for what, count in verdict["leaks"].items() if count}
    if left:
        found.append("left behind: " + ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in left.items()))
    return found
