"""Where the time goes: torchrun --nproc-per-node 4 examples/tracing.py

Every worker writes the spans of its steps, exchanges and waits to a file; worker 0 merges them into one Chrome trace.
The same from the command line: gossamer trace merge, stragglers and plot.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gossamer
from gossamer.trace import merge, stragglers, summarize, write_chrome


def main(steps: int, out: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer = gossamer.GossipAdamW(model.parameters(), lr=1e-3)
    gossip = gossamer.decentralize(model, optimizer, topology="ring", trace=out)
    torch.manual_seed(1 + rank)
    for step in range(steps):
        if rank == 1 and step % 5 == 4:
            time.sleep(0.02)  # worker 1 is late now and then: who waits for it?
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    gossip.close()
    dist.barrier()  # all files are complete
    if rank == 0:
        trace = merge(out)
        write_chrome(trace, out / "trace.json")  # open it on ui.perfetto.dev
        summary = summarize(trace)
        share = summary.seconds["waiting"] / summary.step_time
        print(f"{summary.steps} steps of {1e3 * summary.step_time:.1f} ms, {share:.0%} of it waiting", flush=True)
        for blamed in stragglers(trace)[:3]:
            print(f"waited for {blamed.cause}: {1e3 * blamed.seconds:.0f} ms", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("runs/tracing"))
    main(**vars(parser.parse_args()))
