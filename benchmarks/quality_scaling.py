"""Quality against the number of workers, on virtual workers: the records `quality-batch` and `quality-weak-scaling`.

    python benchmarks/quality_scaling.py batch --data ../shared/data/multi30k/train.en.gz \\
        --record benchmarks/records/quality-batch
    python benchmarks/quality_scaling.py weak --record benchmarks/records/quality-weak-scaling

`batch`: a language model with the same batch of all workers together, divided among 4, 8, 16 and 32 workers on nodes
of 4, at one learning rate. `weak`: images with the same batch per worker and the same number of gradients in all, on 4
to 64 workers, as in the tables of A2CiD2 (Nabli et al., NeurIPS 2023); times are simulated for nodes of 4 A40s, with
the same compute per worker and step for every number of workers. Runs are files in --runs; a study that was stopped
goes on where it was, on another machine from `runs.jsonl` of its record.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.jobs.clock import described_cluster, simulated
from gossamer.predict.methods import parse
from gossamer.recipes.config import make_config
from gossamer.report.record import environment, write_record
from quality import FASHION, INSIDE
from quality_paired import _slug
from quality_runs import pack, run_once, unpack

GLOBAL_WINDOWS = 128  # of the batch of all workers together
GRADIENTS = 9600  # of all workers together, in the weak scaling
Row = tuple[str, int, dict[str, Any]]  # setting, workers, configuration


def batch(args: argparse.Namespace) -> Iterator[Row]:
    shared = {"task": "lm", "steps": args.steps or 500, "warmup": (args.steps or 500) // 5, "lr": 8e-3}
    for n in (4, 8, 16, 32):
        options = {"data": args.data, "context": 32, "batch": GLOBAL_WINDOWS // n}
        base = shared | {"per_node": [4] * (n // 4), "options": options, "eval_every": 0}
        yield "all-reduce, Adam", n, base | {"method": "ddp"}
        yield "gossipadam:aer", n, base | {"method": "gossipadam:aer"}
        yield "dadam:aer", n, base | {"method": "dadam:aer"}
        if n > 4:
            yield "gossipadam:exp inside", n, base | {"method": "gossipadam:exp"} | INSIDE


def weak(args: argparse.Namespace) -> Iterator[Row]:
    options = {"data": args.data or FASHION, "width": 4, "norm": "group", "batch": 8}
    for n in (4, 8, 16, 32, 64):
        steps = (args.steps or GRADIENTS) // n
        base = {"task": "vision", "per_node": [4] * (n // 4), "options": options, "steps": steps, "eval_every": 0}
        base |= {"lr": 0.1, "clip": 0.0, "warmup": steps // 20}
        for momentum in (0.9, 0.0):
            told = f", momentum {momentum:g}"
            given = base | {"momentum": momentum, "lr": 0.1 if momentum else 0.4}
            yield f"all-reduce{told}", n, given | {"method": "ddp", "optimizer": "sgd"}
            for topology in ("ring", "exponential", "complete"):
                for method in ("ad-psgd", "a2cid2"):
                    yield f"{method}:{topology}{told}", n, given | {"method": f"{method}:{topology}"}


STUDIES = {"batch": batch, "weak": weak}


def weak_step_seconds(values: Mapping[str, Any]) -> float:
    """The simulated step time with the compute of the preset's 16 workers. Presets keep the batch of all workers
    together, so their compute per worker and step falls with the number of workers."""
    config = make_config({"virtual": True, "batched": "on", **values})
    cluster = described_cluster("a40", config.per_node)
    cluster = cluster.changed(compute={"seconds": cluster.compute.means(16)[0], "reference_workers": None})
    return float(simulated(parse(config.method), config, cluster)[0]["step_seconds"])


def table(study: str, found: dict[str, dict[int, list[dict[str, Any]]]]) -> str:
    """One row per setting, one column per number of workers."""
    numbers = sorted({n for by in found.values() for n in by})
    first = next(iter(found.values()))
    config = next(iter(first.values()))[0]["config"]
    options = ", ".join(f"{k} {v}" for k, v in config["options"].items() if k not in ("data", "batch"))
    parameters = next(iter(first.values()))[0]["parameters"]
    said = f"{parameters:,} parameters, {options}, seed {config['seed']}. "
    if study == "batch":
        said += (
            f"{config['steps']} steps at learning rate {config['lr']:g}, {config['warmup']} warm-up steps; all workers "
            f"together process {GLOBAL_WINDOWS} windows per step. Loss of the averaged model."
        )
    else:
        said += (
            f"{GRADIENTS} gradients of 8 images in all, SGD at learning rate 0.1 with momentum 0.9 and 0.4 without. "
            "Accuracy of the averaged model, and simulated seconds of the whole run on nodes of 4 A40s, with 52 ms of "
            "compute per worker and step."
        )
    lines = [said, "", "| workers | " + " | ".join(map(str, numbers)) + " |", "|---|" + "---|" * len(numbers)]
    for name, by in found.items():
        cells = [_cell(study, by[n]) if n in by else "" for n in numbers]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(study: str, runs: list[dict[str, Any]]) -> str:
    if any("final" not in r for r in runs):
        return "diverged"
    if study == "batch":
        return f"{sum(r['final']['loss'] for r in runs) / len(runs):.3f}"
    accuracy = sum(r["final"]["accuracy"] for r in runs) / len(runs)
    return f"{accuracy:.3f}, {runs[0]['config']['steps'] * runs[0]['step_seconds']:.0f} s"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--data", help="batch: a text; weak: the folder of Fashion-MNIST")
    parser.add_argument("--steps", type=int, help="batch: steps of a run; weak: gradients of all workers together")
    parser.add_argument("--seed", type=int, default=10)
    parser.add_argument("--only", default="", help="settings whose names contain this")
    parser.add_argument("--finished", action="store_true", help="run nothing: the record of what is there")
    parser.add_argument("--runs", type=Path, help="the folder of the runs (default runs/quality-STUDY)")
    parser.add_argument("--record", type=Path, help="write a record to this folder")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")  # vmap's remarks about attention
    machine = environment()
    folder = args.runs or Path("runs") / f"quality-{args.study}"
    unpack(args.record, folder)
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for name, n, values in STUDIES[args.study](args):
        file = folder / _slug(name) / f"n-{n}-seed-{args.seed}.json"
        if args.only not in name or (args.finished and not file.exists()):
            continue
        made = run_once(values | {"seed": args.seed}, file)
        if args.study == "weak":
            made["step_seconds"] = weak_step_seconds(values)
        found.setdefault(name, {}).setdefault(n, []).append(made)
        print(name, n, made.get("final") or made["diverged"], made["cpu_seconds"], "s", flush=True)
    summary = table(args.study, found)
    if args.record:
        data = {name: {str(n): runs for n, runs in by.items()} for name, by in found.items()}
        for by in data.values():
            for runs in by.values():
                for run in runs:
                    run["config"]["options"].pop("data", None)
                    run["curve"] = " ".join(f"{at}:{loss:.4g}" for at, loss in run["curve"][::3])
        write_record(args.record, data={"results": data}, summary=summary, environment=machine)
        pack(folder, args.record)
    print(summary)


if __name__ == "__main__":
    main()
