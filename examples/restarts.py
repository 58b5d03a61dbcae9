"""Restarts of the whole job: torchrun --nproc-per-node 4 --max-restarts 3 examples/restarts.py --fail-at 120

torchrun ends all workers when one fails and starts them again; they continue from the newest checkpoint. With
--fail-at the last worker is killed once, to show it. An elastic job (examples/elastic.py) needs no restart.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gossamer


def main(steps: int, every: int, fail_at: int, folder: Path) -> None:
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    store, rank, workers = next(dist.rendezvous("env://"))  # it outlives an attempt: separate their keys
    dist.init_process_group("gloo", store=dist.PrefixStore(f"attempt-{attempt}", store), rank=rank, world_size=workers)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = gossamer.GossipAdamW(model.parameters(), lr=1e-2)
    gossip = gossamer.decentralize(model, optimizer)
    checkpoints = gossamer.Checkpoints(folder, keep_last=2)  # a folder that all workers can access
    if checkpoints.latest() is not None:
        checkpoints.load(gossip, model, optimizer)
    for step in range(first := gossip.steps[0], steps):
        x = torch.randn(32, 10, generator=torch.Generator().manual_seed(1 + rank + 1000 * step))
        (model(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % every == 0:
            checkpoints.save(gossip, model, optimizer)
        if step + 1 == fail_at and attempt == 0 and rank == workers - 1:
            checkpoints.wait()
            os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.wait()
    with gossip.averaged(), torch.no_grad():
        x = torch.randn(1000, 10, generator=torch.Generator().manual_seed(0))
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    if rank == 0:
        print(f"attempt {attempt + 1}: steps {first} to {steps}, test loss {loss:.4f}", flush=True)
    gossip.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--fail-at", type=int, default=0, help="the step at which the last worker is killed; 0: never")
    parser.add_argument("--folder", type=Path, default=Path("runs/restarts"))
    main(**vars(parser.parse_args()))
