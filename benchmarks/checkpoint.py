"""What a checkpoint costs training.

    python benchmarks/checkpoint.py --out benchmarks/records/checkpoint-cost

Blocks of steps with one checkpoint and without, in turn, on gossiping workers. What a block with one takes longer,
everything included (the copy on the training thread, and the writing beside the steps that follow), is what a
checkpoint costs; divided by 60 s it is the share of training time at one a minute. Twice: with compute that sleeps, as
on an accelerator, and with compute that keeps the very cores busy that the writer needs.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

import gossamer
from gossamer.checkpoint import files
from gossamer.lab import CpuMeter, WorkerPool
from gossamer.lab.emulate import EmulatedModel
from gossamer.report.record import environment, write_record


class Busy(nn.Module):
    """A model of so many MB whose forward and backward keep a core busy."""

    def __init__(self, mb: float, layers: int = 8):
        super().__init__()
        width = int((mb * 1e6 / 4 / layers) ** 0.5)
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.x = torch.randn(4, width)

    def forward(self) -> torch.Tensor:
        return self.layers(self.x).square().mean()


def blocks(rank: int, folder: str, kind: str, mb: float, repeats: int, seconds: float) -> dict[str, list[float]]:
    """Seconds of each block without and with a checkpoint, of the call to save(), and until it was complete."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = EmulatedModel(mb, 8, 0.05) if kind == "sleeping" else Busy(mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    gossip = gossamer.decentralize(model, optimizer, topology="ring", timeout=120)
    checkpoints = gossamer.Checkpoints(folder, keep_last=2)

    def step() -> None:
        model().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    began = time.perf_counter()
    for _ in range(10):
        step()
    took = torch.tensor([(time.perf_counter() - began) / 10])
    dist.all_reduce(took, dist.ReduceOp.MAX)  # the same number of steps on every worker
    count = max(10, round(seconds / float(took)))
    checkpoints.save(gossip, model, optimizer, step=1)  # the first one makes the folder
    checkpoints.wait()
    found: dict[str, list[float]] = {"without": [], "with": [], "save": [], "complete": []}
    for number in range(2 * repeats):
        saving = number % 2 == (number // 2) % 2  # without, with, with, without
        dist.barrier()
        began = time.perf_counter()
        for at in range(count):
            step()
            if saving and at == 1:
                asked = time.perf_counter()
                checkpoints.save(gossip, model, optimizer, step=number + 2)
                found["save"].append(time.perf_counter() - asked)
        found["with" if saving else "without"].append(time.perf_counter() - began)
        if saving:
            late = time.perf_counter()
            checkpoints.wait()
            found["complete"].append(time.perf_counter() - late)  # beyond the block: 0 where it was long enough
    gossip.close()
    dist.barrier()
    dist.destroy_process_group()
    return {**found, "steps": [count]}


def measured(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        with CpuMeter() as cpu, WorkerPool(args.workers, timeout=3600) as pool:
            samples = pool.run(blocks, folder, kind, args.mb, args.repeats, args.seconds)
        part = Path(folder) / files.name_of(files.latest_in(Path(folder))) / files.part_name(0)
        size = part.stat().st_size
    # the slowest worker ends a block
    without, having = ([max(b) for b in zip(*(s[k] for s in samples), strict=True)] for k in ("without", "with"))
    extra = statistics.median(having) - statistics.median(without)
    return {
        "kind": kind,
        "file_mb": size / 1e6,
        "block_s": statistics.median(without),
        "steps": samples[0]["steps"][0],
        "extra_s": extra,
        "share_at_one_a_minute": extra / 60,
        "save_call_ms": 1e3 * statistics.median(s for w in samples for s in w["save"]),
        "unfinished_after_block_s": max(s for w in samples for s in w["complete"]),
        "spread_without": (max(without) - min(without)) / statistics.median(without),
        "cpu_use": cpu.use,
        "samples_s": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mb", type=float, default=25.0, help="of the model; Adam's moments come on top")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a block")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    facts = environment()
    results = [measured(kind, args) for kind in ("sleeping", "busy")]
    rows = [
        "| compute | a worker's file | block | save() holds the loop | a checkpoint costs | at one a minute | CPU |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        rows.append(
            f"| {r['kind']} | {r['file_mb']:.0f} MB | {r['steps']} steps, {r['block_s']:.1f} s | "
            f"{r['save_call_ms']:.0f} ms | {r['extra_s']:.2f} s | {r['share_at_one_a_minute']:.2%} | "
            f"{r['cpu_use']:.0%} |"
        )
    summary = "\n".join(rows)
    Console().print(summary)
    print(json.dumps([{k: v for k, v in r.items() if k != "samples_s"} for r in results]))
    if args.out is not None:
        note = f"{args.workers} workers, a {args.mb:g} MB model under AdamW, {args.repeats} blocks of each in turn."
        write_record(args.out, data={"results": results}, summary=summary, note=note, environment=facts)


if __name__ == "__main__":
    main()
