"""`gossamer simulate`, `advise` and `trace` as a user calls them."""

import json
import re

import pytest

from gossamer.cli import main
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


def test_exact_averages_are_charged_as_asked(run, tmp_path):
    path = cluster_file(tmp_path / "c.toml", 0.05)

    def one(line):
        return run(f"simulate --cluster {path} --steps 64 {line} --json")

    plain, averaged = one("--method dadam:aer"), one("--method dadam:aer --average-every 4")
    assert averaged["step_time"] > plain["step_time"]
    # 2 nodes of 2: a round of AER crosses every other time; an exact average sends 1.5 models in place of every fourth
    assert plain["bytes_between"] == pytest.approx(10e6 * plain["exchanges_per_step"], rel=0.5)
    assert averaged["bytes_between"] == pytest.approx(0.75 * plain["bytes_between"] + 1.5 * 10e6 / 4)
    assert one("--method dadam:aer --every 4 --average-every 4")["bytes_between"] == pytest.approx(1.5 * 10e6 / 4)
    assert one("--method dadam:aer --fragments 2")["bytes_between"] == pytest.approx(plain["bytes_between"] / 2)
    assert one("--method ddp")["bytes_between"] == pytest.approx(1.5 * 10e6)
    assert one("--method diloco --every 8")["bytes_between"] == pytest.approx(1.5 * 10e6 / 8)
    coarse = one("--method dadam:aer:int8")
    assert "no exact averages are charged" in coarse["notes"][0]
    assert coarse["bytes_between"] == pytest.approx(plain["bytes_between"] * (1 + 2 / 128) / 4)
    fresh = one("--method dadam:aer:int8 --average-every 64")
    assert "notes" not in fresh
    assert fresh["bytes_between"] > coarse["bytes_between"]
    slow = one("--method dadam:ring --every 2")
    assert slow["contraction"] == pytest.approx(one("--method dadam:ring")["contraction"] ** 0.5)
    pairs = one("--method ad-psgd:ring")
    assert pairs["contraction"] is None
    assert one("--method ad-psgd:ring --average-every 4")["bytes_between"] == pairs["bytes_between"]
    assert run(f"{ABSTRACT} --method dadam:aer --steps 20 --json")["bytes_between"] is None
    text = run(f"simulate --cluster {path} --method dadam:aer:int8 --steps 20")
    assert "MB sent" in text
    assert "Note: int8" in text


def test_a_peer_package_keeps_its_own_frequency(run):
    line = "simulate --cluster a40 --nodes 2 --per-node 2 --method decent-dp:aer --steps 20"
    assert run(f"{line} --every 4 --average-every 8 --json")["step_time"] == run(f"{line} --json")["step_time"]


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
        (f"{ABSTRACT} --average-every -1", "--average-every must not be negative"),
        (f"{ABSTRACT} --average-every 10 --every 4", "must be a multiple of --every 4, got 10; pass 8"),
        (f"{ABSTRACT} --average-every 4 --every 4 --fragments 2", "pass at least 8"),
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
