"""How sensitive AccumAdam is to its settings, and how A2CiD2 holds workers together: two records.

    python benchmarks/quality.py sensitivity --record benchmarks/records/quality-sensitivity
    python benchmarks/quality.py asynchronous --record benchmarks/records/quality-asynchronous

Virtual workers, every setting at the learning rate that its name says. Runs are files in --runs; a study that was
stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quality_tables as tables
from gossamer.report.record import environment, write_record
from quality_runs import run_once

FASHION = "/usr/share/datasets/fashion-mnist"
INSIDE = {"exact_inside": True}


@dataclass
class Setting:
    """A method, its learning rate, and what differs from the study's configuration."""

    name: str
    method: str
    values: dict[str, Any]
    lr: float


@dataclass
class Study:
    settings: list[Setting]
    values: dict[str, Any]
    seeds: int


def sensitivity(args: argparse.Namespace) -> Study:
    """Language model, the batch of all workers together always 32 windows: s x workers, beta2, learning rate."""
    settings = []
    for workers in (4, 16):
        base = {"per_node": [workers // 4] * 4, "options": {"context": 32, "batch": 32 // workers}}
        for rate in (8e-3, 16e-3, 32e-3):
            settings.append(Setting(f"n={workers} dadam lr {rate:g}", "dadam:exp", base, rate))
            for s in (2, 4, 8):
                for per in ("step", "accumulation"):
                    if per == "accumulation" and s != 4:
                        continue
                    values = {**base, "accumulate": s, "betas_per": per}
                    name = f"n={workers} accumadam s={s} per {per} lr {rate:g}"
                    settings.append(Setting(name, "accumadam:exp", values, rate))
    for method in ("dadam:exp", "accumadam:exp"):
        for beta2 in (0.95, 0.999):
            values = {**base, "betas": [0.9, beta2]}
            settings.append(Setting(f"n=16 {method[:-4]} beta2={beta2:g} lr 0.016", method, values, 16e-3))
    return Study(settings, {"task": "lm", "steps": args.steps or 200}, seeds=1)


def asynchronous(args: argparse.Namespace) -> Study:
    """AD-PSGD and A2CiD2 with a constant rate, so that there is a stationary phase; the same exchanges for both."""
    settings = []

    def both(name: str, n: int, rate: float, partition: str = "dirichlet:0.1") -> None:
        steps = args.steps or (400 if n == 16 else 320)
        size = {"width": 4, "batch": 32} if n == 16 else {"width": 2, "batch": 8}
        options = {**size, "norm": "group", "partition": partition, "evaluate_on": 64}
        base = {"per_node": [n], "steps": steps, "schedule": "constant", "eval_every": steps // 40}
        base |= {"momentum": 0.0, "clip": 0.0, "options": options}
        for method in ("ad-psgd:ring", "a2cid2:ring"):
            settings.append(Setting(f"{name} {method}", method, base, rate))

    both("16 skewed, lr 0.005", 16, 0.005)
    both("64 skewed, lr 0.005", 64, 0.005)
    both("16 skewed, lr 0.05", 16, 0.05)
    both("16 even, lr 0.01", 16, 0.01, "iid")
    return Study(settings, {"task": "vision"}, seeds=5)


NOTES = {
    "asynchronous": "Step sizes were chosen after one seed had shown that the ratio falls to that of a constant pull "
    "as the step becomes small; a larger step stands beside it.",
}
STUDIES = {s.__name__: s for s in (sensitivity, asynchronous)}


def perform(study: Study, folder: Path, only: str, finished: bool = False) -> dict[str, Any]:
    """By setting its learning rate and its runs, a run per seed; with `finished`, those that are there."""
    found: dict[str, Any] = {}
    for setting in study.settings:
        if only and not re.search(only, setting.name):
            continue
        base = {"per_node": [4] * 4, "eval_every": study.values.get("steps", 400) // 4}
        base |= {**study.values, "method": setting.method, **setting.values, "lr": setting.lr}
        where = folder / re.sub(r"[^a-z0-9.=]+", "-", setting.name)
        runs = []
        for seed in range(study.seeds):
            file = where / f"lr-{setting.lr:g}-seed-{seed}.json"
            if finished and not file.exists():
                continue
            made = run_once({**base, "seed": seed}, file)
            final = made.get("final", {})
            print(setting.name, f"seed {seed}", final or made["diverged"], made["cpu_seconds"], "s", flush=True)
            runs.append(made)
        if runs:
            found[setting.name] = {"method": setting.method, "lr": setting.lr, "runs": runs}
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--steps", type=int, help="of a run")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--only", default="", help="a regular expression: the settings to run")
    parser.add_argument("--finished", action="store_true", help="run nothing: the record of what is there")
    parser.add_argument("--runs", type=Path, help="the folder of the runs (default runs/quality-STUDY)")
    parser.add_argument("--record", type=Path, help="write a record to this folder")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")  # vmap's remarks about attention
    machine = environment()
    study = STUDIES[args.study](args)
    study.seeds = args.seeds or study.seeds
    found = perform(study, args.runs or Path("runs") / f"quality-{args.study}", args.only, args.finished)
    if args.record:
        summary, picture = tables.describe(args.study, found)
        note = NOTES.get(args.study, "")
        write_record(
            args.record,
            data={"results": tables.compact(found)},
            summary=summary,
            environment=machine,
            note=note,
        )
        picture(args.record / "plot.svg")
        print(summary)


if __name__ == "__main__":
    main()
