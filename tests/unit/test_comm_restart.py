"""A restarted directory is empty: members put back what it must hold, and the job continues."""

import threading

from elastic import LIMIT, finish, job, until
from gossamer.comm.tcp import look


def test_workers_can_leave_after_the_directory_was_restarted(monkeypatch):
    restarted = threading.Event()

    def end(gossip):
        if gossip.members.rank == 0:
            made.restart_directory()
            restarted.set()
        assert restarted.wait(LIMIT)

    with job(monkeypatch, 2, topology="ring", soft_deadline=5.0, hard_deadline=20.0) as made:
        workers = made.all(20, end, pause=0.01)
        finish(workers)
    assert [w.gossip.stats()["steps"] for w in workers] == [20, 20]


def test_a_replacement_that_finds_an_empty_directory_joins_the_running_job(monkeypatch):
    with job(monkeypatch, 3, topology="ring", soft_deadline=5.0, hard_deadline=20.0) as made:
        workers = made.all(300, lambda gossip: gossip.stats(), pause=0.02)
        workers[1].until(10)
        workers[1].kill()
        others = [workers[0], workers[2]]
        until(lambda: all(w.gossip.stats()["members"] == [0, 2] for w in others))
        made.restart_directory()
        replacement = made.start(1, 300, lambda gossip: gossip.stats(), pause=0.02)
        until(lambda: all(w.gossip.stats()["members"] == [0, 1, 2] for w in others))
        for worker in [*others, replacement]:
            worker.steps = 0  # end now
        finish([*others, replacement])
    assert replacement.gossip.stats()["joined"]
    assert replacement.gossip.members.run == others[0].gossip.members.run
    assert all(w.gossip.stats()["refused_by_peer"] == {} for w in others)


def test_members_replace_an_older_record(monkeypatch):
    """A worker that was dropped knows only an old record, and may be the first to put one back."""
    with job(monkeypatch, 3, topology="ring", soft_deadline=5.0, hard_deadline=20.0) as made:
        workers = made.all(300, pause=0.02)
        workers[1].until(10)
        members = workers[0].gossip.members
        old = members.record.text()
        workers[1].kill()
        alive = [workers[0].gossip.members, workers[2].gossip.members]
        until(lambda: all(m.record.ranks == (0, 2) for m in alive))
        members.directory.ask(lambda s: s.set("record", old))
        until(lambda: members.directory.ask(lambda s: look(s, "record")) != old)
        assert members.directory.ask(lambda s: look(s, "record")) == members.record.text()
        for worker in workers:
            worker.steps = 0
        finish([workers[0], workers[2]])
