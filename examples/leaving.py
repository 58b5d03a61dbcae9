"""A worker that is taken away with a warning: python examples/leaving.py

Spot machines, Kubernetes and Slurm send SIGTERM and kill the process some seconds later. Here `main` sends SIGTERM to
worker 1. That worker leaves in good order, so the others continue at once, and a replacement joins them.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import time
from typing import Any

import torch
from torch import nn

import gossamer

WORKERS = 3


def worker(rank: int, directory: str, steps: int, progress: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORKERS), GOSSAMER_DIRECTORY=directory)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = gossamer.GossipAdamW(model.parameters(), lr=1e-2)
    gossip = gossamer.decentralize(model, optimizer, on_failure="continue")
    gossip.leave_on(signal.SIGTERM, grace=30)  # seconds until the machine is taken
    first = step = gossip.stats()["steps"]
    while step < steps and not gossip.leaving:
        x = torch.randn(32, 10, generator=torch.Generator().manual_seed(1 + rank + WORKERS * step))
        (model(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step = gossip.stats()["steps"]
        progress[rank] = step
        time.sleep(0.01)
    how = "left" if gossip.leaving else "done"
    if how == "done":
        with gossip.averaged(), torch.no_grad():
            x = torch.randn(1000, 10, generator=torch.Generator().manual_seed(0))
            how += f", test loss {(model(x) - x.sum(dim=1, keepdim=True)).square().mean():.4f}"
    print(f"worker {rank}: steps {first} to {step}, {how}", flush=True)
    gossip.close()  # the others do not wait for this worker any more
    sys.exit(0 if how != "left" else 128 + signal.SIGTERM)  # 0 would tell a launcher that the work is done


def main(steps: int) -> None:
    os.environ.setdefault("GOSSAMER_TOKEN", os.urandom(16).hex())
    directory = gossamer.HostedDirectory(address="127.0.0.1", one_job=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gossamer.engine"])
    progress = context.Array("i", WORKERS)

    def start(rank: int) -> Any:
        process = context.Process(target=worker, args=(rank, f"127.0.0.1:{directory.port}", steps, progress))
        process.start()
        return process

    workers = [start(rank) for rank in range(WORKERS)]
    while progress[1] < steps // 4:
        time.sleep(0.01)
    workers[1].terminate()  # SIGTERM
    workers[1].join()
    print(f"worker 1 ended with code {workers[1].exitcode}", flush=True)
    workers[1] = start(1)
    for process in workers:
        process.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    main(parser.parse_args().steps)
