"""The noise scale of small tasks, and how far gossip is behind all-reduce on them: the record `noise-scale`.

    python benchmarks/noise_scale.py --data ../shared/data/multi30k --record benchmarks/records/noise-scale

Translation and the language model with batch 2 are configured as in `quality_paired.py`. The others vary the batch, the
length of the run and the task; their learning rates are those of all-reduce in `quality_paired.py`, not searched anew.
Runs are files in --runs; a study that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from pathlib import Path
from typing import Any

from gossamer.report.noise import rounded
from gossamer.report.record import environment, write_record
from quality_runs import run_once

SEEDS = (5, 6, 7)
BASE = "all-reduce, Adam"
SETTINGS: dict[str, dict[str, Any]] = {
    "all 16 gossip": {"method": "gossipadam:aer"},
    "exact inside": {"method": "gossipadam:aer", "exact_inside": True},
    "all-reduce, GossipAdam, discount 2": {"method": "ddp", "optimizer": "gossipadam", "discount": 2},
    BASE: {"method": "ddp"},
}
NOTE = (
    "16 virtual workers on nodes of 4; gossip by gossipadam:aer with its defaults. The noise scale is the median of "
    "ten evaluations of a run, and then of the seeds; ∞ means that no signal was found in most of them. The columns "
    "`replica` and `all` are the batches of one replica and of all workers, in tokens or images. Differences of the "
    "loss are paired by seed."
)
COLUMNS = ("task", "setting", "seeds", "loss", f"minus {BASE}", "noise scale", "replica", "all", "scale / all")


def studies(data: str) -> dict[str, dict[str, Any]]:
    """The configurations by name."""
    translate = {"data": data, "test": "test_2016_flickr", "batch": 96, "max_length": 40, "vocabulary": 1000}
    translate |= {"same_shape": True, "beams": 1, "evaluate_on": 64}

    def lm(batch: int, steps: int = 200) -> dict[str, Any]:
        return {"task": "lm", "options": {"context": 32, "batch": batch}, "steps": steps, "lr": 2e-3}

    def digits(batch: int) -> dict[str, Any]:
        return {"task": "vision", "options": {"width": 8, "norm": "group", "batch": batch}, "steps": 200, "lr": 8e-3}

    return {
        "translation, 400 steps": {"task": "translate", "options": translate, "steps": 400, "lr": 8e-3},
        "language model, batch 2, 1000 steps": lm(2, 1000),
        "language model, batch 2, 200 steps": lm(2),
        "language model, batch 8, 200 steps": lm(8),
        "language model, batch 32, 200 steps": lm(32),
        "digits, batch 4, 200 steps": digits(4),
        "digits, batch 32, 200 steps": digits(32),
    }


def scale_of(run: dict[str, Any]) -> float | None:
    """The median noise scale of a run; None if its optimizer does not measure it."""
    if run["config"]["optimizer"] is None and run["config"]["method"] == "ddp":
        return None
    return statistics.median(math.inf if scale is None else scale for _, scale, *_ in run["noise"])


def table(study: str, found: dict[str, dict[int, Any]]) -> list[str]:
    """The rows of one study."""
    rows = []
    for name, runs in found.items():
        losses = {seed: run["final"]["loss"] for seed, run in runs.items()}
        paired = [loss - found[BASE][seed]["final"]["loss"] for seed, loss in losses.items()]
        scales = [scale for run in runs.values() if (scale := scale_of(run)) is not None]
        replica, everyone = next(iter(runs.values()))["noise"][-1][2:]
        scale = statistics.median(scales) if scales else None
        shown = ["", ""]
        if scale is not None:
            shown = ["∞", "∞"] if math.isinf(scale) else [rounded(scale), f"{scale / everyone:.2f}"]
        behind = f"{statistics.fmean(paired):+.3f} ({', '.join(f'{each:+.3f}' for each in paired)})"
        loss = f"{statistics.fmean(losses.values()):.3f}"
        cells = [study, name, str(len(runs)), loss, behind if name != BASE else "", shown[0]]
        rows.append("| " + " | ".join([*cells, f"{replica:,.0f}", f"{everyone:,.0f}", shown[1]]) + " |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="the folder of Multi30k")
    parser.add_argument("--runs", type=Path, default=Path("runs/noise-scale"), help="the folder of the runs")
    parser.add_argument("--only", default="", help="studies whose name contains this")
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")], default=SEEDS)
    parser.add_argument("--finished", action="store_true", help="run nothing: the record of what is there")
    parser.add_argument("--record", type=Path, help="write a record to this folder")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # vmap's remarks about attention
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    kept: dict[str, Any] = {}
    for study, shared in studies(args.data).items():
        found: dict[str, dict[int, Any]] = {name: {} for name in SETTINGS}
        for seed in args.seeds if args.only in study else ():
            for name, values in SETTINGS.items():
                file = args.runs / study.replace(" ", "-") / f"{name.replace(' ', '-')}-seed-{seed}.json"
                if args.finished and not file.exists():
                    continue
                given = {"per_node": [4] * 4, "seed": seed, "eval_every": shared["steps"] // 10}
                made = run_once({**given, **shared, **values}, file)
                found[name][seed] = made
                print(study, name, seed, made["final"]["loss"], scale_of(made), flush=True)
        whole = [seed for seed in args.seeds if all(seed in runs for runs in found.values())]
        found = {name: {seed: runs[seed] for seed in whole} for name, runs in found.items()}
        if whole:
            lines += table(study, found)
            keys = ("final", "noise", "config")
            kept[study] = {n: {s: {k: r[k] for k in keys} for s, r in runs.items()} for n, runs in found.items()}
    print("\n".join(lines))
    if args.record:
        write_record(
            args.record, data={"results": kept}, summary="\n" + "\n".join(lines), note=NOTE, environment=environment()
        )


if __name__ == "__main__":
    main()
