"""The README is short, and its numbers are those of the records."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "records"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def record(name):
    return json.loads((RECORDS / name / "record.json").read_text(encoding="utf-8"))


def test_it_is_short_and_names_both_commands_first():
    assert len(README.splitlines()) < 110
    assert README.splitlines()[2].startswith("    make demo")
    assert README.splitlines()[3].startswith("    make test")


def test_the_step_times_are_those_of_the_record():
    table = (RECORDS / "bench-comm-bound" / "README.md").read_text(encoding="utf-8")
    ms = {row[0]: float(row[1]) for row in re.findall(r"^\| ([\w:.-]+) \| ([\d.]+) \|", table, re.M)}
    assert f"**{ms['ddp'] / ms['dadam:aer']:.2f} times as fast as DDP" in README
    for method in ("ddp", "dadam:aer", "decent-dp:aer", "ddp:bf16"):
        assert f"{ms[method]:.0f} ms" in README, method


def test_the_numbers_about_faults_are_those_of_the_record():
    chaos = record("chaos")
    assert f"**{chaos['longest_stall_s']:.2f} s was the longest stall**" in README
    assert f"with {len(chaos['faults'])} faults" in README
    assert f"all {chaos['rejoined']} victims came back" in README
    assert (chaos["hangs"], chaos["restarts"]) == (0, 0)


def gap(task, setting):
    table = (RECORDS / f"quality-signal-{task}" / "README.md").read_text(encoding="utf-8")
    return float(re.search(rf"^\| {re.escape(setting)} \(\d seeds\) .*\| (\S+) \[", table, re.M)[1])


def test_the_sentence_about_quality_is_that_of_the_records():
    """The bound holds on every task, the one that was kept out of every choice among them, and each gap is said."""
    said = README[README.index("**Within ") : README.index("![Loss minus all-reduce's")].replace("\n", " ")
    bound = float(re.match(r"\*\*Within ([\d.]+) of all-reduce's loss\*\*", said)[1])
    ranges = {
        "gossipadam:exp inside": r"\+([\d.]+) to \+([\d.]+) on three small tasks, \+([\d.]+) on a fourth",
        "gossipadam:aer inside": r"`aer`, .*? it is \+([\d.]+) to \+([\d.]+) and \+([\d.]+);",
        "gossipadam:aer": r"single workers gossip, \+([\d.]+) to \+([\d.]+) and \+([\d.]+)\.",
    }
    for setting, pattern in ranges.items():
        least, most, held_out = re.search(pattern, said).groups()
        gaps = [gap(task, setting) for task in ("translate", "lm", "vision")]
        assert (f"{min(gaps):.2f}", f"{max(gaps):.2f}") == (least, most)
        assert f"{gap('german', setting):.{len(held_out) - 2}f}" == held_out
        if setting == "gossipadam:exp inside":
            assert max(*gaps, float(held_out)) <= bound


def test_the_picture_of_quality_is_drawn_from_the_same_records():
    script = (ROOT / "benchmarks" / "quality_picture.py").read_text(encoding="utf-8")
    assert "quality-signal-{task}" in script
    assert all(f'"{task}":' in script for task in ("translate", "lm", "vision", "german"))
