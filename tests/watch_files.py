"""The folder of a run that was never trained, for tests of `gossamer watch`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

T0 = 1_700_000_000.0


def write_config(
    folder: Path, per_node: Sequence[int], steps: int, method: str = "gossipadam:aer", **config: Any
) -> None:
    """Write config.json as `gossamer train` does, as far as it is read."""
    folder.mkdir(parents=True, exist_ok=True)
    clock: dict[str, Any] = {"kind": "measured", "link": "80mbit", "link_bits_per_second": 80e6}
    if config.get("virtual"):
        links = {"inter": {"bandwidth_gbps": 8.0}}
        clock = {"kind": "simulated", "step_seconds": 0.05, "waiting": 0.2, "model_mb": 4.0, "cluster": "x",
                 "layout": "", "description": {"links": links}}  # fmt: skip
    inside = {"task": "vision", "steps": steps, "seed": 0, "per_node": list(per_node), "method": method, **config}
    content = {"config": {**inside, "options": {}}, "method": method, "lr": 0.1, "metric": "accuracy",
               "higher_is_better": True, "parameters": 1000, "clock": clock, "unit": "images"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(content))


def append(folder: Path, name: str, *rows: dict[str, Any]) -> None:
    with (folder / name).open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def event(folder: Path, time: float, kind: str, **facts: Any) -> None:
    append(folder, "events.jsonl", {"time": T0 + time, "event": kind, **facts})


def worker_rows(
    rank: int, steps: Sequence[int], *, step_time: float = 0.1, waiting: float = 0.25, peers: Sequence[int] = (),
    start: float = 0.0, **observed: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of one worker; each step sends 1000 bytes to every peer and waits for the first one."""
    rows = []
    for k, step in enumerate(steps, start=1):
        seconds = k * step_time
        seen = {
            "loss": 1 / step, "round": step, "sent": {str(p): 1000 * k for p in peers},
            "waited": {str(peers[0]): waiting * seconds} if peers else {}, **observed,
        }  # fmt: skip
        rows.append(
            {"step": step, "seconds": seconds, "units": 32 * k, "bytes": 1000.0 * k * len(peers), "lr": 0.1,
             "waited": waiting * seconds, "loss": 1 / step, "workers": {str(rank): seen},
             "time": T0 + start + seconds}
        )  # fmt: skip
    return rows


def virtual_rows(workers: int, steps: int, sent: Callable[[int], dict[int, int]]) -> list[dict[str, Any]]:
    """Rows of a process with virtual workers: `sent` is what a worker sends to each peer in a step."""
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        seen = {
            str(w): {"loss": (w + 1) / step, "round": step, "waited": {},
                     "sent": {str(p): step * b for p, b in sent(w).items()}}
            for w in range(workers)
        }  # fmt: skip
        rows.append({"step": step, "seconds": 0.05 * step, "units": 1, "bytes": 1.0 * step, "loss": 1 / step,
                     "lr": 0.1, "waited": None, "workers": seen, "time": T0 + 0.1 * step})  # fmt: skip
        if step % 10 == 0:
            rows.append({"step": step, "seconds": 0.05 * step, "consensus_distance": 0.9**step, "final": step == steps,
                         "averaged": {"loss": 2 / step, "accuracy": 0.5}, "local": {},
                         "time": T0 + 0.1 * step})  # fmt: skip
    return rows
