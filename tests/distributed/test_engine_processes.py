"""Real processes equal virtual workers bit by bit, and torch's DDP where that computes the same."""

import itertools
import random

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from workers import decentralize, loss_of, mlp, process_group, seeded, vector

import gossamer
from gossamer.topology import Layout, build
from gossamer.topology.registry import entries
from policies import policies

LAYOUTS = [(1,), (2,), (3,), (2, 1), (2, 2), (2, 2, 1), (4, 4)]
FACTORS = {
    "layout": LAYOUTS,
    "topology": [e.name for e in entries()],
    "algorithm": ["awc", "atc"],
    "wire": ["fp32", "bf16", "fp16", "int8", "int4"],
    "every": [1, 2],
    "average_every": [0, 4],
    "fragments": [1, 2],
    "bucket_mib": [None, 0.0005],  # one bucket, or six that cut parameters
    "hierarchical": [True, False],
    "in_flight": [4, 1],
    "stagger": [True, False],
    "transport": ["gloo", "tcp"],
}
STEPS = 6


def fits(case):
    try:
        build(case["topology"], Layout.of(case["layout"]))
    except gossamer.InputError:
        return False
    return True


def covering():
    """Cases in which every pair of values of two factors occurs, if it can: greedy, from seeded random candidates."""
    draw = random.Random(0)
    missing = {((f, a), (g, b)) for f, g in itertools.combinations(FACTORS, 2) for a in FACTORS[f] for b in FACTORS[g]}
    cases = []
    while missing:
        first = min(missing, key=str)
        tries = [{f: draw.choice(v) for f, v in FACTORS.items()} | dict(first) for _ in range(30)]
        tries = [case for case in tries if fits(case)]
        if not tries:  # this topology does not exist for this layout
            missing.remove(first)
            continue
        best = max(tries, key=lambda case: len(missing & set(itertools.combinations(case.items(), 2))))
        missing -= set(itertools.combinations(best.items(), 2))
        cases.append(best)
    return cases


CASES = covering()


def trained(model, optimizer, rank, steps=STEPS):
    """A generator, so that virtual workers can take turns."""
    for step in range(steps):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def worker(seed=0):
    model = seeded(seed, lambda: mlp(64))
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def on_processes(rank, cases):
    results = []
    with process_group():
        for case in cases:
            model, optimizer = worker(rank)
            seen = []
            with decentralize(model, optimizer, gradients="worker", **case) as gossip:
                for _ in trained(model, optimizer, rank):
                    seen.append(vector(model))
                with gossip.averaged():
                    seen.append(vector(model))
                seen.append(torch.tensor(gossip.consensus_distance()))
                sent = gossip.stats()["bytes_sent"]
            results.append((seen, sent))
    return results


def on_virtual_workers(layout, case):
    case = {k: v for k, v in case.items() if k != "transport"}
    made = [worker(rank) for rank in range(sum(layout))]
    seen = [[] for _ in made]
    with gossamer.VirtualCluster(per_node=list(layout)) as cluster:
        gossips = cluster.decentralize([m for m, _ in made], [o for _, o in made], **policies(**case))
        for _ in zip(*(trained(m, o, r) for r, (m, o) in enumerate(made)), strict=True):
            for record, (model, _) in zip(seen, made, strict=True):
                record.append(vector(model))
        with cluster.averaged():
            for record, (model, _) in zip(seen, made, strict=True):
                record.append(vector(model))
        distance = cluster.consensus_distance()
        for record in seen:
            record.append(torch.tensor(distance))
        return [(record, g.stats()["bytes_sent"]) for record, g in zip(seen, gossips, strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_processes_equal_virtual_workers_bit_by_bit(pools, layout):
    cases = [{k: v for k, v in case.items() if k != "layout"} for case in CASES if case["layout"] == layout]
    assert cases
    results = pools(*layout).run(on_processes, cases, timeout=300)
    for at, case in enumerate(cases):
        expected = on_virtual_workers(layout, case)
        for rank, (seen, sent) in enumerate(expected):
            ours, bytes_sent = results[rank][at]
            different = [t for t, (x, y) in enumerate(zip(ours, seen, strict=True)) if not torch.equal(x, y)]
            assert not different, f"{case}: worker {rank} differs in records {different}"
            assert bytes_sent == sent, case


def against_ddp(rank, steps):
    """Both trainings in one process: torch's DDP, and gossip on the complete graph with adapt-then-combine."""
    with process_group():
        ours = seeded(0, mlp)
        theirs = DistributedDataParallel(seeded(0, mlp))
        options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
        one, two = torch.optim.SGD(ours.parameters(), **options), torch.optim.SGD(theirs.parameters(), **options)
        seen = []
        with decentralize(ours, one, topology="complete", algorithm="atc"):
            for step in range(steps):
                for model, optimizer in ((ours, one), (theirs, two)):
                    loss_of(model, rank, step).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                seen.append((vector(ours), vector(theirs)))
        return seen


@pytest.mark.parametrize("layout", [(3,), (2, 2)], ids=str)
def test_complete_adapt_then_combine_with_sgd_equals_ddp(pools, layout):
    """With momentum too: local momenta of averaged parameters average to the momentum of averaged gradients."""
    for seen in pools(*layout).run(against_ddp, 8):
        for ours, theirs in seen:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
