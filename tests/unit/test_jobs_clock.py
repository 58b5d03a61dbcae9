"""The predicted step time beside a measured one is that of the run's own settings."""

import json

import pytest

from gossamer.jobs.clock import predict_measured
from gossamer.recipes.config import RunConfig
from gossamer.report.runs import Group, Run

STEPS = [{"step": k, "seconds": 0.1 * k, "waited": 0.05 * k} for k in range(1, 11)]


def predicted(folder, method, **settings):
    """The prediction for a run on links of 10 Mbit/s, as it is written to the run's folder."""
    config = RunConfig(task="translation", method=method, **{"per_node": (1, 1, 1, 1), **settings})
    content = {
        "config": json.loads(config.model_dump_json()),
        "method": method,
        "parameters": 1_000_000,
        "clock": {"kind": "measured", "link": "10mbit"},
    }
    predict_measured([Group(method, [Run(folder, content, STEPS, [])])])
    return json.loads((folder / "config.json").read_text())["predicted_step_seconds"]


COMPUTE = 0.05  # half of the measured step
WHOLE = 4e6 * 8 / 10e6  # seconds in which a link carries the model
AVERAGE = 2 * 3 / 4 * WHOLE  # of an all-reduce among four workers


@pytest.mark.parametrize(
    ("method", "settings", "seconds"),
    [
        ("dadam:ring", {}, WHOLE),
        ("dadam:ring", {"fragments": 4}, WHOLE / 4),
        ("dadam:ring", {"every": 4}, (WHOLE + 3 * COMPUTE) / 4),
        ("dadam:ring", {"average_every": 2}, (WHOLE + AVERAGE) / 2),
        ("dadam:ring", {"combine": "atc"}, WHOLE + COMPUTE),
        ("dadam:ring", {"per_node": (2, 2, 2, 2), "exact_inside": True}, WHOLE),
        ("diloco", {}, AVERAGE / 8 + COMPUTE),
        ("diloco", {"every": 32}, AVERAGE / 32 + COMPUTE),
    ],
)
def test_the_settings_of_a_run_are_in_its_prediction(tmp_path, method, settings, seconds):
    assert predicted(tmp_path, method, **settings) == pytest.approx(seconds, rel=0.01)
