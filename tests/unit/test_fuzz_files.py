"""Files that users write or that a crash has torn: whatever is in them, the answer is a result or one clear sentence.

Valid files are mutated as data (values replaced, keys removed, added, repeated) and as bytes (cut, flipped, inserted).
What still loads is used as the commands use it. A small limit on memory turns a huge allocation into a failure.
"""

from __future__ import annotations

import copy
import gzip
import json
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gossamer.errors import InputError
from gossamer.predict.cluster import from_dict, load, to_toml
from gossamer.predict.predict import derived, predict
from gossamer.predict.presets import PRESETS
from gossamer.topology import Layout, build
from gossamer.topology.analysis import analyze
from gossamer.topology.resolve import from_json, to_dict
from gossamer.trace import diff, merge, read_chrome, stragglers, summarize, to_chrome

MEMORY = 1 << 30  # beyond what the process has
LONGEST = 1000  # characters of a sentence
SMALL = 64  # workers: larger clusters load but are not simulated here

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70_000),
    st.sampled_from([2**31, 2**63, 10**30, 10**400, -1, 0, 0.5, 1e-320, 1e300, float("inf"), float("nan")]),
    st.sampled_from(["", "x", "nan", "1e999", "\x00", "\ud800", "ring", "gaussian:9e99", "replay:/dev/null", "[" * 9]),
    st.sampled_from(
        [[], {}, [[]], [None], {"a": {}}, [0] * 40, [[0, 1]], [1e300] * 3, ["a"], [[0.5, 0.5], [0.5, 0.5]]]
    ),
    st.text(max_size=6),
).map(copy.deepcopy)  # a sampled list is the same list each time, and later changes may go inside it


def places(value, at=()):
    """The path of every value inside."""
    found = [at]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        found += places(each, (*at, key))
    return found


@st.composite
def mutated(draw, examples):
    """One of the examples with a few of its values changed."""
    value = copy.deepcopy(draw(st.sampled_from(examples)))
    for _ in range(draw(st.integers(0, 3))):
        *path, last = draw(st.sampled_from(places(value)[1:] or [("x",)]))
        owner = value
        for key in path:
            owner = owner[key]
        kind = draw(st.sampled_from(["replace", "replace", "remove", "add", "repeat"]))
        if kind == "remove":
            del owner[last]
        elif kind == "repeat" and isinstance(owner, list):
            owner.insert(last, copy.deepcopy(owner[last]))
        elif kind == "add" and isinstance(owner, dict):
            owner[draw(st.sampled_from(["bandwith", "n", "nodes", "step", "worker", "seconds", ""]))] = draw(JUNK)
        else:
            owner[last] = draw(JUNK)
        if not isinstance(value, dict | list) or not value:
            break
    return value


@st.composite
def torn(draw, texts):
    """One of the texts, as bytes with a few of them changed."""
    data = bytearray(draw(st.sampled_from(texts)).encode("utf-8", "surrogatepass"))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["cut", "flip", "insert", "remove"]))
        if kind == "cut":
            del data[at:]
        elif kind == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "insert":
            data[at:at] = draw(st.sampled_from([b"[" * 3000, b"\xff", b"\x00", b"9" * 5000, b"e9", b"-", b'"', b"{"]))
        else:
            del data[at : at + draw(st.integers(1, 40))]
    return bytes(data)


@contextmanager
def little_memory():
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def attempt(use):
    """Run it; an InputError must be one sentence."""
    try:
        with little_memory():
            use()
    except InputError as error:
        text = " ".join(str(error).split())
        assert 10 < len(text) < LONGEST, text[:2000]


def text_of(value):
    return json.dumps(value)  # NaN and infinities as Python writes them


CLUSTERS = [
    {
        "name": "mine",
        "nodes": 3,
        "per_node": [2, 2, 1],
        "links": {
            "inter": {"bandwidth_gbps": 25, "latency_us": 30, "flow_gbps": 20},
            "intra": {"bandwidth_gbps": 200, "latency_us": 5},
            "pairs": [{"nodes": [0, 2], "bandwidth_gbps": 10}],
        },
        "compute": {"seconds": 0.1, "samples": [0.11, 0.12], "fixed_seconds": 0.01, "update_seconds": 0.01},
        "model": {"mb": 26, "buckets": 2},
        "ddp": {"bucket_mb": 25, "allreduce": "best", "backward_share": 0.6},
    },
    {
        "nodes": 2,
        "per_node": 2,
        "links": {"inter": {"bandwidth_gbps": 1}},
        "compute": {"seconds": 0.1, "jitter": "lognormal:0.1+slow-worker:2@1", "per_worker": [0.1, 0.2, 0.1, 0.1]},
        "model": {"mb": 4},
    },
]
TOMLS = [to_toml(from_dict(c)) for c in CLUSTERS] + [to_toml(PRESETS["a40"])]


def use_cluster(path):
    cluster = load(path)
    if cluster.layout.n <= SMALL:
        derived(cluster)
        for method in ("ddp", "dadam:aer", "ad-psgd:ring"):
            predict(method, cluster, steps=10)
    assert from_dict(json.loads(cluster.model_dump_json())) == cluster


TOPOLOGIES = [
    {"edges": [[0, 1], [1, 2], [2, 3]], "n": 4, "per_node": [2, 2]},
    {"edges": [[0, 1, 0.5], [1, 2, 0.25]], "style": "static", "name": "weighted"},
    {"matrix": [[0.5, 0.5, 0.0], [0.5, 0.25, 0.25], [0.0, 0.25, 0.75]]},
    to_dict(build("aer", Layout.of([2, 2]))),
    to_dict(build("ring-static", Layout.flat(4)), matrices=True),
]


def use_topology(path):
    topology = from_json(path)
    assert topology.n <= 1 << 16
    if topology.n <= SMALL:
        analyze(topology)
        again = to_dict(topology)
        assert again["n"] == topology.n


HEADER = {"gossamer_trace": 1, "worker": 0, "node": [0, 1], "origin": 1.7e9, "offset": 0.5, "versions": {"torch": "2"}}
LINES = [
    HEADER,
    {"category": "forward", "start": 0.0, "end": 0.2, "step": 0},
    {"category": "backward", "start": 0.2, "end": 0.5, "step": 0},
    {"category": "exchange", "start": 0.0, "end": 0.6, "round": 0, "bucket": 1, "bytes": 8},
    {"category": "wait", "start": 0.5, "end": 0.6, "step": 0, "round": 0, "bucket": 1, "peer": 1},
    {"category": "wait", "start": 0.6, "end": 0.6, "step": 0, "link": "0-1"},
    {"category": "step", "start": 0.6, "end": 0.7, "step": 0},
]
OTHER = "\n".join(json.dumps(line) for line in [{**HEADER, "worker": 1}, *LINES[1:]]) + "\n"


def jsonl(lines):
    return "\n".join(text_of(line) for line in lines) + "\n" if isinstance(lines, list) else text_of(lines)


def use_trace(trace):
    summarize(trace)
    stragglers(trace)
    diff(trace, trace)
    json.dumps(to_chrome(trace))


def use_folder(folder, content):
    folder.mkdir(exist_ok=True)
    (folder / "trace-00000.jsonl").write_bytes(content)
    (folder / "trace-00001.jsonl").write_text(OTHER)
    use_trace(merge(folder))


def chrome_example():
    spans = {"ph": "X", "pid": 1, "tid": 1, "ts": 0.0, "dur": 5.0}
    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "node 0"}},
        {**spans, "cat": "compute", "name": "compute", "args": {"worker": 0, "step": 0}},
        {**spans, "cat": "exchange", "name": "e", "args": {"worker": 1, "round": 0, "bucket": 1}},
        {**spans, "cat": "wait", "name": "w", "args": {"worker": 0, "step": 0, "round": 0, "bucket": 1, "peer": 1}},
        {**spans, "cat": "compute", "name": "compute", "args": {"worker": 1, "step": 0}},
    ]
    return {"traceEvents": events, "gossamer": {"node": [0, 0], "label": "mine"}}


CHROME = [chrome_example(), chrome_example()["traceEvents"]]

CASES = {
    "cluster.json": (mutated(CLUSTERS), torn([json.dumps(c) for c in CLUSTERS])),
    "cluster.toml": (torn(TOMLS), torn(TOMLS)),
    "topology.json": (mutated(TOPOLOGIES), torn([json.dumps(t) for t in TOPOLOGIES])),
    "trace.jsonl": (mutated([LINES]), torn([jsonl(LINES)])),
    "chrome.json": (mutated(CHROME), torn([json.dumps(c) for c in CHROME])),
    "chrome.json.gz": (torn([json.dumps(CHROME[0])]), torn([json.dumps(CHROME[0])])),
}


def check(kind, tmp_path, count):
    data, raw = CASES[kind]

    @settings(
        max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
    )
    @given(st.one_of(data, raw), st.integers(0, 60))
    def run(value, cut):
        if isinstance(value, bytes):
            content = value
        else:
            content = (jsonl(value) if kind == "trace.jsonl" else text_of(value)).encode("utf-8", "surrogatepass")
        path = tmp_path / kind
        if kind == "trace.jsonl":
            attempt(lambda: use_folder(tmp_path / "run", content))
            return
        if kind.endswith(".gz"):
            packed = bytearray(gzip.compress(content, mtime=0))
            if cut < len(packed):  # half of the files are damaged after they were packed
                packed[cut] ^= 0x10 * (cut % 2)
            content = bytes(packed)
        path.write_bytes(content)
        if kind.startswith("cluster"):
            attempt(lambda: use_cluster(path))
        elif kind.startswith("topology"):
            attempt(lambda: use_topology(path))
        else:
            attempt(lambda: use_trace(read_chrome(path)))

    run()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", CASES)
def test_any_file_gives_a_result_or_one_sentence(kind, tmp_path):
    check(kind, tmp_path, 60)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", CASES)
def test_a_thousand_files_of_each_kind(kind, tmp_path):
    check(kind, tmp_path, 1000)
