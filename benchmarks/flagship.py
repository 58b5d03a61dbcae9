"""Runs that go on until the result is one that a practitioner recognizes: the records `flagship-*`.

    python benchmarks/flagship.py translate --data ../shared/data/multi30k --out benchmarks/records/flagship-translate
    python benchmarks/flagship.py lm --data ../shared/data/multi30k/train.en.gz --out benchmarks/records/flagship-lm
    python benchmarks/flagship.py vision --out benchmarks/records/flagship-vision

All-reduce with Adam, and the default of `gossamer train` on the same 16 virtual workers (4 nodes of 4): GossipAdam on
`aer` between nodes, gradients averaged exactly inside them. Both train at one learning rate, for equally many steps.
Every run is `gossamer train` with checkpoints: a study that was stopped goes on where it was. The goals: 25 BLEU on
test_2016_flickr for English to German of Multi30k, an accuracy of 0.90 on Fashion-MNIST, and a validation loss of the
language model that has stopped falling.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.report.plots.style import new_figure, save
from gossamer.report.record import environment, write_record
from quality import FASHION

METHODS = ("ddp", "gossipadam:aer")


class Study(NamedTuple):
    """The options of `gossamer train`, the metric, and the goal."""

    options: dict[str, Any]
    metric: str
    goal: float | None


STUDIES = {
    "translate": Study(
        {"steps": 3000, "warmup": 300, "lr": 8e-3, "batch": 128, "model": "tiny", "vocabulary": 4000, "dropout": 0.1}
        | {"label_smoothing": 0.1, "test": "test_2016_flickr", "same_shape": True},
        "bleu",
        25.0,
    ),
    "lm": Study({"steps": 3000, "warmup": 300, "lr": 8e-3, "batch": 8, "context": 64, "model": "nano"}, "loss", None),
    "vision": Study({"steps": 1500, "warmup": 150, "lr": 1.6e-2, "width": 16, "norm": "group"}, "accuracy", 0.90),
}
EVALUATIONS = 20


def flags(options: dict[str, Any]) -> list[str]:
    """The options as flags of the command line."""
    made = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            made.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            made += [f"--{flag}", f"{value:g}" if isinstance(value, float) else str(value)]
    return made


def train(task: str, method: str, seed: int, study: Study, args: argparse.Namespace) -> Path:
    """Train, or continue; returns the folder of the run."""
    folder = args.runs / f"{task}-{method.replace(':', '-')}-seed-{seed}"
    options = {**study.options, **({"steps": args.steps, "warmup": args.steps // 10} if args.steps else {})}
    steps = options["steps"]
    if done(folder, steps):
        return folder
    command = [sys.executable, "-m", "gossamer", "train"]
    if any(folder.glob("checkpoints/step-*")):
        command += ["--resume", str(folder)]
    else:
        data = args.data or (FASHION if task == "vision" else None)
        command += [task, "--virtual", "16", "--method", method, "--seed", str(seed), "--out", str(folder)]
        command += ["--checkpoint-every", str(max(1, steps // 40)), "--eval-every", str(max(1, steps // EVALUATIONS))]
        command += [*flags(options), *(["--data", data] if data else [])]
    print(" ".join(command[3:]), flush=True)
    subprocess.run(
        [*command, "--json"], check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    """The evaluations of a run."""
    file = folder / "metrics-00000.jsonl"  # of the process that evaluates
    lines = file.read_text().splitlines() if file.exists() else []
    return [row for row in map(json.loads, lines) if "averaged" in row]


def done(folder: Path, steps: int) -> bool:
    return any(row["step"] >= steps and row["final"] for row in rows(folder))


def summary(found: dict[str, dict[int, list[dict[str, Any]]]], study: Study) -> str:
    metric = study.metric
    heads = ["loss"] if metric == "loss" else [metric, "loss"]
    lines = [f"| | {' | '.join(heads)} | of each seed |", "|---|" + "---|" * (len(heads) + 1)]
    for method, runs in found.items():
        last = [found[-1]["averaged"] for found in runs.values()]
        cells = [spread([each[name] for each in last]) for name in heads]
        each = ", ".join(f"{one[metric]:.4g}" for one in last)
        lines.append(f"| {method} | {' | '.join(cells)} | {each} |")
    if study.goal is not None:
        lowest = min(found[-1]["averaged"][metric] for runs in found.values() for found in runs.values())
        reached = "reached by every run" if lowest >= study.goal else f"NOT reached by every run: {lowest:.4g}"
        lines += ["", f"The goal, {metric} of at least {study.goal:g}, is {reached}."]
    else:
        for method, runs in found.items():
            falls = [
                found[-5]["averaged"]["loss"] - found[-1]["averaged"]["loss"]
                for found in runs.values()
                if len(found) > 4
            ]
            text = ", ".join(f"{fall:+.4f}" for fall in falls)
            lines += ["", f"{method}: in the last fifth of the run the loss fell by {text or '-'}."]
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4g}{deviation}"


def draw(found: dict[str, dict[int, list[dict[str, Any]]]], metric: str, path: Path) -> None:
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for number, (method, runs) in enumerate(found.items()):
        for seed, made in runs.items():
            label = method if seed == min(runs) else None
            axes.plot([r["step"] for r in made], [r["averaged"][metric] for r in made], color=f"C{number}", label=label)
    axes.set(xlabel="steps", ylabel=f"{metric} of the averaged model")
    axes.legend()
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=STUDIES)
    parser.add_argument("--data", help="the folder of Multi30k, a text, or the folder of Fashion-MNIST")
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")], default=[0, 1])
    parser.add_argument("--steps", type=int, help="of a run, for a trial")
    parser.add_argument("--runs", type=Path, default=Path("runs/flagship"), help="the folder of the runs")
    parser.add_argument(
        "--finished", action="store_true", help="train nothing: the record of the runs that are complete"
    )
    parser.add_argument("--out", type=Path, help="folder of the record")
    args = parser.parse_args()
    machine, study = environment(), STUDIES[args.task]
    found: dict[str, dict[int, list[dict[str, Any]]]] = {method: {} for method in METHODS}
    for seed in args.seeds:
        for method in METHODS:
            folder = args.runs / f"{args.task}-{method.replace(':', '-')}-seed-{seed}"
            if not args.finished:
                folder = train(args.task, method, seed, study, args)
            if done(folder, args.steps or study.options["steps"]):
                found[method][seed] = rows(folder)
    found = {method: runs for method, runs in found.items() if runs}
    if not found:
        raise SystemExit(f"no run in {args.runs} is complete; leave --finished out to train")
    text = summary(found, study)
    print(text)
    if args.out:
        options = ", ".join(f"{name} {value}" for name, value in study.options.items())
        write_record(
            args.out,
            data={"options": study.options, "evaluations": found},
            summary=f"{options}.\n\n{text}\n\n![{study.metric} against steps](curve.svg)",
            note="",
            environment=machine,
        )
        draw(found, study.metric, args.out / "curve.svg")


if __name__ == "__main__":
    main()
