"""How much the communication thread of asynchronous gossip slows the training thread down.

    python benchmarks/async_overhead.py --out benchmarks/records/async-overhead

Two workers, `rate` exchanges a gradient, the plain loop and the asynchronous methods in turn. Worker 0 is measured, its
partner's compute is emulated (sleeping), so that two cores are enough for one training thread and all communication.
Worker 0's own compute is emulated too ("sleeping"), or a fixed amount of matrix products ("computing"), which shows
what the communication takes of its core, its caches and the interpreter. A sample is the mean step time of a block over
that of the plain block beside it; the part spent in `optimizer.step()` is also given. A row is INVALID when the cores
were saturated: then they were the bottleneck, whoever used them.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import gossamer
from gossamer.lab import CpuMeter, WorkerPool
from gossamer.lab.emulate import EmulatedModel, PassTimer
from gossamer.report.record import environment, write_record

KINDS = ("plain", "ad-psgd", "a2cid2")
WARM_UP = 8  # steps until the unit of time is agreed and exchanges have begun


class Products(PassTimer):
    """Computes where the emulated model would sleep: the same products every step."""

    def __init__(self) -> None:
        super().__init__()
        self._matrix = torch.rand(192, 192)
        self._per_second = 200.0
        for _ in range(4):  # the last one is measured warm
            begin = time.perf_counter()
            self._multiply(0.1)
            self._per_second *= 0.1 / (time.perf_counter() - begin)

    def begin(self) -> None:
        self._done = 0.0

    def sleep_until(self, seconds: float) -> None:
        self._multiply(seconds - self._done)
        self._done = seconds

    def _multiply(self, seconds: float) -> None:
        for _ in range(round(seconds * self._per_second)):
            torch.mm(self._matrix, self._matrix)


def worker(rank: int, args: argparse.Namespace, model_mb: float, compute: float, computing: bool) -> list[dict]:
    """Mean seconds of a step, and of its `optimizer.step()`, for a block of each kind in turn."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    clock = Products() if computing and rank == 0 else PassTimer()
    samples = []
    for _ in range(args.repeats):
        block = {}
        for kind in KINDS:
            model = EmulatedModel(model_mb, 8, compute)
            model.clock = clock
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, fused=True)
            gossip = None
            if kind != "plain":
                policy = gossamer.algorithm(kind, rate=args.rate, pairing="edges")
                gossip = gossamer.decentralize(model, optimizer, timeout=120, topology="ring", algorithm=policy)
            dist.barrier()
            block[kind] = _block(model, optimizer, gossip, args.steps)
            if gossip is not None:
                gossip.close()
        samples.append(block)
    dist.destroy_process_group()
    return samples


def _block(model: Any, optimizer: Any, gossip: Any, steps: int) -> dict[str, float]:
    inside = begin = 0.0
    exchanges = 0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            inside, begin = 0.0, time.perf_counter()
            exchanges = gossip.stats()["rounds"] if gossip is not None else 0
        model().backward()
        before = time.perf_counter()
        optimizer.step()
        inside += time.perf_counter() - before
        optimizer.zero_grad()
    whole = time.perf_counter() - begin
    exchanges = gossip.stats()["rounds"] - exchanges if gossip is not None else 0
    return {"step_s": whole / steps, "in_step_s": inside / steps, "exchanges_per_step": exchanges / steps}


def measure(args: argparse.Namespace, model_mb: float, compute: float, computing: bool) -> list[dict[str, Any]]:
    with CpuMeter() as cpu, WorkerPool(2, timeout=1800) as pool:
        samples = pool.run(worker, args, model_mb, compute, computing)[0]
    rows = []
    for kind in KINDS[1:]:
        ratios = sorted(block[kind]["step_s"] / block["plain"]["step_s"] for block in samples)
        inside = [(b[kind]["in_step_s"] - b["plain"]["in_step_s"]) / b["plain"]["step_s"] for b in samples]
        rows.append(
            {
                "method": kind,
                "compute": "computing" if computing else "sleeping",
                "model_mb": model_mb,
                "compute_s": compute,
                "plain_ms": 1e3 * statistics.median(b["plain"]["step_s"] for b in samples),
                "slow_down": statistics.median(ratios) - 1,
                "slow_down_spread": [ratios[0] - 1, ratios[-1] - 1],
                "in_step": statistics.median(inside),
                "exchanges_per_step": statistics.mean(b[kind]["exchanges_per_step"] for b in samples),
                "cpu_use": cpu.use,
                "valid": not cpu.saturated,
                "samples": [{k: b[k] for k in ("plain", kind)} for b in samples],
            }
        )
    return rows


def table(results: list[dict[str, Any]]) -> str:
    rows = [
        "| model, compute | method | plain step | slow-down (spread) | of that in step() | exchanges a step | CPU |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        low, high = r["slow_down_spread"]
        rows.append(
            f"| {r['model_mb']:g} MB, {r['compute_s']:g} s {r['compute']} | {r['method']} | {r['plain_ms']:.1f} ms | "
            f"{100 * r['slow_down']:.1f} % ({100 * low:.1f} to {100 * high:.1f}) | {100 * r['in_step']:.1f} % | "
            f"{r['exchanges_per_step']:.2f} | {100 * (r['cpu_use'] or 0):.0f} %{'' if r['valid'] else ' INVALID'} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4:0.1,25:0.4", help="MB:SECONDS of compute, separated by commas")
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, help="folder for the record")
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    before = environment()
    results = []
    for size in args.sizes.split(","):
        model_mb, compute = map(float, size.split(":"))
        for computing in (False, True):
            results += measure(args, model_mb, compute, computing)
    summary = f"Rate {args.rate:g}, two workers.\n\n" + table(results)
    Console().print(summary, markup=False)
    if args.out is not None:
        write_record(
            args.out, data={"rate": args.rate, "results": results}, summary=summary, note=args.note, environment=before
        )


if __name__ == "__main__":
    main()
