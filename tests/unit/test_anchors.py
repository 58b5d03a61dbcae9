"""Anchored wires: parameters travel relative to the last exact average, which all workers share."""

import numpy as np
import pytest
import torch
from test_exchange import Still
from torch import nn

import gossamer
from gossamer import ConsensusGuard
from gossamer.comm import Anchor, OtherAnchor, Scratch, exchange, wire_named
from gossamer.errors import InputError
from gossamer.topology import Layout, build
from gossamer.topology.plan import program
from policies import policies
from reference import distance

QUANTIZED = ["int8", "int4"]
LEVELS = {"int8": 127, "int4": 7}


def anchors(still, worker=0):
    return still.gossips[worker].lanes[0]._anchors


def quantized(d, levels):
    """Q in numpy, block by block, in single precision; independent of the engine."""
    out = np.empty_like(d)
    for at in range(0, len(d), 128):
        block = d[at : at + 128].astype(np.float32)
        largest = np.abs(block).max()
        if largest == 0:
            out[at : at + 128] = 0
            continue
        bits = (np.float32(largest * np.float32(1 / levels)).view(np.uint32) + np.uint32(0xFFFF)) >> 16
        scale = (bits.astype(np.uint32) << 16).view(np.float32)
        out[at : at + 128] = np.rint(block * (np.float32(1) / scale)) * scale
    return out


@pytest.mark.parametrize("wire", QUANTIZED)
@pytest.mark.parametrize("topology", ["one-peer-exponential", "ring-static", "random-matching"])
def test_parity_with_a_dense_reference(wire, topology):
    """x <- x + (W - I) Q(x - a) + steps, and a <- x <- mean at every exact average."""
    n, elements, every = 5, 300, 4
    still = Still([n], elements, topology=topology, wire=wire, average_every=every, bucket_mib=1)
    built = build(topology, still.layout)
    x = still.values().astype(np.float32)
    a = np.zeros((n, elements), np.float32)  # where all workers started
    sent = None
    generator = torch.Generator().manual_seed(0)
    for _, optimizer in zip(still.models, still.optimizers, strict=True):
        optimizer.param_groups[0]["lr"] = 1.0
    for k in range(13):
        gradients = 0.01 * torch.randn(n, elements, generator=generator)
        if sent is not None:  # mixed while the gradients were computed
            if k % every == 0:
                mean = sent.astype(np.float64).mean(axis=0).astype(np.float32)
                x = a = np.tile(mean, (n, 1))
            else:
                q = np.stack([quantized(d, LEVELS[wire]) for d in (sent - a).astype(np.float32)])
                x = sent + (built.matrix(k - 1) - np.eye(n)) @ q
        x = (x - gradients.numpy()).astype(np.float32)
        sent = x.copy()
        for model, optimizer, gradient in zip(still.models, still.optimizers, gradients, strict=True):
            model.x.grad = gradient.clone()
            optimizer.step()
        error = np.abs(still.values() - x).max()
        assert error < 1e-5, (k, error)
        x = still.values().astype(np.float32)  # a value near the middle of two levels may go either way
        sent = x.copy()


@pytest.mark.parametrize("wire", QUANTIZED)
@pytest.mark.parametrize("per_node", [[8], [2, 2, 2, 2], [3, 2]], ids=str)
def test_the_distance_falls_far_below_the_rounding_of_the_parameters(wire, per_node):
    """Parameters of size 3 whose workers differ by 1e-3: the rounding is that of the difference."""
    still = Still(per_node, 512, topology="aer", wire=wire, average_every=8, algorithm="atc")
    with torch.no_grad():
        for model in still.models:
            model.x.mul_(1e-3).add_(3.0)
    for _ in range(8):  # the exact average becomes the anchor
        still.step()
    assert distance(still.values()) < 1e-5
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for model in still.models:
            model.x.add_(1e-3 * torch.randn(512, generator=generator))
    before, mean = distance(still.values()), still.values().mean(axis=0)
    for _ in range(6):
        still.step()
    assert distance(still.values()) < before * {"int8": 0.02, "int4": 0.3}[wire]
    assert np.abs(still.values().mean(axis=0) - mean).max() < 1e-6


@pytest.mark.parametrize("wire", QUANTIZED)
def test_every_exact_average_is_the_next_anchor(wire):
    still = Still([2, 2], 300, topology="ring", wire=wire, average_every=3, fragments=3)
    assert anchors(still)._ids == [0] * 3
    for _ in range(7):
        still.step()
    ids = [anchors(still, w)._ids for w in range(4)]
    assert ids[0] == ids[1] == ids[2] == ids[3]
    assert sorted(ids[0]) == [5, 6, 7]
    first = anchors(still)._values
    for worker in range(1, 4):
        assert all(torch.equal(a, b) for a, b in zip(first, anchors(still, worker)._values, strict=True))


def test_an_average_of_the_guard_is_the_next_anchor():
    guard = ConsensusGuard(max_ratio=1e-4, every=4)
    still = Still([4], 256, topology="ring", wire="int4", guard=guard)
    for _ in range(4):
        still.step()
    assert still.gossips[0].stats()["guard_averages"] == 1
    assert [anchors(still, w)._ids[0] for w in range(4)] == [3] * 4


def test_calls_that_measure_leave_the_anchors_alone():
    still = Still([4], 256, topology="ring", wire="int4")
    for _ in range(3):
        still.step()
    before = anchors(still).state_dict()
    with still.cluster.averaged():
        pass
    still.cluster.consensus_distance()
    still.cluster.state_dicts()
    after = anchors(still).state_dict()
    assert before["ids"] == after["ids"] == [0] * len(before["ids"])
    assert all(torch.equal(a, b) for a, b in zip(before["values"], after["values"], strict=True))


@pytest.mark.parametrize("how", ["broadcast=False", "reset()", "restart()", "a state without anchors"])
def test_without_a_common_anchor_the_next_round_is_an_exact_average(how):
    models = [nn.Linear(8, 4) for _ in range(4)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.0) for m in models]
    cluster = gossamer.VirtualCluster(4)
    cluster.decentralize(models, optimizers, topology="ring", wire="int4", broadcast=how != "broadcast=False")
    if how != "broadcast=False":
        with torch.no_grad():
            for rank, model in enumerate(models):
                model.weight.add_(rank)
        if how == "reset()":
            cluster.reset()
        elif how == "restart()":
            cluster.restart(7)
        else:
            states = cluster.state_dicts()
            for state in states:
                del state["lanes"][0]["anchors"]
            cluster.load_state_dicts(states)

    def step():
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()

    assert cluster.consensus_distance() > 0.1
    step()
    step()
    assert cluster.gossips[0].stats()["exact_averages"] == 1
    assert cluster.gossips[0].stats()["guard_averages"] == 0
    assert cluster.consensus_distance() < 1e-6
    cluster.close()


def test_a_neighbor_that_is_relative_to_another_anchor_is_refused():
    still = Still([4], 256, topology="one-peer-exponential", wire="int4")
    anchors(still, 2)._ids = [7] * len(anchors(still, 2)._ids)

    def steps():
        for _ in range(4):
            still.step()

    with pytest.raises(OtherAnchor, match=r"another exact average than this worker has \(anchor 7, here 0\)"):
        steps()


def test_without_an_anchor_nothing_is_sent_to_anybody():
    """Workers that have no common anchor do not match each other either."""
    layout = Layout.of([2])
    made = program(build("complete", layout).round(0), layout, 0, 4)
    steps = exchange(
        made, torch.ones(4), torch.empty(8), wire_named("int8"), Scratch(), anchor=Anchor(torch.ones(4), None)
    )
    (_, message), (_, received) = (batch := next(steps)).sends[0], batch.recvs[0]
    assert wire_named("int8").marked(message) == -1
    received.copy_(message)
    with pytest.raises(OtherAnchor, match="here none"):
        next(steps)


def test_a_mean_that_is_not_finite_is_no_anchor():
    still = Still([4], 64, topology="ring", wire="int4", average_every=2)
    with torch.no_grad():
        still.models[1].x[3] = float("nan")
    for _ in range(3):
        still.step()
    for worker in range(4):
        assert all(torch.isfinite(v).all() for v in anchors(still, worker)._values)
    assert [anchors(still, w)._ids[0] for w in range(4)] == [0] * 4


def test_other_buckets_than_those_of_the_state_are_refused():
    saved = Still([2], 1024, topology="ring", wire="int8").cluster.state_dicts()
    other = Still([2], 1024, topology="ring", wire="int8", fragments=4)
    theirs, ours = (rf"fragments={f} and {f} bucket\(s\) of {1024 // f} elements" for f in (1, 4))
    with pytest.raises(InputError, match=f"saved with {theirs}, and this run has {ours}; resume with the same"):
        other.cluster.load_state_dicts(saved)
    for state in saved:  # as an earlier revision saved it
        del state["lanes"][0]["buckets"]
    with pytest.raises(
        InputError, match=r"anchors for buckets of \[1024\] elements and this run has buckets of \[256, "
    ):
        other.cluster.load_state_dicts(saved)


@pytest.mark.parametrize("algorithm", ["ad-psgd", "a2cid2"])
def test_asynchronous_algorithms_have_no_int4(algorithm):
    with pytest.raises(InputError, match=f"and '{algorithm}' makes none, so four bits would have to hold"):
        Still([2], topology="ring", wire="int4", algorithm=algorithm)


def test_one_worker_has_no_anchor():
    still = Still([1], 64, wire="int4", average_every=2)
    for _ in range(4):
        still.step()
    assert still.gossips[0].lanes[0]._anchors is None


@pytest.mark.parametrize("settings", [{"staleness": 1}, {"algorithm": "atc"}, {"every": 2}], ids=str)
def test_other_settings(settings):
    still = Still([2, 2], 512, topology="aer", wire="int4", **{"average_every": 4, **settings})
    mean = still.values().mean(axis=0)
    for _ in range(10):
        still.step()
    assert still.cluster.consensus_distance() < 1e-5
    assert np.abs(still.values().mean(axis=0) - mean).max() < 1e-5
    assert policies(**settings)
