"""The rows that a worker writes while it trains: strict JSON, one per line."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Metrics:
    """The file of one process, open for writing. A resumed run drops the rows after its checkpoint, step `at`."""

    def __init__(self, folder: Path, rank: int, at: int):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"metrics-{rank:05d}.jsonl"
        kept = []
        if at and path.exists():
            for line in path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    break  # torn when the run was killed
                if row["step"] <= at:
                    kept.append(line)
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text("".join(f"{line}\n" for line in kept))
        beside.replace(path)
        self._file = path.open("a", buffering=1)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row with the wall-clock time, which all workers have in common; `seconds` leaves pauses out."""
        row = {**row, "time": round(time.time(), 3)}
        self._file.write(json.dumps(finite(row), allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """Return the value in plain Python types for strict JSON: NaN and infinities become None."""
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value
