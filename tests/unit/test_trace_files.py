"""Trace files of workers, merging them, and the Chrome format."""

import gzip
import json
import math
import threading
from collections import defaultdict

import pytest

from gossamer.errors import InputError
from gossamer.predict.predict import predict, predicted_trace
from gossamer.predict.presets import PRESETS
from gossamer.trace import Span, Trace, TraceWriter, merge, read, read_chrome, to_chrome, write_chrome

NODE = (0, 0, 1)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def record(directory, worker, *, node=NODE, clock=None, offset=0.0):
    with TraceWriter(directory, worker, node, clock=clock or Clock(), offset=offset, versions={"torch": "2"}) as w:
        w.record("compute", 0.0, 0.5, step=0)
        w.record("exchange", 0.1, 0.6, round=0, bucket=1, bytes=8)
        w.record("wait", 0.5, 0.6, step=0, round=0, bucket=1, peer=(worker + 1) % 3)
    return w.path


def test_write_and_read(tmp_path):
    header, spans = read(record(tmp_path, 1))
    assert header.worker == 1
    assert header.node == NODE
    assert header.versions == (("torch", "2"),)
    assert spans == [
        Span("compute", 1, 0.0, 0.5, {"step": 0}),
        Span("exchange", 1, 0.1, 0.6, {"round": 0, "bucket": 1, "bytes": 8}),
        Span("wait", 1, 0.5, 0.6, {"step": 0, "round": 0, "bucket": 1, "peer": 2}),
    ]


def test_now_is_the_injected_clock(tmp_path):
    clock = Clock()
    writer = TraceWriter(tmp_path, 0, (0,), clock=clock)
    clock.now += 2.5
    assert writer.now() == 2.5
    writer.close()
    writer.close()


def test_spans_of_many_threads_are_all_written(tmp_path):
    writer = TraceWriter(tmp_path, 0, (0,), flush_every=7)

    def work(bucket):
        for k in range(200):
            writer.record("exchange", k, k + 1, round=k, bucket=bucket)

    threads = [threading.Thread(target=work, args=(b,)) for b in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    writer.close()
    assert {(s.attrs["round"], s.attrs["bucket"]) for s in read(writer.path)[1]} == {
        (k, b) for k in range(200) for b in range(4)
    }


def test_torn_last_line_is_left_out(tmp_path):
    path = record(tmp_path, 0)
    text = path.read_text()
    path.write_text(text[:-20])
    assert len(read(path)[1]) == 2
    lines = text.splitlines()
    path.write_text("\n".join([lines[0], lines[1][:10], *lines[2:]]) + "\n")
    with pytest.raises(InputError, match=r"line 2 of .* is not a span"):
        read(path)


def test_bad_headers(tmp_path):
    path = tmp_path / "trace-00000.jsonl"
    path.write_text('{"loss": 3}\n')
    with pytest.raises(InputError, match="does not begin with a Gossamer trace header"):
        read(path)
    path.write_text('{"gossamer_trace": 99}\n')
    with pytest.raises(InputError, match="trace format 99"):
        read(path)


def test_merge_puts_workers_on_one_clock(tmp_path):
    for worker in range(3):
        path = record(tmp_path, worker)
        head, *rest = path.read_text().splitlines()
        data = json.loads(head) | {"origin": 1000.0 + worker, "offset": -0.25 * worker}
        path.write_text("\n".join([json.dumps(data), *rest]) + "\n")
    merged = merge(tmp_path)
    assert merged.node == NODE
    starts = {s.worker: s.start for s in merged.spans if s.category == "compute"}
    assert starts == pytest.approx({0: 0.0, 1: 0.75, 2: 1.5})
    assert [s.start for s in merged.spans] == sorted(s.start for s in merged.spans)


def test_merge_names_what_is_missing(tmp_path):
    with pytest.raises(InputError, match="is not a directory"):
        merge(tmp_path / "nowhere")
    with pytest.raises(InputError, match="holds no trace-"):
        merge(tmp_path)
    record(tmp_path, 1)
    with pytest.raises(InputError, match="lacks workers 0, 2 of 3; copy the missing"):
        merge(tmp_path)
    record(tmp_path, 0, node=(0, 1))
    with pytest.raises(InputError, match="merge one run at a time"):
        merge(tmp_path)


def spans():
    return (
        Span("compute", 0, 0.0, 0.25, {"step": 0}),
        Span("forward", 1, 0.0, 0.125, {"step": 0}),
        Span("exchange", 0, 0.0, 0.375, {"round": 0, "bucket": 2, "bytes": 64, "wire": "bf16"}),
        Span("wait", 0, 0.25, 0.375, {"step": 0, "peer": 1}),
    )


def test_chrome_format_that_viewers_expect():
    data = to_chrome(Trace(spans(), (0, 1), "mine"))
    assert data["distributedInfo"] == {"backend": "gossamer", "rank": 0, "world_size": 2}
    assert data["displayTimeUnit"] == "ms"
    complete = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert all({"name", "cat", "pid", "tid", "ts", "dur", "args"} <= e.keys() for e in complete)
    compute = next(e for e in complete if e["cat"] == "compute")
    assert (compute["pid"], compute["tid"], compute["ts"], compute["dur"]) == (1, 1, 0.0, 250_000.0)
    wait = next(e for e in complete if e["cat"] == "wait")
    assert wait["name"] == "wait for worker 1"
    # slices of one thread must nest: an exchange overlaps compute, so it has a thread of its own
    exchange = next(e for e in complete if e["cat"] == "exchange")
    assert exchange["tid"] != compute["tid"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"}
    assert names[1, 1] == "worker 0"
    assert names[1, exchange["tid"]] == "worker 0 exchange, bucket 2"
    processes = {e["pid"]: e["args"]["name"] for e in data["traceEvents"] if e["name"] == "process_name"}
    assert processes == {1: "node 0", 2: "node 1"}


def check_trace_events(data):
    """The rules of the Trace Event Format, and those of Perfetto's importer beyond it."""
    assert data["displayTimeUnit"] in ("ms", "ns")
    named, threads = set(), defaultdict(list)
    for e in data["traceEvents"]:
        assert isinstance(e["name"], str)
        assert type(e["pid"]) is type(e["tid"]) is int
        assert e["pid"] > 0  # Perfetto keeps 0 for the idle process
        assert e["tid"] < 2**31
        assert e["ph"] in ("X", "M")
        if e["ph"] == "M":
            assert e["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            assert list(e["args"]) == ["sort_index" if e["name"].endswith("index") else "name"]
            if e["name"] == "thread_name":
                named.add((e["pid"], e["tid"]))
            continue
        assert e["tid"] > 0
        assert isinstance(e["cat"], str)
        assert isinstance(e["args"], dict)
        assert math.isfinite(e["ts"])
        assert e["dur"] >= 0
        ends = [round(1e3 * e["ts"]), round(1e3 * (e["ts"] + e["dur"]))]  # whole nanoseconds
        assert ends == pytest.approx([1e3 * e["ts"], 1e3 * (e["ts"] + e["dur"])], abs=1e-2)
        threads[e["pid"], e["tid"]].append(ends)
    assert set(threads) <= named
    for slices in threads.values():  # one after another, or nested
        open_until = []
        for begin, end in sorted(slices, key=lambda s: (s[0], -s[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)
    json.loads(json.dumps(data, allow_nan=False))


@pytest.mark.parametrize("method", ["ddp", "dadam:aer", "dadam:exp:int8", "dadam:ring-static", "ad-psgd:ring"])
def test_predicted_traces_follow_the_format_rules(method):
    cluster = PRESETS["a40"].changed(compute={"update_seconds": 0.003})
    result = predict(method, cluster, steps=20, trace_steps=8)
    check_trace_events(to_chrome(predicted_trace(method, cluster, result)))


def test_measured_traces_follow_the_format_rules(tmp_path):
    for worker in range(3):
        record(tmp_path, worker)
    check_trace_events(to_chrome(merge(tmp_path)))


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_chrome_round_trip(tmp_path, name):
    trace = Trace(tuple(sorted(spans(), key=lambda s: (s.start, s.worker))), (0, 1), "mine")
    back = read_chrome(write_chrome(trace, tmp_path / name))
    assert back.node == trace.node
    assert back.label == "mine"
    key = lambda s: (s.worker, s.category, s.start, s.end, sorted(s.attrs.items(), key=str))  # noqa: E731
    assert sorted(map(key, back.spans)) == sorted(map(key, trace.spans))


def test_chrome_mistakes(tmp_path):
    path = tmp_path / "t.json"
    with pytest.raises(InputError, match="cannot read"):
        read_chrome(path)
    path.write_text("no")
    with pytest.raises(InputError, match="is not JSON"):
        read_chrome(path)
    path.write_text("{}")
    with pytest.raises(InputError, match="no 'traceEvents'"):
        read_chrome(path)
    path.write_text('{"traceEvents": [{"ph": "X", "cat": "kernel"}]}')
    with pytest.raises(InputError, match="no span of a category"):
        read_chrome(path)
    for broken, message in (
        ({"pid": 1, "ts": 0, "dur": 1, "tid": 1, "args": {"worker": 10**9}}, "event 0 of .* wrong value .worker"),
        ({"pid": 1, "ts": float("nan"), "dur": 1, "tid": 1}, "event 0 of .* wrong value .time nan"),
        ({"pid": 1, "ts": 0, "tid": 1}, "event 0 of .* lacks 'dur'"),
        ({"pid": 1, "ts": 0, "dur": 1, "tid": 1, "args": {"worker": 0, "peer": 3}}, "mentions worker 3 but has 1"),
    ):
        path.write_text(json.dumps([{"ph": "X", "cat": "compute", **broken}]))
        with pytest.raises(InputError, match=message):
            read_chrome(path)
    packed = gzip.compress(b"[" + b" " * (1 << 20))
    path.write_bytes(packed[:-9])
    with pytest.raises(InputError, match="cannot read"):
        read_chrome(path)
    with pytest.raises(InputError, match="cannot write"):
        write_chrome(Trace(spans(), (0, 1)), path / "below-a-file.json")
    path.write_bytes(gzip.compress(json.dumps(to_chrome(Trace(spans()[:1], (0, 0, 0)))).encode()))
    with pytest.raises(InputError, match="no span of workers 1, 2 of 3"):
        read_chrome(path)
