"""What held a run up, from recorded waits without a timeline; timelines: tests/distributed/test_bench_smoke.py."""

import json

import pytest

from gossamer.errors import InputError
from gossamer.report.held_up import held_up_in
from gossamer.report.waits import waits_in

STEPS = {"steps": 100, "seconds": 10.0, "buckets": 4, "bucket_bytes": 1e6}


def written(folder, waits, per_node=(1, 1, 1), **more):
    """One file per worker; `waits[w]` are the seconds that worker w waited for each peer."""
    for worker, by_peer in enumerate(waits):
        row = {**STEPS, **more, "worker": worker, "per_node": list(per_node), "waited": sum(by_peer.values())}
        row["by_peer"] = {str(p): s for p, s in by_peer.items()}
        (folder / f"waits-{worker:05d}.json").write_text(json.dumps(row))
    (found,) = held_up_in(folder)
    return found


def test_a_worker_that_waits_least_is_the_slow_one(tmp_path):
    found = written(tmp_path, [{1: 1.0, 2: 4.0}, {0: 0.1, 2: 4.5}, {0: 0.1, 1: 0.1}])
    assert (found.kind, found.cause) == ("worker", "worker 2")
    assert "worker 2" in found.change


def test_both_ends_wait_for_a_slow_link(tmp_path):
    """Worker 1 waits as long as the others, but for a peer that does not wait for it."""
    found = written(tmp_path, [{2: 4.0}, {0: 4.0}, {0: 4.0}])
    assert (found.kind, found.cause) == ("link", "link 0-2")
    assert "--trace" in found.sentence


def test_small_buckets_and_calm_runs(tmp_path):
    waits = [{1: 2.0}, {0: 2.0}]
    assert written(tmp_path, waits, (1, 1), buckets=200, bucket_bytes=2000).kind == "buckets"
    assert written(tmp_path, waits, (2,)).cause == "inside node 0"
    calm = written(tmp_path, [{1: 0.1}, {0: 0.1}], (1, 1))
    assert (calm.kind, calm.change) == ("nothing", "")
    assert "compute is the limit" in calm.sentence


def test_files_of_an_earlier_number_of_workers_are_ignored(tmp_path):
    written(tmp_path, [{1: 1.0}, {0: 1.0}, {}, {}], (2, 2))
    assert written(tmp_path, [{1: 3.0}, {0: 3.0}], (1, 1)).cause == "link 0-1"


def elastic(folder, deadlines):
    """Add the deadlines of an elastic run; `deadlines[w]` are those of worker w."""
    for worker, by_peer in enumerate(deadlines):
        file = folder / f"waits-{worker:05d}.json"
        row = json.loads(file.read_text())
        file.write_text(json.dumps({**row, "deadlines": {str(p): s for p, s in by_peer.items()}}))


def test_the_deadlines_of_an_elastic_run_are_shown_beside_its_waits(tmp_path):
    waits = [{1: 3.0}, {0: 3.0}]
    assert written(tmp_path, waits, (1, 1)).deadline_seconds is None
    elastic(tmp_path, [{1: 0.25}, {0: 0.7}])
    (found,) = held_up_in(tmp_path)
    assert found.to_dict()["deadline_seconds"] == (0.25, 0.7)
    assert found.sentence.endswith("An exchange waits at most 0.25 to 0.7 s for a neighbor.")
    assert [(w.worker, w.peer, w.seconds, w.share, w.deadline) for w in waits_in(tmp_path)] == [
        (0, 1, 3.0, 0.3, 0.25),
        (1, 0, 3.0, 0.3, 0.7),
    ]
    elastic(tmp_path, [{1: 0.5, 2: 0.5}, {}])
    assert held_up_in(tmp_path)[0].sentence.endswith("An exchange waits at most 0.5 s for a neighbor.")
    assert [w.deadline for w in waits_in(tmp_path)] == [0.5, 0.5, None]


@pytest.mark.parametrize("deadlines", [3, {"one": 1.0}, {"1": "soon"}, {"1": []}])
def test_damaged_deadlines_are_one_sentence(tmp_path, deadlines):
    written(tmp_path, [{1: 3.0}, {0: 3.0}], (1, 1))
    file = tmp_path / "waits-00000.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "deadlines": deadlines}))
    with pytest.raises(InputError, match="damaged"):
        held_up_in(tmp_path)


def test_damaged_files_are_one_sentence(tmp_path):
    (tmp_path / "waits-00000.json").write_text("{")
    with pytest.raises(InputError, match="damaged"):
        held_up_in(tmp_path)
    with pytest.raises(InputError, match="not a folder"):
        held_up_in(tmp_path / "missing")
