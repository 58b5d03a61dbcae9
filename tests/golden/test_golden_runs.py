"""Tiny runs with a fixed seed: their losses must not move unless somebody means them to.

To accept new values: GOLDEN=write pytest tests/golden, and say in the commit why they moved.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from gossamer.predict.methods import parse
from gossamer.recipes.config import make_config
from gossamer.recipes.run import run
from gossamer.recipes.task import make_task

GOLDEN = Path(__file__).with_name("golden.json")
TASKS = {
    "vision": {"batch": 4, "width": 4, "evaluate_on": 32},
    "lm": {"batch": 2, "context": 16, "evaluate_on": 4},
    "translate": {"batch": 64, "evaluate_on": 4, "beams": 1},
}
METHODS = ["ddp", "dadam:ring", "a2cid2:ring"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("task", list(TASKS))
def test_losses_are_what_they_were(tmp_path, task, method):
    torch.manual_seed(12345)  # whatever the caller's random numbers are, a run has its own
    values = {"task": task, "method": method, "steps": 4, "per_node": (1, 1), "virtual": True, "batched": "off"}
    options = dict(TASKS[task])
    if task == "lm":  # the embedded text is the standard library's and moves with it
        options["data"] = tmp_path / "text.txt"
        options["data"].write_text("".join(f"{k} times {k} is {k * k}.\n" for k in range(2000)))
    config = make_config({**values, "eval_every": 0, "options": options})
    seen = []
    made = make_task(task, config.options)
    if task == "translate":
        made._corpus.test = made._corpus.test[:8]  # only translated, which is slow; the loss is of the validation set
    run(config, made, parse(method), tmp_path / "run", watch=seen.append)
    got = [r["loss"] for r in seen if "loss" in r] + [seen[-1]["averaged"]["loss"]]
    kept = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("GOLDEN") == "write":
        kept[f"{task} {method}"] = [round(v, 6) for v in got]
        GOLDEN.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    assert got == pytest.approx(kept[f"{task} {method}"], rel=2e-4)  # other CPUs round otherwise
