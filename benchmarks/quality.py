"""Quality against all-reduce with the same number of steps, on virtual workers: the records `quality-*`.

    python benchmarks/quality.py translate --data ../shared/data/multi30k --record benchmarks/records/quality-translate

Every setting has its own learning rate: the same number of trials on the first seed, by factors of two in the
direction that helps, judged by the loss of the averaged model. The best trial is the first of the seeds. Runs are files
in --runs; a study that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import quality_tables as tables
from gossamer.report.record import environment, write_record
from quality_runs import run_once

FASHION = "/usr/share/datasets/fashion-mnist"
GOSSIP = [f"{o}:{t}" for o in ("dadam", "accumadam") for t in ("ring", "aer", "complete")]
INSIDE = {"exact_inside": True}


@dataclass
class Setting:
    """A method and what differs from the study's configuration."""

    name: str
    method: str
    values: dict[str, Any] = field(default_factory=dict)
    lr: float | None = None  # where the search starts; None: where the study's does
    search: bool = True
    like: str = ""  # no search: the rate of that setting, which comes before


@dataclass
class Study:
    settings: list[Setting]
    values: dict[str, Any]
    start: float
    metric: str = "loss"
    trials: int = 3
    seeds: int = 3


def translate(args: argparse.Namespace) -> Study:
    options = {
        "data": args.data,
        "test": "test_2016_flickr",
        "batch": args.batch or 96,
        "max_length": 40,
        "vocabulary": 1000,
        "same_shape": True,
        "beams": 1,
        "evaluate_on": 64,
    }
    settings = [Setting("ddp", "ddp")]
    settings += [Setting(f"{m} inside", m, INSIDE) for m in GOSSIP if m.endswith("aer")]
    settings += [Setting(m, m) for m in GOSSIP]
    settings += [Setting(f"{m} inside", m, INSIDE) for m in GOSSIP if not m.endswith("aer")]
    return Study(settings, {"task": "translate", "options": options, "steps": args.steps or 400}, 8e-3, "bleu")


def vision(args: argparse.Namespace) -> Study:
    options = {"data": args.data or FASHION, "width": 4, "norm": "group", "batch": args.batch or 4}
    asynchronous = [Setting(m, m, {}, 0.1) for m in ("a2cid2:ring", "ad-psgd:ring")]
    settings = [Setting("ddp", "ddp"), *(Setting(m, m) for m in GOSSIP), *asynchronous]
    settings += [Setting(f"{m} inside", m, INSIDE) for m in GOSSIP if m.endswith("aer")]
    return Study(settings, {"task": "vision", "options": options, "steps": args.steps or 300}, 32e-3, "accuracy")


def skewed(args: argparse.Namespace) -> Study:
    """Vision with label-skewed shards, and what helps."""
    made = vision(args)
    made.values["steps"] = args.steps or 200
    made.values["options"]["partition"] = "dirichlet:0.1"
    made.settings = [
        Setting("ddp", "ddp"),
        Setting("dadam:aer", "dadam:aer"),
        Setting("dadam:aer average_every 8", "dadam:aer", {"average_every": 8}),
        Setting("dadam:aer inside", "dadam:aer", INSIDE),
        Setting("accumadam:aer", "accumadam:aer"),
        Setting("accumadam:aer inside", "accumadam:aer", INSIDE),
    ]
    return made


def lm(args: argparse.Namespace) -> Study:
    options = {"context": 32, "batch": args.batch or 2}
    steps = args.steps or 200
    longer = {"steps": steps * 3 // 2}
    settings = [
        Setting("ddp", "ddp"),
        Setting("dadam:aer inside", "dadam:aer", INSIDE),
        Setting("dadam:aer", "dadam:aer"),
        Setting("accumadam:aer", "accumadam:aer"),
        Setting("accumadam:aer inside", "accumadam:aer", INSIDE),
        Setting("dadam:aer, 1.5 times the steps", "dadam:aer", longer, like="dadam:aer"),
        Setting("dadam:aer inside, 1.5 times the steps", "dadam:aer", {**INSIDE, **longer}, like="dadam:aer inside"),
    ]
    return Study(settings, {"task": "lm", "options": options, "steps": steps}, 8e-3)


def sensitivity(args: argparse.Namespace) -> Study:
    """Language model, the batch of all workers together always 32 windows: s x workers, beta2, learning rate."""
    settings = []
    for workers in (4, 16):
        base = {"per_node": [workers // 4] * 4, "options": {"context": 32, "batch": 32 // workers}}
        for rate in (8e-3, 16e-3, 32e-3):
            settings.append(Setting(f"n={workers} dadam lr {rate:g}", "dadam:exp", base, rate, search=False))
            for s in (2, 4, 8):
                for per in ("step", "accumulation"):
                    if per == "accumulation" and s != 4:
                        continue
                    values = {**base, "accumulate": s, "betas_per": per}
                    name = f"n={workers} accumadam s={s} per {per} lr {rate:g}"
                    settings.append(Setting(name, "accumadam:exp", values, rate, search=False))
    for method in ("dadam:exp", "accumadam:exp"):
        for beta2 in (0.95, 0.999):
            values = {**base, "betas": [0.9, beta2]}
            settings.append(
                Setting(f"n=16 {method[:-4]} beta2={beta2:g} lr 0.016", method, values, 16e-3, search=False)
            )
    return Study(settings, {"task": "lm", "steps": args.steps or 200}, 8e-3, seeds=1)


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
            settings.append(Setting(f"{name} {method}", method, base, rate, search=False))

    both("16 skewed, lr 0.005", 16, 0.005)
    both("64 skewed, lr 0.005", 64, 0.005)
    both("16 skewed, lr 0.05", 16, 0.05)
    both("16 even, lr 0.01", 16, 0.01, "iid")
    return Study(settings, {"task": "vision"}, 0.005, "accuracy", seeds=5)


NOTES = {
    "translate": "The model is a pre-norm transformer with one layer on either side, width 64: the recipe's `small` is "
    "too slow for 65 runs on two cores.",
    "lm": "All-reduce is better at rates below those that were tried: 2.481 at 0.002 on the first seed "
    "(quality-paired-lm). This table compares the methods on a plateau.",
    "vision": "Rates are chosen by test loss, for there is no validation set.",
    "skewed": "Rates are chosen by test loss, for there is no validation set.",
    "asynchronous": "Step sizes were chosen after one seed had shown that the ratio falls to that of a constant pull "
    "as the step becomes small; a larger step stands beside it.",
}
STUDIES = {s.__name__: s for s in (translate, vision, skewed, lm, sensitivity, asynchronous)}


class Missing(Exception):
    """A run that was not made yet, when only finished ones are asked for."""


def perform(study: Study, folder: Path, only: str, finished: bool = False) -> dict[str, Any]:
    """All runs of the study, or the settings for which all trials and three seeds are there; by setting the trials and
    the seeds."""
    found: dict[str, Any] = {}
    for setting in study.settings:
        if only and not re.search(only, setting.name):
            continue
        base = {"per_node": [4] * 4, "eval_every": study.values.get("steps", 400) // 4}
        base |= {**study.values, "method": setting.method, **setting.values}
        where = folder / re.sub(r"[^a-z0-9.=]+", "-", setting.name)

        def run(rate: float, seed: int, base: Any = base, where: Path = where, name: str = setting.name) -> Any:
            file = where / f"lr-{rate:g}-seed-{seed}.json"
            if finished and not file.exists():
                raise Missing
            made = run_once({**base, "lr": rate, "seed": seed}, file)
            final = made.get("final", {})
            print(name, f"lr {rate:g} seed {seed}", final or made["diverged"], made["cpu_seconds"], "s", flush=True)
            return made

        try:
            start = found[setting.like]["lr"] if setting.like else setting.lr or study.start
            tried = search(run, start, study.trials if setting.search and not setting.like else 1)
            best = min(tried, key=lambda rate: loss_of(tried[rate]))
            runs = [tried[best]]
            for seed in range(1, study.seeds):
                if finished and seed >= 3 and not (where / f"lr-{best:g}-seed-{seed}.json").exists():
                    break
                runs.append(run(best, seed))
        except (Missing, KeyError):
            if not finished:
                raise
            continue
        found[setting.name] = {
            "method": setting.method,
            "lr": best,
            "trials": {f"{rate:g}": made for rate, made in sorted(tried.items())},
            "runs": runs,
        }
    return found


def search(run: Any, start: float, trials: int) -> dict[float, Any]:
    """`trials` rates by factors of two: upwards while that helps, else downwards, at last between the best two."""
    tried: dict[float, Any] = {}
    rate = start
    while len(tried) < trials:
        tried[rate] = run(rate, 0)
        best = min(tried, key=lambda r: loss_of(tried[r]))
        if best == max(tried):
            rate = 2 * best
        elif best == min(tried):
            rate = best / 2
        else:
            rate = best * 2**0.5 if loss_of(tried[2 * best]) < loss_of(tried[best / 2]) else best / 2**0.5
    return tried


def loss_of(made: dict[str, Any]) -> float:
    return float(made["final"]["loss"]) if "final" in made else float("inf")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--data", help="for translate: the folder of Multi30k; for vision: Fashion-MNIST's")
    parser.add_argument("--steps", type=int, help="of a run")
    parser.add_argument("--batch", type=int, help="one worker's")
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
        summary, picture = tables.describe(args.study, study.metric, found)
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
