"""What `decentralize` costs the training thread, and how much memory it takes.

    python benchmarks/engine.py overhead --out benchmarks/records/engine-overhead
    python benchmarks/engine.py memory   --out benchmarks/records/engine-memory

overhead: a 25 MB model, 50 ms of emulated compute a step (sleeping), the plain loop and `decentralize` in turn, on one
worker and on two workers with free links; of the overhead, the part that `step()` takes longer is what the training
thread pays, the rest is two workers and their exchanges sharing the cores. memory: 100 M parameters on two workers;
resident memory beyond the plain loop's, in parameter sizes.
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
from gossamer.lab.emulate import EmulatedModel
from gossamer.report.record import environment, write_record


def overhead_worker(rank: int, repeats: int, steps: int, model_mb: float, compute: float, options: dict[str, Any]):
    """Seconds of an iteration and of its `optimizer.step()`, plain and gossip interleaved; seconds waited a step."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    kinds = ("plain", "gossip", "plain_step", "gossip_step", "waited")
    samples: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind in ("plain", "gossip"):
            model = EmulatedModel(model_mb, 8, compute)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
            gossip = gossamer.decentralize(model, optimizer, timeout=60, **options) if kind == "gossip" else None
            whole, inside = [], []
            for _ in range(steps):
                start = time.perf_counter()
                model().backward()
                before = time.perf_counter()
                optimizer.step()
                inside.append(time.perf_counter() - before)
                optimizer.zero_grad()
                whole.append(time.perf_counter() - start)
            samples[kind] += whole[2:]
            samples[f"{kind}_step"] += inside[2:]
            if gossip is not None:
                samples["waited"].append(gossip.stats()["seconds_waited"] / steps)
                gossip.close()
    dist.destroy_process_group()
    return samples


def overhead(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    results = []
    for workers in (1, 2):
        with CpuMeter() as cpu, WorkerPool(workers, timeout=600) as pool:
            samples = pool.run(overhead_worker, args.repeats, args.steps, 25.0, 0.05, {"topology": "ring"})
        plain, gossip, plain_step, gossip_step = (
            statistics.median(s for w in samples for s in w[kind])
            for kind in ("plain", "gossip", "plain_step", "gossip_step")
        )
        results.append(
            {
                "workers": workers,
                "plain_ms": 1e3 * plain,
                "gossip_ms": 1e3 * gossip,
                "overhead": gossip / plain - 1,
                "training_thread": (gossip_step - plain_step) / plain,
                "waited_ms": 1e3 * statistics.mean(s for w in samples for s in w["waited"]),
                "cpu_use": cpu.use,
                "valid": not cpu.saturated,
                "samples_s": samples,
            }
        )
    rows = [
        "| workers | plain loop | decentralize | overhead | training thread's part, in step() | waiting | CPU |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        rows.append(
            f"| {r['workers']} | {r['plain_ms']:.1f} ms | {r['gossip_ms']:.1f} ms | {100 * r['overhead']:.1f} % | "
            f"{100 * r['training_thread']:.1f} % | {r['waited_ms']:.1f} ms | "
            f"{100 * r['cpu_use']:.0f} %{'' if r['valid'] else ' INVALID'} |"
        )
    return {"results": results}, "\n".join(rows)


def memory_worker(rank: int, parameters: int, options: dict[str, Any]):
    """Resident memory beyond the plain loop, in parameter sizes: after a few steps, and at the peak in averaged()."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    layers = 10
    model = torch.nn.Sequential(
        *(torch.nn.Linear(parameters // layers // 1000, 1000, bias=False) for _ in range(layers))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step() -> None:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()

    size = sum(p.numel() * p.element_size() for p in model.parameters())
    step()
    plain = _resident()
    gossip = gossamer.decentralize(model, optimizer, timeout=120, **options)
    for _ in range(4):
        step()
    training = _resident()
    with gossip.averaged():
        averaging = _resident()
    gossip.close()
    dist.destroy_process_group()
    return {"training": (training - plain) / size, "averaged": (averaging - plain) / size}


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


def memory(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    rows = ["| setting | while training | inside averaged() |", "|---|---|---|"]
    results = []
    for name, options in (
        ("ring", {"topology": "ring"}),
        ("ring, staleness=1", {"topology": "ring", "algorithm": gossamer.AWC(staleness=1)}),
        ("ring, bf16 wire", {"topology": "ring", "wire": "bf16"}),
        ("aer", {"topology": "aer"}),
    ):
        with WorkerPool(2, timeout=600) as pool:
            samples = pool.run(memory_worker, 100_000_000, options)
        results.append({"setting": name, "samples": samples})
        worst = {key: max(s[key] for s in samples) for key in ("training", "averaged")}
        rows.append(f"| {name} | {worst['training']:.2f} | {worst['averaged']:.2f} |")
    return {"parameters": 100_000_000, "results": results}, "In parameter sizes beyond the plain loop:\n\n" + "\n".join(
        rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead", "memory"])
    parser.add_argument("--out", type=Path, help="folder for the record")
    parser.add_argument("--note", default="")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    before = environment()
    data, summary = (overhead if args.what == "overhead" else memory)(args)
    Console().print(summary, markup=False)
    if args.out is not None:
        write_record(args.out, data=data, summary=summary, note=args.note, environment=before)


if __name__ == "__main__":
    main()
