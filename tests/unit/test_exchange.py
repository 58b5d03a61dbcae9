"""Exchanges on virtual workers at learning rate zero: what arrives, how many bytes travel, that the mean stays."""

import numpy as np
import pytest
import torch
from torch import nn

import gossamer
from gossamer.topology import Layout, build, entries
from gossamer.topology.plan import program
from policies import policies
from reference import distance

WIRES = ["fp32", "bf16", "fp16", "int8", "int4"]
ITEM = {
    "fp32": lambda n: 4 * n,
    "bf16": lambda n: 2 * n,
    "fp16": lambda n: 2 * n,
    "int8": lambda n: 8 + n + 2 * -(-n // 128),
    "int4": lambda n: 8 + -(-n // 2) + 2 * -(-n // 128),
}
LAYOUTS = [[2], [5], [3, 3], [2, 2, 1], [1, 2, 1]]


class Still:
    """Workers that hold a vector each and never learn: every step only mixes."""

    def __init__(self, per_node, elements=48, dtype=torch.float32, seed=0, **settings):
        self.layout = Layout.of(per_node)
        self.models = []
        for _ in range(self.layout.n):
            model = nn.Module()
            model.x = nn.Parameter(torch.zeros(elements, dtype=dtype))
            self.models.append(model)
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.0) for m in self.models]
        self.cluster = gossamer.VirtualCluster(per_node=per_node)
        self.gossips = self.cluster.decentralize(self.models, self.optimizers, **policies(**settings))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():  # not at the start, so that the first round is not an exact average on a quantized wire
            for model in self.models:
                model.x.copy_(torch.randn(elements, generator=generator, dtype=torch.float64))

    def step(self):
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            model.x.grad = torch.ones_like(model.x)
            optimizer.step()

    def values(self):
        return np.stack([m.x.detach().double().numpy() for m in self.models])


@pytest.mark.parametrize(("wire", "algorithm"), [*((wire, "awc") for wire in WIRES), ("int8", "atc")])
@pytest.mark.parametrize("topology", [e.name for e in entries()])
def test_the_mean_does_not_move(topology, wire, algorithm):
    for per_node in LAYOUTS:
        still = Still(per_node, topology=topology, wire=wire, algorithm=algorithm, bucket_mib=100 / 2**20)
        before = still.values()
        for _ in range(6):
            still.step()
        drift = np.abs(still.values().mean(axis=0) - before.mean(axis=0)).max() / np.abs(before).max()
        assert drift < 1e-6, f"{per_node}: the mean moved by {drift:.1e}"


@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize(
    ("topology", "per_node"),
    [
        ("complete", [3]),
        ("complete", [7]),
        ("complete", [3, 3, 3]),
        ("complete", [4, 3, 2]),
        ("complete", [5, 3]),
        ("aer", [3, 3]),
        ("aer", [3, 2]),
    ],
    ids=str,
)
def test_the_mean_does_not_drift_while_workers_move(topology, per_node, wire):
    """Group sizes that are not powers of two: 1/n is no floating-point number, so multiplying by it is biased.

    Workers take steps whose sum over the workers is zero. Each coordinate's mean then does a small random walk; a bias
    would move all coordinates the same way.
    """
    steps, elements = 250, 64
    still = Still(per_node, elements, topology=topology, wire=wire)
    with torch.no_grad():
        for model, optimizer in zip(still.models, still.optimizers, strict=True):
            model.x.add_(3.0)
            optimizer.param_groups[0]["lr"] = 1.0
    before = still.values().mean(axis=0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        moves = torch.randint(-64, 65, (still.layout.n, elements), generator=generator) / 1024
        for model, optimizer, move in zip(still.models, still.optimizers, moves - moves.roll(1, 0), strict=True):
            model.x.grad = move
            optimizer.step()
    bias = float((still.values().mean(axis=0) / before - 1).mean())
    assert abs(bias) < 4e-7, f"the mean moved by {bias:.1e} of its value in {steps} rounds"


@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8", "int4"])
@pytest.mark.parametrize("algorithm", ["awc", "atc"])
def test_exact_averages_travel_in_full_precision(wire, algorithm):
    for per_node in ([4], [3, 3], [2, 2, 1]):
        still = Still(per_node, topology="ring", wire=wire, algorithm=algorithm, average_every=4)
        x = still.values()
        for _ in range(5 if algorithm == "awc" else 4):
            still.step()
        assert still.gossips[0].stats()["exact_averages"] == 1
        assert np.abs(still.values() - x.mean(axis=0)).max() < 1e-6 * np.abs(x).max(), per_node


def test_averages_that_a_guard_asks_for_travel_in_full_precision():
    """The guard's limit lies below the rounding of the wire: one exact average brings the distance below it."""
    guard = gossamer.ConsensusGuard(max_ratio=1e-4, every=4)
    still = Still([4], 256, topology="ring", wire="int8", guard=guard)
    for _ in range(4):
        still.step()
    assert still.gossips[0].stats()["guard_averages"] == 1  # the third round, applied by the fourth step
    assert still.cluster.consensus_distance() < 1e-5


@pytest.mark.parametrize("topology", [e.name for e in entries()])
def test_fp32_contracts_as_the_product_of_the_matrices(topology):
    for per_node in LAYOUTS:
        still = Still(per_node, topology=topology)
        built = build(topology, still.layout)
        want = still.values()
        for k in range(6):
            still.step()
            if k > 0:  # what was sent after step k - 1 is put in before step k
                want = built.matrix(k - 1) @ want
            assert np.abs(still.values() - want).max() < 1e-6 * np.abs(want).max(), (per_node, k)
        assert still.cluster.consensus_distance() == pytest.approx(distance(want), rel=1e-5, abs=1e-6), per_node


@pytest.mark.parametrize(("wire", "floor"), [("bf16", 2**-8), ("fp16", 2**-11), ("int8", 1 / 127), ("int4", 1 / 7)])
@pytest.mark.parametrize("topology", [e.name for e in entries()])
def test_lossy_wires_contract_to_their_rounding(topology, wire, floor):
    for per_node in ([4], [3, 3], [2, 2, 1]):
        still = Still(per_node, topology=topology, wire=wire)
        built = build(topology, still.layout)
        x = still.values()
        product, rounds = x, 0
        while distance(product) > 1e-3 * floor * distance(x) and rounds < 200:
            product = built.matrix(rounds) @ product
            rounds += 1
        for _ in range(rounds + 1):
            still.step()
        # each worker is within a rounding or two of the largest value in every coordinate
        assert np.abs(still.values() - x.mean(axis=0)).max() < 4 * floor * np.abs(x).max(), (per_node, rounds)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("elements", [1, 255, 256, 257])
def test_odd_sizes(wire, elements):
    for per_node in ([2], [3], [2, 2], [3, 2, 1]):
        still = Still(per_node, elements, topology="complete", wire=wire)
        x = still.values()
        still.step()
        still.step()
        floor = {"fp32": 1e-6, "bf16": 2**-7, "fp16": 2**-10, "int8": 1 / 60, "int4": 1 / 3}[wire]
        assert np.abs(still.values() - x.mean(axis=0)).max() < floor * np.abs(x).max(), per_node
        assert np.abs(still.values().mean(axis=0) - x.mean(axis=0)).max() < 1e-6 * np.abs(x).max(), per_node


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("topology", ["one-peer-exponential", "complete", "ring-static", "aer"])
def test_nan_reaches_the_neighbors(topology, wire):
    for per_node in ([4], [2, 2]):
        still = Still(per_node, topology=topology, wire=wire)
        with torch.no_grad():
            still.models[0].x[5] = float("nan")
        for _ in range(9):
            still.step()
        assert np.isnan(still.values()[:, 5]).all(), per_node


def sent(still, steps=2):
    """Bytes each worker has sent in the first round, by kind of link."""
    for _ in range(steps):
        still.step()
    stats = [g.stats() for g in still.gossips]
    assert all(s["bytes_sent"] == s["bytes_sent_intra"] + s["bytes_sent_inter"] for s in stats)
    assert all(s["bytes_sent"] == sum(s["bytes_sent_by_peer"].values()) for s in stats)
    return [(s["bytes_sent_intra"], s["bytes_sent_inter"]) for s in stats]


@pytest.mark.parametrize("wire", WIRES)
def test_bytes_of_a_pair(wire):
    still = Still([4], 320, topology="one-peer-exponential", wire=wire)
    assert sent(still) == [(ITEM[wire](320), 0)] * 4
    assert still.gossips[0].stats()["bytes_sent_by_peer"] == {1: ITEM[wire](320)}
    assert still.gossips[2].stats()["bytes_sent_by_peer"] == {3: ITEM[wire](320)}


@pytest.mark.parametrize("wire", WIRES)
def test_bytes_of_pairs_on_nodes(wire):
    """Only what crosses nodes is rounded."""
    inside = Still([2, 2], 320, topology="one-peer-exponential", wire=wire)
    assert sent(inside) == [(4 * 320, 0)] * 4
    # the next round pairs (0, 2) and (1, 3)
    assert sent(inside, 1) == [(4 * 320, ITEM[wire](320))] * 4


@pytest.mark.parametrize("wire", WIRES)
def test_bytes_of_aer(wire):
    """Two nodes of four: a round inside each node (reduce-scatter and all-gather), then one over both."""
    n, size = 8, 320
    still = Still([4, 4], size, topology="aer", wire=wire)
    built = build("aer", still.layout)
    groups = [len(built.round(k).groups) for k in range(2)]
    assert sorted(groups) == [1, 2]  # one round joins both nodes, the other is inside
    inside, swap = 2 * 3 * 4 * size // 4, ITEM[wire](size // 4)
    want = [(inside, swap if groups[0] == 1 else 0)] * n
    assert sent(still) == want
    assert sent(still, 1) == [(2 * inside, swap)] * n


@pytest.mark.parametrize("wire", WIRES)
def test_bytes_of_complete(wire):
    """Five workers, one node: pieces of a fifth are reduced in the wire format and spread in full precision."""
    still = Still([5], 320, topology="complete", wire=wire)
    assert sent(still) == [(4 * ITEM[wire](64) + 4 * 4 * 64, 0)] * 5


@pytest.mark.parametrize("wire", WIRES)
def test_bytes_of_complete_over_three_nodes(wire):
    still = Still([2, 2, 2], 480, topology="complete", wire=wire)
    inside = 2 * 4 * 240
    across = 2 * ITEM[wire](80) + 2 * 4 * 80
    assert sent(still) == [(inside, across)] * 6


@pytest.mark.parametrize("wire", WIRES)
def test_bytes_of_weighted_neighbors(wire):
    still = Still([5], 320, topology="ring-static", wire=wire)
    assert sent(still) == [(2 * ITEM[wire](320), 0)] * 5


@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize("topology", [e.name for e in entries()])
def test_stats_count_exactly_the_messages_of_the_plan(topology, wire):
    """Three buckets, several rounds, unequal nodes: every message of every program, encoded as it travels."""
    for per_node in ([5], [2, 2, 1]):
        still = Still(per_node, 48, topology=topology, wire=wire, bucket_mib=64 / 2**20)
        built = build(topology, still.layout)
        steps = 5
        for _ in range(steps):
            still.step()
        for worker, gossip in enumerate(still.gossips):
            want = {}
            for k in range(steps - 1):
                for b in range(3):
                    for s in program(built.round(k + b), still.layout, worker, 16):
                        for p in s.sends:
                            size = p.stop - p.start
                            length = ITEM[wire](size) if s.wired else 4 * size
                            want[p.peer] = want.get(p.peer, 0) + length
            stats = gossip.stats()
            assert stats["bytes_sent_by_peer"] == dict(sorted(want.items())), (per_node, worker)
            assert (stats["steps"], stats["rounds"], stats["buckets"]) == (steps, steps, 3)


def test_padding_stays_zero():
    """Parameters are padded to 64 bytes; what lies between them takes part in exchanges and must stay nothing."""
    still = Still([3], 17, topology="ring", wire="int8")
    for _ in range(6):
        still.step()
    for gossip in still.gossips:
        assert gossip.lanes[0].flats[0].buffer[17:].eq(0).all()


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_mix_in_their_own_precision(dtype, wire):
    still = Still([4], 40, dtype=dtype, topology="complete", wire=wire)
    x = still.values()
    still.step()
    still.step()
    assert {m.x.dtype for m in still.models} == {dtype}
    precision = {torch.float64: 1e-15, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    floor = max({"fp32": 0.0, "bf16": 2**-8, "int8": 1 / 127}[wire], precision)
    assert np.abs(still.values() - x.mean(axis=0)).max() < 3 * floor * np.abs(x).max()
