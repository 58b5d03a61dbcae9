"""Gossip at all-reduce's best learning rate and at its own, beside all-reduce: the records `quality-rates-*`.

    python benchmarks/quality_rates.py translate --data ../shared/data/multi30k \\
        --record benchmarks/records/quality-rates-translate

Rates are searched on seed 0 by factors of two until the best one has a worse neighbor on both sides. The other seeds
then run at all-reduce's best rate and at the setting's own, and are in no choice. Differences to all-reduce are taken
seed by seed. Runs are files in --runs; a study that was stopped goes on where it was, on another machine from
`runs.jsonl` of its record.
"""

from __future__ import annotations

import argparse
import re
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import quality_tables as tables
from gossamer.report.plots.style import method_styles, new_figure, save
from gossamer.report.record import environment, write_record
from quality_paired import BASE, NOTES, SETTINGS, _slug, differences, interval, study
from quality_runs import pack, run_once, search_rates, unpack

STEPS = 400
SEEDS = (20, 21, 22)
COMPARED = [
    BASE,
    *(f"{optimizer}:aer{inside}" for optimizer in ("dadam", "accumadam", "gossipadam") for inside in ("", " inside")),
]
Found = dict[str, dict[str, Any]]


def perform(args: argparse.Namespace, folder: Path) -> Found:
    """By setting: the rates that were tried with their losses, the own best one, and the runs at both rates."""
    shared, start, _ = study(args)
    base = {"per_node": [4] * 4, "eval_every": shared["steps"], **shared}
    found: Found = {}
    for name in COMPARED:
        if not re.search(args.only, name):
            continue

        def run(rate: float, seed: int, name: str = name) -> dict[str, Any] | None:
            file = folder / _slug(name) / f"lr-{rate:g}-seed-{seed}.json"
            if args.finished and not file.exists():
                return None
            made = run_once({**base, **SETTINGS[name], "lr": rate, "seed": seed}, file)
            print(
                name,
                f"lr {rate:g} seed {seed}",
                made.get("final") or made["diverged"],
                made["cpu_seconds"],
                "s",
                flush=True,
            )
            return made

        theirs = found[BASE]["lr"] if BASE in found else start
        tried = search_rates(lambda rate, run=run: run(rate, 0), (theirs / 2, theirs, 2 * theirs))
        good = {rate: made["final"]["loss"] for rate, made in tried.items() if "final" in made}
        if not good:
            continue
        own = min(good, key=lambda rate: good[rate])
        theirs = own if name == BASE else theirs
        runs = {
            rate: [made for seed in args.seeds if (made := run(rate, seed))] for rate in dict.fromkeys((theirs, own))
        }
        if runs[theirs]:
            found[name] = {"lr": own, "tried": good, "at": runs}
    return found


def table(found: Found, metric: str) -> str:
    """One row per setting: at all-reduce's rate, and at its own."""
    rate = found[BASE]["lr"]
    first = found[BASE]["at"][rate][0]
    config = first["config"]
    options = ", ".join(f"{k} {v}" for k, v in config["options"].items() if k != "data")
    heads = [metric, "loss"] if metric != "loss" else ["loss"]
    lines = [
        f"{sum(config['per_node'])} virtual workers on nodes of {config['per_node'][0]}, {config['steps']} steps, "
        f"{first['parameters']:,} parameters, betas {list(config['betas'])}, s = {config['accumulate']} with betas per "
        f"{config['betas_per']}, {config['warmup']} warm-up steps, {config['schedule']} schedule, {options}. `inside`: "
        "gradients averaged exactly inside a node. Results are those of the averaged model at the end, mean ± standard "
        f"deviation over seeds {', '.join(map(str, SEEDS))}; rates are chosen on seed 0 (* the last rate that was "
        "tried). `minus all-reduce` is the difference of the loss to all-reduce at its own best rate, paired by seed: "
        "mean [95 % interval by Student's t].",
        "",
        "| setting | "
        + " | ".join(f"{h} at lr {rate:g}" for h in heads)
        + " | minus all-reduce | own lr | "
        + " | ".join(f"{h} there" for h in heads)
        + " | minus all-reduce |",
        "|---|" + "---|" * (2 * len(heads) + 3),
    ]

    def results(name: str, lr: float) -> list[str]:
        runs = {"runs": found[name]["at"][lr]}
        pair = {BASE: {"runs": found[BASE]["at"][rate]}, name: runs}
        losses = [tables.finals(runs, head) for head in heads]
        cells = [tables.figure_of(values, 3) if values else "diverged" for values in losses]
        return [*cells, "" if name == BASE else interval(differences(pair, name, BASE))]

    for name, got in found.items():
        edge = "*" if got["lr"] in (min(got["tried"]), max(got["tried"])) else ""
        seeds = len(got["at"][rate])
        cells = [f"{name} ({seeds} seeds)", *results(name, rate), f"{got['lr']:g}{edge}", *results(name, got["lr"])]
        lines.append("| " + " | ".join(cells) + " |")
    rates = sorted({r for got in found.values() for r in got["tried"]})
    lines += [
        "",
        "Loss on seed 0, by which the rates are chosen:",
        "",
        "| setting | lr " + " | lr ".join(f"{r:g}" for r in rates) + " |",
    ]
    lines.append("|---|" + "---|" * len(rates))
    for name, got in found.items():
        lines.append(
            f"| {name} | " + " | ".join(f"{got['tried'][r]:.3f}" if r in got["tried"] else "" for r in rates) + " |"
        )
    return "\n".join([*lines, "", "![Loss at all-reduce's rate and at the own rate](rates.svg)"])


def draw(found: Found, path: Path) -> None:
    """The mean loss of each setting at all-reduce's rate (open) and at its own (filled); the band is all-reduce."""
    figure = new_figure(7.5, 0.9 + 0.32 * len(found))
    axes = figure.subplots()
    rate = found[BASE]["lr"]
    losses = tables.finals({"runs": found[BASE]["at"][rate]}, "loss")
    mean, spread = statistics.mean(losses), statistics.stdev(losses)
    axes.axvspan(mean - spread, mean + spread, color=tables.GREY, alpha=0.35, linewidth=0)
    others = [name for name in found if name != BASE]
    styles = method_styles(others)
    for at, name in enumerate(others):
        for lr, face in ((rate, "none"), (found[name]["lr"], styles[name].color)):
            values = tables.finals({"runs": found[name]["at"][lr]}, "loss")
            if values:
                color, bar = styles[name].color, statistics.stdev(values) if len(values) > 1 else 0.0
                axes.errorbar(statistics.mean(values), at, xerr=bar, fmt="o", color=color, markerfacecolor=face)
    axes.set_yticks(range(len(others)), others)
    axes.set_ylim(len(others) - 0.5, -0.5)
    axes.set_xlabel(
        "loss at all-reduce's rate (open) and at its own (filled);\nband and bars: ± standard deviation over seeds"
    )
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("translate", "lm", "german", "vision", "skewed"))
    parser.add_argument("--data", help="the folder of Multi30k, a text, or Fashion-MNIST's folder")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run")
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")], default=SEEDS)
    parser.add_argument("--only", default="", help="a regular expression: the settings to run")
    parser.add_argument("--finished", action="store_true", help="run nothing: the record of what is there")
    parser.add_argument("--runs", type=Path, help="the folder of the runs (default runs/quality-rates-STUDY)")
    parser.add_argument("--record", type=Path, help="write a record to this folder")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    machine = environment()
    folder = args.runs or Path("runs") / f"quality-rates-{args.study}"
    unpack(args.record, folder)
    found = perform(args, folder)
    summary = table(found, study(args)[2])
    if args.record:
        data = {
            name: {"lr": got["lr"], "tried": {f"{r:g}": loss for r, loss in got["tried"].items()}}
            for name, got in found.items()
        }
        write_record(
            args.record, data={"results": data}, summary=summary, environment=machine, note=NOTES.get(args.study, "")
        )
        draw(found, args.record / "rates.svg")
        pack(folder, args.record)
    print(summary)


if __name__ == "__main__":
    main()
