"""The noise scale of the tasks in `quality-paired-*`, measured by GossipAdam: the record `noise-scale`.

    python benchmarks/noise_scale.py --data ../shared/data/multi30k --record benchmarks/records/noise-scale

Configurations are those of `quality_paired.py`, with one seed, and the language model also with larger batches.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from gossamer.report.record import environment, write_record
from quality_runs import run_once

BASE: dict[str, Any] = {"per_node": [4] * 4, "seed": 5}
SETTINGS: dict[str, dict[str, Any]] = {
    "all 16 gossip": {"method": "gossipadam:aer"},
    "exact inside": {"method": "gossipadam:aer", "exact_inside": True},
    "all-reduce, GossipAdam": {"method": "ddp", "optimizer": "gossipadam", "discount": 2},
    "all-reduce, Adam": {"method": "ddp"},
}


def studies(data: str) -> dict[str, dict[str, Any]]:
    translate = {"data": data, "test": "test_2016_flickr", "batch": 96, "max_length": 40, "vocabulary": 1000}
    translate |= {"same_shape": True, "beams": 1, "evaluate_on": 64}
    made: dict[str, dict[str, Any]] = {
        f"language model, batch {batch}": {
            "task": "lm", "options": {"context": 32, "batch": batch}, "steps": 200, "lr": 2e-3
        }
        for batch in (2, 8, 32)
    }  # fmt: skip
    made |= {
        f"digits, batch {batch}": {
            "task": "vision", "options": {"width": 8, "norm": "group", "batch": batch}, "steps": 200, "lr": 8e-3
        }
        for batch in (4, 32)
    }  # fmt: skip
    made["language model, batch 2, 1000 steps"] = {**made["language model, batch 2"], "steps": 1000}
    return {"translation": {"task": "translate", "options": translate, "steps": 400, "lr": 8e-3}, **made}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of Multi30k")
    parser.add_argument("--runs", type=Path, default=Path("runs/noise-scale"))
    parser.add_argument("--only", default="", help="studies whose name contains this")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    rows: list[str] = []
    found: dict[str, dict[str, Any]] = {}
    for study, shared in studies(args.data).items():
        if args.only not in study:
            continue
        found[study] = {}
        for name, values in SETTINGS.items():
            config = {**BASE, **shared, **values, "eval_every": shared["steps"] // 10}
            made = run_once(config, args.runs / study.replace(" ", "-") / f"{name.replace(' ', '-')}.json")
            found[study][name] = made
            print(study, name, made.get("final"), made["noise"][-1], made["cpu_seconds"], "s", flush=True)
        rows += table(study, found[study])
    if args.record:
        lines = [
            "| task | setting | loss | minus all-reduce, Adam | noise scale, second half of the run | batch of a replica | of all |"
        ]
        lines += ["|---|---|---|---|---|---|---|", *rows]
        print("\n".join(lines), environment()["cpu"])
        write_record(args.record, {"runs": found}, "\n".join(lines))


def table(study: str, runs: dict[str, Any]) -> list[str]:
    base = runs["all-reduce, Adam"]["final"]["loss"]
    rows = []
    for name, run in runs.items():
        later = [row[1] for row in run["noise"][len(run["noise"]) // 2 :] if row[1] is not None]
        scale = f"{statistics.median(later):,.0f} ({min(later):,.0f} to {max(later):,.0f})" if later else ""
        batch, everyone = run["noise"][-1][2:]
        loss = run["final"]["loss"]
        rows.append(
            f"| {study} | {name} | {loss:.3f} | {loss - base:+.3f} | {scale} | {batch:,.0f} | {everyone:,.0f} |"
        )
    return rows


if __name__ == "__main__":
    main()
