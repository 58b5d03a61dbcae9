"""Asynchronous gossip on real processes: parity with virtual workers, no lost update, no hang, nothing left behind."""

import contextlib
import copy
import gc
import os
import random
import signal
import threading
import time
import warnings

import pytest
import torch
from torch import nn
from workers import error_of, loss_of, mlp, real, seeded, vector

import gossamer
from gossamer.engine.asynchronous import clock as clocks
from policies import policies

ALGORITHMS = ["ad-psgd", "a2cid2"]


def train(model, optimizer, rank, steps, first=0):
    for step in range(first, first + steps):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.02)


# -- the virtual clock --------------------------------------------------------------------------------------------


def on_the_virtual_clock(rank, decentralize, lengths, **settings):
    """Uneven numbers of steps, a collective call after each epoch."""
    model = seeded(0, mlp)
    optimizer = adam(model)
    seen = []
    with decentralize(model, optimizer, clock="virtual", **settings) as gossip:
        for epoch, length in enumerate(lengths):
            train(model, optimizer, rank, length[rank], 100 * epoch)
            seen.append(vector(model))
            with gossip.averaged():
                seen.append(vector(model))
            seen.append(torch.tensor(gossip.consensus_distance(), dtype=torch.float64))
        rounds = gossip.stats()["rounds"]
    return [*seen, vector(model)], rounds


def virtual_reference(n, lengths, **settings):
    models = [seeded(0, mlp) for _ in range(n)]
    optimizers = [adam(m) for m in models]
    cluster = gossamer.VirtualCluster(n)
    gossips = cluster.decentralize(models, optimizers, **policies(**settings))
    seen = [[] for _ in range(n)]
    for epoch, length in enumerate(lengths):
        for step in range(max(length)):
            for i in range(n):
                if step < length[i]:
                    train(models[i], optimizers[i], i, 1, 100 * epoch + step)
        for i in range(n):
            seen[i].append(vector(models[i]))
        with cluster.averaged():
            for i in range(n):
                seen[i].append(vector(models[i]))
        distance = cluster.consensus_distance()
        for i in range(n):
            seen[i].append(torch.tensor(distance, dtype=torch.float64))
    rounds = [g.stats()["rounds"] for g in gossips]
    cluster.close()
    return [([*s, vector(m)], r) for s, m, r in zip(seen, models, rounds, strict=True)]


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(("n", "topology"), [(2, "ring"), (3, "star"), (4, "ring"), (4, "complete")])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_virtual_clock_equals_virtual_workers(pools, one_thread, algorithm, n, topology, wire):
    lengths = [[7] * n, [3 + 2 * r for r in range(n)], [4 - r % 3 for r in range(n)]]
    settings = {"topology": topology, "algorithm": algorithm, "wire": wire, "rate": 1.3, "seed": 2}
    ours = pools(n).run(real, on_the_virtual_clock, lengths, **settings)
    theirs = virtual_reference(n, lengths, **settings)
    for rank in range(n):
        assert ours[rank][1] == theirs[rank][1]
        for mine, other in zip(ours[rank][0], theirs[rank][0], strict=True):
            assert torch.equal(mine, other)


def resumed(rank, decentralize, split, algorithm):
    """Train 12 steps; with `split`, in two handles with a checkpoint in between."""
    model = seeded(0, mlp)
    optimizer = adam(model)
    settings = {"topology": "ring", "algorithm": algorithm, "clock": "virtual"}
    gossip = decentralize(model, optimizer, **settings)
    train(model, optimizer, rank, 5)
    state = gossip.state_dict()
    if split:
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), state))
        train(model, optimizer, rank, 2)  # is thrown away
        gossip.close()
        model = seeded(1, mlp)
        optimizer = adam(model)
        gossip = decentralize(model, optimizer, broadcast=False, **settings)
        train(model, optimizer, rank, 1)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        gossip.load_state_dict(saved[2])
    train(model, optimizer, rank, 7, 5)
    total = gossip.total_steps
    gossip.close()
    return vector(model), total


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_resumed_run_equals_the_uninterrupted_one(pools, algorithm):
    whole = pools(3).run(real, resumed, False, algorithm)
    halves = pools(3).run(real, resumed, True, algorithm)
    for rank in range(3):
        assert torch.equal(whole[rank][0], halves[rank][0])
        assert whole[rank][1] == halves[rank][1]


def two_lanes(rank, decentralize, algorithm, seed):
    """Both workers skip other optimizers at other times."""
    draw = random.Random(10 * seed + rank)
    model = seeded(0, mlp)
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)]
    with decentralize(model, optimizers, topology="ring", algorithm=algorithm, clock="virtual") as gossip:
        for step in range(10):
            loss_of(model, rank, step).backward()
            for optimizer in optimizers:
                if draw.random() < 0.6:
                    optimizer.step()
            model.zero_grad()
        with gossip.averaged():
            return vector(model)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_lanes_do_not_deadlock(pools, algorithm):
    for seed in range(3):
        means = pools(3).run(real, two_lanes, algorithm, seed)
        assert all(torch.equal(m, means[0]) for m in means)


# -- the wall clock -----------------------------------------------------------------------------------------------


class Counter(nn.Module):
    """Each worker adds whole numbers to its own coordinate: sums of dyadic fractions are exact in double precision."""

    def __init__(self, n):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(n, 16, dtype=torch.float64))


def stress(rank, decentralize, n, algorithm, events, **settings):
    """Known displacements under random delays; whatever is lost shows in the sums."""
    draw = random.Random(rank)
    model = Counter(n)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with decentralize(model, optimizer, algorithm=algorithm, **settings) as gossip:
        steps = 0
        while gossip.stats()["rounds"] < events:
            model.w.grad = torch.zeros_like(model.w)
            model.w.grad[rank] = -1.0
            if draw.random() < 0.3:
                time.sleep(draw.random() * 0.004)
            optimizer.step()
            steps += 1
        lane = gossip.lanes[0]
        with gossip._together("sum"):
            x = torch.cat(lane.state.x)[: n * 16].view(n, 16).clone()
            xt = x if lane.state.x_tilde is None else torch.cat(lane.state.x_tilde)[: n * 16].view(n, 16).clone()
            total = gossip.total_steps
        rounds = gossip.stats()["rounds"]
    return steps, rounds, x, xt, total


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_update_is_lost_in_thousands_of_events(pools, algorithm):
    n = 4
    results = pools(n).run(
        real, stress, n, algorithm, 520, topology="complete", rate=4.0, pairing="edges", wire="fp32", timeout=300
    )
    steps = torch.tensor([r[0] for r in results], dtype=torch.float64)
    assert sum(r[1] for r in results) > 2000
    sums = sum(r[2] + r[3] for r in results) / 2  # without momentum x~ is x
    torch.testing.assert_close(sums, steps[:, None].expand(n, 16), rtol=1e-12, atol=1e-9)
    assert max(r[4] for r in results) <= steps.sum()
    assert sum(r[1] for r in results) % 2 == 0  # an event counts on both sides


def bounded(rank, decentralize, n, bound, gaps):
    """Everybody notes its count before each step; the slowest worker is ten times slower."""
    model = seeded(0, mlp)
    optimizer = adam(model)
    log = []
    settings = {"topology": "ring", "algorithm": "a2cid2", "rate": 2.0, "max_staleness": bound, "gaps": gaps}
    with decentralize(model, optimizer, **settings) as gossip:
        lane = gossip.lanes[0]
        stepped = lane.stepped

        def noted():
            log.append((time.monotonic(), lane.metrics.steps))
            stepped()

        lane.stepped = noted
        for _ in gossip.budget(40 * n):
            loss_of(model, rank, 0).backward()
            time.sleep(0.03 if rank == 1 else 0.003)
            optimizer.step()
            optimizer.zero_grad()
        steps = gossip.stats()["steps"]
    return log, steps


@pytest.mark.parametrize(("bound", "gaps"), [(1, "poisson"), (1, "fixed"), (4, "poisson")])
def test_max_staleness_bounds_the_drift_and_budget_stops_everybody(pools, bound, gaps):
    n = 3
    results = pools(n).run(real, bounded, n, bound, gaps, timeout=300)
    logs = [r[0] for r in results]
    for log in logs[0], logs[2]:
        for at, count in log:  # the count-th step is being completed at that time
            slow = max((c for t, c in logs[1] if t <= at), default=0)
            assert count - 1 - slow <= bound
    total = sum(r[1] for r in results)
    assert 40 * n <= total <= 40 * n + n * (bound + 8)


def uneven(rank, decentralize, algorithm):
    """Worker r has 5 r batches; worker 0 none at all. Then one of them evaluates alone for long."""
    model = seeded(0, mlp)
    optimizer = adam(model)
    means = []
    with decentralize(model, optimizer, topology="ring", algorithm=algorithm, max_staleness=3) as gossip:
        for epoch in range(2):
            train(model, optimizer, rank, 15 * rank, 100 * epoch)
            with gossip.averaged():
                means.append(vector(model))
                if rank == 1:
                    time.sleep(0.5)
    return means


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_uneven_data_and_a_long_evaluation_do_not_hang(pools, algorithm):
    results = pools(4).run(real, uneven, algorithm)
    for means in results:
        assert all(torch.equal(a, b) for a, b in zip(means, results[0], strict=True))


def alone(rank, decentralize, clock):
    model = seeded(0, mlp)
    optimizer = adam(model)
    with decentralize(model, optimizer, topology="ring", algorithm="a2cid2", clock=clock) as gossip:
        for _ in gossip.budget(8):
            train(model, optimizer, rank, 1, gossip.total_steps)
        with gossip.averaged():
            mean = vector(model)
    return mean, vector(model)


@pytest.mark.parametrize("clock", ["wall", "virtual"])
def test_one_worker_trains_like_the_plain_loop(pools, clock, one_thread):
    plain = seeded(0, mlp)
    train(plain, adam(plain), 0, 8)
    ((mean, last),) = pools(1).run(real, alone, clock)
    assert torch.equal(mean, vector(plain))
    assert torch.equal(last, vector(plain))


def wall_resume(rank, decentralize):
    """A state of a later time, loaded by a fresh run: exchanges go on at once, the budget too."""
    model = seeded(0, mlp)
    optimizer = adam(model)
    settings = {"topology": "ring", "algorithm": "a2cid2", "rate": 2.0}
    gossip = decentralize(model, optimizer, **settings)
    while gossip.stats()["rounds"] < 60:
        train(model, optimizer, rank, 1)
        time.sleep(0.002)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), gossip.state_dict()))
    total = gossip.total_steps
    gossip.close()
    gossip = decentralize(model, optimizer, broadcast=False, **settings)
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    load, lane, times = gossip._load, gossip.lanes[0], []

    def noted(saved):
        load(saved)
        times.append(lane.timetable.next.time - lane.clock.start_at)  # the clock stands still until the call is over

    gossip._load = noted
    gossip.load_state_dict(state[2])
    (ahead,) = times
    rounds = gossip.stats()["rounds"]
    assert rounds >= 60  # continues like the steps
    while gossip.stats()["rounds"] < rounds + 20:
        train(model, optimizer, rank, 1)
        time.sleep(0.002)
    grown = gossip.total_steps - total
    with gossip.averaged():
        mean = vector(model)
    gossip.close()
    return ahead, grown, mean


def test_a_wall_clock_run_resumes_at_its_time(pools):
    results = pools(3).run(real, wall_resume)
    for ahead, grown, mean in results:
        assert 0 <= ahead < 20
        assert grown > 0
        assert torch.equal(mean, results[0][2])


def going_back(rank, decentralize):
    """An earlier state, loaded by the run that saved it: what happens before the call is over, and afterwards."""
    model = seeded(0, mlp)
    optimizer = adam(model)
    with decentralize(model, optimizer, topology="ring", algorithm="ad-psgd", rate=2.0, pairing="edges") as gossip:

        def train_until(rounds):
            while gossip.stats()["rounds"] < rounds:
                train(model, optimizer, rank, 1)
                time.sleep(0.002)

        train_until(5)
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), gossip.state_dict()))
        train_until(60)
        load, rounds = gossip._load, []

        def slowly(saved):
            load(saved)
            rounds.append(saved["lanes"][0]["exchanged"])
            time.sleep(0.3)  # long enough for 55 exchanges of this model, if they did not wait for their time
            rounds.append(gossip.stats()["rounds"])

        gossip._load = slowly
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        gossip.load_state_dict(state[2])
        train_until(rounds[1] + 20)
        with gossip.averaged():
            return rounds, vector(model)


def test_no_exchange_is_made_before_its_time_when_an_earlier_state_is_loaded(pools):
    results = pools(3).run(real, going_back)
    for (before, after), mean in results:
        assert before == after
        assert torch.equal(mean, results[0][1])


def pairing(rank, decentralize, units):
    """Exchanges that take `units` of time (and what they really do), or none at all: on a busy machine they may really
    take longer than they should."""
    model = seeded(0, mlp)
    optimizer = adam(model)
    with decentralize(model, optimizer, topology="ring", algorithm="ad-psgd") as gossip:
        lane = gossip.lanes[0]
        wait = lane._thread._await

        def slow(job):
            wait(job)
            if job.bucket == 0:
                time.sleep(units * lane.clock.unit)
                job.finished = time.perf_counter() if units else 0.0

        lane._thread._await = slow
        while lane.timetable.trial is not None or gossip.stats()["rounds"] < 20:
            train(model, optimizer, rank, 1)
            time.sleep(0.01)
        state = gossip.state_dict()["lanes"][0]["rounds"]
        return lane.timetable.events.pairing, lane.timetable.events.first, state


def test_pairing_switches_to_rounds_by_agreement_where_exchanges_last(pools):
    long = pools(4).run(real, pairing, 2.0)
    assert [r[0] for r in long] == ["rounds"] * 4
    assert len({r[1] for r in long}) == 1
    assert long[0][2] is not None
    short = pools(4).run(real, pairing, 0.0)
    assert [r[0] for r in short] == ["edges"] * 4
    assert short[0][2] is None


def slow_start(rank, decentralize):
    """The first steps take long, until this worker has said how long, and the others do not; what the user is warned
    of. They take long on a clock that is put forward: on a busy machine any step may take long."""
    before, clocks.LATER = clocks.LATER, 10
    clock, passed = clocks.clock, [0.0]
    clocks.clock = lambda: clock() + passed[0]
    model = seeded(0, mlp)
    optimizer = adam(model)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with decentralize(model, optimizer, topology="ring", algorithm="ad-psgd", rate=2.0) as gossip:
                while not (units := gossip.stats()["unit_seconds_by_lane"]):
                    if gossip.lanes[0].clock.said is None:
                        passed[0] += 1000.0
                    train(model, optimizer, rank, 1)
                    time.sleep(0.002)
                unit = units[0]
                for _ in range(35):
                    train(model, optimizer, rank, 1)
                    time.sleep(0.002)
    finally:
        clocks.LATER, clocks.clock = before, clock
    return unit, [str(w.message) for w in caught if issubclass(w.category, gossamer.GossamerWarning)]


def test_a_unit_that_slow_first_steps_made_too_long_is_told_once(pools):
    for rank, (unit, told) in enumerate(pools(2).run(real, slow_start)):
        assert unit > 1000.0
        assert len(told) == 1
        assert told[0].startswith(f"worker {rank} took ")
        assert "exchanges per step instead of rate=2." in told[0]


# -- leaving ------------------------------------------------------------------------------------------------------


def ours(seconds=120):
    """Threads that are left when those that are on their way out have gone."""
    end = time.perf_counter() + seconds
    while (
        left := [t.name for t in threading.enumerate() if t.name.startswith("gossamer")]
    ) and time.perf_counter() < end:
        time.sleep(0.02)
    return sorted(left)


def sockets(rank, settle_at=None):
    """Open sockets of this process; the kernel may take a moment to see the last ones closed."""
    end = time.perf_counter() + 120
    while True:
        gc.collect()
        fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        count = sum(os.path.realpath(fd).rpartition("/")[2].startswith("socket:") for fd in fds)
        if settle_at is None or count <= settle_at[rank] or time.perf_counter() > end:
            return count
        time.sleep(0.05)


def leaves(rank, decentralize, how, clock):
    """What the handle's end was, and what is left of its threads."""
    model = seeded(0, mlp)
    optimizer = adam(model)
    try:
        with decentralize(model, optimizer, topology="ring", algorithm="a2cid2", clock=clock):
            for step in range(40):
                train(model, optimizer, rank, 1, step)
                time.sleep(0.002)
                if how != "close" and rank == 0 and step == 20:
                    raise KeyboardInterrupt if how == "interrupt" else ValueError("boom")
    except (KeyboardInterrupt, ValueError, gossamer.GossamerError) as error:
        return type(error).__name__, ours()
    return None, ours()


@pytest.mark.parametrize("clock", ["wall", "virtual"])
@pytest.mark.parametrize("how", ["close", "exception", "interrupt"])
def test_nothing_is_left_behind(pools, how, clock):
    pools(3).run(real, leaves, "close", clock)  # makes the process's one listener
    before = pools(3).run(sockets)
    results = pools(3).run(real, leaves, how, clock)
    assert [threads for _, threads in results] == [[]] * 3
    expected = {"close": None, "exception": "ValueError", "interrupt": "KeyboardInterrupt"}[how]
    assert results[0][0] == expected
    if how != "close":
        assert [kind for kind, _ in results[1:]] == ["PeerError"] * 2
    after = pools(3).run(sockets, before)
    assert all(a <= b for a, b in zip(after, before, strict=True))


def traced(rank, decentralize, directory):
    model = seeded(0, mlp)
    optimizer = adam(model)
    settings = {"topology": "ring", "algorithm": "a2cid2", "clock": "virtual", "trace": directory}
    with decentralize(model, optimizer, **settings) as gossip:
        train(model, optimizer, rank, 10)
        return gossip.stats()


def test_spans_are_recorded(pools, tmp_path):
    from gossamer.trace import merge

    stats = pools(3).run(real, traced, str(tmp_path))
    spans = merge(tmp_path).spans
    for rank in range(3):
        mine = [s for s in spans if s.worker == rank]
        exchanges = [s for s in mine if s.category == "exchange"]
        assert len(exchanges) == stats[rank]["rounds"] * stats[rank]["buckets"]
        assert sum(s.attrs["bytes"] for s in exchanges) == stats[rank]["bytes_sent"] > 0
        assert len([s for s in mine if s.category == "step"]) == 10


def wrapped(rank, decentralize):
    model = nn.parallel.DistributedDataParallel(mlp())
    decentralize(model, adam(model), algorithm="a2cid2")


def test_ddp_is_refused_in_one_sentence(pools):
    for kind, message in pools(2).run(error_of, wrapped):
        assert kind == "InputError"
        assert "needs every worker to have a replica of its own" in message


def interrupted(rank, decentralize, trials):
    """Ctrl-C at random moments: in a wait, in the optimizer, with the lock held."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    draw = random.Random(5)
    ends = []
    try:
        for trial in range(trials):
            model = seeded(0, lambda: mlp(64))
            optimizer = adam(model)
            delay = 0.05 + 0.3 * draw.random()
            settings = {"algorithm": "a2cid2", "rate": 4.0, "clock": ["wall", "virtual"][trial % 2]}
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            try:
                with decentralize(model, optimizer, topology="complete", **settings):
                    timer.start()
                    while True:
                        train(model, optimizer, rank, 1)
            except (KeyboardInterrupt, gossamer.GossamerError) as error:
                ends.append(type(error).__name__)
            timer.cancel()
            with contextlib.suppress(KeyboardInterrupt):
                if timer.ident is not None:  # else another worker's end came before this one had begun
                    timer.join()
                time.sleep(0.05)
            torch.distributed.barrier()
            ends.append(ours())
    finally:
        signal.signal(signal.SIGINT, before)
    return ends


def test_interrupts_at_any_moment_leave_nothing(pools):
    for ends in pools(3).run(real, interrupted, 8):
        assert ends[1::2] == [[]] * 8
        assert set(ends[::2]) <= {"KeyboardInterrupt", "PeerError", "GossamerError"}
