"""The documentation site: it builds without a warning, needs no network, and its reference is what the code says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gossamer
from browser import driven, needs_playwright
from gossamer.cli import COMMANDS

pytest.importorskip("mkdocs", reason="pip install '.[docs]'")
ROOT = Path(__file__).parents[2]
REMOTE = re.compile(r"""(?:src|href|srcset)=["'](?:https?:)?//[^"']+|url\(["']?(?:https?:)?//""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def _text(page: Path) -> str:
    return re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for path in (*site.rglob("*.html"), *site.rglob("*.css")):
        loads = [found for found in REMOTE.findall(path.read_text(encoding="utf-8")) if "href" not in found]
        assert loads == [], path
        assert not re.search(r"<link[^>]+href=[\"']https?://", path.read_text(encoding="utf-8")), path


def test_every_table_is_a_table(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = re.sub(r"<(pre|code)[^>]*>.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.S)
        assert not re.search(r"\|\s*:?---", text), page


def test_every_picture_is_there(site: Path) -> None:
    for page in site.rglob("*.html"):
        for source in re.findall(r'<img[^>]+src="([^"]+)"', page.read_text(encoding="utf-8")):
            assert source.startswith("data:") or (page.parent / source).exists(), f"{page}: {source}"


def test_every_record_has_its_page_with_its_own_numbers(site: Path) -> None:
    for record in filter(Path.is_dir, (ROOT / "benchmarks" / "records").iterdir()):
        if {path.name for path in record.iterdir()} == {"runs.jsonl"}:  # of a study that is not finished
            assert not (site / "evidence" / f"{record.name}.html").exists()
        else:
            page = _text(site / "evidence" / f"{record.name}.html")
            readme = record / "README.md"
            table = re.findall(r"^\|(.+)\|$", readme.read_text(encoding="utf-8"), re.M) if readme.exists() else []
            numbers = {number for row in table for number in re.findall(r"\d+\.\d+", row)}
            assert {number for number in numbers if number not in page} == set(), record.name


def test_every_command_and_public_name_is_in_the_reference(site: Path) -> None:
    commands = _text(site / "reference" / "commands.html")
    assert [name for name in COMMANDS if f"gossamer {name}" not in commands] == []
    assert "--soft-deadline" in commands
    api = _text(site / "reference" / "api.html")
    public = [name for name in gossamer.__all__ if not name.startswith("_")]
    assert [name for name in public if not re.search(rf"\b{name}\b", api)] == []


def test_the_index_of_errors_has_the_sentences_of_the_source(site: Path) -> None:
    errors = _text(site / "reference" / "errors.html")
    assert "holds no complete checkpoint" in errors
    assert "the consensus distance is still 0 after" in errors
    assert errors.count("InputError") > 300


@needs_playwright
def test_the_site_works_without_a_network_when_it_is_opened_as_files(site: Path) -> None:
    with driven() as page:
        page.goto((site / "index.html").as_uri())
        page.click(".md-search__input")
        page.keyboard.type("one-peer-exponential")
        page.wait_for_selector('.md-search-result__link[href*="topologies.html"]')

        page.goto((site / "understand" / "step.html").as_uri())
        page.wait_for_selector("mjx-container")
        page.wait_for_selector("div.mermaid")  # takes the place of the diagram's source
        assert "flowchart TB" not in page.inner_text("article")
    assert "mermaid.tiny.js" not in (site / "index.html").read_text(encoding="utf-8"), "loaded where it is needed"


@needs_playwright
@pytest.mark.parametrize("dark", [False, True])
def test_no_page_is_wider_than_a_phone(site: Path, dark: bool) -> None:
    names = ("index", "tutorials/choose", "reference/commands", "evidence/bench-comm-bound", "engine", "topologies")
    with driven(width=390, dark=dark) as page:
        for name in names:
            page.goto((site / f"{name}.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
