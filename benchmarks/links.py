"""Cost of on_failure="continue" without faults: TCP links of an elastic job against gloo.

    python benchmarks/links.py --out benchmarks/records/links

Workers on loopback train an emulated model with SGD on a ring, in turn with on_failure="raise" (gloo) and with
"continue" (TCP links, a directory, heartbeats). Loopback is the worst case: there a message costs only processor time,
while on a real network both transports wait for the same wire. Each size is measured with compute that sleeps, which
hides the exchange, and without compute, where a step is an exchange.
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import gossamer
from gossamer.comm.tcp import HostedDirectory
from gossamer.lab import CpuMeter, WorkerPool
from gossamer.lab.emulate import EmulatedModel
from gossamer.report.record import environment, write_record

KINDS = ("raise", "continue")
WARM_UP = 5


def worker(rank: int, args: argparse.Namespace, mb: float, compute: float, ports: list[int]) -> list[dict[str, Any]]:
    """Run a block of steps of each kind in turn; return the mean wall and processor seconds per step."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    blocks = []
    for port in ports:
        os.environ["GOSSAMER_DIRECTORY"] = f"127.0.0.1:{port}"
        block = {}
        for kind in KINDS:
            model = EmulatedModel(mb, 8, compute)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
            gossip = gossamer.decentralize(model, optimizer, topology="ring", on_failure=kind, timeout=60)
            for step in range(WARM_UP + args.steps):
                if step == WARM_UP:
                    dist.barrier()
                    began, used = time.perf_counter(), time.process_time()
                model().backward()
                optimizer.step()
                optimizer.zero_grad()
            block[kind] = {
                "step_s": (time.perf_counter() - began) / args.steps,
                "cpu_s": (time.process_time() - used) / args.steps,
                "lost": gossip.stats().get("lost_exchanges", 0),
            }
            dist.barrier()
            gossip.close()
        blocks.append(block)
    dist.destroy_process_group()
    return blocks


def measure(args: argparse.Namespace, mb: float, compute: float) -> dict[str, Any]:
    directories = [HostedDirectory() for _ in range(args.repeats)]
    with CpuMeter() as cpu, WorkerPool(args.workers, timeout=1800) as pool:
        blocks = pool.run(worker, args, mb, compute, [d.port for d in directories])[0]
    ratios = sorted(b["continue"]["step_s"] / b["raise"]["step_s"] for b in blocks)
    row: dict[str, Any] = {"mb": mb, "compute_s": compute, "ratio": statistics.median(ratios), "cpu_use": cpu.use}
    row |= {"ratio_spread": [ratios[0], ratios[-1]], "saturated": cpu.saturated, "samples": blocks}
    for kind in KINDS:
        row[kind] = {k: statistics.median(b[kind][k] for b in blocks) for k in blocks[0][kind]}
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model, compute | gloo, ms per step | TCP, ms per step | TCP / gloo | gloo, CPU ms | TCP, CPU ms | CPU |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        gloo, links = r["raise"], r["continue"]
        low, high = r["ratio_spread"]
        lines.append(
            f"| {r['mb']:g} MB, {r['compute_s']:g} s | {1e3 * gloo['step_s']:.1f} | {1e3 * links['step_s']:.1f} | "
            f"{r['ratio']:.2f} ({low:.2f} to {high:.2f}) | {1e3 * gloo['cpu_s']:.1f} | {1e3 * links['cpu_s']:.1f} | "
            f"{100 * (r['cpu_use'] or 0):.0f} %{' saturated' if r['saturated'] else ''} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--sizes", default="4:0.2,25:0.4,4:0,25:0", help="MB:SECONDS of compute, separated by commas")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, help="folder for the record")
    args = parser.parse_args()
    before = environment()
    rows = [measure(args, *map(float, size.split(":"))) for size in args.sizes.split(",")]
    lost = sum(b["continue"]["lost"] for r in rows for b in r["samples"])
    summary = (
        f"{args.workers} workers on loopback, ring, SGD; {args.repeats} blocks of {args.steps} steps of each kind, in "
        f"turn; CPU ms are per step of one worker. Exchanges lost: {lost}.\n\n{table(rows)}"
    )
    Console().print(summary, markup=False)
    if args.out is not None:
        note = "Without compute the cores are the bottleneck of both transports: those rows show the processor time."
        write_record(args.out, data={"results": rows}, summary=summary, note=note, environment=before)


if __name__ == "__main__":
    main()
