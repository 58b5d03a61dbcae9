"""Bytes per token against loss, for links too thin for an exchange in every step: the records `thin-quality-*`.

    python benchmarks/thin_quality.py lm --data ../shared/data/multi30k/train.en.gz \\
        --record benchmarks/records/thin-quality-lm
    python benchmarks/thin_quality.py translate --data ../shared/data/multi30k \\
        --record benchmarks/records/thin-quality-translate

16 virtual workers, each on a node of its own, so that every byte crosses a link between nodes. (AER then sends in every
second round, and the one-peer exponential graph, `exp`, in every round.) Rates are searched on seed 0 by factors of two
until the best one has a worse neighbor on both sides; all seeds, seed 0 among them, then use it: every setting had the
same search. A setting is on the Pareto front if no other one has both fewer bytes and less loss. Bytes are those that a
worker sends, exact averages and those that measure the signal for GossipAdam included, over the tokens that all workers
see. Runs are files in --runs; a study that was stopped goes on where it was, on another machine from `runs.jsonl` of
its record. --finished runs nothing and tables what is there.
"""

from __future__ import annotations

import argparse
import re
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gossamer.report.record import environment, write_record
from quality_paired import study
from quality_runs import pack, run_once, search_rates, unpack

WORKERS = 16
STEPS = 400
SEEDS = (0, 10, 11)
RATES = (4e-3, 8e-3)  # tried first
REFRESH = 64  # steps between exact averages, for wires that are relative to them

Settings = dict[str, dict[str, Any]]


def gossip(wire: str = "fp32", refresh: int = 0, topology: str = "aer", **values: Any) -> dict[str, Any]:
    fresh = {"average_every": refresh} if refresh else {}
    return {"method": f"gossipadam:{topology}:{wire}", **fresh, **values}


def local(h: int, **values: Any) -> dict[str, Any]:
    """Gossip after every h local steps. It waits for its exchange, as DiLoCo does, unless `combine` says otherwise."""
    return gossip(every=h, **{"combine": "atc", **values})


def diloco(h: int, **values: Any) -> dict[str, Any]:
    return {"method": "diloco", "every": h, **values}


SETTINGS: Settings = {  # what matters most first: a study may be stopped
    "all-reduce": {"method": "ddp"},
    "gossip fp32": gossip(),
    "gossip int4, 4 fragments": gossip("int4", REFRESH, fragments=4),
    "gossip exp int4, 4 fragments": gossip("int4", 2 * REFRESH, topology="exp", fragments=4),
    "gossip exp int4, 4 fragments, atc": gossip("int4", 2 * REFRESH, topology="exp", fragments=4, combine="atc"),
    **{f"DiLoCo, momentum 0.5, H = {h}": diloco(h, outer_momentum=0.5) for h in (8, 32)},
    "gossip int4": gossip("int4", REFRESH),
    "gossip int8": gossip("int8", REFRESH),
    "gossip bf16": gossip("bf16"),
    **{f"gossip fp32, Nesterov, H = {h}": local(h, outer="nesterov") for h in (4, 16)},
    **{f"DiLoCo, H = {h}": diloco(h) for h in (8, 32)},
    "gossip int8, 4 fragments": gossip("int8", 2 * REFRESH, fragments=4),
    **{f"gossip fp32, {f} fragments": gossip(fragments=f) for f in (2, 4, 8)},
    "gossip int4, 8 fragments": gossip("int4", REFRESH, fragments=8),
    "gossip int8, 8 fragments": gossip("int8", 2 * REFRESH, fragments=8),
    "gossip exp int4": gossip("int4", REFRESH, topology="exp"),
    "gossip fp32, local steps, H = 16": local(16),
    "LocalSGD, H = 8": {"method": "localsgd", "every": 8},
    "gossip fp32, heavy ball, H = 16": local(16, outer="heavy-ball"),
    "gossip fp32, accelerated, H = 16": local(16, outer="accelerated"),
    "gossip fp32, Nesterov with overlap, H = 16": local(16, outer="nesterov", combine="awc"),
    f"gossip fp32, averages every {REFRESH}": gossip(refresh=REFRESH),
    "DiLoCo with GossipAdam, momentum 0.5, H = 32": diloco(32, outer_momentum=0.5, optimizer="gossipadam"),
    "all-reduce, Nesterov, H = 16": {
        "method": "dadam:complete",
        "per_node": [WORKERS],
        "exact_inside": True,
        "every": 16,
        "outer": "nesterov",
        "combine": "atc",
    },
}
BASE = "gossip fp32"
COLORS = {"gossip": "tab:blue", "DiLoCo": "tab:orange", "LocalSGD": "tab:orange"}  # all-reduce: black


def perform(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """By setting: the rate with the least loss on seed 0, the losses there, and the runs of the other seeds at it."""
    shared, _, _ = study(args)
    base = {"per_node": [1] * WORKERS, "eval_every": max(1, shared["steps"] // 4), **shared}
    found: dict[str, dict[str, Any]] = {}
    for name, values in SETTINGS.items():
        if not re.search(args.only, name):
            continue

        def run(rate: float, seed: int, name: str = name, values: dict[str, Any] = values) -> dict[str, Any] | None:
            file = folder / re.sub(r"[^a-z0-9.]+", "-", name.lower()) / f"lr-{rate:g}-seed-{seed}.json"
            if args.finished and not file.exists():
                return None
            made = run_once({**base, **values, "lr": rate, "seed": seed}, file)
            print(name, f"lr {rate:g} seed {seed}", made.get("final") or made["diverged"], flush=True)
            return made

        tried = search_rates(lambda rate, run=run: run(rate, 0), args.rates)
        trials = {f"{rate:g}": made["final"]["loss"] if "final" in made else None for rate, made in tried.items()}
        good = [rate for rate, made in tried.items() if "final" in made]
        if not good:
            if tried:
                print(f"{name}: diverged at every rate", flush=True)
            continue
        best = min(good, key=lambda rate: tried[rate]["final"]["loss"])
        runs = [made for seed in args.seeds if (made := run(best, seed)) is not None]
        ended = [made for made in runs if "final" in made]
        if ended:
            found[name] = {"lr": best, "trials": trials, "runs": ended, "diverged": len(runs) - len(ended)}
    return found


def points(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row of each setting, fewest bytes first; `front`: no other setting has both fewer bytes and less loss."""
    rows = []
    for name, got in found.items():
        losses = [run["final"]["loss"] for run in got["runs"]]
        spread = statistics.stdev(losses) if len(losses) > 1 else None
        sent = statistics.mean(run["bytes"] / run["units"] for run in got["runs"])
        tried = sorted(got["trials"], key=float)
        edge = len(tried) > 1 and f"{got['lr']:g}" in (tried[0], tried[-1])
        row = {"setting": name, "lr": got["lr"], "edge": edge, "seeds": len(losses), "bytes_per_token": sent}
        row["diverged"] = got["diverged"]
        rows.append(row | {"loss": statistics.mean(losses), "std": spread, "trials": got["trials"]})
    for row in rows:
        row["front"] = not row["diverged"] and not beaten(row, rows)
    return sorted(rows, key=lambda row: row["bytes_per_token"])


def beaten(row: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Whether another setting, which converged on every seed, has both no more bytes and no more loss."""
    return any(
        o["bytes_per_token"] <= row["bytes_per_token"] and o["loss"] <= row["loss"]
        for o in rows
        if o is not row and not o["diverged"]
    )


def table(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    base = next((row["bytes_per_token"] for row in rows if row["setting"] == BASE), None)
    lines = [
        f"{WORKERS} virtual workers on nodes of their own, {study(args)[0]['steps']} steps, task {args.study}; every "
        "setting at its best rate of seed 0 (* the last rate that was tried). Exact averages are counted; "
        f"int8 and int4 have one every {REFRESH} steps, int8 and exp with fragments every {2 * REFRESH}. Gossip is on "
        "`aer` unless the setting says `exp`, the one-peer exponential graph; `atc` mixes after the step and waits for "
        "the exchange, all other gossip in every step overlaps it with the step.",
        "",
        "![Loss against bytes per token](front.svg)",
        "",
        f"| setting | bytes per token | of {BASE} | loss | lr | seeds | front |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        share = "" if base is None else f"{row['bytes_per_token'] / base:.3f}"
        loss = f"{row['loss']:.3f}" + ("" if row["std"] is None else f" ± {row['std']:.3f}")
        rate, ended = f"{row['lr']:g}{'*' * row['edge']}", f"{row['seeds']}{', rest diverged' * bool(row['diverged'])}"
        cells = [row["setting"], f"{row['bytes_per_token']:.1f}", share, loss, rate, ended]
        lines.append("| " + " | ".join([*cells, "yes" if row["front"] else ""]) + " |")
    return "\n".join([*lines, "", *verdicts(rows)])


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """What the study was to show: an eighth of the bytes at the same loss, and gossip that dominates DiLoCo."""
    own = [row for row in rows if row["setting"].startswith("gossip") and not row["diverged"]]
    base = next((row for row in rows if row["setting"] == BASE), None)
    said = []
    if base is not None and base["std"] is not None:
        found = at_least_as_good(own, base["bytes_per_token"] / 8, base["loss"] + base["std"])
        said.append(f"At most an eighth of the bytes of {BASE}, and within its standard deviation: {found}.")
    averaged = [row for row in rows if row["setting"].startswith(("DiLoCo", "LocalSGD"))]
    for other in averaged:
        if not beaten(other, averaged):  # the best that local steps with an all-reduce can do
            found = at_least_as_good(own, other["bytes_per_token"], other["loss"])
            said.append(f"No more bytes and no more loss than {other['setting']}: {found}.")
    return said


def at_least_as_good(rows: list[dict[str, Any]], most_bytes: float, most_loss: float) -> str:
    """The settings within both limits, each with its bytes and its loss relative to them."""
    names = [
        f"{r['setting']} ({r['bytes_per_token'] / most_bytes:.2f} times the limit, loss {r['loss'] - most_loss:+.3f})"
        for r in rows
        if r["bytes_per_token"] <= most_bytes and r["loss"] <= most_loss
    ]
    return "; ".join(names) or "none"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The picture: loss against bytes per token, with the Pareto front as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 5.5))
    front = [row for row in rows if row["front"]]
    axis.plot([r["bytes_per_token"] for r in front], [r["loss"] for r in front], color="0.6", lw=1, zorder=1)
    for row in rows:
        at = row["bytes_per_token"], row["loss"]
        color = next((shade for start, shade in COLORS.items() if row["setting"].startswith(start)), "black")
        axis.errorbar(*at, yerr=row["std"], fmt="o" if row["front"] else "x", capsize=2, color=color)
        place = {"xytext": (-5, -8), "ha": "right"} if row["front"] else {"xytext": (5, 3)}
        axis.annotate(row["setting"], at, fontsize=6, textcoords="offset points", **place)
    axis.set_xscale("log")
    axis.set_xlim(min(r["bytes_per_token"] for r in rows) / 3)  # room for names
    axis.set_xlabel("bytes that a worker sends per token")
    axis.set_ylabel("loss of the averaged model")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("translate", "lm"))
    parser.add_argument("--data", help="the folder of Multi30k, or a text")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run")
    parser.add_argument("--rates", type=lambda text: [float(r) for r in text.split(",")], default=RATES)
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",") if s], default=SEEDS)
    parser.add_argument("--only", default="", help="a regular expression: the settings to run")
    parser.add_argument("--finished", action="store_true", help="run nothing: the record of what is there")
    parser.add_argument("--runs", type=Path, help="the folder of the runs (default runs/thin-quality-STUDY)")
    parser.add_argument("--record", type=Path, help="write a record to this folder")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")  # vmap's remarks about attention
    machine = environment()
    folder = args.runs or Path("runs") / f"thin-quality-{args.study}"
    unpack(args.record, folder)
    rows = points(perform(args, folder))
    summary = table(rows, args)
    if args.record:
        write_record(args.record, data={"results": rows}, summary=summary, environment=machine, note="")
        draw(rows, args.record / "front.svg")
        pack(folder, args.record)
    print(summary)


if __name__ == "__main__":
    main()
