"""Gossip against all-reduce at all-reduce's own learning rate, paired by seed: the records `quality-paired-*`.

    python benchmarks/quality_paired.py translate --data ../shared/data/multi30k \\
        --record benchmarks/records/quality-paired-translate

Every setting runs at the best rate that all-reduce with Adam has on seed 0, with nothing else set by hand. Seeds 20 to
24 were in no choice of a rate, a form or a setting, and neither was the task `german`. A seed fixes weights and data
order, so the difference to all-reduce is taken seed by seed. Runs are files in --runs; a study that was stopped goes on
where it was, on another machine from `runs.jsonl` of its record. Runs of seed 0 at other rates (--seeds 0 --lr RATE)
are shown in the record as trials.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import quality_tables as tables
from gossamer.report.record import environment, write_record
from quality import FASHION, INSIDE
from quality_runs import pack, run_once, unpack

SEEDS = (20, 21, 22, 23, 24)
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}

NOTES = {
    "translate": "The model is a pre-norm transformer with one layer on either side, width 64.",
    "german": "The task that was kept out of every choice: a language model of German subwords (Multi30k).",
}

Settings = dict[str, dict[str, Any]]


def corrected(topology: str = "aer", **values: Any) -> dict[str, Any]:
    return {"method": f"gossipadam:{topology}"} | values


BASE = "all-reduce, Adam"
SETTINGS: Settings = {
    BASE: {"method": "ddp"},
    "gossipadam:aer": corrected(),
    "gossipadam:aer inside": corrected(**INSIDE),
    "gossipadam:exp inside": corrected("exp", **INSIDE),
    "gossipadam:complete inside": corrected("complete", **INSIDE),
    "dadam:aer": {"method": "dadam:aer"},
    "dadam:aer inside": {"method": "dadam:aer"} | INSIDE,
    "accumadam:aer": {"method": "accumadam:aer"},
    "accumadam:aer inside": {"method": "accumadam:aer"} | INSIDE,
    "gossipadam:aer, clipped at √replicas times the threshold": corrected(clipping="√replicas"),
    "gossipadam:aer, clipped at the threshold": corrected(clipping="threshold"),
    "gossipadam:aer, discount 2": corrected(discount=2.0),
    "gossipadam:aer inside, discount 2": corrected(discount=2.0, **INSIDE),
    "gossipadam:exp inside, discount 2": corrected("exp", discount=2.0, **INSIDE),
    "all-reduce, GossipAdam, discount 2": {"method": "ddp", "optimizer": "gossipadam", "discount": 2.0},
    "gossipadam:aer, atc": corrected(combine="atc"),
    "gossipadam:complete": corrected("complete"),
    "gossipadam:complete, atc": corrected("complete", combine="atc"),
}


def study(args: argparse.Namespace) -> tuple[dict[str, Any], float, str]:
    """The configuration that all settings share, all-reduce's best rate on seed 0, and the metric beside the loss."""
    if args.study == "translate":
        options: dict[str, Any] = {"data": args.data, "test": "test_2016_flickr", "batch": 96, "max_length": 40}
        options |= {"vocabulary": 1000, "same_shape": True, "beams": 1, "evaluate_on": 64}
        rate, metric = 16e-3, "bleu"
    elif args.study == "lm":
        options, rate, metric = {"data": args.data, "context": 32, "batch": 8}, 16e-3, "loss"
    elif args.study == "german":
        options = {"data": args.data, "context": 16, "batch": 8, "tokenizer": "bpe", "vocabulary": 1000}
        rate, metric = 8e-3, "loss"
    else:
        options = {"data": args.data or FASHION, "width": 8, "norm": "group", "batch": 8}
        options |= {"partition": "dirichlet:0.1"} if args.study == "skewed" else {}
        rate, metric = 32e-3, "accuracy"  # 0.064 is better by 0.003 on seed 0
    task = {"german": "lm", "skewed": "vision"}.get(args.study, args.study)
    steps = args.steps or 800
    return {"task": task, "options": options, "steps": steps, "warmup": steps // 5}, rate, metric


def perform(args: argparse.Namespace, folder: Path) -> tables.Found:
    """All runs, seed by seed, so that a study that was stopped compares its settings on the same seeds."""
    shared, best, _ = study(args)
    rate = args.lr or best
    base = {"per_node": [4] * 4, "eval_every": shared["steps"] // 4, **shared, "lr": rate}
    chosen = {n: v for n, v in SETTINGS.items() if re.search(args.only, n)}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    for seed in args.seeds:
        for name, values in chosen.items():
            file = folder / _slug(name) / f"lr-{rate:g}-seed-{seed}.json"
            if args.finished and not file.exists():
                continue
            made = run_once({**base, **values, "seed": seed}, file)
            runs[name].append(made)
            print(name, "seed", seed, made.get("final") or made["diverged"], made["cpu_seconds"], "s", flush=True)
    return {name: {"lr": rate, "runs": made} for name, made in runs.items() if made}


def differences(found: tables.Found, name: str, base: str, key: str = "loss") -> list[float]:
    """By seed, the setting's result minus that of `base`."""
    theirs = (
        {r["config"]["seed"]: r["final"][key] for r in found[base]["runs"] if "final" in r} if base in found else {}
    )
    ours = {r["config"]["seed"]: r["final"][key] for r in found[name]["runs"] if "final" in r}
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def interval(values: list[float], digits: int = 3) -> str:
    """Mean and 95 % interval of the mean, by Student's t."""
    if len(values) < 2:
        return ""
    mean, half = statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values)) * T95[len(values) - 1]
    return f"{mean:+.{digits}f} [{mean - half:+.{digits}f}, {mean + half:+.{digits}f}]"


def table(found: tables.Found, metric: str) -> str:
    first = next(iter(found.values()))["runs"][0]
    config = first["config"]
    options = ", ".join(f"{k} {v}" for k, v in config["options"].items() if k != "data")
    seeds = sorted({r["config"]["seed"] for got in found.values() for r in got["runs"]})
    extra = metric != "loss"
    head = ["setting", *([metric] if extra else []), "loss"]
    head += ["minus all-reduce"]
    lines = [
        f"{sum(config['per_node'])} virtual workers on nodes of {config['per_node'][0]}, {config['steps']} steps, "
        f"{first['parameters']:,} parameters, betas {list(config['betas'])}, {config['warmup']} warm-up steps, "
        f"{config['schedule']} schedule, {options}. "
        f"Every setting at learning rate {config['lr']:g}; gradients clipped at norm {config['clip']:g} under "
        "all-reduce, and by gossip where the averaged gradient is estimated to exceed that. `inside`: gradients "
        "averaged exactly inside a node. Loss and metric are those of the averaged model at the end: mean ± standard "
        "deviation. Differences of the loss are paired by seed: mean [95 % interval by Student's t]. "
        f"Seeds {', '.join(map(str, seeds))}: none was used to choose a rate or a setting. With one replica GossipAdam "
        "is Adam, so all-reduce with the same optimizer is the base.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for name, got in found.items():
        values = tables.finals(got, "loss")
        if not values:
            lines.append(f"| {name} | diverged |")
            continue
        row = [f"{name} ({len(values)} seed{'s' * (len(values) > 1)})"]
        row += [tables.figure_of(tables.finals(got, metric), tables.DIGITS[metric])] if extra else []
        row += [tables.figure_of(values, 3), interval(differences(found, name, BASE)) if name != BASE else ""]
        lines.append("| " + " | ".join(row) + " |")
    lines += ["", "| loss by seed | " + " | ".join(map(str, seeds)) + " |", "|---|" + "---|" * len(seeds)]
    for name, got in found.items():
        by = {r["config"]["seed"]: r["final"]["loss"] for r in got["runs"] if "final" in r}
        lines.append(f"| {name} | " + " | ".join(f"{by[s]:.3f}" if s in by else "" for s in seeds) + " |")
    return "\n".join(lines)


def trials(folder: Path, steps: int) -> dict[str, dict[str, Any]]:
    """By setting and rate, the runs of seed 0."""
    made: dict[str, dict[str, Any]] = {}
    for name in SETTINGS:
        files = (folder / _slug(name)).glob("lr-*-seed-0.json")
        runs = [run for file in files if (run := json.loads(file.read_text()))["config"]["steps"] == steps]
        if runs:
            made[name] = {f"{run['config']['lr']:g}": run for run in sorted(runs, key=lambda run: run["config"]["lr"])}
    return made


def trials_table(found: dict[str, dict[str, Any]]) -> str:
    rates = sorted({rate for runs in found.values() for rate in runs}, key=float)
    lines = ["Loss on seed 0 at other rates:", "", "| setting | lr " + " | lr ".join(rates) + " |"]
    lines += ["|---|" + "---|" * len(rates)]
    for name, runs in found.items():
        cells = [f"{tables.finals({'runs': [runs[r]]}, 'loss')[0]:.3f}" if r in runs else "" for r in rates]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.=]+", "-", name.lower())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("translate", "lm", "german", "vision", "skewed"))
    parser.add_argument("--data", help="the folder of Multi30k, a text, or Fashion-MNIST's folder")
    parser.add_argument("--steps", type=int, help="of a run")
    parser.add_argument("--lr", type=float, help="all-reduce's rate (default: that of its record)")
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")], default=SEEDS)
    parser.add_argument("--only", default="", help="a regular expression: the settings to run")
    parser.add_argument("--finished", action="store_true", help="run nothing: the record of what is there")
    parser.add_argument("--runs", type=Path, help="the folder of the runs (default runs/quality-paired-STUDY)")
    parser.add_argument("--record", type=Path, help="write a record to this folder")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")  # vmap's remarks about attention
    machine = environment()
    folder = args.runs or Path("runs") / f"quality-paired-{args.study}"
    unpack(args.record, folder)
    found = perform(args, folder)
    summary = table(found, study(args)[2])
    tried = trials(folder, study(args)[0]["steps"])
    if tried:
        summary += "\n\n" + trials_table(tried)
    if args.record:
        data = {"results": tables.compact(found)}
        data["trials"] = {name: [tables.short(run) for run in runs.values()] for name, runs in tried.items()}
        write_record(args.record, data=data, summary=summary, environment=machine, note=NOTES.get(args.study, ""))
        pack(folder, args.record)
    print(summary)


if __name__ == "__main__":
    main()
