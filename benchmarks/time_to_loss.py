"""Time to loss on real processes: the same task trained by several methods in one run, loss against wall time.

    python benchmarks/time_to_loss.py --out benchmarks/records/time-to-loss

Real gradients and data, links and compute time of an emulated cluster. Every method trains at its own best learning
rate of a short search without sleeps and links (which do not change what is learnt by synchronous methods, only when).
The target is the loss that every method reaches: the highest of their final smoothed losses.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gossamer.lab import CpuMeter, LabCluster
from gossamer.lab.bench.setup import Setup
from gossamer.lab.bench.time_to_loss import LearningRun, curve, learn, time_to
from gossamer.predict.methods import Method, parse_list
from gossamer.report.plots import draw_loss
from gossamer.report.record import environment, write_record


def best_rate(method: Method, setup: Setup, args: argparse.Namespace) -> tuple[float, list[dict[str, Any]]]:
    """The learning rate with the lowest final loss, and the search."""
    still = tuple((0.0,) * args.search_steps for _ in range(setup.n))
    tried = []
    with LabCluster(per_node=setup.per_node, network="loopback") as cluster, cluster.pool(timeout=600) as pool:
        for lr in args.lr:
            told = pool.run(learn, LearningRun(method, lr, still, args.width, args.batch, args.seed))
            tried.append({"lr": lr, "final_loss": told[0]["final"]})
            print(f"{method}: lr {lr:g}: loss {told[0]['final']:.4f}", flush=True)
    return min(tried, key=lambda t: t["final_loss"])["lr"], tried


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="ddp,accumadam:aer")
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
    parser.add_argument(
        "--bucket-mb", type=float, default=0.2, help="for all methods; a layer of the task has 0.25 MiB"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--network", default="namespaces")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    machine = environment()
    link = None if args.network == "loopback" else args.link
    setup = Setup((args.per_node,) * args.nodes, link, compute=args.compute, jitter=args.jitter, network=args.network)
    table = setup.table(args.steps, args.seed)
    columns = tuple(tuple(map(float, column)) for column in table.T)
    methods = parse_list(args.methods)
    rates = {m: best_rate(m, setup, args) for m in methods}
    results, curves = [], {}
    with setup.cluster() as cluster, cluster.pool(timeout=7200) as pool:
        for method in methods:
            lesson = LearningRun(method, rates[method][0], columns, args.width, args.batch, args.seed, args.bucket_mb)
            with CpuMeter() as cpu:
                told = pool.run(learn, lesson)
            curves[str(method)] = curve(told)
            results.append(
                {
                    "method": str(method),
                    "lr": rates[method][0],
                    "search": rates[method][1],
                    "final_loss": told[0]["final"],
                    "seconds": curves[str(method)][-1][0],
                    "cpu_use": cpu.use,
                    "valid": not cpu.saturated,
                    "curve": curves[str(method)],
                }
            )
            print(f"{method}: {results[-1]['seconds']:.1f} s, loss {told[0]['final']:.4f}", flush=True)
    target = max(points[-1][1] for points in curves.values())
    lines = ["| method | lr | steps | seconds | final loss of the mean model | seconds to the target | CPU |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for r in results:
        r["seconds_to_target"] = time_to(r["curve"], target)
        lines.append(
            f"| {r['method']} | {r['lr']:g} | {args.steps} | {r['seconds']:.1f} | {r['final_loss']:.4f} | "
            f"{r['seconds_to_target']:.1f} | {100 * (r['cpu_use'] or 0):.0f} %{'' if r['valid'] else ' INVALID'} |"
        )
    summary = "\n".join(
        [*lines, "", f"Target: {target:.4f}, the highest of the final smoothed losses.", "", "![](loss.svg)"]
    )
    data = {"results": results, "target": target, "cluster": {**cluster.describe(), **setup.describe()}}
    write_record(args.out, data=data, summary=summary, environment=machine)
    draw_loss(curves, args.out / "loss.svg", target=target)
    print(summary)


if __name__ == "__main__":
    main()
