"""Gloo's edges against our TCP links: time and processor time per byte, on loopback and on shaped links.

    python benchmarks/links.py --out benchmarks/records/links          # about 5 minutes on two cores

Workers exchange parameters on a ring, four buckets at a time, as `decentralize` does with transport="gloo" and with
transport="tcp"; there is no model and no compute. Blocks of rounds of both transports alternate inside the same
processes, so that a slow moment of the machine meets both, and a ratio is that of two blocks side by side. On loopback
a byte costs only processor time: that is the worst case for either transport. On shaped links (network namespaces,
needs root) both wait for the same wire.

A case is written to OUT/cases.jsonl as soon as it is measured; the same command again continues after the last one.
"""

import argparse
import json
import math
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from gossamer.comm import (
    ChannelId,
    GlooTransport,
    Job,
    Plain,
    PrefixStore,
    Purpose,
    default_store,
    exchange,
    room_for,
    worker_group,
)
from gossamer.comm.tcp.static import StaticTcpTransport
from gossamer.lab import CpuMeter, LabCluster
from gossamer.report.record import environment, write_record
from gossamer.topology import Layout, build
from gossamer.topology.schedule import Schedule

KINDS = ("gloo", "tcp")
BUCKETS = 4
LOOPBACK = [(n, mb) for mb in (1, 4, 25, 100) for n in (2, 4, 8, 16)]
SHAPED = [(n, mb) for mb in (1, 4, 25) for n in (2, 4, 8, 16)] + [(2, 100)]
MEMORY = 5  # parameter sizes that a worker needs: sent, received, early messages of two neighbors, and some room


class Case(NamedTuple):
    link: str  # "loopback", or the rate of the shaped links
    workers: int
    mb: float


def worker(rank: int, case: Case, seconds: float, repeats: int) -> list[dict[str, dict[str, float]]]:
    """Alternate blocks of both transports; return each block's seconds and processor seconds per round, and bytes."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workers = worker_group(None)
    schedule = Schedule(build("ring", Layout.of([1] * workers.size)))
    size = round(case.mb * 1e6 / 4 / BUCKETS)
    values = [torch.full((size,), float(rank)) for _ in range(BUCKETS)]
    outs = [torch.zeros(room_for(size, 1)) for _ in range(BUCKETS)]
    transports: dict[str, Any] = {}
    for kind in KINDS:
        store = PrefixStore(f"links/{kind}", default_store())
        if kind == "gloo":
            transports[kind] = GlooTransport(store, workers, 120.0)
        else:
            transports[kind] = StaticTcpTransport(store, workers, 120.0, longest=2**40)
    channels = {k: t.channel(ChannelId(0, Purpose.PARAMETERS), BUCKETS, 120.0) for k, t in transports.items()}
    rounds = dict.fromkeys(KINDS, 0)

    def block(kind: str, count: int) -> dict[str, float]:
        dist.barrier()
        began, used, sent = time.perf_counter(), time.process_time(), 0
        for _ in range(count):
            jobs = []
            for b, (x, out) in enumerate(zip(values, outs, strict=True)):
                program = schedule.program(rounds[kind], b, rank, size)
                jobs.append(Job(rounds[kind], b, partial(exchange, program, x, out, Plain())))
                channels[kind].launch(jobs[-1])
            for job in jobs:
                while not channels[kind].wait(job, 60.0):
                    pass
                if job.error is not None:
                    raise job.error
                sent += sum(job.sent.values())
            rounds[kind] += 1
        return {
            "s": (time.perf_counter() - began) / count,
            "cpu_s": (time.process_time() - used) / count,
            "bytes": sent / count,
        }

    slowest = torch.tensor([max(block(kind, 2)["s"] for kind in KINDS)])  # also connects, and makes memory warm
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    count = max(1, min(1000, round(seconds / float(slowest))))
    blocks = [{kind: block(kind, count) for kind in KINDS} for _ in range(repeats)]
    dist.barrier()
    for kind in KINDS:
        channels[kind].close(1.0)
        transports[kind].close()
    dist.destroy_process_group()
    return blocks


def measure(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    shaped = case.link != "loopback"
    lab = LabCluster(
        nodes=case.workers,
        per_node=1,
        link=case.link if shaped else None,
        network="namespaces" if shaped else "loopback",
    )
    repeats = args.repeats if not shaped else max(3, args.repeats // 2)
    with lab as cluster, CpuMeter() as cpu:
        found = cluster.run(worker, case, args.seconds, repeats, timeout=600.0)
    blocks = [
        {
            kind: {
                "s": max(f[at][kind]["s"] for f in found),
                "cpu_s": sum(f[at][kind]["cpu_s"] for f in found),
                "bytes": sum(f[at][kind]["bytes"] for f in found),
            }
            for kind in KINDS
        }
        for at in range(repeats)
    ]
    row: dict[str, Any] = {**case._asdict(), "cpu_use": cpu.use, "saturated": cpu.saturated, "samples": blocks}
    for name, unit in (("ratio", "s"), ("cpu_ratio", "cpu_s")):
        ratios = sorted(b["tcp"][unit] / b["gloo"][unit] for b in blocks)
        row |= {name: statistics.median(ratios), f"{name}_spread": [ratios[0], ratios[-1]]}
    for kind in KINDS:
        row[kind] = {
            "ms_per_round": 1e3 * statistics.median(b[kind]["s"] for b in blocks),
            "cpu_ns_per_byte": 1e9 * statistics.median(b[kind]["cpu_s"] / b[kind]["bytes"] for b in blocks),
        }
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| links | workers | MB | gloo, ms | TCP, ms | TCP / gloo, time | gloo, CPU ns/byte | TCP, CPU ns/byte "
        "| TCP / gloo, CPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        (low, high), (cpu_low, cpu_high) = r["ratio_spread"], r["cpu_ratio_spread"]
        lines.append(
            f"| {r['link']} | {r['workers']} | {r['mb']:g} | {r['gloo']['ms_per_round']:.1f} | "
            f"{r['tcp']['ms_per_round']:.1f} | {r['ratio']:.2f} ({low:.2f} to {high:.2f}) | "
            f"{r['gloo']['cpu_ns_per_byte']:.2f} | {r['tcp']['cpu_ns_per_byte']:.2f} | "
            f"{r['cpu_ratio']:.2f} ({cpu_low:.2f} to {cpu_high:.2f}) |"
        )
    return "\n".join(lines)


def verdict(rows: list[dict[str, Any]]) -> str:
    """What decides the default: TCP may cost at most 10 % more time than gloo."""
    lines = []
    for name, chosen in (
        ("loopback", [r for r in rows if r["link"] == "loopback"]),
        ("shaped links", [r for r in rows if r["link"] != "loopback"]),
    ):
        if not chosen:
            continue
        mean = math.exp(statistics.fmean(math.log(r["ratio"]) for r in chosen))
        cpu = math.exp(statistics.fmean(math.log(r["cpu_ratio"]) for r in chosen))
        worst = max(chosen, key=lambda r: r["ratio"])
        within = sum(r["ratio"] <= 1.1 for r in chosen)
        lines.append(
            f"{name}: TCP takes {mean:.2f} times gloo's time and {cpu:.2f} times its processor time (geometric means); "
            f"within 10 % in {within} of {len(chosen)} cases; worst {worst['ratio']:.2f} ({worst['workers']} workers, "
            f"{worst['mb']:g} MB)."
        )
    return "\n".join(lines)


def cases_of(args: argparse.Namespace) -> list[Case]:
    sizes = None if args.mb is None else {float(mb) for mb in args.mb.split(",")}
    counts = None if args.workers is None else {int(n) for n in args.workers.split(",")}
    chosen = [Case("loopback", *c) for c in LOOPBACK] if not args.no_loopback else []
    chosen += [Case(args.link, *c) for c in SHAPED] if not args.no_shaped else []
    return [c for c in chosen if (sizes is None or c.mb in sizes) and (counts is None or c.workers in counts)]


def available_mb() -> float:
    text = Path("/proc/meminfo").read_text()
    return float(text.split("MemAvailable:")[1].split()[0]) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", help="measure only these numbers of workers, of 2,4,8,16")
    parser.add_argument("--mb", help="measure only these sizes in MB, of 1,4,25,100")
    parser.add_argument("--link", default="200mbit", help="rate of the shaped links (default: %(default)s)")
    parser.add_argument("--no-loopback", action="store_true")
    parser.add_argument("--no-shaped", action="store_true", help="without network namespaces, which need root")
    parser.add_argument("--repeats", type=int, default=7, help="blocks of each transport (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.4, help="length of a block (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the record; cases that are in it are not repeated")
    args = parser.parse_args()
    if args.repeats < 1 or args.seconds <= 0:
        parser.error(f"--repeats and --seconds must be positive, got {args.repeats} and {args.seconds:g}")
    try:
        cases = cases_of(args)
    except ValueError as error:
        parser.error(f"--workers and --mb take numbers separated by commas: {error}")
    if not cases:
        parser.error("no case is left; see --help for the numbers of workers and the sizes that are measured")
    before, rows = environment(), []
    kept = None if args.out is None else args.out / "cases.jsonl"
    done = {}
    if kept is not None and kept.exists():
        for line in kept.read_text().splitlines():
            row = json.loads(line)
            done[Case(row["link"], row["workers"], row["mb"])] = row
    skipped = []
    for at, case in enumerate(cases):
        if case not in done and case.workers * case.mb * MEMORY > 0.8 * available_mb():
            skipped.append(f"{case.workers} x {case.mb:g} MB")
            continue
        if case not in done:
            print(f"{at + 1}/{len(cases)}: {case.link}, {case.workers} workers, {case.mb:g} MB", file=sys.stderr)
            done[case] = measure(case, args)
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                with kept.open("a") as file:
                    file.write(json.dumps(done[case]) + "\n")
        rows.append(done[case])
    summary = (
        f"Ring, {BUCKETS} buckets in flight, no compute; blocks of about {args.seconds:g} s of each transport in turn. "
        "Ratios: median and range over pairs of blocks. CPU: of all workers, per byte sent.\n\n"
        f"{table(rows)}\n\n{verdict(rows)}"
    )
    if skipped:
        summary += f"\n\nNot measured, for lack of memory: {', '.join(skipped)}."
    Console(width=200).print(summary, markup=False)
    if args.out is not None:
        note = "On loopback the cores are the bottleneck of both transports."
        write_record(args.out, data={"results": rows}, summary=summary, note=note, environment=before)


if __name__ == "__main__":
    main()
