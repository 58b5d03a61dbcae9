"""Time to loss on real processes: the same task trained by several methods in one run, loss against wall time.

    python benchmarks/time_to_loss.py --out benchmarks/records/time-to-loss

Real gradients and data, links and compute time of an emulated cluster. All methods train at the best learning rate of
the first one, which is all-reduce's, but for `NAME own`, which trains at its own. Rates come from a short search
without sleeps and links (which do not change what synchronous methods learn, only when). The target is the first
method's final loss, seed by seed, as the mean of the workers' own losses. `NAME inside` averages gradients exactly
inside nodes, `NAME f=4` exchanges one of 4 fragments of the model per step, `NAME avg=64` makes an exact average every
64 steps, and `NAME x=1.25` trains for 1.25 times as many steps, for a method that needs more of them to the target.
localsgd and diloco are torchft's, with an all-reduce every 8 steps; `diloco m=0.5` has that outer momentum.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gossamer.lab import CpuMeter, LabCluster
from gossamer.lab.bench.setup import Setup
from gossamer.lab.bench.time_to_loss import LearningRun, curve, learn, time_to
from gossamer.predict.methods import DILOCO_LR, DILOCO_MOMENTUM, Method, parse_list
from gossamer.report.plots import draw_loss
from gossamer.report.record import environment, write_record
from quality_tables import figure_of

METHODS = (
    "ddp,diloco own m=0.5 x=1.5,gossipadam:aer inside x=1.25,gossipadam:exp:bf16 inside x=1.25,"
    "gossipadam:exp:int8 inside f=2 avg=64 x=1.5"
)
WORDS = {"f": "fragments", "avg": "average_every"}


@dataclass(frozen=True)
class Contestant:
    """A method, how it averages gradients, and its bucket size."""

    name: str
    method: Method
    gradients: Literal["worker", "node"]
    bucket_mb: float | None
    options: dict[str, Any]
    longer: float = 1.0  # its steps over those of the first method
    own: bool = False  # it trains at its own best rate

    @classmethod
    def of(cls, text: str, ddp_bucket_mb: float, bucket_mb: float | None) -> Contestant:
        method, *words = text.split()
        (parsed,) = parse_list(method)
        size = ddp_bucket_mb if parsed.algorithm == "ddp" else bucket_mb
        named = dict(word.split("=") for word in words if "=" in word)
        longer, momentum = float(named.pop("x", 1.0)), float(named.pop("m", DILOCO_MOMENTUM))
        if unknown := sorted({*named} - {*WORDS} | {w for w in words if "=" not in w} - {"inside", "own"}):
            known = ", ".join(("inside", "own", *WORDS, "x", "m"))
            raise SystemExit(f"{text.strip()!r}: unknown {', '.join(unknown)}; known are {known}")
        options: dict[str, Any] = {WORDS[word]: int(value) for word, value in named.items()}
        if parsed.algorithm == "local":
            options = {"every": parsed.local_steps(1)}
        if parsed.name == "diloco":
            options |= {"lr": DILOCO_LR, "momentum": momentum}
        return cls(
            text.strip(), parsed, "node" if "inside" in words else "worker", size, options, longer, "own" in words
        )


def best_rate(one: Contestant, setup: Setup, args: argparse.Namespace) -> tuple[float, list[dict[str, Any]]]:
    """The learning rate with the lowest final loss, and the search."""
    still = tuple((0.0,) * args.search_steps for _ in range(setup.n))
    tried = []
    with LabCluster(per_node=setup.per_node, network="loopback") as cluster, cluster.pool(timeout=600) as pool:
        for lr in args.lr:
            lesson = LearningRun(
                one.method,
                lr,
                still,
                args.width,
                args.batch,
                args.seeds[0],
                gradients=one.gradients,
                options=one.options,
            )
            loss = pool.run(learn, lesson)[0]["final"]
            tried.append({"method": one.name, "lr": lr, "final_loss": loss})
            print(f"{one.name}: lr {lr:g}: loss {loss:.4f}", flush=True)
    return min(tried, key=lambda t: t["final_loss"])["lr"], tried


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--per-node", type=int, default=2)
    parser.add_argument("--link", default="10mbit")
    parser.add_argument("--compute", type=float, default=0.2)
    parser.add_argument("--jitter", default="none")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--search-steps", type=int, default=300)
    parser.add_argument("--lr", type=float, nargs="+", default=[0.001, 0.002, 0.004, 0.008, 0.016])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--ddp-bucket-mb", type=float, default=0.2, help="a layer of the task has 0.25 MiB")
    parser.add_argument("--bucket-mb", type=float, help="of gossip (default: chosen by Gossamer)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--network", default="namespaces")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    machine = environment()
    link = None if args.network == "loopback" else args.link
    setup = Setup((args.per_node,) * args.nodes, link, compute=args.compute, jitter=args.jitter, network=args.network)
    contestants = [Contestant.of(text, args.ddp_bucket_mb, args.bucket_mb) for text in args.methods.split(",")]
    rates: dict[str, float] = {}
    search: list[dict[str, Any]] = []
    for one in contestants:
        if one is contestants[0] or one.own:
            rates[one.name], tried = best_rate(one, setup, args)
            search += tried
    results: list[dict[str, Any]] = []
    with setup.cluster() as cluster, cluster.pool(timeout=7200) as pool:
        for seed in args.seeds:
            for one in contestants:
                table_of = setup.table(round(one.longer * args.steps), seed)
                columns = tuple(tuple(map(float, column)) for column in table_of.T)
                lesson = LearningRun(
                    one.method,
                    rates.get(one.name, rates[contestants[0].name]),
                    columns,
                    args.width,
                    args.batch,
                    seed,
                    one.bucket_mb,
                    gradients=one.gradients,
                    options=one.options,
                )
                with CpuMeter() as cpu:
                    told = pool.run(learn, lesson)
                points = curve(told)
                results.append(
                    {
                        "method": one.name,
                        "seed": seed,
                        "lr": lesson.lr,
                        "steps": len(table_of),
                        "final_loss": told[0]["final"],
                        "seconds": points[-1][0],
                        "cpu_use": cpu.use,
                        "valid": not cpu.saturated,
                        "curve": points,
                    }
                )
                print(f"{one.name}, seed {seed}: {points[-1][0]:.1f} s, loss {told[0]['final']:.4f}", flush=True)
    summary = table(results, contestants, args.steps)
    data = {"search": search, "results": results, "cluster": {**cluster.describe(), **setup.describe()}}
    write_record(args.out, data=data, summary=summary, environment=machine)
    first = {r["method"]: r["curve"] for r in results if r["seed"] == args.seeds[0]}
    draw_loss(first, args.out / "loss.svg", target=first[contestants[0].name][-1][1])
    print(summary)


def table(results: list[dict[str, Any]], contestants: list[Contestant], steps: int) -> str:
    """One row per method; adds to every result the seconds to the target of its seed."""
    base = contestants[0].name
    target = {r["seed"]: r["curve"][-1][1] for r in results if r["method"] == base}
    for r in results:
        r["seconds_to_target"] = time_to(r["curve"], target[r["seed"]])
    lines = [
        f"{steps} steps of {base}. The target of a seed is the final smoothed training loss of {base}: "
        + ", ".join(f"{loss:.4f} (seed {seed})" for seed, loss in target.items())
        + ". A method that does not reach it within its steps has no time.",
        "",
        f"| method | lr | steps | ms per step | final loss of the mean model | seconds to the target | times {base}'s "
        "speed: to the target | per step | CPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    whole = {r["seed"]: r for r in results if r["method"] == base}
    for one in contestants:
        mine = [r for r in results if r["method"] == one.name]
        reached = [r for r in mine if r["seconds_to_target"] is not None]
        ratio = [whole[r["seed"]]["seconds_to_target"] / r["seconds_to_target"] for r in reached]
        took = f"{statistics.mean(r['seconds_to_target'] for r in reached):.1f}" if reached else "-"
        took += "" if len(reached) == len(mine) else f" ({len(reached)} of {len(mine)} seeds)"
        step = statistics.mean(r["seconds"] / r["steps"] for r in mine)
        speed = statistics.mean(whole[r["seed"]]["seconds"] / steps / (r["seconds"] / r["steps"]) for r in mine)
        invalid = sum(not r["valid"] for r in mine)
        told = f", {invalid} INVALID" if invalid else ""
        lines.append(
            f"| {one.name} | {mine[0]['lr']:g} | {mine[0]['steps']} | {1000 * step:.0f} | "
            f"{figure_of([r['final_loss'] for r in mine], 4)} | {took} | {figure_of(ratio, 2) if ratio else '-'} | "
            f"{speed:.2f} | {100 * max(r['cpu_use'] or 0 for r in mine):.0f} %{told} |"
        )
    return "\n".join([*lines, "", "![](loss.svg)"])


if __name__ == "__main__":
    main()
