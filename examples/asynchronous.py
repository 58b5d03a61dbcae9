"""Asynchronous gossip with one slow worker: torchrun --nproc-per-node 4 examples/asynchronous.py

Worker 0 takes four times as long for a step. No other worker waits for it: each steps at its own pace, and a thread
averages its parameters with one neighbor after another. The job ends when all workers together have taken --steps.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn

import gossamer


def main(steps: int, seconds: float) -> None:
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    target = torch.randn(10, 1)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    gossip = gossamer.decentralize(model, optimizer, topology="ring", algorithm="a2cid2")
    torch.manual_seed(1 + rank)  # every worker has its own data
    mine = 0
    for done in gossip.budget(steps):  # until all workers together have taken `steps` steps
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - done / steps)  # the schedule follows the progress of all workers
        x = torch.randn(32, 10)
        time.sleep(4 * seconds if rank == 0 else seconds)  # a slow host
        (model(x) - x @ target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        mine += 1
    with gossip.averaged(), torch.no_grad():
        x = torch.randn(1000, 10, generator=torch.Generator().manual_seed(0))
        loss = (model(x) - x @ target).square().mean()
    each: list[int | None] = [None] * workers
    dist.all_gather_object(each, mine)
    if rank == 0:
        print(
            f"steps of each worker: {each}; test loss {loss:.3f}, at the start {target.square().sum():.3f}", flush=True
        )
    gossip.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000, help="steps of all workers together")
    parser.add_argument("--seconds", type=float, default=0.02, help="compute time of a fast worker's step")
    main(**vars(parser.parse_args()))
