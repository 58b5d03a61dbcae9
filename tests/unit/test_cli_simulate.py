"""`gossamer simulate`, `advise` and `trace` as a user calls them."""

import json
import re
from inspect import signature
from types import SimpleNamespace

import pytest

from gossamer.cli import main
from gossamer.engine.decentralize import decentralize
from gossamer.engine.policies import Exchange, Settings
from gossamer.predict.advise import advise, line
from gossamer.predict.cluster import load
from gossamer.predict.methods import parse
from gossamer.topology import Layout, build, entries
from gossamer.trace import TraceWriter, read_chrome

ABSTRACT = "simulate --nodes 4 --per-node 4 --gamma 3 --omega 0.5 --sigma 0.2"
CLUSTER = """
nodes = 2
per_node = 2
[links.inter]
bandwidth_gbps = {gbps}
[links.intra]
bandwidth_gbps = 100
[compute]
seconds = 0.1
jitter = "gaussian:0.05"
[model]
mb = 10
"""


@pytest.fixture
def run(capsys):
    def call(line, code=0):
        assert main(line.split()) == code
        out, err = capsys.readouterr()
        if code:
            assert re.fullmatch(r"gossamer: error: [^\n]+\n", err)
            return err
        return json.loads(out) if "--json" in line else out

    return call


def cluster_file(path, gbps):
    path.write_text(CLUSTER.format(gbps=gbps))
    return path


def test_abstract(run):
    got = run(f"{ABSTRACT} --method dadam:aer --steps 1000 --json")
    assert got["unit"] == "mean compute time"
    assert got["ddp_step_time"] == pytest.approx(4.353, abs=0.02)
    assert got["step_time"] == pytest.approx(1.39, abs=0.02)
    assert got["saving"] == pytest.approx(1 - got["step_time"] / got["ddp_step_time"])
    assert got["p5"] <= got["p50"] <= got["p95"] <= got["p99"]


def test_improvements_are_flags(run):
    plain = run(f"{ABSTRACT} --method dadam:aer --json")["step_time"]
    better = run(f"{ABSTRACT} --method dadam:aer:bf16 --buckets 4 --stagger --hierarchical --json")["step_time"]
    assert better < plain
    assert run(f"{ABSTRACT} --method dadam:aer --atc --json")["step_time"] > plain


def test_preset_and_methods(run):
    got = run("simulate --cluster a40 --nodes 4 --per-node 4 --methods ddp,dadam:exp,dadam:aer --steps 100 --json")
    rows = {r["method"]: r for r in got["methods"]}
    assert list(rows) == ["ddp", "dadam:one-peer-exponential", "dadam:aer"]
    assert rows["ddp"]["saving"] == 0
    assert rows["dadam:aer"]["saving"] > 0.5
    assert got["workers"] == 16
    assert got["gamma"] > 1 > got["omega"] > 0
    assert "saving" in run("simulate --cluster a40 --methods ddp,dadam:ring --steps 50")


def test_files(run, tmp_path):
    trace, page, picture = tmp_path / "t.json", tmp_path / "t.html", tmp_path / "t.svg"
    run(f"{ABSTRACT} --method dadam:aer --steps 50 --trace-steps 4 --trace {trace} --html {page} --plot {picture}")
    made = read_chrome(trace)
    assert made.workers == 16
    assert {s.attrs["step"] for s in made.spans if s.category == "compute"} == {0, 1, 2, 3}
    text = page.read_text()
    assert "<svg" in text
    assert not re.search(r'<(script|link)[^>]+(src|href)="http', text)
    assert "<svg" in picture.read_text()


def test_scaling(run, tmp_path):
    got = run(f"simulate --cluster a40 --method dadam:aer --steps 50 --scaling 2,4 --plot {tmp_path / 's.png'} --json")
    assert [(r["nodes"], r["workers"]) for r in got["scaling"]] == [(2, 8), (4, 16)]
    assert (tmp_path / "s.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("simulate --nodes 4 --per-node 4", "pass --cluster a40"),
        ("simulate --gamma 3 --nodes 4", "needs --per-node"),
        (f"{ABSTRACT} --gamma -1", "gamma must be"),
        (f"{ABSTRACT} --jitter gamma:0.2", "pass one of them"),
        (f"{ABSTRACT} --cluster a40", "exclude each other"),
        (f"{ABSTRACT} --method dadam:ear", "unknown topology 'ear'"),
        (f"{ABSTRACT} --method ddp --methods ddp", "exclude each other"),
        (f"{ABSTRACT} --methods ddp,dadam --trace t.json", "one method's timeline"),
        (f"{ABSTRACT} --scaling 2,x", "--scaling must list"),
        (f"{ABSTRACT} --model-mb 3", "needs --cluster"),
        (f"{ABSTRACT} --plot t.bmp", "ends in .html"),
        (f"{ABSTRACT} --every 0", "every must be at least 1"),
        (f"{ABSTRACT} --steps 1", "at least 10 steps"),
        (f"{ABSTRACT} --steps 2000000000", "too many to simulate"),
        (f"{ABSTRACT} --every 1000000000", "too many to simulate"),
        (f"{ABSTRACT} --buckets 100000000", "buckets must be at most 4096"),
        (f"{ABSTRACT} --seed -1", "seed must not be negative"),
        (f"{ABSTRACT} --trace-steps -1 --trace t.json", "must not be negative, got -1"),
        (f"{ABSTRACT} --method ad-psgd:ring --rate nan", "rate must not be negative"),
        (f"{ABSTRACT} --method ad-psgd:ring --rate 1e9", "above 100"),
        (f"{ABSTRACT} --scaling 100000000", "must stay below"),
        (f"{ABSTRACT} --scaling 2 --plot x.foo", "ends in .svg"),
        (f"{ABSTRACT} --contour x.bmp --method dadam:aer --steps 10", "ends in .svg"),
        (f"{ABSTRACT} --trace /proc/x/t.json", "cannot write"),
        (f"{ABSTRACT.replace(' --sigma 0.2', '')} --jitter replay:/dev/zero", "is longer than"),
        ("advise a40 --model-mb 1e12", "less than or equal to 1000000"),
        ("simulate --method a2cid2:ring --n 8 --consensus --seed -1", "--seed must not be negative"),
        ("simulate --method a2cid2:ring --n 8 --consensus --runs 1000000000", "--runs must be from 1"),
        ("simulate --method a2cid2:ring --n 8 --consensus --steps 1000000000", "--steps must be from 2"),
        ("simulate --cluster b40", "unknown cluster 'b40'"),
        ("simulate --cluster a40 --model-mb -3", "positive number of megabytes"),
        ("advise nowhere.toml", "cannot read cluster file"),
        ("trace merge nowhere", "is not a directory"),
        ("trace diff nowhere.json nowhere.json", "cannot read"),
    ],
)
def test_mistakes(run, line, message):
    assert message in run(line, code=2)


def test_unknown_key_in_a_file(run, tmp_path):
    path = cluster_file(tmp_path / "c.toml", 1)
    path.write_text(path.read_text() + "layers = 3\n")
    assert "unknown key 'model.layers'" in run(f"simulate --cluster {path}", code=2)


def test_advise(run, tmp_path):
    slow = run(f"advise {cluster_file(tmp_path / 'slow.toml', 0.5)} --steps 40 --json")
    chosen = slow["recommendation"]
    assert chosen["saving"] > 0.3
    assert chosen["line"].startswith("gossip = gossamer.decentralize(model, optimizer, topology=")
    assert chosen["line"].endswith(', gradients="worker")')  # all workers gossip, as in the prediction
    rows = {(r["method"], r["algorithm"]): r for r in slow["table"]}
    assert len(rows) == len(slow["table"]) == 2 + len(entries()) * 3 * 4  # wires, algorithms
    assert rows["accumadam:aer", "awc"]["step_time"] < rows["accumadam:aer", "atc"]["step_time"]
    assert [r["score"] for r in slow["table"]] == sorted(r["score"] for r in slow["table"])
    cases = {s["if"]: s for s in slow["sensitivity"]}
    assert cases["twice the bandwidth"]["ddp_step_time"] < cases["half the bandwidth"]["ddp_step_time"]
    bigger = run(f"advise {tmp_path / 'slow.toml'} --steps 40 --model-mb 40 --json")
    assert bigger["cluster"]["gamma"] == pytest.approx(4 * slow["cluster"]["gamma"], rel=0.01)


def test_advise_tries_bucket_plans(run, tmp_path):
    path = cluster_file(tmp_path / "c.toml", 0.5)
    path.write_text(path.read_text().replace("mb = 10", "mb = 60"))
    table = run(f"advise {path} --nodes 4 --steps 40 --json")["table"]
    tried = [r for r in table if len(r["plans"]) > 1]
    assert any(r["algorithm"] == "awc" for r in tried)
    for r in tried:
        best, default = min(p["step_time"] for p in r["plans"]), r["plans"][0]["step_time"]
        assert r["step_time"] <= default
        assert r["step_time"] == pytest.approx(best, rel=0.02)  # a plan must earn its options
        keys = ("bucket_mb", "in_flight", "stagger")
        assert len({tuple(p[k] for k in keys) for p in r["plans"]}) == len(r["plans"])
    unlike = next(r for r in tried if any(not p["stagger"] for p in r["plans"]))
    spread = {p["stagger"]: p["step_time"] for p in unlike["plans"] if p["in_flight"] == 4 and p["bucket_mb"] is None}
    assert spread[True] <= spread[False] + 1e-9
    ddp = next(r for r in table if r["method"] == "ddp")
    assert {p["bucket_mb"] for p in ddp["plans"]} == {None, 10, 100}


@pytest.mark.parametrize("buckets", [None, 9])
def test_every_line_to_paste_is_accepted(tmp_path, buckets):
    """Each row's line names real arguments with values that the engine takes, and says what was predicted."""
    layout = Layout.of([2] * 4)
    cluster = load(cluster_file(tmp_path / "c.toml", 20)).resized(layout)
    far = cluster.links.inter.model_copy(update={"latency_us": 20_000.0})
    advice = advise(cluster.changed(model={"mb": 260, "buckets": buckets}, links={"inter": far}), steps=20)
    options_seen = set()
    for row in advice.table:
        calls = []
        exec(line(row), {"model": object(), "optimizer": object(), "gossamer": engine(calls), "torch": torch(calls)})
        (given,) = calls
        if row.ddp:
            assert given.get("bucket_cap_mb") == row.options.get("bucket_mb")
            continue
        topology = build(given.pop("topology"), layout)
        settings = Settings.of(**given)
        method = parse(row.method)
        assert topology.name == build(method.topology, layout).name
        assert (settings.algorithm.name, settings.wire) == (row.algorithm, method.wire)
        names = {"bucket_mb": "bucket_mib"}
        assert {k: getattr(settings.exchange, names.get(k, k)) for k in row.options} == row.options
        options_seen |= set(row.options)
        if buckets and not method.asynchronous:
            assert -(-260_000_000 // round(settings.exchange.bucket_mib * 2**20)) == buckets
    assert "in_flight" in options_seen or "bucket_mb" in options_seen  # latency counts for every wave of buckets


def engine(calls):
    def bind(*positional, **named):
        given = dict(signature(decentralize).bind(*positional, **named).arguments)
        calls.append({k: v for k, v in given.items() if k not in ("model", "optimizer")})

    return SimpleNamespace(decentralize=bind, Exchange=Exchange)


def torch(calls):
    parallel = SimpleNamespace(DistributedDataParallel=lambda model, **k: calls.append(k))
    return SimpleNamespace(nn=SimpleNamespace(parallel=parallel))


def test_advise_counts_mixing_not_only_speed(run, tmp_path):
    """On a starved network asynchronous workers race ahead without averaging: fast, but not recommended."""
    got = run(f"advise {cluster_file(tmp_path / 'c.toml', 0.01)} --nodes 4 --steps 40 --json")
    rows = {r["method"]: r for r in got["table"] if r["algorithm"] != "atc"}
    starved = rows["ad-psgd:ring"]
    assert starved["step_time"] == min(r["step_time"] for r in got["table"])
    assert starved["exchanges_per_step"] < 0.2
    assert not got["recommendation"]["method"].startswith(("ad-psgd", "a2cid2"))


def test_advise_stays_with_ddp(run, tmp_path):
    path = cluster_file(tmp_path / "fast.toml", 400)
    path.write_text(path.read_text().replace("gaussian:0.05", "none"))
    chosen = run(f"advise {path} --steps 40 --json")["recommendation"]
    assert chosen["method"] == "ddp"
    assert chosen["why"].startswith("stay with DDP: compute hides the all-reduce")
    assert "DistributedDataParallel" in chosen["line"]
    assert "stay with DDP" in run(f"advise {path} --steps 40")


def test_trace_commands(run, tmp_path):
    for worker in range(2):
        with TraceWriter(tmp_path / "run", worker, (0, 1)) as w:
            for k in range(3):
                w.record("compute", k, k + 0.5 + 0.3 * worker, step=k)
                w.record("exchange", k + 0.5 + 0.3 * worker, k + 1, round=k, bucket=0)
                w.record("wait", k + 0.5 + 0.3 * worker, k + 1, step=k, round=k, bucket=0, peer=1 - worker)
    merged = tmp_path / "trace.json"
    got = run(f"trace merge {tmp_path / 'run'} -o {merged} --json")
    assert (got["workers"], got["steps"]) == (2, 3)
    assert got["step_time"] == pytest.approx(1.0, abs=0.02)
    rows = run(f"trace diff {merged} {tmp_path / 'run'} --json")["rows"]
    assert all(abs(r["error"]) < 1e-3 for r in rows)
    assert "step time" in run(f"trace diff {merged} {merged}")
    causes = run(f"trace stragglers {merged} --json")["stragglers"]
    assert {"worker 1", "link 0-1"} <= {c["cause"] for c in causes}
    assert "worker 1" in run(f"trace stragglers {merged}")
    run(f"trace plot {merged} {merged} -o {tmp_path / 'both.png'}")
    assert (tmp_path / "both.png").stat().st_size > 5000
