"""What a difference of the loss is worth in steps: all-reduce after half the steps of the records `quality-signal-*`.

    python benchmarks/quality_steps.py --data ../shared/data/multi30k --record benchmarks/records/quality-steps

The slope of a task is the loss that all-reduce gains per e-fold of steps: the difference between complete runs of 400
and of 800 steps, each with its own warm-up and decay, over log 2, paired by seed; the median over the seeds, because a
rate close to the limit of stability has runs with spikes. `predict/evidence.py` turns a gap g to all-reduce into
exp(g / slope) times as many steps. Everything but the number of steps is as in `quality_paired.py`. Runs are files in
--runs; a study that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gossamer.report.record import environment, write_record
from quality import FASHION
from quality_paired import BASE, SETTINGS, study
from quality_runs import run_once

RECORDS = Path(__file__).parent / "records"
DATA = {"translate": "", "lm": "train.en.gz", "german": "train.de.gz", "vision": None}  # None: --images
STEPS = 400
SEEDS = (20, 21, 22)  # of those of the records


def complete(task: str) -> dict[int, float]:
    """All-reduce's losses in the record of a task, by seed."""
    results = json.loads((RECORDS / f"quality-signal-{task}" / "record.json").read_text())["results"]
    return {run["seed"]: run["final"]["loss"] for run in results[BASE]["runs"]}


def shorter(task: str, args: argparse.Namespace) -> dict[int, float]:
    """All-reduce's losses after STEPS steps, by seed."""
    place = DATA[task]
    data = args.images if place is None else args.data / place
    given = argparse.Namespace(study=task, data=str(data), steps=STEPS)
    shared, rate, _ = study(given)
    values = {"per_node": [4] * 4, "eval_every": STEPS // 4, **shared, "lr": rate, **SETTINGS[BASE]}
    found = {}
    for seed in args.seeds:
        made = run_once({**values, "seed": seed}, args.runs / task / f"seed-{seed}.json")
        print(task, "seed", seed, made["final"], made["cpu_seconds"], "s", flush=True)
        found[seed] = made["final"]["loss"]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of Multi30k")
    parser.add_argument("--images", default=FASHION, help="Fashion-MNIST's folder")
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")], default=SEEDS)
    parser.add_argument("--runs", type=Path, default=Path("runs/quality-steps"), help="the folder of the runs")
    parser.add_argument("--record", type=Path, help="write a record to this folder")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")  # vmap's remarks about attention
    machine = environment()
    data: dict[str, Any] = {}
    lines = [
        f"All-reduce with Adam, as in the records quality-signal-*, seeds {', '.join(map(str, args.seeds))}: the loss "
        "after 400 steps here and after 800 steps there, and the loss that is gained per e-fold of steps: the "
        "median of the seeds (least and most).",
        "",
        "| task | 400 steps | 800 steps | per e-fold |",
        "|---|---|---|---|",
    ]
    for task in DATA:
        half, whole = shorter(task, args), complete(task)
        slopes = [(half[s] - whole[s]) / math.log(2) for s in args.seeds]
        data[task] = {"losses": half, "slopes": slopes, "slope": statistics.median(slopes)}
        losses = [", ".join(f"{found[s]:.3f}" for s in args.seeds) for found in (half, whole)]
        lines.append(
            f"| {task} | {losses[0]} | {losses[1]} | {data[task]['slope']:.2f} "
            f"({min(slopes):.2f} to {max(slopes):.2f}) |"
        )
    summary = "\n".join(lines)
    print(summary)
    if args.record:
        write_record(args.record, data={"results": data}, summary=summary, environment=machine)


if __name__ == "__main__":
    main()
