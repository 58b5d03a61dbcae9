"""A resumed run equals the uninterrupted one bit by bit; taking the state changes nothing."""

import copy
import io
import itertools

import pytest
import torch
from torch import nn

import gossamer
from gossamer import ConsensusGuard
from gossamer.errors import InputError
from policies import policies

CASES = {
    "awc": {},
    "atc": {"algorithm": "atc"},
    "every": {"every": 2},
    "every, odd steps": {"every": 3, "average_every": 6},
    "average_every": {"average_every": 4},
    "int8": {"wire": "int8"},
    "int4": {"wire": "int4", "average_every": 3, "fragments": 2},
    "int4, staleness": {"wire": "int4", "staleness": 2, "guard": ConsensusGuard(max_ratio=1e-9, every=4)},
    "int4, atc": {"wire": "int4", "algorithm": "atc", "average_every": 4},
    "guard": {"guard": ConsensusGuard(max_ratio=1e-9, every=4)},
    "guard below its limit": {"guard": ConsensusGuard(max_ratio=1e9, every=3)},
    "staleness": {"staleness": 2},
    "staleness and every": {"staleness": 1, "every": 2, "guard": ConsensusGuard(max_ratio=1e-9, every=4)},
    "fragments": {"fragments": 2, "average_every": 5, "staleness": 1},
    "atc, fragments": {"algorithm": "atc", "fragments": 3, "every": 2},
    "atc, guard": {"algorithm": "atc", "guard": ConsensusGuard(max_ratio=1e-9, every=4)},
}


pytestmark = pytest.mark.filterwarnings("ignore:bucket_mib")  # models so small are cut as the fragments need it


class Run:
    def __init__(self, per_node, seed, broadcast=True, **settings):
        n = sum(per_node)
        torch.manual_seed(seed)
        self.models = [nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)) for _ in range(n)]
        self.optimizers = [
            [
                torch.optim.AdamW(m[0].parameters(), lr=0.05),
                gossamer.AccumAdamW(m[2].parameters(), lr=0.05, accumulate=3),
            ]
            for m in self.models
        ]
        self.cluster = gossamer.VirtualCluster(per_node=per_node)
        self.gossips = self.cluster.decentralize(
            self.models, self.optimizers, broadcast=broadcast, **policies(**{"bucket_mib": 128 / 2**20, **settings})
        )

    def train(self, first, last, skipped=()):
        """Steps `first` to `last - 1`; `skipped` holds (step, worker). The last worker goes first: it may lag."""
        for t in range(first, last):
            for i, (model, optimizers) in reversed([*enumerate(zip(self.models, self.optimizers, strict=True))]):
                if (t, i) in skipped:
                    continue
                g = torch.Generator().manual_seed(100 * t + i)
                model.zero_grad()
                (model(torch.randn(4, 5, generator=g)) - i).square().mean().backward()
                for o in optimizers:
                    o.step()

    def save(self):
        """As a file on disk would have it."""
        file = io.BytesIO()
        states = self.cluster.state_dicts()
        torch.save(
            [
                (m.state_dict(), [o.state_dict() for o in os], s)
                for m, os, s in zip(self.models, self.optimizers, states, strict=True)
            ],
            file,
        )
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, saved):
        for m, os, (model, optimizers, _) in zip(self.models, self.optimizers, saved, strict=True):
            m.load_state_dict(model)
            for o, state in zip(os, optimizers, strict=True):
                o.load_state_dict(copy.deepcopy(state))
        self.cluster.load_state_dicts([s for _, _, s in saved])

    def values(self):
        return [p.detach().clone() for m in self.models for p in m.parameters()]


@pytest.mark.parametrize("per_node", [[3], [2, 2]], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_resume_is_bit_exact(case, per_node):
    plain = Run(per_node, 0, **CASES[case])
    plain.train(0, 9)
    for stop in (1, 4, 5):
        stopped = Run(per_node, 0, **CASES[case])
        stopped.train(0, stop)
        saved = stopped.save()
        resumed = Run(per_node, 1, broadcast=False, **CASES[case])
        resumed.load(saved)
        assert all(map(torch.equal, resumed.values(), stopped.values()))
        resumed.train(stop, 9)
        assert all(map(torch.equal, resumed.values(), plain.values())), f"stopped after {stop} steps"
        stopped.train(stop, 9)  # the one whose state was taken goes on
        assert all(map(torch.equal, stopped.values(), plain.values())), f"looked at after {stop} steps"


def test_resume_after_uneven_steps():
    """Mixing every second step, worker 1 skips one: at the save worker 0 has applied the round that is still in flight
    at worker 1. The resumed run must not send it again."""
    skipped = {(2, 1)}
    plain, stopped = (Run([2], 0, every=2) for _ in range(2))
    plain.train(0, 9, skipped)
    stopped.train(0, 3, skipped)
    assert [[lane.jobs is not None for lane in g.lanes] for g in stopped.gossips] == [[False] * 2, [True] * 2]
    resumed = Run([2], 1, broadcast=False, every=2)
    resumed.load(stopped.save())
    resumed.train(3, 9)
    assert all(map(torch.equal, resumed.values(), plain.values()))


def test_a_state_without_the_round_in_flight_is_refused():
    saved = Run([2], 0).save()
    for _, _, state in saved:
        for lane in state["lanes"]:
            del lane["stale"]
    with pytest.raises(InputError, match=r"saved by Gossamer 0.1, which did not save the round in flight; load only"):
        Run([2], 0).load(saved)


def test_resume_into_a_cluster_that_has_trained():
    plain, stopped, other = (Run([3], s) for s in (0, 0, 1))
    plain.train(0, 8)
    stopped.train(0, 4)
    saved = stopped.save()
    other.train(0, 3)
    other.load(saved)
    other.train(4, 8)
    assert all(map(torch.equal, other.values(), plain.values()))


def test_resume_into_a_cluster_in_the_middle_of_a_step():
    stopped, other = Run([3], 0), Run([3], 1)
    stopped.train(0, 2)
    saved = stopped.save()
    for o in other.optimizers[0]:
        o.step()  # workers 1 and 2 have not stepped
    other.load(saved)
    other.train(2, 4)
    stopped.train(2, 4)
    assert all(map(torch.equal, other.values(), stopped.values()))


def test_a_state_of_another_run_is_refused():
    saved = [s for _, _, s in Run([3], 0).save()]
    other = Run([2, 2], 0)
    with pytest.raises(InputError, match="3 states for 4 virtual workers; pass one each"):
        other.cluster.load_state_dicts(saved)
    with pytest.raises(InputError, match=r"saved with 3 workers, topology 'aer' .* this run has 4, 'aer' and 2"):
        other.cluster.load_state_dicts([*saved, saved[0]])
    with pytest.raises(InputError, match=r"not a state of Gossip.state_dict\(\): version None, expected 2"):
        other.cluster.load_state_dicts([{}] * 4)


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0)])
def test_staleness_must_be_the_same(before, after):
    run = Run([2], 0, staleness=before)
    run.train(0, 2)
    saved = run.save()
    with pytest.raises(InputError, match=rf"saved {'with' if before else 'without'} staleness .* staleness={after};"):
        Run([2], 0, staleness=after).load(saved)


def complete_state(run):
    """All that gossip of `run` holds, lane by lane."""
    return [[(lane.k, lane.state_dict()) for lane in g.lanes] for g in run.gossips]


def equal(a, b):
    """Equality of nested containers with tensors."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


CUTS = {
    "fragments": ({"fragments": 1}, {"fragments": 4}),
    "buckets": ({"bucket_mib": 64 / 2**20}, {"bucket_mib": 1}),
}
LANES = {
    "fp32": {},
    "atc": {"algorithm": "atc"},
    "nesterov": {"every": 2, "outer": gossamer.Nesterov(momentum=0.3)},
    "int4": {"wire": "int4", "average_every": 8},
    "int4, nesterov": {"wire": "int4", "average_every": 8, "every": 2, "outer": gossamer.Nesterov(momentum=0.3)},
}
ASYNCHRONOUS = {"ad-psgd": {"algorithm": "ad-psgd"}}  # has no fragments


@pytest.mark.parametrize(("case", "cut"), [*itertools.product(LANES, CUTS), ("ad-psgd", "buckets")])
def test_another_cut_of_the_parameters_is_refused_and_changes_nothing(case, cut):
    settings, (before, after) = {**LANES, **ASYNCHRONOUS}[case], CUTS[cut]
    stopped = Run([2, 2], 0, **{**settings, **before})
    other = Run([2, 2], 1, **{**settings, **after})
    stopped.train(0, 3)
    other.train(0, 3)
    states, values, held = stopped.cluster.state_dicts(), other.values(), complete_state(other)
    assert stopped.cluster.accepts(states[0])
    assert not other.cluster.accepts(states[0])
    lanes = [run.gossips[0].lanes[0] for run in (stopped, other)]
    theirs, ours = (f"fragments={x.schedule.fragments} and {len(x.buckets)} bucket" for x in lanes)
    remedy = r"resume with the same fragments and Exchange\(bucket_mib=\), or load only the model"
    with pytest.raises(InputError, match=rf"saved with {theirs}.* this run has {ours}.* elements; {remedy}"):
        other.cluster.load_state_dicts(states)
    assert equal(complete_state(other), held)
    assert all(map(torch.equal, other.values(), values))
    plain = Run([2, 2], 1, **{**settings, **after})
    plain.train(0, 6)
    other.train(3, 6)
    assert all(map(torch.equal, other.values(), plain.values()))


def test_a_checkpoint_with_another_cut_restarts_gossip_from_the_saved_parameters(tmp_path):
    stopped, other, same = Run([2, 2], 0), Run([2, 2], 1, fragments=4), Run([2, 2], 1)
    stopped.train(0, 3)
    saved = stopped.values()
    checkpoints = gossamer.Checkpoints(tmp_path)
    checkpoints.save(stopped.cluster, stopped.models, stopped.optimizers)
    checkpoints.wait()
    for run, resized in ((same, False), (other, True)):
        loaded = gossamer.Checkpoints(tmp_path).load(run.cluster, run.models, run.optimizers)
        assert (loaded.step, loaded.resized) == (3, resized)
        assert all(map(torch.equal, run.values(), saved))
        assert {lane.metrics.steps for g in run.gossips for lane in g.lanes} == {3}
        assert all(not lane.jobs for lane in run.gossips[0].lanes) == resized
        run.train(3, 9)
    stopped.train(3, 9)
    assert all(map(torch.equal, same.values(), stopped.values()))


def test_reset_forgets_the_exchange_in_flight():
    run = Run([3], 0)
    run.train(0, 2)
    with torch.no_grad():
        for m in run.models:
            for p in m.parameters():
                p.fill_(0.5)
    run.cluster.reset()
    for os in run.optimizers:
        for o in os:
            o.zero_grad()  # no gradient: only a mix could move anything
            o.step()
    assert all(v.eq(0.5).all() for v in run.values())
