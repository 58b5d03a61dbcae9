"""A directory that answers nonsense: refused, counted, and the workers keep training, dropping and admitting."""

import pytest

from elastic import end_now, finish, job, until
from gossamer.comm.tcp import look
from gossamer.engine.elastic.member_lane import MemberLane

RECORDS = [
    "not a record",
    '{"epoch": Infinity, "members": {}, "starts": []}',
    '{"epoch": 99, "members": {}, "starts": []}',
    '{"epoch": 99, "members": {"0": {"incarnation": 1, "host": 2, "port": "x", "node": 3}}, "starts": [0]}',
    '{"epoch": 99, "members": {"7": {"incarnation": "a", "host": "b", "port": 1, "node": "c"}}, "starts": [0]}',
]


def write(gossip, key, value):
    gossip.members.directory.ask(lambda store: store.set(key, value))


def held(gossip, key):
    return gossip.members.directory.ask(lambda store: look(store, key))


@pytest.mark.parametrize("algorithm", ["awc", "a2cid2"])
def test_a_nonsensical_record_is_refused_and_the_job_goes_on(monkeypatch, algorithm):
    with job(monkeypatch, 3, topology="ring", algorithm=algorithm, soft_deadline=5.0) as made:
        workers = made.all(100000, pause=0.005)
        for worker in workers:
            worker.until(5)
        gossips = [worker.gossip for worker in workers]
        for text in RECORDS:
            counted = sum(gossip.stats()["refused_from_directory"] for gossip in gossips)
            write(gossips[0], "record", text)
            until(
                lambda counted=counted: sum(g.stats()["refused_from_directory"] for g in gossips) > counted,
                f"{text} was not counted",
            )
            until(lambda text=text: held(gossips[0], "record") != text)  # a member has repaired it
        assert all(gossip.members._thread.is_alive() for gossip in gossips)
        assert all(gossip.stats()["members"] == [0, 1, 2] for gossip in gossips)
        assert any("cannot be read" in gossip.stats()["last_refusal"] for gossip in gossips)
        workers[2].kill()
        until(lambda: all(gossip.stats()["members"] == [0, 1] for gossip in gossips[:2]))
        replacement = made.start(2, 100000, pause=0.005)
        replacement.until(6)
        living = [*workers[:2], replacement]
        until(lambda: all(w.gossip.stats()["members"] == [0, 1, 2] for w in living))
        end_now(living)


@pytest.mark.parametrize("unit", ["0", "-1", "Infinity", "NaN", "null", '"fast"', "[1]", "1e300", "\0"])
def test_a_nonsensical_unit_of_time_is_refused_and_the_worker_takes_its_own(monkeypatch, unit):
    monkeypatch.setattr(MemberLane, "hard_deadline", 0.5)  # seconds until it takes its own
    with job(monkeypatch, 2, topology="ring", algorithm="ad-psgd", soft_deadline=0.2) as made:
        made.directory._store.set("gossamer/unit/0", unit)
        workers = made.all(100000, pause=0.005)
        until(lambda: all(w.gossip is not None and w.gossip.stats()["unit_seconds_by_lane"] for w in workers))
        for worker in workers:
            stats = worker.gossip.stats()
            assert 1e-4 < stats["unit_seconds_by_lane"][0] < 300.0
            assert stats["refused_from_directory"] > 0
            worker.until(worker.gossip.stats()["steps"] + 10)
        end_now(workers)


def test_nonsense_about_a_meeting_does_not_end_the_training(monkeypatch):
    """What a worker posts is posted again; a nonsensical decision lets the workers meet alone, with a warning."""

    def end(gossip):
        with gossip.averaged():
            return len(gossip.met.came), gossip.met.alone

    with job(monkeypatch, 2, topology="ring", soft_deadline=0.2, hard_deadline=20.0, timeout=300.0) as made:
        store = made.directory._store
        store.set("gossamer/meeting/0/0", "[1, 2]")
        store.set("gossamer/meeting/0/1", '{"a": Infinity}')
        store.set("gossamer/present/0", "nonsense")
        assert finish(made.all(5, end)) == [(2, False), (2, False)]
    with job(monkeypatch, 2, topology="ring", soft_deadline=0.2, hard_deadline=20.0, timeout=300.0) as made:
        made.directory._store.set("gossamer/meeting/0", '[Infinity, [["x"]]]')
        with pytest.warns(UserWarning, match="the directory did not answer"):
            results = finish(made.all(5, end))
    # a worker that is second finds the first one gone, and needs no directory to be alone
    assert [came for came, _ in results] == [1, 1]
    assert any(alone for _, alone in results)
