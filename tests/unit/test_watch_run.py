"""What `gossamer watch` reads from a run's folder: frames of workers, links, rounds, deaths, and damaged files."""

import json
import os
import socket

import pytest

from gossamer.errors import InputError
from gossamer.report.watch.clock import LONGEST_PAUSE, SHORT, RunClock
from gossamer.report.watch.run import FINEST, MOST_FRAMES, WatchedRun
from watch_files import T0, append, event, virtual_rows, worker_rows, write_config


def started(folder, **other):
    event(folder, -1.0, "started", pid=os.getpid(), host=socket.gethostname(), **other)


def gossiping(folder, steps=40, slow=()):
    """Four workers on two nodes; a slow worker takes three times as long and waits for nobody."""
    write_config(folder, [2, 2], steps)
    started(folder)
    for rank in range(4):
        own = {"waiting": 0.0, "step_time": 0.1} if rank in slow else {"waiting": 0.6, "step_time": 0.1}
        append(
            folder,
            f"metrics-{rank:05d}.jsonl",
            *worker_rows(rank, range(1, steps + 1), peers=[rank ^ 1, (rank + 2) % 4], **own),
        )


def test_a_frame_has_step_waiting_own_time_bytes_and_loss_of_every_worker(tmp_path):
    gossiping(tmp_path, slow=[2])
    found = WatchedRun(tmp_path).update()
    frame = found["newest"]
    assert frame["step"] == 40
    assert frame["waiting"] == pytest.approx([0.6, 0.6, 0.0, 0.6], abs=1e-3)
    assert frame["own_ms"] == pytest.approx([40, 40, 100, 40], rel=1e-3)
    assert frame["sent"] == pytest.approx(20000, rel=1e-3)  # 2 peers, 1000 bytes each, 10 steps a second
    assert frame["awaited"] == pytest.approx([0.6, 0.6, 0.0 + 0.6, 0.0], abs=1e-3)  # worker 2 itself waits for nobody
    assert sorted(map(tuple, frame["links"]))[0] == (0, 1, pytest.approx(10000, rel=1e-3))
    assert frame["round"] == 39  # forty rounds were launched, the first is number 0
    assert found["status"]["state"] == "running"


def test_frames_are_asked_for_from_a_number_on_and_only_new_rows_are_read(tmp_path):
    gossiping(tmp_path, steps=10)
    run = WatchedRun(tmp_path)
    first = run.update()
    assert first["every"] == FINEST
    known = len(first["frames"])
    assert known == 3  # from the first row at 0.1 s to the last at 1.0 s
    for rank in range(4):
        append(tmp_path, f"metrics-{rank:05d}.jsonl", *worker_rows(rank, range(11, 21), start=1.0, peers=[rank ^ 1]))
    more = run.update(first["version"], first["every"], known)
    assert more["begin"] == known
    assert [f["time"] for f in more["frames"]] == [1.0, 1.25, 1.5, 1.75]
    assert more["frames"][-1]["step"] == 18
    assert more["newest"]["step"] == 20


def test_a_long_run_has_fewer_frames_further_apart(tmp_path):
    write_config(tmp_path, [1], 100)
    started(tmp_path)
    append(tmp_path, "metrics-00000.jsonl", *worker_rows(0, range(1, 101), step_time=1.0))
    run = WatchedRun(tmp_path)
    found = run.update()
    assert len(found["frames"]) <= MOST_FRAMES
    assert found["every"] == 2 * FINEST
    append(tmp_path, "metrics-00000.jsonl", *worker_rows(0, range(101, 201), step_time=1.0, start=100.0))
    again = run.update(found["version"], found["every"], len(found["frames"]))
    assert again["begin"] == 0  # the distance has changed: all frames are sent
    assert again["every"] == 4 * FINEST
    times = [f["time"] for f in again["frames"]]
    assert times == [4 * FINEST * (k + 1) for k in range(len(times))]
    assert found["plans"].keys() == {""}
    assert run.update(again["version"], again["every"], len(times))["plans"] == {}  # the page has it already


def test_a_worker_dies_and_comes_back(tmp_path):
    write_config(tmp_path, [2, 2], 60, on_failure="continue")
    started(tmp_path)
    everyone, rest = [0, 1, 2, 3], [0, 1, 2]
    for rank in rest:
        rows = worker_rows(rank, range(1, 61), peers=[(rank + 1) % 3], members=everyone)
        for row in rows[20:40]:
            row["workers"][str(rank)]["members"] = rest
        append(tmp_path, f"metrics-{rank:05d}.jsonl", *rows)
    append(tmp_path, "metrics-00003.jsonl", *worker_rows(3, range(1, 21), peers=[0], members=everyone))
    event(tmp_path, 2.05, "gone", worker=3, why="killed by SIGKILL")
    # the replacement counts seconds, bytes and waits from 0 again
    append(tmp_path, "metrics-00003.jsonl", *worker_rows(3, range(41, 61), start=4.0, peers=[0], members=everyone))
    frames = WatchedRun(tmp_path).update()["frames"]
    of_three = {round(f["time"], 1): (f["state"][3] if isinstance(f["state"], list) else f["state"]) for f in frames}
    assert of_three[1.5] == "training"
    assert of_three[3.0] == "gone"
    assert of_three[5.0] == "training"
    away = next(f for f in frames if round(f["time"], 1) == 3.0)
    assert away["plan"] == "0,1,2"
    assert all(f["sent"][3] is None or f["sent"][3] >= 0 for f in frames if isinstance(f["sent"], list))


def test_the_plan_of_the_workers_that_are_left_joins_only_them(tmp_path):
    write_config(tmp_path, [2, 2], 10, method="dadam:complete", on_failure="continue")
    run = WatchedRun(tmp_path)
    assert run.facts.rounds([0, 1, 3])[0].groups == ((0, 1, 3), (2,))
    assert run.facts.plan([0, 1, 3])["rounds"][0]["colors"][2] == "#c9ced6"


def test_virtual_workers_have_own_losses_and_bytes_of_the_simulated_model(tmp_path):
    write_config(tmp_path, [4, 4], 20, virtual=True)
    append(tmp_path, "metrics-00000.jsonl", *virtual_rows(8, 20, lambda w: {(w + 4) % 8: 4000}))
    run = WatchedRun(tmp_path)
    found = run.update()
    frame = found["newest"]
    assert frame["loss"] == pytest.approx([(w + 1) / 20 for w in range(8)], rel=1e-3)
    # a model of 1000 parameters has 4000 bytes; the cluster's has 4 MB and a step of 0.05 simulated seconds
    assert frame["sent"] == pytest.approx(4e6 / 0.05, rel=1e-3)
    assert frame["waiting"] == pytest.approx(0.2)
    assert frame["own_ms"] == pytest.approx(40)
    assert [e["step"] for e in found["evaluations"]] == [10, 20]
    assert found["evaluations"][-1]["consensus_distance"] == pytest.approx(0.9**20)
    assert run.facts.to_dict()["link_bytes_per_second"] == 1e9


def test_links_of_many_workers_are_those_between_nodes(tmp_path):
    write_config(tmp_path, [8] * 8, 10, virtual=True)
    append(tmp_path, "metrics-00000.jsonl", *virtual_rows(64, 10, lambda w: {(w + 8) % 64: 1}))
    run = WatchedRun(tmp_path)
    pairs = {(a, b) for a, b, _ in run.update()["newest"]["links"]}
    assert pairs == {(m, (m + 1) % 8) for m in range(8)}


@pytest.mark.parametrize(("events", "state", "word"), [
    ([("started", {"pid": 2**22 + 5})], "dead", "gone"),
    ([("started", {}), ("ended", {})], "ended", "stopped at step 5"),
    ([("started", {}), ("failed", {"why": "the loss is nan"})], "failed", "the loss is nan"),
    ([], "ended", "stopped at step 5"),
])  # fmt: skip
def test_the_status_says_how_a_run_ended(tmp_path, events, state, word):
    write_config(tmp_path, [1], 10)
    append(tmp_path, "metrics-00000.jsonl", *worker_rows(0, range(1, 6)))
    for kind, facts in events:
        event(tmp_path, 1.0, kind, host=socket.gethostname(), **facts)
    status = WatchedRun(tmp_path).update()["status"]
    assert status["state"] == state
    assert word in status["text"]


def test_damaged_lines_are_left_out_and_counted(tmp_path):
    gossiping(tmp_path, steps=10)
    path = tmp_path / "metrics-00001.jsonl"
    lines = path.read_text().splitlines()
    lines[3] = '{"step": 4, "seco'
    lines[5] = '{"step": "six"}'
    path.write_text("\n".join(lines) + "\n" + '{"step": 11, "torn')
    append(tmp_path, "events.jsonl", {"event": 5}, {"time": "now", "event": "ended"})
    found = WatchedRun(tmp_path).update()
    assert found["notes"] == ["2 damaged lines of metrics-00001.jsonl left out"]
    assert found["newest"]["step"] == 10


def test_a_run_that_is_resumed_with_other_workers_begins_anew(tmp_path):
    gossiping(tmp_path, steps=10)
    run = WatchedRun(tmp_path)
    before = run.update()
    write_config(tmp_path, [1, 1], 20)
    os.utime(tmp_path / "config.json", (T0, T0))
    after = run.update(before["version"], before["every"], len(before["frames"]))
    assert after["version"] == before["version"] + 1
    assert after["begin"] == 0
    assert run.facts.layout.n == 2


def test_a_file_that_is_written_anew_is_read_anew(tmp_path):
    write_config(tmp_path, [1], 50)
    started(tmp_path)
    append(tmp_path, "metrics-00000.jsonl", *worker_rows(0, range(1, 21)))
    run = WatchedRun(tmp_path)
    run.update()
    beside = tmp_path / "beside"
    beside.write_text("".join(json.dumps(r) + "\n" for r in worker_rows(0, range(1, 11))))
    beside.replace(tmp_path / "metrics-00000.jsonl")
    append(tmp_path, "metrics-00000.jsonl", *worker_rows(0, range(11, 16), start=3.0))
    assert run.update()["newest"]["step"] == 15


def test_long_pauses_are_not_replayed():
    clock = RunClock()
    clock.add([100.0, 101.0])
    clock.add([101.0 + LONGEST_PAUSE + 50, 102.0 + LONGEST_PAUSE + 50])
    assert clock.of(101.0) == 1.0
    assert clock.end == 1.0 + SHORT + 1.0
    assert clock.wall(clock.end) == 102.0 + LONGEST_PAUSE + 50
    assert clock.wall(0.5) == 100.5


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "not the folder of a run"),
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"config": {}}', "damaged"),
        ('{"config": {"steps": 1, "per_node": 3, "method": "ddp"}}', "damaged"),
    ],
)
def test_a_folder_that_is_no_run_is_refused_in_one_sentence(tmp_path, content, word):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=word):
        WatchedRun(tmp_path)


def test_a_folder_of_runs_names_them(tmp_path):
    write_config(tmp_path / "one", [1], 5)
    with pytest.raises(InputError, match=r"it holds the runs .*one: watch one of those"):
        WatchedRun(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        WatchedRun(tmp_path / "nothing")
