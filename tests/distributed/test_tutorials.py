"""The tutorials are carried out as printed: their files are written, their commands run, their output is compared.

Numbers may differ from those that a page shows (times, and losses on another machine); the text around them may not.
"""

import contextlib
import io
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch

from gossamer.cli import main
from gossamer.topology import registry

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.S | re.M)
PICTURE = re.compile(r"!\[[^\]]+\]\(([^)]+)\)")


def masked(text):
    """The text without its numbers and spaces."""
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.,e%+-]*", "#", text)).strip()


def run_script(rank, script, arguments, folder):
    """What the script prints, in `folder`."""
    back, given, printed = os.getcwd(), sys.argv, io.StringIO()
    os.chdir(folder)
    sys.argv = [script, *arguments]
    torch.set_num_threads(1)
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(script, run_name="__main__")
    finally:
        os.chdir(back)
        sys.argv = given
    return printed.getvalue()


def carry_out(command, folder, pools):
    """Run one command of a page and return what it prints."""
    program, *arguments = shlex.split(command)
    if program == "torchrun":
        assert arguments[0] == "--nproc-per-node"
        return pools(int(arguments[1])).run(run_script, arguments[2], arguments[3:], str(folder))[0]
    if program == "python":
        return run_script(0, arguments[0], arguments[1:], str(folder))
    assert program == "gossamer", command
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(arguments) == 0, command
    return printed.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tutorial_works_as_printed(page, pools, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    monkeypatch.setattr(registry, "_NAMES", dict(registry._NAMES))
    text = page.read_text(encoding="utf-8")
    commands = 0
    for language, title, block in FENCE.findall(text):
        if title:
            (tmp_path / title).write_text(block)
        for command, shown in re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", block, re.M):
            if language == "console" and "examples/" not in command:  # tests/distributed/test_engine_examples.py
                printed = carry_out(command.replace("\\\n", " "), tmp_path, pools)
                assert masked(printed).startswith(masked(shown)), f"{command} printed\n{printed}"
                commands += 1
    pictures = [ROOT / "docs" / "tutorials" / link for link in PICTURE.findall(text)]
    assert pictures, "a tutorial ends in a picture"
    assert all(picture.exists() for picture in pictures)
    made = [picture.name for picture in pictures if picture.parent.name == "tutorials"]
    assert [name for name in made if not (tmp_path / name).exists()] == []
    assert commands or page.stem == "failures"
    if os.environ.get("GOSSAMER_WRITE_PICTURES"):  # to draw the pictures of the pages anew
        for name in made:
            (ROOT / "docs" / "images" / "tutorials" / name).write_bytes((tmp_path / name).read_bytes())
