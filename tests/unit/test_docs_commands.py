"""Every `gossamer` command that a page shows is one that the program accepts; listed names are those of the code."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from gossamer.cli import COMMANDS, main, program

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "launch" / "README.md"]
LAUNCHED = re.compile(r"^(?:torchrun .*?-m |python -m |sbatch \S+ |srun )(?=gossamer )")


def _commands(page: Path) -> list[str]:
    """Return the commands in the fenced and indented blocks of a page, without comments."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    fenced = re.findall(r"^ *```(?!python|json|toml|yaml|diff|mermaid)[^\n]*\n(.*?)^ *```", text, re.S | re.M)
    lines = [line.strip() for block in fenced for line in block.splitlines()]
    lines += [
        line.strip() for line in re.sub(r"^```.*?^```", "", text, flags=re.S | re.M).splitlines() if line[:4] == "    "
    ]
    found = [LAUNCHED.sub("", line.removeprefix("$ ")) for line in lines]
    commands = [
        line for line in found if re.match(rf"gossamer (--|{'|'.join(COMMANDS)})\b", line) or line == "gossamer"
    ]
    return [re.sub(r"\s+#.*|\s*[|&;].*", "", line) for line in commands]


SHOWN = sorted({(page.relative_to(ROOT).as_posix(), command) for page in PAGES for command in _commands(page)})


def test_there_are_commands_to_check() -> None:
    assert len(SHOWN) > 40


@pytest.mark.parametrize(("page", "command"), SHOWN, ids=[f"{p}: {c[:60]}" for p, c in SHOWN])
def test_the_command_is_accepted(page: str, command: str) -> None:
    words = shlex.split(command)[1:]
    if words in (["--version"], ["--install-completion"]):
        return
    group = typer.main.get_command(program.app)
    context = group.context_class(group, info_name="gossamer")
    found = group
    while hasattr(found, "get_command"):
        found = found.get_command(context, words.pop(0))
        assert found is not None, command
    found.make_context(found.name, words)  # raises if an option does not exist or a value has the wrong type


def test_every_variable_is_documented() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    page = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    assert {name for name in re.findall(r"GOSSAMER_[A-Z_]+[A-Z]", source) if f"`{name}`" not in page} == set()


@pytest.mark.parametrize(
    "command",
    [
        "topology list --nodes 2 --per-node 2",
        "topology show aer --nodes 2 --per-node 2",
        "simulate --cluster a40 --methods ddp,dadam:aer",
        "doctor",
    ],
)
def test_the_documented_keys_are_printed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "reference" / "formats.md").read_text(encoding="utf-8")
    name = " ".join(word for word in command.split()[:2] if word in ("topology", "list", "show", "simulate", "doctor"))
    row = re.search(rf"^\| `{name}` \| (.*) \|$", page, re.M)
    assert row is not None
    assert main([*shlex.split(command), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == re.findall(r"`([^`]+)`", row[1])
