"""A GAN, two models with two optimizers in one job: torchrun --nproc-per-node 4 examples/gan.py

`decentralize` takes a list of optimizers. Each one is a lane with exchanges of its own, launched by its own `step()`.
The generator learns a ring of 8 Gaussians in the plane.
"""

import argparse
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossamer


def network(inputs: int, outputs: int) -> nn.Module:
    layers = [nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)]
    return nn.Sequential(*layers)


def real(count: int) -> Tensor:
    angle = 2 * math.pi * torch.randint(8, (count,)) / 8
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(count, 2)


def main(steps: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.ModuleDict({"generator": network(8, 2), "critic": network(2, 1)})
    generator, critic = model["generator"], model["critic"]
    for_generator = gossamer.GossipAdamW(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    for_critic = gossamer.GossipAdamW(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    gossip = gossamer.decentralize(model, [for_generator, for_critic])
    torch.manual_seed(dist.get_rank())  # every worker draws its own samples
    for _ in range(steps):
        # The critic's loss needs the generator's output, but no gradient of it.
        fake = generator(torch.randn(64, 8)).detach()
        critic_loss = nn.functional.softplus(-critic(real(64))).mean() + nn.functional.softplus(critic(fake)).mean()
        critic_loss.backward()
        for_critic.step()
        for_critic.zero_grad()
        # A new graph after the critic's step: its parameters were changed by the step and by gossip.
        nn.functional.softplus(-critic(generator(torch.randn(64, 8)))).mean().backward()
        for_generator.step()
        for_generator.zero_grad()
        for_critic.zero_grad()
    with gossip.averaged(), torch.no_grad():
        made = generator(torch.randn(1000, 8))
    distance = (made.norm(dim=1) - 1).abs().mean()
    if dist.get_rank() == 0:
        print(f"{steps} steps: the points lie {distance:.2f} off the circle on average", flush=True)
    gossip.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    main(parser.parse_args().steps)
