"""What the lanes of a handle have measured, as the totals of `Gossip.stats` and the numbers of `Gossip.scalars`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gossamer.engine.lane import Lane

COUNTS = (
    "steps",
    "rounds",
    "mix_only_rounds",
    "skipped_mixes",
    "exact_averages",
    "bytes_sent",
    "bytes_sent_inter",
    "seconds_waited",
)
"""Counts of `Gossip.stats` that are numbers in `Gossip.scalars` too."""


def summed(lanes: Sequence[Lane]) -> dict[str, Any]:
    """The measurements of all lanes added up, and those of each lane under `lanes`."""
    each = [lane.metrics.summary() for lane in lanes]
    for lane, summary in zip(lanes, each, strict=True):
        latest = lane.sketcher.latest if lane.sketcher is not None else None
        summary["consensus_ratio"] = None if latest is None else latest.ratio
        summary["consensus_distance"] = None if latest is None else latest.distance
    total: dict[str, Any] = {}
    for summary in each:
        for key, value in summary.items():
            if isinstance(value, dict):
                mine = total.setdefault(key, {})
                for name, amount in value.items():
                    mine[name] = mine.get(name, 0) + amount
            elif key.startswith("consensus"):
                total[key] = value if len(each) == 1 else None
            else:
                total[key] = total.get(key, 0) + value
    total["steps"] = each[0]["steps"]  # a step of every optimizer is one step of training
    return {**total, "buckets": sum(len(lane.buckets) for lane in lanes), "lanes": each}


def numbers(stats: Mapping[str, Any], lanes: Sequence[Lane]) -> dict[str, float | None]:
    """The plain numbers of `stats`, and the pace over the latest steps where it is known."""
    found: dict[str, float | None] = {name: stats[name] for name in COUNTS}
    found["refused_exchanges"] = sum(stats["refused_by_peer"].values())
    paces = [pace for lane in lanes if (pace := lane.metrics.pace()) is not None]
    if paces:
        found["seconds_per_step"] = paces[0][0]
        found["waiting_share"] = sum(share for _, share in paces)
    return found
