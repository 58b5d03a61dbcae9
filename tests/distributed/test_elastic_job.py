"""Elastic jobs: without a fault they equal any other job; after a fault the other workers continue."""

import threading
import time
from typing import Any

import pytest
import torch

from elastic import PATIENCE, end_now, finish, job, silent, until
from gossamer import GossamerError, InputError, VirtualCluster
from gossamer.comm import PeerError
from gossamer.comm.tcp import DirectoryClient
from gossamer.comm.tcp.frame import Ask
from gossamer.comm.tcp.links import LinkTable
from gossamer.engine.elastic.lane import ElasticLane
from policies import policies


def report(gossip):
    distance = gossip.consensus_distance()
    stats = gossip.stats()  # before any worker can have left
    with gossip.averaged() as model:
        mean = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    return distance, mean, stats


def exchanges(replacement, rounds=40):
    """Wait until a replacement has joined, and has been in so many rounds with the others."""
    replacement.until(1)
    lane, members = replacement.gossip.lanes[0], replacement.gossip.members

    def been() -> bool:
        record = members.record
        return lane.epoch == record.epoch and lane.k > record.starts[0] + rounds

    until(been)


@pytest.mark.parametrize(("n", "per_node", "topology"), [(3, 1, "ring"), (4, 2, "aer")])
@pytest.mark.parametrize(
    "settings",
    [{"algorithm": "awc"}, {"algorithm": "atc"}, {"fragments": 2, "average_every": 5, "wire": "int4"}],
    ids=["awc", "atc", "thin"],
)
def test_a_run_without_faults_equals_virtual_workers_bit_by_bit(monkeypatch, n, per_node, topology, settings):
    options = {"topology": topology, **settings, "soft_deadline": PATIENCE}
    with job(monkeypatch, n, per_node, **options) as made:
        workers = made.all(12, report)
        results = finish(workers)
        parts = [made.make(rank) for rank in range(n)]
        for model, _ in parts[1:]:
            model.load_state_dict(parts[0][0].state_dict())
        per = [min(per_node, n - at) for at in range(0, n, per_node)]
        models, optimizers = [m for m, _ in parts], [o for _, o in parts]
        cluster = VirtualCluster(per_node=per)
        cluster.decentralize(models, optimizers, topology=topology, **policies(**settings))
        for step in range(12):
            for rank in range(n):
                made.train(rank, step, models[rank], optimizers[rank])
            for rank in range(n):
                now = torch.cat([p.detach().flatten() for p in models[rank].parameters()])
                assert torch.equal(workers[rank].values[step], now), f"worker {rank} differs after step {step}"
        distance = cluster.consensus_distance()
    for theirs, mean, stats in results:
        assert theirs == pytest.approx(distance, rel=1e-5)
        assert torch.equal(mean, results[0][1])
        assert stats["lost_exchanges"] == 0
        assert stats["refused_by_peer"] == {}


@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_continue_and_a_replacement_joins(monkeypatch, victim):
    with job(monkeypatch, 4, 2, topology="aer", soft_deadline=5.0) as made:
        workers = made.all(10**6, report, pause=0.02)
        workers[victim].until(20)
        workers[victim].kill()
        others = [w for w in workers if w.rank != victim]
        for worker in others:
            worker.until(50)
        until(lambda: others[0].gossip.stats()["members"] == [w.rank for w in others])
        replacement = made.start(victim, 10**6, report, pause=0.02)
        exchanges(replacement)
        results = end_now([*others, replacement])
    assert replacement.gossip.stats()["joined"]
    assert replacement.started_at >= 40  # it started where the others were
    assert all(stats["members"] == [0, 1, 2, 3] for *_, stats in results)
    assert all(torch.equal(mean, results[0][1]) for _, mean, _ in results)
    assert results[0][0] < 0.2  # their parameters are close again
    assert all(w.started_at == 0 for w in others)  # nobody was restarted


def test_anchors_stay_consistent_when_members_come_and_go(monkeypatch):
    """A newcomer takes its donor's anchor. One that is out of date is refused, until the next exact average."""
    options = {"wire": "int4", "average_every": 16, "soft_deadline": PATIENCE}
    with job(monkeypatch, 4, 2, topology="aer", **options) as made:
        workers = made.all(10**6, report, pause=0.02)
        workers[2].until(20)
        workers[2].kill()
        others = [w for w in workers if w.rank != 2]
        for worker in others:
            worker.until(50)
        replacement = made.start(2, 10**6, report, pause=0.02)
        exchanges(replacement)
        members = [*others, replacement]
        for worker in members:
            worker.frozen.set()  # all end after the same step, some rounds after an exact average
        last = (max(w.gossip.stats()["steps"] for w in members) // 16 + 3) * 16 + 6
        for worker in members:
            worker.steps = last
            worker.frozen.clear()
        results = finish(members)
        lanes = [w.gossip.lanes[0] for w in [*others, replacement]]
    assert replacement.started_at >= 40
    states = [lane._anchors.state_dict() for lane in lanes]
    assert all(s["ids"] == states[0]["ids"] for s in states)  # of the last exact average
    assert states[0]["ids"][0] >> 24 == lanes[0].k // 16 * 16
    for mine, *theirs in zip(*(s["values"] for s in states), strict=True):
        assert all(torch.equal(mine, other) for other in theirs)
    assert all(torch.equal(mean, results[0][1]) for _, mean, _ in results)
    assert results[0][0] < 0.2


def test_messages_relative_to_another_anchor_are_refused_on_both_sides(monkeypatch):
    options = {"wire": "int4", "average_every": 40, "soft_deadline": PATIENCE}
    with job(monkeypatch, 3, 1, topology="ring", **options) as made:
        workers = made.all(10**6, report, pause=0.01)
        workers[1].until(5)
        anchors = workers[1].gossip.lanes[0]._anchors
        anchors._ids = [12345 for _ in anchors._ids]  # as if it had missed an exact average
        until(lambda: all(sum(w.gossip.stats()["refused_by_peer"].values()) > 0 for w in workers))
        until(lambda: len({tuple(w.gossip.lanes[0]._anchors._ids) for w in workers}) == 1)  # equal again after it
        for worker in workers:
            worker.until(worker.gossip.stats()["steps"] + 5)
        results = end_now(workers)
    assert "another exact average than this worker has" in results[0][2]["last_refusal"]
    for rank, (distance, _, stats) in enumerate(results):
        assert stats["members"] == [0, 1, 2]
        assert sum(stats["refused_by_peer"].values()) > 0, rank
        assert distance < 0.2
    assert results[0][2]["refused_by_peer"].keys() == {1}


def test_a_replacement_may_be_on_another_node(monkeypatch):
    with job(monkeypatch, 4, 2, topology="aer", soft_deadline=5.0) as made:
        workers = made.all(10**6, report, pause=0.02)
        workers[3].until(20)
        workers[3].kill()
        made.nodes[3] = 0
        replacement = made.start(3, 10**6, report, pause=0.02)
        replacement.until(1)
        members = [*workers[:3], replacement]
        until(lambda: all(w.gossip.lanes[0].planned.topology.layout.node == (0, 0, 1, 0) for w in members))
        means = [mean for _, mean, _ in end_now(members)]
    assert all(torch.allclose(mean, means[0], atol=1e-6) for mean in means)


def test_the_others_continue_after_a_whole_node_dies(monkeypatch):
    with job(monkeypatch, 6, 2, topology="aer", soft_deadline=5.0) as made:
        made.deaths = {2: 20, 3: 20}
        workers = made.all(80, report, pause=0.02)
        results = finish([w for w in workers if w.rank not in (2, 3)])
    assert all(stats["members"] == [0, 1, 4, 5] for *_, stats in results)
    assert all(stats["steps"] == 80 for *_, stats in results)
    assert all(torch.equal(mean, results[0][1]) for _, mean, _ in results)


def test_the_last_worker_continues_alone(monkeypatch):
    with job(monkeypatch, 2, 1, topology="ring", soft_deadline=5.0) as made:
        made.deaths[0] = 15
        workers = made.all(60, report, pause=0.01)
        ((distance, _, stats),) = finish(workers[1:])
    assert (distance, stats["members"], stats["steps"]) == (0.0, [1], 60)


def test_a_late_worker_is_not_waited_for_twice(monkeypatch):
    """It stands still but is alive: its neighbors wait for it once, then continue until it takes part again."""
    with job(monkeypatch, 3, 1, topology="ring", soft_deadline=0.3) as made:
        workers = made.all(10**6, report, pause=0.01)
        workers[1].until(20)
        workers[1].frozen.set()
        for gossip in (workers[0].gossip, workers[2].gossip):
            until(lambda g=gossip: g.stats()["given_up_exchanges"] > 0)
            lost, given_up = gossip.stats()["lost_exchanges"], gossip.stats()["given_up_exchanges"]
            until(lambda g=gossip, lost=lost: g.stats()["lost_exchanges"] > lost + 30)
            assert gossip.stats()["given_up_exchanges"] < given_up + 30  # it was not waited for in every round
        workers[1].frozen.clear()
        results = end_now(workers)
    assert results[0][2]["members"] == [0, 1, 2]


def test_a_worker_that_was_silent_too_long_joins_again_with_a_members_state(monkeypatch):
    """Its links are silent as under SIGSTOP, so the others drop it; then it notices and takes a member's state."""
    with job(monkeypatch, 3, 1, topology="complete", soft_deadline=0.2) as made:
        workers = made.all(10**6, report, pause=0.02)
        workers[1].until(20)
        with silent(monkeypatch, workers, 1):
            workers[0].until(workers[1].gossip.stats()["steps"] + 10)
        until(lambda: all(w.gossip.stats()["members"] == [0, 1, 2] for w in workers))
        results = end_now(workers)
    assert all(stats["members"] == [0, 1, 2] for *_, stats in results)
    assert len(workers[1].values) < results[1][2]["steps"]  # it jumped to where the others were
    assert all(torch.equal(mean, results[0][1]) for _, mean, _ in results)


class Launches(list[tuple[Any, int, int]]):
    """What the lanes of all workers have launched: lane, epoch of its plan, and round."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.starts: dict[int, int] = {}  # by epoch: the round from which its plan is followed
        launch_job = ElasticLane._launch_job

        def launch(lane, k, *rest):
            self.append((lane, lane.epoch, k))
            self.starts.setdefault(lane._members.record.epoch, lane._members.record.starts[0])
            return launch_job(lane, k, *rest)

        monkeypatch.setattr(ElasticLane, "_launch_job", launch)


@pytest.mark.parametrize("again", [False, True], ids=["joins", "joins again"])
def test_a_newcomer_waits_for_nobody_before_its_plan_begins(monkeypatch, again):
    """The others follow the plan with the newcomer from an announced round on, and answer nothing before it."""
    launched = Launches(monkeypatch)
    with job(monkeypatch, 3, 1, topology="complete", soft_deadline=0.5) as made:
        workers = made.all(10**6, report, pause=0.02)
        workers[1].until(20)
        if again:
            with silent(monkeypatch, workers, 1):
                before = len(launched)
            newcomer = workers[1]
            until(lambda: newcomer.gossip.lanes[0].epoch > 1)
        else:
            workers[1].kill()
            until(lambda: 1 not in workers[0].gossip.stats()["members"])
            before = len(launched)
            newcomer = made.start(1, 10**6, report, pause=0.02)
        exchanges(newcomer, 5)
        end_now([workers[0], workers[2], newcomer])
    lane = newcomer.gossip.lanes[0]
    joined = min(epoch for one, epoch, _ in launched[before:] if one is lane and epoch > 1)
    rounds = [k for one, epoch, k in launched[before:] if one is lane and epoch == joined]
    assert rounds, "the newcomer has exchanged nothing"
    assert min(rounds) >= launched.starts[joined]


def test_an_announced_plan_is_followed_until_the_next_one_begins(monkeypatch):
    """The members change again before the plan for the last change begins: nobody skips that plan."""
    monkeypatch.setattr("gossamer.engine.elastic.coordinator.MARGIN", 30)
    monkeypatch.setattr("gossamer.engine.elastic.lane.SLACK", 10**6)  # nor jumps over it if it stood still
    launched = Launches(monkeypatch)
    with job(monkeypatch, 3, 1, topology="complete", soft_deadline=PATIENCE) as made:
        workers = made.all(10**6, report, pause=0.02)
        workers[1].until(20)
        workers[1].kill()
        until(lambda: 1 not in workers[0].gossip.stats()["members"])
        newcomer = made.start(1, 10**6, report, pause=0.02)
        exchanges(newcomer, 5)
        end_now([workers[0], workers[2], newcomer])
    left, joined = launched.starts[2], launched.starts[3]
    assert left < joined
    survivors = [worker.gossip.lanes[0] for worker in (workers[0], workers[2])]
    followed = {epoch for lane, epoch, k in launched if lane in survivors and left <= k < joined}
    assert followed == {2}


def test_a_newcomer_is_in_step_with_the_others(monkeypatch):
    """It has its donor's state, so its next round is its donor's next round, which it launches after a step."""
    rounds: list[tuple[int, int]] = []  # of the newcomer: its next round, and that of the others

    def resume(lane, k, steps, donated):
        continue_from(lane, k, steps, donated)
        rounds.append((lane.k, k))

    continue_from = ElasticLane.continue_from
    monkeypatch.setattr(ElasticLane, "continue_from", resume)
    with job(monkeypatch, 3, 1, topology="complete", soft_deadline=0.5) as made:
        workers = made.all(10**6, report, pause=0.05)
        workers[1].until(20)
        workers[1].kill()
        until(lambda: 1 not in workers[0].gossip.stats()["members"])
        newcomer = made.start(1, 10**6, report, pause=0.05)
        exchanges(newcomer, 5)
        end_now([workers[0], workers[2], newcomer])
    ((own, theirs),) = rounds
    assert own == theirs


def test_a_worker_that_ran_out_of_data_relays_until_the_others_come(monkeypatch):
    with job(monkeypatch, 3, 1, topology="ring", soft_deadline=PATIENCE) as made:
        workers = [made.start(rank, 20 if rank == 0 else 60, report, 0.005) for rank in range(3)]
        results = finish(workers)
    assert [stats["steps"] for *_, stats in results] == [20, 60, 60]
    assert results[0][2]["mix_only_rounds"] > 10
    assert all(torch.equal(mean, results[0][1]) for _, mean, _ in results)  # its parameters count in the mean


def test_a_worker_that_left_is_not_waited_for(monkeypatch):
    with job(monkeypatch, 3, 1, topology="complete", soft_deadline=PATIENCE) as made:
        workers = [made.start(rank, 10 if rank == 2 else 50, report if rank < 2 else id, 0.01) for rank in range(3)]
        results = finish(workers)
    assert all(stats["members"] == [0, 1] and stats["steps"] == 50 for *_, stats in results[:2])
    assert all(stats["given_up_exchanges"] == 0 for *_, stats in results[:2])


def test_a_collective_call_in_which_a_worker_dies_is_repeated_without_it(monkeypatch):
    def met_without_it(gossip):
        found = report(gossip)
        until(lambda: 0 not in gossip.members.record.members)  # the news may come after the call
        return found

    with job(monkeypatch, 3, 1, topology="ring", soft_deadline=5.0) as made:
        workers = [
            made.start(rank, 15, met_without_it if rank else lambda g: time.sleep(60), 0.005) for rank in range(3)
        ]
        workers[0].until(15)
        others = workers[1:]
        until(lambda: all(w.gossip is not None and w.gossip.coordinator.meetings.parked for w in others))
        threading.Thread(target=workers[0].kill, daemon=True).start()
        results = finish(workers[1:])
    assert torch.equal(results[0][1], results[1][1])


def test_training_continues_without_the_directory(monkeypatch):
    with job(monkeypatch, 3, 1, topology="ring", soft_deadline=1.0) as made:
        workers = made.all(10**6, lambda g: g.stats(), pause=0.01)
        for worker in workers:
            worker.until(10)
        made.directory.close()
        workers[2].until(20)
        workers[2].kill()
        for worker in workers[:2]:
            worker.until(worker.gossip.stats()["steps"] + 40)
        results = end_now(workers[:2])
    assert all(stats["members"] == [0, 1, 2] for stats in results)  # nothing could be agreed, the edge is dropped
    assert all(stats["lost_exchanges"] > 0 for stats in results)


def test_the_older_of_two_processes_with_one_rank_ends(monkeypatch):
    with job(monkeypatch, 3, 1, topology="ring", soft_deadline=0.5) as made:
        workers = made.all(10**6, report, pause=0.02)
        workers[1].until(10)
        second = made.start(1, 10**6, report, pause=0.02)
        with pytest.raises(GossamerError, match=r"another process .* has joined the job as worker 1"):
            finish([workers[1]])
        workers[1].kill()
        second.until(1)  # it has started
        others = [workers[0], workers[2], second]
        until(lambda: len({w.gossip.members.record.epoch for w in others}) == 1)
        epoch = second.gossip.members.record.epoch
        second.until(second.gossip.stats()["steps"] + 20)
        assert [w.gossip.members.record.epoch for w in others] == [epoch] * 3  # no worker was evicted since
        results = end_now(others)
    assert all(stats["members"] == [0, 1, 2] for *_, stats in results)


@pytest.mark.parametrize("broadcast", [False, True])
def test_workers_keep_their_own_parameters_without_broadcast(monkeypatch, broadcast):
    def end(gossip):
        weight = gossip.model.state_dict()["0.weight"].clone()
        gossip.consensus_distance()  # no worker leaves before all have started
        return weight

    with job(monkeypatch, 3, 1, topology="ring", broadcast=broadcast) as made:
        started = finish(made.all(0, end))
        own = [made.make(rank)[0].state_dict()["0.weight"] for rank in range(3)]
    assert [torch.equal(a, b) for a, b in zip(started, own, strict=True)] == [True, not broadcast, not broadcast]


def test_a_founder_whose_parent_in_the_broadcast_has_left_takes_another_members_state(monkeypatch):
    """Worker 0 leaves before worker 1 has its initial parameters from it."""
    fetch, started = LinkTable.fetch, threading.Event()

    def late(self, address, ask, *limits):
        if self.rank == 1 and ask is Ask.INITIAL_STATE:
            assert started.wait(300)
            workers[2].until(5)
            workers[0].kill()
        return fetch(self, address, ask, *limits)

    monkeypatch.setattr(LinkTable, "fetch", late)
    with job(monkeypatch, 3, 1, topology="complete", soft_deadline=0.2) as made:
        workers = made.all(60, report, pause=0.02)
        started.set()
        results = finish(workers[1:])
    assert workers[1].started_at >= 5
    assert [stats["joined"] for *_, stats in results] == [False, False]
    assert torch.equal(results[0][1], results[1][1])


def test_a_joining_worker_with_another_model_is_refused(monkeypatch):
    with job(monkeypatch, 2, 1, topology="ring", soft_deadline=5.0) as made:
        workers = made.all(10**6, report, pause=0.02)
        workers[0].until(10)
        workers[0].kill()
        made.make = lambda rank: (lambda m: (m, torch.optim.SGD(m.parameters(), lr=0.1)))(torch.nn.Linear(8, 3))
        other = made.start(0, 100)
        with pytest.raises(InputError, match="workers disagree on"):
            finish([other])
        end_now(workers[1:])


def test_workers_that_disagree_do_not_start(monkeypatch):
    with job(monkeypatch, 2, 1, topology="ring") as made:
        alike = made.make
        made.make = lambda rank: (
            alike(rank) if rank else (lambda m: (m, torch.optim.SGD(m.parameters(), 0.1)))(torch.nn.Linear(8, 3))
        )
        workers = made.all(5)
        for worker in workers:
            with pytest.raises(InputError, match="workers disagree on"):
                finish([worker])


def test_a_worker_that_waits_in_vain_for_the_others_names_them(monkeypatch):
    of_job = DirectoryClient.of_job
    monkeypatch.setattr(DirectoryClient, "of_job", lambda rank, timeout: of_job(rank, PATIENCE))
    with job(monkeypatch, 2, 1, topology="ring", timeout=1.0) as made:
        worker = made.start(0, 5)
        with pytest.raises(PeerError, match=r"worker\(s\) 1 did not show up within 1 s"):
            finish([worker])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"on_failure": "ignore"}, "on_failure must be one of raise, continue, got 'ignore'"),
        ({"soft_deadline": 0}, r"soft_deadline must be a positive duration \(seconds or a timedelta\), got 0"),
        ({"soft_deadline": 9.0, "hard_deadline": 5.0}, "must not be longer than hard_deadline=5"),
        ({"algorithm": "ad-psgd", "clock": "virtual", "on_failure": "continue"}, "lets nobody wait for a dead one"),
    ],
)
def test_bad_arguments(options, complaint):
    from gossamer.engine.policies import Settings

    with pytest.raises(InputError, match=complaint):
        Settings.of(**policies(**options))


def test_threads_and_sockets_are_gone_after_close(monkeypatch):
    before = set(threading.enumerate())
    with job(monkeypatch, 3, 1, topology="complete", soft_deadline=5.0) as made:
        finish(made.all(10, report))
    until(lambda: not [t for t in set(threading.enumerate()) - before if t.name.startswith("gossamer-")])
