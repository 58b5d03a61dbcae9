"""`bytes_sent` counts the small vectors that are averaged beside the rounds: the signal's and the guard's."""

import math

import pytest
import torch
from torch import nn

import gossamer
from gossamer.engine import signal, sketch

ROUNDS = 21  # vectors are launched beside rounds 0, 8 and 16, and read in rounds 4, 12 and 20
READ = 3
ELEMENTS = 256 + 8  # coordinates sampled of a weight of 320 elements and of a bias of 8


def sent(per_node, make, looked_at=(), **settings):
    """Bytes that all workers sent, and those between nodes. The state is taken after the steps `looked_at`."""
    n = sum(per_node)
    torch.manual_seed(0)
    models = [nn.Linear(40, 8) for _ in range(n)]
    optimizers = [make(m.parameters(), lr=0.01) for m in models]
    with gossamer.VirtualCluster(per_node=per_node) as cluster:
        gossips = cluster.decentralize(models, optimizers, topology="ring", **settings)
        for step in range(ROUNDS):
            for model, optimizer in zip(models, optimizers, strict=True):
                model(torch.randn(4, 40)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if step in looked_at:
                cluster.state_dicts()
        stats = [g.stats() for g in gossips]
    return [sum(s[name] for s in stats) for name in ("bytes_sent", "bytes_sent_inter")]


@pytest.mark.parametrize("per_node", [[2], [4], [2, 2], [1, 1, 1], [3, 2]], ids=str)
@pytest.mark.parametrize("looked_at", [(), (1, 2, 9)], ids=["", "with state_dict()"])
def test_the_signal_of_gossip_adam_is_counted_once(per_node, looked_at):
    assert signal.EVERY == 8
    assert signal.SAMPLES == 256
    plain = sent(per_node, torch.optim.Adam, looked_at)
    measured = sent(per_node, gossamer.GossipAdam, looked_at)
    each = 4 * (ELEMENTS + 2)  # the coordinates and, for each parameter, the sum of their squares
    among = [2 * (members - 1) for members in (sum(per_node), len(per_node))]  # shares are collected and given back
    assert [b - a for a, b in zip(plain, measured, strict=True)] == [READ * each * a for a in among]


def test_the_sketch_of_a_guard_is_counted():
    guard = gossamer.ConsensusGuard(max_ratio=math.inf, every=8)  # measures only
    plain, guarded = sent([2, 2], torch.optim.Adam), sent([2, 2], torch.optim.Adam, guard=guard)
    each = 8 * (sketch.SAMPLES + 2)
    assert [b - a for a, b in zip(plain, guarded, strict=True)] == [READ * each * 2 * 3, READ * each * 2 * 1]
