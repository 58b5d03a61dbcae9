"""Damaged metrics of a run: `report` names the file, the line and the remedy."""

import json

import pytest

from gossamer.errors import InputError
from gossamer.report.rows import read_rows

STEP = {"step": 1, "seconds": 0.1, "units": 32, "bytes": 0.0, "loss": None, "waited": None}
EVALUATION = {"step": 1, "seconds": 0.1, "averaged": {"loss": None}, "consensus_distance": None}


def written(tmp_path, *lines):
    path = tmp_path / "metrics-00000.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_rows_are_told_apart_and_a_torn_end_is_ignored(tmp_path):
    path = written(tmp_path, json.dumps(STEP), "", json.dumps(EVALUATION), '{"step": 2, "seco')
    assert read_rows(path) == ([STEP], [EVALUATION])


@pytest.mark.parametrize(("line", "why"), [
    ('{"step": 2, "seco', "it is not JSON"),
    ("[1, 2]", "it is not a JSON object"),
    ('{"kind": "other"}', "it has no proper step, seconds, units, bytes, loss"),
    (json.dumps({**STEP, "loss": "low"}), "it has no proper loss"),
    (json.dumps({**STEP, "seconds": True}), "it has no proper seconds"),
    (json.dumps({**EVALUATION, "averaged": 5}), "it has no proper averaged"),
])  # fmt: skip
def test_a_damaged_line_is_named(tmp_path, line, why):
    path = written(tmp_path, json.dumps(STEP), line, json.dumps(STEP), "")
    with pytest.raises(InputError) as error:
        read_rows(path)
    assert str(error.value) == f"line 2 of {path} is damaged ({why}); remove the line, or move the run away"


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InputError, match=f"cannot read {tmp_path}"):
        read_rows(tmp_path)
