"""What a chaos run showed: stalls, who came back and when, leaks, whether memory stayed flat. Pure arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from gossamer.lab.chaos.job import CarriedOut, JobRecord
from gossamer.lab.chaos.log import ProcessLog

AWAY = ("kill", "stop", "cut", "join")  # a victim of these is not a survivor until it is back
LATE = 2.0  # seconds after a fault in which its victim may still be dropped for it
SHORTEST = 0.2  # seconds: shorter ones are the steps' own noise and not listed
WARM_UP = 0.25  # of a process's life that tells nothing about leaks: buffers and caches fill
GROWTH_MB, GROWTH_SHARE = 4.0, 0.02  # what may be gained after that: the larger of the two
STALL = 4.0  # times the soft deadline that a survivor may be held up
NOISE = 0.1  # how far a loss may be off when fewer than three calm runs tell its spread


def back_at(ran: JobRecord, done: CarriedOut, rank: int) -> float | None:
    """When a victim trained among the others again (seconds since the start); None if it did not.

    It has made a step since the fault ended, and if the survivors had dropped it, they list it again. A victim that
    never left is back with its first step.
    """
    over = ran.begin + (done.until if done.until is not None else ran.seconds)
    step = next((t for life in _lives(ran, rank) for t, *_ in life.steps if t > over), None)
    if step is None:
        return None
    seen = []
    for life in ran.lives:
        if life.rank in done.fault.victims or not life.steps or life.steps[0][0] > ran.begin + done.at:
            continue
        lists = [m for m in life.members if m[0] >= ran.begin + done.at]
        dropped = next((k for k, m in enumerate(lists) if rank not in m[2]), None)
        if dropped is None or lists[dropped][0] > over + LATE:
            continue
        again = next((t for t, _, members in lists[dropped:] if rank in members and t > over), None)
        if again is not None:
            seen.append(again)
        elif life.steps[-1][0] > over + LATE:  # it went on without this victim
            return None
    return max([step, *seen]) - ran.begin


def false_drops(ran: JobRecord) -> list[dict[str, Any]]:
    """Workers that the others dropped although nothing had been done to them; they come back by themselves."""
    epochs: dict[int, tuple[float, frozenset[int]]] = {}
    for life in ran.lives:
        for t, epoch, ranks in life.members:
            if epoch not in epochs or t < epochs[epoch][0]:
                epochs[epoch] = (t, frozenset(ranks))
    found = []
    for before, after in pairwise(sorted(epochs)):
        at = epochs[after][0] - ran.begin
        for rank in epochs[before][1] - epochs[after][1]:
            own = any(
                rank in d.fault.victims and d.at <= at <= (ran.seconds if d.until is None else d.until) + LATE
                for d in ran.done
            )
            if not own and at <= ran.seconds:
                found.append({"worker": rank, "at": at, "epoch": after})
    return found


def rejoins(ran: JobRecord) -> list[dict[str, Any]]:
    """Every victim that had to come back: `seconds` from the end of its fault to its first step as a member."""
    found = []
    for done in ran.done:
        if done.fault.kind not in AWAY or done.until is None:
            continue
        for rank in done.fault.victims:
            back = back_at(ran, done, rank)
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


def stalls(ran: JobRecord, least: float = SHORTEST) -> list[dict[str, Any]]:
    """Gaps between two steps of a survivor beyond its compute time, longest first."""
    away = [(r["worker"], r["at"], r["back"] if r["back"] is not None else ran.seconds) for r in rejoins(ran)]
    found = []
    for life in ran.lives:
        own = [(begin, end) for rank, begin, end in away if rank == life.rank]
        for t0, t1, seconds in _gaps(life):
            start, end = t0 - ran.begin, t1 - ran.begin
            if seconds >= least and end <= ran.seconds and not any(a < end and start < b for a, b in own):
                found.append({"worker": life.rank, "from": start, "to": end, "seconds": seconds})
    return sorted(found, key=lambda s: -s["seconds"])


def _gaps(life: ProcessLog) -> Iterator[tuple[float, float, float]]:
    for before, after in pairwise(life.steps):
        yield before[0], after[0], after[0] - before[0] - after[2]


def _lives(ran: JobRecord, rank: int) -> list[ProcessLog]:
    return [life for life in ran.lives if life.rank == rank]


def leaks(ran: JobRecord) -> dict[str, int]:
    """What is left of the run: processes that would not end; threads and descriptors that workers kept after close."""
    kept = {"processes": ran.orphans, "threads": 0, "file_descriptors": 0}
    for value in ran.values.values():
        for what in ("threads", "file_descriptors"):
            kept[what] += max(0, value["after"][what] - value["before"][what])
    return kept


def flatness(ran: JobRecord) -> dict[str, Any]:
    """Memory and descriptors of every process over its life, after the warm-up: slopes, growth, and the bound."""
    told = []
    for life in ran.lives:
        if len(life.census) < 8:
            continue
        begin, end = life.census[0][0], life.census[-1][0]
        kept = [c for c in life.census if c[0] >= begin + WARM_UP * (end - begin)]
        times = [c[0] for c in kept]
        megabytes, descriptors = [c[1] / 1e6 for c in kept], [float(c[2]) for c in kept]
        span = times[-1] - times[0]
        rss, fds = slope(times, megabytes), slope(times, descriptors)
        bound = max(GROWTH_MB, GROWTH_SHARE * statistics.median(megabytes))
        told.append(
            {
                "worker": life.rank,
                "generation": life.generation,
                "seconds": span,
                "rss_mb": statistics.median(megabytes),
                "rss_mb_per_minute": 60 * rss,
                "rss_growth_mb": rss * span,
                "rss_bound_mb": bound,
                "descriptors": statistics.median(descriptors),
                "descriptors_growth": fds * span,
                "flat": rss * span <= bound and fds * span < 1.0,
                "samples": [[c[0] - ran.begin, c[1] / 1e6, c[2], c[3]] for c in life.census],
            }
        )
    return {"flat": bool(told) and all(t["flat"] for t in told), "workers": told}


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Of the least-squares line; 0 when there is no line."""
    if len(times) < 2 or times[0] == times[-1]:
        return 0.0
    return float(statistics.linear_regression(times, values).slope)


def loss_bound(calm: Sequence[float]) -> float | None:
    """The largest final loss that is no worse than calm runs: three tell their spread, which may be had once more."""
    if not calm:
        return None
    if len(calm) < 3:
        return max(calm) * (1 + NOISE)
    return max(calm) + (max(calm) - min(calm))


def problems(told: Mapping[str, Any], *, soft: float) -> list[str]:
    """What is wrong with a verdict, in sentences; empty when the job survived as promised."""
    found = []
    if told["hangs"]:
        found.append(f"{told['hangs']} workers hung")
    if told["restarts"]:
        found.append(f"{told['restarts']} workers ended of themselves and had to be started again")
    if told["not_rejoined"]:
        found.append(f"{told['not_rejoined']} victims did not come back")
    if told["longest_stall_s"] is not None and told["longest_stall_s"] > STALL * soft:
        found.append(
            f"a survivor was held up for {told['longest_stall_s']:.2f} s, longer than {STALL:g} soft deadlines of "
            f"{soft:g} s"
        )
    if told["final_loss"] is None:
        found.append("no worker came to the end, so there is no final loss")
    bound = loss_bound(told["calm_final_losses"])
    if bound is not None and told["final_loss"] is not None and told["final_loss"] > bound:
        found.append(f"the final loss {told['final_loss']:.4f} is above {bound:.4f}, the bound from calm runs")
    left = {what: count for what, count in told["leaks"].items() if count}
    if left:
        found.append("left behind: " + ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in left.items()))
    return found
