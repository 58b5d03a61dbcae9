"""Processor sharing: when transfers end on a link that serves all that are there in equal parts.

In *virtual time* every present job progresses at rate 1: V grows at rate 1/m while m jobs are there, and a job of work
w that arrives at virtual time V ends when V has grown by w (Kleinrock, "Queueing Systems" II, section 4.4).
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FEW = 40  # jobs: below, plain Python is faster than a score of calls to numpy


def share(arrival: Floats, work: Floats) -> Floats:
    """When each job ends, one server a row. Rows are padded with jobs of no work that never arrive (infinity)."""
    columns = arrival.shape[1]
    if columns == 1:
        return arrival + work
    if arrival.size <= FEW:
        return np.array([_one(a, w) for a, w in zip(arrival.tolist(), work.tolist(), strict=True)])
    if columns == 2:
        return _two(arrival, work)
    end, crowded = _crowded(arrival, work)
    for row in np.flatnonzero(~crowded).tolist():
        end[row] = _one(arrival[row].tolist(), work[row].tolist())
    return end


def _one(arrival: list[float], work: list[float]) -> list[float]:
    """One server, event by event."""
    end = list(arrival)
    present: list[tuple[float, int]] = []  # (virtual time of its end, job)
    now = virtual = 0.0
    for job in sorted(range(len(arrival)), key=arrival.__getitem__):
        at = arrival[job]
        while present:
            finish, first = present[0]
            then = now + (finish - virtual) * len(present)
            if then > at:
                virtual += (at - now) / len(present)
                break
            now, virtual = then, finish
            end[first] = then
            heapq.heappop(present)
        if work[job] == 0:  # padding; it sorts last
            continue
        now = at
        heapq.heappush(present, (virtual + work[job], job))
    while present:
        finish, first = present[0]
        now, virtual = now + (finish - virtual) * len(present), finish
        end[first] = now
        heapq.heappop(present)
    return end


def _two(arrival: Floats, work: Floats) -> Floats:
    """Two jobs a server: alone until the second arrives, half the speed while both are there."""
    swap = arrival[:, 1] < arrival[:, 0]
    first, second = arrival.min(axis=1), arrival.max(axis=1)
    own, other = np.where(swap, work[:, 1], work[:, 0]), np.where(swap, work[:, 0], work[:, 1])
    left = np.maximum(own - (second - first), 0.0)
    both = np.minimum(left, other)
    end_first = np.where(left > 0, second + left + both, first + own)
    end_second = second + other + both
    return np.stack([np.where(swap, end_second, end_first), np.where(swap, end_first, end_second)], axis=1)


def _crowded(arrival: Floats, work: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """All rows at once, and for which of them it is right: those where all arrive before the first ends."""
    rows, columns = arrival.shape
    never = np.isinf(arrival)
    if never.any():  # padding arrives with the last job and ends at once, before the others
        last = np.where(never, -np.inf, arrival).max(axis=1, keepdims=True)
        arrival = np.where(never, last, arrival)
    at = np.arange(rows)[:, None]
    order = arrival.argsort(axis=1, kind="stable")
    sorted_arrival = arrival[at, order]
    virtual = np.zeros_like(arrival)
    np.cumsum(np.diff(sorted_arrival, axis=1) / np.arange(1, columns), axis=1, out=virtual[:, 1:])
    finish = virtual + work[at, order]
    by_finish = finish.argsort(axis=1, kind="stable")
    finish = finish[at, by_finish]
    crowded = finish[:, 0] >= virtual[:, -1]
    steps = np.diff(finish, axis=1, prepend=virtual[:, -1:]) * np.arange(columns, 0, -1)
    end = np.empty_like(arrival)
    end[at, order[at, by_finish]] = sorted_arrival[:, -1:] + np.cumsum(steps, axis=1)
    return end, crowded
