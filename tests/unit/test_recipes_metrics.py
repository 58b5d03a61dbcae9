"""The rows of a run: strict JSON, and a resumed run drops those after its checkpoint."""

import json
import math

import pytest

from gossamer.recipes.metrics import Metrics


def refuse(constant):
    raise ValueError(f"{constant} is not JSON")


def rows(path):
    """The rows without their wall-clock times, which do not decrease."""
    found = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    times = [row.pop("time") for row in found]
    assert times == sorted(times)
    return found


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_become_null(tmp_path, value):
    with Metrics(tmp_path, 3, 0) as metrics:
        metrics.write({"step": 1, "consensus_distance": value, "averaged": {"loss": value, "accuracy": 0.5}})
    expected = {"step": 1, "consensus_distance": None, "averaged": {"loss": None, "accuracy": 0.5}}
    assert rows(tmp_path / "metrics-00003.jsonl") == [expected]


def test_a_resumed_run_drops_the_rows_after_its_checkpoint(tmp_path):
    with Metrics(tmp_path, 0, 0) as metrics:
        for step in range(1, 5):
            metrics.write({"step": step})
    path = tmp_path / "metrics-00000.jsonl"
    path.write_text(path.read_text() + '{"step": 5, "lo')  # torn by a kill
    with Metrics(tmp_path, 0, 2) as metrics:
        metrics.write({"step": 3, "again": True})
    assert rows(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
