"""A topology of your own, looked at and then trained with: torchrun --nproc-per-node 4 examples/own_topology.py

Two ways: a function with `@register`, whose name works everywhere a family's does, and a networkx graph.
"""

import argparse

import networkx as nx
import torch
import torch.distributed as dist
from torch import nn

import gossamer
from gossamer.topology import Layout, Round, Topology, analyze, build, from_graph, register


@register("halves")
def halves(layout: Layout) -> Topology:
    """Workers pair across the two halves, shifted by one each round; a worker without a pair keeps its value."""
    half = layout.n // 2
    rounds = [Round.uniform(layout.n, [(i, half + (i + shift) % half) for i in range(half)]) for shift in range(half)]
    inside = Round.uniform(layout.n, [tuple(range(half)), tuple(range(half, layout.n))])
    return Topology.of_rounds("halves", layout, [*rounds, inside])


def main(steps: int) -> None:
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    for topology in (build("halves", Layout.of([workers])), from_graph(nx.cycle_graph(workers))):
        facts = analyze(topology)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
        optimizer = gossamer.GossipAdamW(model.parameters(), lr=1e-2)
        gossip = gossamer.decentralize(model, optimizer, topology=topology)
        data = torch.Generator().manual_seed(rank)
        for _ in range(steps):
            x = torch.randn(32, 10, generator=data)
            (model(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        distance = gossip.consensus_distance()  # every worker must call it
        if rank == 0:
            print(
                f"{topology.name}: period {topology.period}, contraction {facts.mixing.contraction:.2f} a round, "
                f"consensus distance {distance:.2g} after {steps} steps",
                flush=True,
            )
        gossip.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
