"""A worker that was dropped, and whose other members have left or died: it goes on alone with the state that it has."""

import gc
import threading

import pytest

from elastic import PATIENCE, end_now, finish, job, until
from gossamer import GossamerError, GossamerWarning, HostedDirectory
from gossamer.comm import PeerError
from gossamer.engine.elastic.coordinator import ElasticCoordinator
from gossamer.engine.elastic.state_transfer import StateTransfer

OPTIONS = {"topology": "ring", "soft_deadline": 0.5, "timeout": 3600.0}


@pytest.fixture
def away(monkeypatch):
    """While it is set, dropped workers do not join again."""
    away, join = threading.Event(), ElasticCoordinator._join_again
    monkeypatch.setattr(
        ElasticCoordinator, "_join_again", lambda self, lanes: None if away.is_set() else join(self, lanes)
    )
    away.set()
    return away


def drop(workers, *ranks):
    """Let the others drop `ranks`, and wait until all know."""
    for worker in workers:
        worker.until(5)
    members = list(workers)
    for rank in ranks:
        members = [w for w in members if w.rank != rank]
        for worker in members:
            worker.gossip.members.links.peer(rank).dead = "the test says so"
            worker.gossip.members._hurry.set()
        left = tuple(w.rank for w in members)
        until(lambda left=left: all(w.gossip.members.record.ranks == left for w in workers))


def impatient(worker, seconds=0.5):
    """Let a worker count others as gone whose signs have not changed for so long."""
    meetings = worker.gossip._meetings
    meetings._hard = meetings._attendance._hard = seconds


def end(workers, *members):
    """Let all workers come to their end, once all know that `members` are there, if any are given."""
    until(lambda: not members or all(w.gossip.members.record.ranks == members for w in workers))
    return end_now(workers)


def met(gossip):
    with gossip.averaged():
        return gossip.met.ranks, gossip.met.alone


@pytest.mark.parametrize("algorithm", ["awc", "a2cid2"])
@pytest.mark.parametrize("how", ["left", "died"])
def test_a_dropped_worker_whose_only_other_member_is_gone_goes_on(monkeypatch, away, how, algorithm):
    with job(monkeypatch, 2, algorithm=algorithm, **OPTIONS) as made:
        workers = made.all(100_000, met, pause=0.005)
        drop(workers, 1)
        impatient(workers[1])
        if how == "left":
            workers[0].end = lambda gossip: None
            end(workers[:1])
        else:
            workers[0].kill()
        steps = workers[1].gossip.stats()["steps"]
        away.clear()
        until(lambda: workers[1].gossip.stats()["members"] == [1])
        impatient(workers[1], PATIENCE)
        workers[1].until(steps + 5)
        replacement = made.start(0, 100_000, met, pause=0.005)
        replacement.until(steps + 5)
        assert replacement.gossip.joined
        assert end([workers[1], replacement], 0, 1) == [((0, 1), False)] * 2


def test_of_two_dropped_workers_one_goes_on_and_the_other_joins_it(monkeypatch, away):
    with job(monkeypatch, 3, **OPTIONS) as made:
        workers = made.all(100_000, met, pause=0.005)
        drop(workers, 1, 2)
        for worker in workers[1:]:
            impatient(worker)
        workers[0].kill()
        away.clear()
        until(lambda: all(0 not in w.gossip.stats()["members"] for w in workers[1:]))  # one of them goes on
        for worker in workers[1:]:
            impatient(worker, PATIENCE)
        assert end(workers[1:], 1, 2) == [((1, 2), False)] * 2


def test_a_dropped_worker_does_not_wait_in_a_meeting_for_members_that_are_gone(monkeypatch, away):
    with job(monkeypatch, 2, **OPTIONS) as made:
        workers = made.all(100_000, met, pause=0.005)
        drop(workers, 1)
        impatient(workers[1])
        workers[0].kill()
        with pytest.warns(GossamerWarning, match="worker 1's parameters only: all other members have left or died"):
            assert end(workers[1:]) == [((1,), True)]


def test_a_dropped_worker_waits_between_its_attempts_to_join_again(monkeypatch, away):
    attempts = []

    def fetch(self, members, *args):
        attempts.append(members.rank)
        raise ConnectionResetError("no donor can be reached")

    with job(monkeypatch, 2, **{**OPTIONS, "soft_deadline": 0.05}) as made:
        workers = made.all(100_000, lambda gossip: None, pause=0.005)
        drop(workers, 1)
        monkeypatch.setattr(StateTransfer, "fetch", fetch)
        away.clear()
        workers[1].until(workers[1].gossip.stats()["steps"] + 40)
        assert 0 < len(attempts) < 20
        assert workers[1].gossip.stats()["members"] == [0]  # worker 0 gives signs
        end(workers)


def test_workers_found_another_job_after_one_that_all_have_left(monkeypatch):
    with job(monkeypatch, 2, **OPTIONS) as made:
        for _ in range(2):
            workers = made.all(10, met)
            assert finish(workers) == [((0, 1), False)] * 2
            assert [w.gossip.joined for w in workers] == [False, False]
            assert [w.started_at for w in workers] == [0, 0]
        workers = made.all(100_000, met, pause=0.005)
        for worker in workers:
            worker.until(5)
        made.restart_directory()  # the members say which job it is
        workers[1].kill()
        until(lambda: workers[0].gossip.stats()["members"] == [0])
        replacement = made.start(1, 100_000, met, pause=0.005)
        replacement.until(5)
        assert replacement.gossip.joined
        assert end([workers[0], replacement], 0, 1) == [((0, 1), False)] * 2


def test_a_replacement_that_comes_after_all_have_left_is_too_late_in_the_directory_of_one_job(monkeypatch):
    """It must not wait for the others to found another job: a launcher does not start them again."""
    with job(monkeypatch, 2, **OPTIONS) as made:
        port = made.directory.port
        made.directory.close()
        gc.collect()
        made.directory = HostedDirectory(port, one_job=True)
        finish(made.all(5, met))
        with pytest.raises(PeerError, match="no member of the running job sent its state: there is none"):
            finish([made.start(1, 5)])


def test_a_worker_whose_job_is_over_ends_when_new_workers_have_begun_another_one(monkeypatch, away):
    with job(monkeypatch, 2, **OPTIONS) as made:
        workers = made.all(100_000, lambda gossip: None, pause=0.005)
        drop(workers, 1)
        end(workers[:1])
        new = made.start(0, 100_000, pause=0.005)
        store = made.directory._store
        until(lambda: store.check(["gossamer/1/node/0"]))
        away.clear()
        with pytest.raises(GossamerError, match="new workers have begun another one in the directory"):
            finish(workers[1:])
        other = made.start(1, 100_000, pause=0.005)
        for worker in (new, other):
            worker.until(5)
        end([new, other], 0, 1)
