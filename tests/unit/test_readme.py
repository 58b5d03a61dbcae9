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


def test_the_sentence_about_quality_is_that_of_the_records():
    bound = float(re.search(r"\*\*Within ([\d.]+) of all-reduce's loss\*\*", README)[1])
    for task in ("translate", "lm", "vision"):
        table = (RECORDS / f"quality-paired-{task}" / "README.md").read_text(encoding="utf-8")
        gap = float(re.search(r"^\| gossipadam:exp inside .*\| \+?([-\d.]+) \[", table, re.M)[1])
        assert gap <= bound, task
