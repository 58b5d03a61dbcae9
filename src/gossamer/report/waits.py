"""For whom the workers of a finished run waited, and how long they would have waited: its `waits-*.json`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.errors import InputError


@dataclass(frozen=True)
class Wait:
    """How long a worker waited for a peer in all: `seconds`, and as the `share` of its time.

    `deadline`: how long one exchange waited for that peer at most, in the end; None if the run was not elastic.
    """

    worker: int
    peer: int
    seconds: float
    share: float
    deadline: float | None


def damaged(folder: Path) -> InputError:
    return InputError(f"the waits-*.json in {folder} are damaged; move them away, or train again")


def wait_rows(folder: Path) -> list[dict[str, Any]]:
    """Return what the workers of a run have written, one row each; a resumed run may have had more workers before."""
    try:
        rows = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("waits-*.json"))]
        return [row for row in rows if row["per_node"] == rows[0]["per_node"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise damaged(folder) from None


def waits_in(folder: Path) -> list[Wait]:
    """Return the waits of every worker for each peer that it had."""
    found = []
    for row in wait_rows(folder):
        try:
            waited, deadlines = row["by_peer"], row.get("deadlines", {})
            for peer in sorted({*waited, *deadlines}, key=int):
                seconds, deadline = float(waited.get(peer, 0.0)), deadlines.get(peer)
                share = seconds / max(1e-9, float(row["seconds"]))
                found.append(
                    Wait(int(row["worker"]), int(peer), seconds, share, None if deadline is None else float(deadline))
                )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise damaged(folder) from None
    return found


def deadlines_in(folder: Path) -> tuple[float, float] | None:
    """Return the shortest and the longest deadline of a run's exchanges; None if the run was not elastic."""
    known = [wait.deadline for wait in waits_in(folder) if wait.deadline is not None and math.isfinite(wait.deadline)]
    return (min(known), max(known)) if known else None
