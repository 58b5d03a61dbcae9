"""An elastic job on one machine: python examples/elastic.py

Starts the directory and four workers, kills worker 0 in the middle, and starts a replacement, which takes the state of
another worker while all others train. On a cluster, your launcher does what `main` does here.
"""

import argparse
import multiprocessing
import os
import time
from typing import Any

import torch
from torch import nn

import gossamer

WORKERS = 4


def worker(rank: int, directory: str, steps: int, progress: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORKERS), GOSSAMER_DIRECTORY=directory)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = gossamer.GossipAdamW(model.parameters(), lr=1e-2)
    gossip = gossamer.decentralize(model, optimizer, on_failure="continue")  # no process group
    first = step = gossip.stats()["steps"]  # 0, or the step at which a replacement joined
    while step < steps:
        x = torch.randn(32, 10, generator=torch.Generator().manual_seed(1 + rank + WORKERS * step))
        (model(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step = gossip.stats()["steps"]
        progress[rank] = step
        time.sleep(0.01)
    with gossip.averaged(), torch.no_grad():  # the mean of the workers that are alive
        x = torch.randn(1000, 10, generator=torch.Generator().manual_seed(0))
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    print(f"worker {rank}: steps {first} to {step}, test loss {loss:.4f}", flush=True)
    gossip.close()


def main(steps: int) -> None:
    os.environ.setdefault("GOSSAMER_TOKEN", os.urandom(16).hex())  # a secret that all workers share
    directory = gossamer.HostedDirectory(address="127.0.0.1", one_job=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gossamer.engine"])  # torch is imported once for all workers
    progress = context.Array("i", WORKERS)

    def start(rank: int) -> Any:
        process = context.Process(target=worker, args=(rank, f"127.0.0.1:{directory.port}", steps, progress))
        process.start()
        return process

    workers = [start(rank) for rank in range(WORKERS)]
    while progress[0] < steps // 4:
        time.sleep(0.01)
    workers[0].kill()
    print(f"worker 0 was killed at step {progress[0]}; the others continue", flush=True)
    workers[0].join()
    workers[0] = start(0)
    for process in workers:
        process.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    main(parser.parse_args().steps)
