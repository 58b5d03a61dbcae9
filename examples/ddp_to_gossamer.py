"""A small classifier trained by gossip: torchrun --nproc-per-node 4 examples/ddp_to_gossamer.py"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gossamer


def spirals(points: int, seed: int) -> TensorDataset:
    """Three arms of a noisy spiral in the plane: which arm is a point on?"""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(3, (points,), generator=generator)
    radius = torch.rand(points, generator=generator)
    angle = 2.1 * arm + 4.0 * radius + 0.15 * torch.randn(points, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm)


@torch.no_grad()
def report(model: nn.Module, data: TensorDataset, epoch: int) -> None:
    x, y = data.tensors
    scores = model(x)
    loss, accuracy = nn.functional.cross_entropy(scores, y), (scores.argmax(1) == y).float().mean()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}  test loss {loss:.4f}  accuracy {accuracy:.3f}", flush=True)


def main(epochs: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, test = spirals(16000, seed=1), spirals(2000, seed=2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = gossamer.GossipAdamW(model.parameters(), lr=0.01)  # the learning rate of DDP
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    gossip = gossamer.decentralize(model, optimizer)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        with gossip.averaged():
            report(model, test, epoch)
    gossip.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    main(parser.parse_args().epochs)
