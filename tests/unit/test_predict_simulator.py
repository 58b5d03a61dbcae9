"""The simulator against the published check values, exact formulas and a plain event-by-event reference."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from gossamer.errors import InputError
from gossamer.predict.closed_form import allreduce_step, expected_max, gossip_step
from gossamer.predict.cluster import from_dict
from gossamer.predict.compute import Gaussian
from gossamer.predict.costs import AbstractCosts, ClusterCosts, share
from gossamer.predict.methods import parse
from gossamer.predict.predict import Abstract, ddp_shares, default_policy, predict
from gossamer.predict.presets import PRESETS
from gossamer.predict.simulator import PAPER, ExchangePolicy, simulate, simulate_ddp
from gossamer.topology import Layout, build, entries
from gossamer.topology.schedule import Schedule

FOUR_BY_FOUR = Layout.of([4] * 4)
CHECKS = {  # (sigma, C): complete, aer, exp, ring; 4 x 4 workers, Gaussian compute, intra-node exchanges free
    (0.1, 0.5): (1.030, 1.026, 1.018, 1.013),
    (0.2, 0.5): (1.097, 1.082, 1.054, 1.042),
    (0.3, 0.5): (1.186, 1.151, 1.106, 1.085),
    (0.2, 1.0): (1.211, 1.172, 1.116, 1.094),
}


@pytest.mark.parametrize(("sigma", "cost"), CHECKS)
def test_check_values(sigma, cost):
    draws = Gaussian(sigma).sample(16, 6000, 3)
    for name, expected in zip(("complete", "aer", "exp", "ring"), CHECKS[sigma, cost], strict=True):
        schedule = Schedule(build(name, FOUR_BY_FOUR))
        got = simulate(schedule, AbstractCosts(FOUR_BY_FOUR, cost, 1.0), draws, PAPER, rounds=6000).step_time
        assert got == pytest.approx(expected, abs=0.01), name


# a weighted round waits for neighbors only; the formula is of groups
GROUPED = [e.name for e in entries() if build(e.name, FOUR_BY_FOUR).round(0).weights is None]


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("cost", [0.5, 2.5])
def test_without_jitter_the_formula_is_exact(name, cost):
    topology = build(name, FOUR_BY_FOUR)
    rounds = topology.period * max(2, 400 // topology.period)
    got = simulate(
        Schedule(topology), AbstractCosts(FOUR_BY_FOUR, cost, 1.0), np.ones((rounds, 16)), PAPER, rounds=rounds
    )
    # the growth over whole periods is exact; the run's mean starts within one period of it
    assert got.step_time == pytest.approx(gossip_step(topology, cost), rel=2 * topology.period / rounds)
    if name in ("complete", "aer"):
        exact = max(1, cost) if name == "complete" else (1 + max(1, cost)) / 2
        assert got.step_time == pytest.approx(exact, abs=1e-9)


def test_ddp_is_the_formula():
    draws = Gaussian(0.2).sample(16, 4000, 0)
    costs = AbstractCosts(FOUR_BY_FOUR, 3.0, 0.5)
    one = simulate_ddp(costs, draws, np.array([1.0]))
    assert one.step_time == pytest.approx(allreduce_step(3.0, expected_max(16, 0.2)), abs=0.01)
    constant = simulate_ddp(costs, np.ones((20, 16)), np.full(4, 0.25))
    assert constant.step_time == pytest.approx(allreduce_step(3.0, 1.0, buckets=4), abs=1e-12)


def reference(arrival, work):
    """Processor sharing in tiny time steps."""
    left, end, now, tick = list(work), [None] * len(work), 0.0, 1e-4
    while any(e is None for e in end):
        present = [j for j in range(len(work)) if arrival[j] <= now and end[j] is None]
        for j in present:
            left[j] -= tick / len(present)
            if left[j] <= 0:
                end[j] = now + tick
        now += tick
    return end


def test_links_are_shared_equally():
    rng = np.random.default_rng(0)
    arrival, work = rng.uniform(0, 1, (3, 5)), rng.uniform(0.05, 0.5, (3, 5))
    got = share(arrival, work)
    for row in range(3):
        assert got[row] == pytest.approx(reference(arrival[row], work[row]), abs=2e-3)
        pairs = share(arrival[:, :2], work[:, :2])
        assert pairs[row] == pytest.approx(reference(arrival[row, :2], work[row, :2]), abs=2e-3)
    padded = np.c_[arrival, np.full(3, np.inf)]
    assert share(padded, np.c_[work, np.zeros(3)])[:, :5] == pytest.approx(got)
    together = share(np.zeros((1, 4)), np.full((1, 4), 0.5))
    assert together == pytest.approx(np.full((1, 4), 2.0))


@pytest.mark.parametrize("columns", [2, 3, 8])
@pytest.mark.parametrize("spread", [0.01, 1.0, 10.0])
def test_sharing_many_links_equals_sharing_each_link(columns, spread):
    """The formulas over many rows agree with the event-by-event path that few rows take."""
    rng = np.random.default_rng(columns)
    arrival = rng.uniform(0, spread, (60, columns))
    work = np.where(rng.random((60, 1)) < 0.5, 0.2, rng.uniform(0.05, 0.5, (60, columns)))
    arrival[:20] = np.maximum(arrival[:20], spread / 2)  # behind a backlog several start together
    if columns > 2:
        arrival[40:, -1], work[40:, -1] = np.inf, 0.0
    alone = np.concatenate([share(arrival[r : r + 1], work[r : r + 1]) for r in range(60)])
    assert share(arrival, work)[work > 0] == pytest.approx(alone[work > 0], rel=1e-12)


def test_transfer_that_arrives_when_others_end():
    """Arrivals one rounding apart, as exchanges behind one backlog have them."""
    arrival = np.array([[1.9963798760544715, 1.9998551131071385, 1.9998551134300588, 1.9963970160084075]])
    arrival = np.c_[arrival, arrival + 1e-16, [[1.9998551134300586, 1.9963770170848085]]]
    work = np.full((1, 10), 0.00346666666666667)
    assert (share(arrival, work) >= arrival + work * (1 - 1e-9)).all()
    assert share(arrival, work).max() == pytest.approx(arrival.min() + work.sum())  # the link is never idle


# (preset, workers a node, method, policy): step time, standard deviation of the durations. Computed once by a plain
# implementation that handled bucket by bucket and event by event; with staleness, the time of the slowest worker.
KNOWN = [
    ("a40", [4] * 4, "dadam:aer", {}, 0.057089142843329554, 0.0038318106794667656),
    ("a40", [4] * 4, "dadam:exp", {"in_flight": 2, "buckets": 5}, 0.08947000000000038, 0.015147095018517591),
    ("a40", [4] * 4, "dadam:ring", {"stagger": False}, 0.0672356271045579, 0.016203582938254912),
    ("a40", [4, 4, 2], "dadam:aer", {}, 0.0853019359475313, 0.008080971734436693),
    ("a40", [4] * 4, "dadam:complete:int8", {"staleness": 2}, 0.052547365521635137, 0.0033923143685009828),
    ("a40", [4] * 4, "dadam:aer", {"combine": "atc"}, 0.11239780993899078, 0.004749877828852375),
    ("a40", [4] * 4, "dadam:exponential:bf16", {"average_every": 8}, 0.38510749999999927, 0.10947254647919169),
    ("t4", [8] * 2, "decent-dp:exp", {}, 0.3097276925885626, 0.03186509959371581),
    ("t4", [8] * 4, "dadam:random", {"buckets": 3}, 0.17763984645565611, 0.0184543164816934),
    ("a100", [4] * 8, "dadam:base", {}, 0.04151918003500616, 0.004032334960965674),
]


@pytest.mark.parametrize(("preset", "per_node", "method", "changes", "time", "spread"), KNOWN)
def test_known_step_times(preset, per_node, method, changes, time, spread):
    setting = PRESETS[preset].resized(Layout.of(per_node)).changed(costs=None)
    policy = replace(default_policy(setting, parse(method)), **changes)
    got = predict(method, setting, steps=60, seed=1, policy=policy)
    assert got.step_time == pytest.approx(time, rel=1e-9)
    assert got.durations.std() == pytest.approx(spread, rel=1e-9)


def cluster(**changes):
    made = {
        "nodes": 4,
        "per_node": 2,
        "links": {"inter": {"bandwidth_gbps": 0.08}, "intra": {"bandwidth_gbps": 80}},
        "compute": {"seconds": 0.1},
        "model": {"mb": 4, "buckets": 1},
    }
    return from_dict({**made, **changes})


def step(method, policy, **changes):
    return predict(method, cluster(**changes), steps=80, policy=policy).step_time


def test_bytes_over_bandwidth():
    """10 MB/s, 4 MB: AER's hierarchical exchange crosses nodes every other phase, 0.4 s; inside a node 0.4 ms."""
    one = ExchangePolicy(buckets=1, stagger=False)
    assert step("dadam:aer", one) == pytest.approx((0.1 + 0.4) / 2, rel=0.01)
    # flat: each of a pair of nodes' 4 workers sends 3/4 twice, two thirds of it across: 2 x 4 MB per node
    assert step("dadam:aer", ExchangePolicy(buckets=1, stagger=False, hierarchical=False)) == pytest.approx(
        0.45, rel=0.01
    )
    # exp on 8 workers: distance 1 inside, 2 and 4 across, both workers of a node share its interface
    assert step("dadam:exp", one) == pytest.approx((0.1 + 0.8 + 0.8) / 3, rel=0.01)
    # the ring crosses nodes in one of two rounds, a node's two workers to either side through one interface
    assert step("dadam:ring", one) == pytest.approx((0.1 + 0.8) / 2, rel=0.01)


def test_exchanges_that_share_a_link_use_the_measured_part_of_it():
    links = {"inter": {"bandwidth_gbps": 0.08, "shared": 0.8}, "intra": {"bandwidth_gbps": 80}}
    assert step("dadam:aer", ExchangePolicy(buckets=4), links=links) == pytest.approx(0.2 / 0.8, rel=0.02)
    assert step("dadam:aer", ExchangePolicy(buckets=4, in_flight=1), links=links) > 0.2 / 0.8 - 1e-9
    assert step("ddp", None, links=links) == step("ddp", None)


def test_wire_scales_what_crosses_nodes():
    one = ExchangePolicy(buckets=1, stagger=False)
    assert step("dadam:complete:bf16", one) < step("dadam:complete", one)
    assert step("dadam:aer:bf16", one) == pytest.approx((0.1 + 0.2) / 2, rel=0.01)
    assert step("dadam:aer:int8", one) == pytest.approx((0.1 + 0.1 * (1 + 4 / 256)) / 2, rel=0.01)


def test_staggering_spreads_the_load():
    """With a bucket for every phase the links carry half the data every step: 0.2 s instead of 0.1 and 0.4 in turn."""
    assert step("dadam:aer", ExchangePolicy(buckets=4)) == pytest.approx(0.2, rel=0.02)
    assert step("dadam:aer", ExchangePolicy(buckets=4, stagger=False)) == pytest.approx(0.25, rel=0.02)
    assert (
        step("dadam:aer", ExchangePolicy(buckets=4, in_flight=1)) >= step("dadam:aer", ExchangePolicy(buckets=4)) - 1e-9
    )


def test_every_atc_and_staleness():
    one = {"buckets": 1, "stagger": False}
    assert step("dadam:complete", ExchangePolicy(**one)) == pytest.approx(0.6, rel=0.01)  # 2 x 3/4 of 4 MB at 10 MB/s
    assert step("dadam:complete", ExchangePolicy(**one, combine="atc")) == pytest.approx(0.7, rel=0.01)
    assert step("dadam:complete", ExchangePolicy(**one, every=4)) == pytest.approx((0.6 + 3 * 0.1) / 4, rel=0.01)
    assert step("dadam:complete", ExchangePolicy(**one, staleness=2)) == pytest.approx(0.2, rel=0.01)
    stale = predict("dadam:complete", cluster(), steps=80, policy=ExchangePolicy(**one, staleness=9))
    assert stale.step_time == pytest.approx(0.1, rel=0.01)
    assert stale.exchange_rate == pytest.approx(1 / 7, rel=0.02)  # 0.6 s and a little inside the node: the 7th step
    with pytest.raises(InputError, match="staleness must be 0"):
        ExchangePolicy(combine="atc", staleness=1)
    with pytest.raises(InputError, match="every must be at least 1"):
        ExchangePolicy(every=0)


def test_with_staleness_the_slowest_worker_sets_the_step_time():
    """A run ends when every worker has taken its steps, however many the fast ones could have taken meanwhile."""
    slow = {"seconds": 0.1, "jitter": "slow-worker:2"}
    free = {"inter": {"bandwidth_gbps": 80}, "intra": {"bandwidth_gbps": 80}}
    stale = ExchangePolicy(buckets=1, stagger=False, staleness=1)
    got = predict("dadam:complete", cluster(compute=slow, links=free), steps=80, policy=stale)
    assert got.step_time == pytest.approx(0.2, rel=0.02)
    assert 1 / got.rates.max() == pytest.approx(0.1, rel=0.02)  # the others take two steps for one of the slow worker


def test_update_time_is_added_to_every_step():
    """10 MB/s, 4 MB: 0.6 s on the links in a complete round. 0.05 s of update come on top of whatever is longer."""
    one = ExchangePolicy(buckets=1, stagger=False)
    compute = {"seconds": 0.1, "update_seconds": 0.05}
    for method, policy, plain in (
        ("dadam:complete", one, 0.6),
        ("dadam:complete", replace(one, combine="atc"), 0.7),
        ("dadam:complete", replace(one, every=4), (0.6 + 3 * 0.1) / 4),
        ("ddp", None, step("ddp", None)),
        ("ad-psgd:ring", None, 0.1),
    ):
        assert step(method, policy, compute=compute) == pytest.approx(plain + 0.05, rel=0.01)
    stale = step("dadam:complete", replace(one, staleness=2), compute=compute)
    assert stale == pytest.approx((0.6 + 0.05) / 3, rel=0.01)  # two updates lie within the exchange
    assert predict("ddp", cluster(compute=compute), steps=20).compute_time == pytest.approx(0.15)


def test_slow_pair_delays_only_workers_that_use_it():
    links = {"inter": {"bandwidth_gbps": 0.08}, "intra": {"bandwidth_gbps": 80}}
    slow = {**links, "pairs": [{"nodes": [0, 1], "bandwidth_gbps": 0.02}]}
    fast = {**links, "pairs": [{"nodes": [0, 1], "bandwidth_gbps": 0.8}]}
    one = ExchangePolicy(buckets=1, stagger=False)
    plain = step("dadam:aer", one)
    assert step("dadam:aer", one, links=slow) > plain * 1.2
    assert step("dadam:aer", one, links=fast) <= plain + 1e-9
    assert step("ddp", one, links=slow) == pytest.approx(4 * step("ddp", one) - 3 * 0.1, rel=0.1)


def test_ddp_buckets_as_in_torch():
    assert ddp_shares(cluster(model={"mb": 4})) == pytest.approx([2**20 / 4e6, 1 - 2**20 / 4e6])
    assert len(ddp_shares(cluster(model={"mb": 260}))) == 11
    # torch's first bucket is small only if bucket_cap_mb is not passed
    assert ddp_shares(cluster(model={"mb": 4}, ddp={"bucket_mb": 10})) == pytest.approx([1.0])
    assert ddp_shares(cluster(model={"mb": 4}, ddp={"bucket_mb": 2})) == pytest.approx([0.524288, 0.475712])
    assert ddp_shares(cluster(model={"mb": 4}, ddp={"first_bucket_mb": 25})) == pytest.approx([1.0])
    assert ddp_shares(cluster(model={"mb": 0.5})) == pytest.approx([1.0])
    assert ddp_shares(Abstract(FOUR_BY_FOUR, 1.0), 5) == pytest.approx([0.2] * 5)


@pytest.mark.parametrize("name", [e.name for e in entries()])
@pytest.mark.parametrize("per_node", [[1], [3], [2, 2], [4, 4, 2], [1] * 7])
def test_every_topology_on_any_layout(name, per_node):
    made = cluster(nodes=len(per_node), per_node=per_node, model={"mb": 4})
    result = predict(f"dadam:{name}", made, steps=24)
    assert result.step_time >= 0.1 - 1e-12
    assert np.isfinite(result.durations).all()
    assert 0 <= result.waiting < 1


def test_same_seed_same_times():
    setting = Abstract(FOUR_BY_FOUR, 2.0, 0.5, "lognormal:0.3")
    first, again, other = (predict("dadam:aer", setting, steps=50, seed=s).step_time for s in (0, 0, 1))
    assert first == again != other


def test_spans_cover_the_time_of_every_worker():
    compute = {"seconds": 0.1, "jitter": "gaussian:0.2", "update_seconds": 0.01}
    setting = cluster(compute=compute, model={"mb": 4})
    for method in ("dadam:aer", "ddp", "dadam:ring-static"):
        spans = predict(method, setting, steps=40, trace_steps=5).spans
        for worker in range(8):
            own = sorted((s for s in spans if s.worker == worker and s.category != "exchange"), key=lambda s: s.start)
            assert own[0].start == 0
            for a, b in itertools.pairwise(own):
                assert b.start == pytest.approx(a.end, abs=1e-9)
            assert [s.attrs["step"] for s in own if s.category == "compute"] == list(range(5))
        assert any(s.category == "exchange" and s.attrs["bucket"] == 1 for s in spans)
        assert any(s.category == "wait" and "link" in s.attrs for s in spans)
        assert all(s.end >= s.start for s in spans)


def test_exchange_cost_counts_the_messages_of_the_engine():
    """The simulator's bytes equal what the engine's programs send, message by message."""
    made = cluster()
    topology = build("aer", made.layout)
    costs = ClusterCosts(made)
    schedule = Schedule(topology)
    for k in range(topology.period):
        exchange = costs.exchange(schedule.round(k), 1.0)
        for worker in range(made.layout.n):
            program = schedule.program(k, 0, worker, 1_000_000)
            sent = sum(4 * (p.stop - p.start) for s in program for p in s.sends)
            assert exchange.sent[worker] == pytest.approx(sent, rel=1e-5)


def test_asynchronous_workers_never_wait():
    jitter = {"seconds": 0.1, "jitter": "slow-worker:4"}
    setting = cluster(compute=jitter, links={"inter": {"bandwidth_gbps": 8}, "intra": {"bandwidth_gbps": 80}})
    asynchronous = predict("ad-psgd:ring", setting, steps=300)
    assert asynchronous.rates[:7] == pytest.approx(10.0, rel=0.01)
    assert asynchronous.rates[7] == pytest.approx(2.5, rel=0.01)
    assert asynchronous.step_time == pytest.approx(8 / (7 * 10 + 2.5), rel=0.01)
    assert predict("dadam:ring", setting, steps=300).step_time == pytest.approx(0.4, rel=0.02)
    assert predict("ddp", setting, steps=50).step_time >= 0.4
    slow = predict("ad-psgd:ring", cluster(compute=jitter), steps=300)
    assert slow.step_time == pytest.approx(asynchronous.step_time, rel=0.01)
    assert slow.exchange_rate < 0.6 * asynchronous.exchange_rate
    assert predict("a2cid2:ring", setting, steps=300, rate=0.5).exchange_rate < asynchronous.exchange_rate
    assert predict("ad-psgd:ring", setting, steps=50, trace_steps=4).spans
    with pytest.raises(InputError, match="rate must not be negative"):
        predict("ad-psgd:ring", setting, rate=-1)


def test_too_few_steps():
    with pytest.raises(InputError, match="at least 10 steps"):
        predict("dadam:aer", cluster(), steps=3)
