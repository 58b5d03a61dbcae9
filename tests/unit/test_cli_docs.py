"""Documents are true: commands print what the pages show, and the example of a topology works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gossamer.cli import main
from gossamer.topology import Layout, registry

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```console\n\$ gossamer (.*?)\n(.*?)```", re.S)
SHOWN = [
    (str(path.relative_to(ROOT)), command, output)
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for command, output in BLOCK.findall(path.read_text(encoding="utf-8"))
    if command.startswith("topology") and "plot" not in command and ".json" not in command
]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def test_there_is_output_to_check() -> None:
    assert {"docs/start/first-run.md", "docs/topologies.md"} <= {where for where, _, _ in SHOWN}


@pytest.mark.parametrize(("where", "command", "output"), SHOWN, ids=[f"{w}: {c}" for w, c, _ in SHOWN])
def test_the_documented_output_is_printed(
    where: str, command: str, output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(shlex.split(command)) == 0
    assert _lines(capsys.readouterr().out) == _lines(output)


def test_the_topology_of_the_contributing_page_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    monkeypatch.setattr(registry, "_NAMES", dict(registry._NAMES))
    block = re.search(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.S)
    assert block is not None
    exec(block[1], {})
    topology = registry.build("node-pairs", Layout.of([2, 1, 2]))
    assert [round.groups for round in topology.rounds] == [((0, 1, 2), (3, 4)), ((0, 1), (2, 3, 4))]
