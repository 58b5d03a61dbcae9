"""The program itself: version, help, exit codes, errors in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest
import typer

import gossamer
import gossamer.cli
from gossamer.cli import COMMANDS, main
from gossamer.cli.program import LazyGroup, app
from gossamer.errors import GossamerError, InputError


def _paths(command: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command and sub-command of the program."""
    yield path
    if isinstance(command, LazyGroup):
        for name in COMMANDS:
            yield from _paths(command.get_command(None, name), (*path, name))
    else:
        for name, sub in getattr(command, "commands", {}).items():
            yield from _paths(sub, (*path, name))


PATHS = list(_paths(typer.main.get_command(app)))


def test_all_commands_are_found() -> None:
    assert {p[0] for p in PATHS if p} == set(COMMANDS)
    assert ("topology", "show") in PATHS


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_has_an_example(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*path, "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Usage: " + " ".join(("gossamer", *path)) in out
    if not path or all(p[: len(path)] != path for p in PATHS if p != path):  # a group's examples are its commands'
        assert "Example: gossamer" in out or "Examples: gossamer" in out
    assert not path or "completion" not in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gossamer {gossamer.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    ["nonsense", "topology nonsense", "topology show", "doctor --nonsense", "topology show base --k x"],
)
def test_usage_errors_are_one_sentence(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gossamer: error: ")
    assert captured.err.count("\n") == 1
    assert "--help'" in captured.err


@pytest.mark.parametrize("arguments", [[], ["topology"]])
def test_no_command_shows_the_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert "Usage: gossamer" in captured.out + captured.err
    assert "error" not in captured.err


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A command added as a contributor would: a module with an `app`, a line in the table."""
    module = types.ModuleType("gossamer.cli.fail")
    module.app = gossamer.cli.common.command_app()  # type: ignore[attr-defined]

    @module.app.command(epilog="Example: gossamer fail input")
    def fail(how: str) -> None:
        raise {"input": InputError("the value is\nbad"), "ours": GossamerError("no"), "bug": ZeroDivisionError()}[how]

    monkeypatch.setitem(sys.modules, "gossamer.cli.fail", module)
    monkeypatch.setattr(gossamer.cli, "COMMANDS", (*COMMANDS, "fail"))
    return module


def test_our_errors_are_one_sentence_without_traceback(
    added: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fail", "input"]) == 2
    assert capsys.readouterr() == ("", "gossamer: error: the value is bad\n")
    assert main(["fail", "ours"]) == 2
    assert capsys.readouterr() == ("", "gossamer: error: no\n")


def test_a_bug_is_not_hidden(added: types.ModuleType) -> None:
    with pytest.raises(ZeroDivisionError):
        main(["fail", "bug"])


def test_python_dash_m() -> None:
    command = [sys.executable, "-m", "gossamer", "topology", "show", "ring", "--n", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gossamer: error: --n must be between 1 and")


def test_a_closed_pipe_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "gossamer", "topology", "list", "--json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(write)
    assert done.returncode == 1
    assert done.stderr == ""
