"""Fragments: a step exchanges one of f parts of the model, and every bucket still follows the topology."""

import warnings

import numpy as np
import pytest
import torch
from test_engine_parity import check
from test_engine_staleness import Delayed
from test_exchange import Still
from torch import nn

import gossamer
from gossamer.errors import GossamerWarning, InputError
from gossamer.predict.cluster import load
from gossamer.predict.methods import parse
from gossamer.predict.predict import Abstract, default_policy, predict
from gossamer.predict.simulator import ExchangePolicy
from gossamer.topology import Layout, build, entries
from gossamer.topology.analysis import analyze
from gossamer.topology.schedule import Schedule, bucket_count
from policies import policies
from reference import distance

LAYOUTS = [Layout.of(p) for p in ([8], [2, 2, 2, 2], [3, 3])]


def product(schedule, first, last, bucket):
    """The matrix by which rounds `first` to `last - 1` mix a bucket."""
    n = schedule.topology.n
    total = np.eye(n)
    for k in range(first, last):
        total = schedule.round(k, bucket).sparse(n).toarray() @ total
    return total


@pytest.mark.parametrize("topology", [e.name for e in entries()])
def test_finite_time_topologies_stay_exact_and_take_f_times_as_long(topology):
    for layout in LAYOUTS:
        built = build(topology, layout)
        offsets = analyze(built).mixing.exact_after_by_offset
        for f in range(1, 9) if offsets is not None else ():
            for bucket in range(2 * f):
                schedule = Schedule(built, fragments=f)
                rounds = offsets[bucket // f % built.period]
                assert rounds <= built.period + 1
                exact = product(schedule, 0, f * rounds, bucket)
                assert np.abs(exact - 1 / layout.n).max() < 1e-12, (layout, f, bucket)


@pytest.mark.parametrize("topology", [e.name for e in entries()])
def test_a_bucket_performs_the_rounds_of_the_topology_in_order(topology):
    built = build(topology, LAYOUTS[1])
    for f in (1, 2, 3, 8):
        schedule = Schedule(built, fragments=f)
        for bucket in range(f + 2):
            mine = [k for k in range(6 * f) if schedule.exchanges(k, bucket)]
            assert [k + bucket for k in mine] == list(range(mine[0] + bucket, 6 * f + bucket, f))
            assert len(mine) == 6
            rounds = [schedule.round(k, bucket) for k in mine]
            assert rounds == [built.round(j + bucket // f) for j in range(6)]
            others = [schedule.round(k, bucket) for k in range(6 * f) if k not in mine]
            assert all(len(g) == 1 for r in others for g in r.groups)


def test_without_fragments_a_schedule_is_what_it_was():
    built = build("aer", LAYOUTS[1])
    schedule = Schedule(built, average_every=5)
    for k in range(20):
        for bucket in range(6):
            assert schedule.round(k, bucket) == (schedule.everyone if k % 5 == 4 else built.round(k + bucket))


@pytest.mark.parametrize("f", range(1, 9))
def test_every_step_loads_the_links_alike(f):
    built = build("aer", LAYOUTS[1])
    schedule = Schedule(built, fragments=f)
    buckets = bucket_count(4e6, built.period, f)
    assert buckets % (f * built.period) == 0
    loads = []
    for k in range(2 * f * built.period):
        inter = [schedule.traffic(k, b) for b in range(buckets)]
        loads.append(sum(t.inter_wired + t.inter_plain for t in inter).max() / buckets)
    whole = Schedule(built).traffic(1, 0)
    assert np.allclose(loads, loads[0])
    assert loads[0] == pytest.approx((whole.inter_wired + whole.inter_plain).max() / 2 / f)


@pytest.mark.parametrize("fragments", [2, 3])
@pytest.mark.parametrize("algorithm", ["awc", "atc"])
@pytest.mark.parametrize(("every", "average_every"), [(1, 0), (1, 5), (2, 8)])
@pytest.mark.filterwarnings("ignore:bucket_mib")
def test_parity_with_the_dense_reference(fragments, algorithm, every, average_every):
    for per_node in ([5], [2, 2], [1, 2, 1]):
        layout = Layout.of(per_node)
        names = ["sgd", "accumadamw"]
        settings = {"algorithm": algorithm, "every": every, "average_every": average_every, "fragments": fragments}
        check(str(settings), layout, build("aer", layout), names, torch.float32, 14, **settings)


@pytest.mark.parametrize("average_every", [0, 6])
@pytest.mark.filterwarnings("ignore:bucket_mib")
def test_parity_with_staleness(monkeypatch, average_every):
    layout = Layout.of([4])

    def late(worker, step):
        return (worker + step) % 3 == 0

    topology = build("one-peer-exponential", layout)
    delayed = Delayed(monkeypatch, layout, topology, late, 2, steps=16, fragments=2, average_every=average_every)
    for _ in range(16):
        delayed.step()
    assert delayed.dense.was_late


@pytest.mark.parametrize("topology", ["aer", "ring", "one-peer-exponential", "complete"])
def test_the_mean_stays_and_the_distance_contracts_as_computed(topology):
    f, periods = 4, 2
    still = Still([2, 2, 2, 2], elements=512, topology=topology, fragments=f)
    built = still.gossips[0].lanes[0].schedule.topology
    before = still.values()
    steps = f * periods * built.period
    for _ in range(steps + 1):  # the exchange of a step is applied in the next one
        still.step()
    after = still.values()
    assert np.abs(after.mean(axis=0) - before.mean(axis=0)).max() < 1e-6 * np.abs(before).max()
    bound = analyze(built).mixing.contraction_period ** periods
    assert distance(after) <= bound * distance(before) + 1e-6 * distance(before)


@pytest.mark.parametrize("algorithm", ["awc", "atc"])
def test_exact_averages_reach_every_bucket_within_f_steps(algorithm):
    f, every = 4, 12
    still = Still([8], elements=512, topology="ring", algorithm=algorithm, fragments=f, average_every=every)
    distances = []
    for _ in range(every + 1):
        still.step()
        distances.append(distance(still.values()))
    assert distances[-1] < 1e-6 * distances[0] < distances[every - f - 1]
    assert still.gossips[0].stats()["exact_averages"] == 1
    assert still.gossips[0].stats()["rounds"] == every + 1


def test_bytes_are_divided_by_the_fragments_and_even():
    sent = {}
    for f in (1, 4):
        still = Still([1, 1, 1, 1], elements=2048, topology="one-peer-exponential", fragments=f)
        counts = [0]
        for _ in range(8 * f + 1):
            still.step()
            counts.append(still.gossips[0].stats()["bytes_sent"])
        steps = np.diff(counts)[1:]
        assert len(set(steps)) == 1, steps
        sent[f] = steps[0]
    assert sent[1] == 4 * sent[4] == 2048 * 4


def test_buckets_are_a_multiple_of_the_fragments():
    for nbytes in (1e3, 4e6, 3e8, 1e10):
        for period in (1, 3, 4, 6, 40):
            for f in range(1, 9):
                assert bucket_count(nbytes, period, f) % f == 0
                assert bucket_count(nbytes, period, 1) == bucket_count(nbytes, period)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        still = Still([2], elements=640, fragments=4)
        assert [b.x.numel() for b in still.gossips[0].lanes[0].buckets] == [160] * 4


def test_a_bucket_size_that_does_not_fit_is_changed_and_said():
    with pytest.warns(GossamerWarning, match=r"would make 3 bucket\(s\), but each of the 2 fragments .* into 4; "):
        still = Still([2], elements=640, fragments=2, bucket_mib=1000 / 2**20)
    assert still.gossips[0].stats()["buckets"] == 4


def test_more_fragments_than_the_model_can_be_cut_into():
    """A model of two cache lines has two buckets; in most of eight steps nothing is exchanged."""
    still = Still([2], elements=32, fragments=8)
    assert still.gossips[0].stats()["buckets"] == 2
    before = still.values()
    moved = []
    for _ in range(9):
        last = still.values()
        still.step()
        moved.append(bool((still.values() != last).any()))
    assert sum(moved) == 2
    assert np.allclose(still.values(), before.mean(axis=0), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"fragments": 0}, "fragments must be an integer of at least 1, got 0"),
        ({"fragments": 2.5}, "fragments must be an integer of at least 1, got 2.5"),
        ({"fragments": 65}, "fragments must be at most 64, got 65"),
        ({"fragments": 4, "every": 2, "average_every": 6}, "all 4 fragments, which takes 8; use at least 8"),
        ({"algorithm": "ad-psgd", "fragments": 2}, "algorithm 'ad-psgd' has no setting 'fragments'"),
    ],
)
def test_bad_input(settings, error):
    with pytest.raises(InputError, match=error):
        policies(**settings)


def test_workers_with_fewer_steps_take_part_in_the_rounds_of_others():
    models = [nn.Linear(40, 8) for _ in range(4)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    with gossamer.VirtualCluster(4) as cluster:
        cluster.decentralize(models, optimizers, topology="ring", algorithm=gossamer.AWC(fragments=3))
        generator = torch.Generator().manual_seed(0)
        for step in range(9):
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                if step == 4 and rank == 3:
                    cluster.park(rank)
                if step < 4 or rank != 3:
                    model(torch.randn(4, 40, generator=generator)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        with cluster.averaged() as mean:
            assert torch.isfinite(mean.weight).all()
        assert [g.stats()["rounds"] for g in cluster.gossips] == [9] * 4
        assert [g.stats()["mix_only_rounds"] for g in cluster.gossips] == [0, 0, 0, 5]


# -- predictions ----------------------------------------------------------------------------------------------------


def test_predicted_steps_shrink_where_links_are_slow():
    slow = load("a40").changed(model={"mb": 4000.0})
    times = [
        predict("dadam:aer", slow, policy=default_policy(slow, parse("dadam:aer"), f), steps=120) for f in (1, 2, 4)
    ]
    assert times[0].step_time > 1.5 * times[1].step_time > 2 * times[2].step_time
    assert all(t.step_time >= t.compute_time for t in times)


def test_the_abstract_setting_knows_fragments():
    setting = Abstract(Layout.of([1] * 8), gamma=4.0)
    step = {f: predict("dadam:ring", setting, policy=default_policy(setting, parse("dadam:ring"), f)) for f in (1, 4)}
    assert step[1].step_time == pytest.approx(4.0)
    assert step[4].step_time == pytest.approx(1.0)


def test_a_predicted_timeline_names_the_buckets_that_are_exchanged():
    setting = load("a40")
    policy = ExchangePolicy(8, fragments=4)
    spans = predict("dadam:aer", setting, policy=policy, steps=20, trace_steps=6).spans
    found = {(s.attrs["round"], s.attrs["bucket"]) for s in spans if s.category == "exchange"}
    assert found
    assert all((k + b) % 4 == 0 for k, b in found)


def test_only_synchronous_methods_have_fragments():
    setting = load("a40")
    assert default_policy(setting, parse("ddp"), 4).fragments == 1
    assert default_policy(setting, parse("ad-psgd"), 4).fragments == 1
    with pytest.raises(InputError, match="fragments must be at least 1, got 0"):
        default_policy(setting, parse("dadam"), 0)
