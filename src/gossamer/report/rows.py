"""The rows of a run's `metrics-*.jsonl`, checked: a report must not fail over a damaged file without naming it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gossamer.errors import InputError

Row = dict[str, Any]
OF_STEP = ("step", "seconds", "units", "bytes")  # numbers in the row of a step
OF_EVALUATION = ("step", "seconds")


def read_rows(path: Path) -> tuple[list[Row], list[Row]]:
    """Return the rows of steps and of evaluations. A torn last line is ignored; another damaged line is an error."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}; check the file") from None
    steps: list[Row] = []
    evaluations: list[Row] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):  # without a newline: the run was killed while it wrote the line
                break
            raise _damaged(path, number, "it is not JSON") from None
        if not isinstance(row, dict):
            raise _damaged(path, number, "it is not a JSON object")
        evaluated = "averaged" in row
        lacking = [name for name in (OF_EVALUATION if evaluated else OF_STEP) if not _number(row.get(name))]
        if evaluated and not isinstance(row["averaged"], dict):
            lacking.append("averaged")
        if not evaluated and not (row.get("loss", "") is None or _number(row.get("loss"))):
            lacking.append("loss")
        if lacking:
            raise _damaged(path, number, f"it has no proper {', '.join(lacking)}")
        (evaluations if evaluated else steps).append(row)
    return steps, evaluations


def _damaged(path: Path, number: int, why: str) -> InputError:
    return InputError(f"line {number} of {path} is damaged ({why}); remove the line, or move the run away")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
