"""What a release needs: metadata that agrees, extras that exist, files that people look for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

import gossamer

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_versions_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert PROJECT["version"] == gossamer.__version__ == citation["version"]
    assert f"## [{gossamer.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_extras_that_texts_name_exist() -> None:
    texts = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), ROOT / "Makefile"]
    named = {
        extra
        for path in texts
        for found in re.findall(r"pip install[^\n]*\.\[([\w,]+)\]", path.read_text(encoding="utf-8"))
        for extra in found.split(",")
    }
    assert {"recipes", "plot"} <= named
    assert named <= set(PROJECT["optional-dependencies"])


def test_the_install_page_lists_every_extra() -> None:
    page = (ROOT / "docs" / "start" / "install.md").read_text(encoding="utf-8")
    assert {name for name in PROJECT["optional-dependencies"] if f"`{name}`" not in page and name != "dev"} == set()


def test_people_find_what_they_look_for() -> None:
    for name in ("LICENSE", "SECURITY.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "src/gossamer/py.typed"):
        assert (ROOT / name).exists(), name
    assert "license" in PROJECT
    papers = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["references"]
    assert all(paper["authors"] and paper["year"] for paper in papers)


def test_issue_forms_have_what_a_forge_needs() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.name != "config.yml":
            assert {"name", "description", "body"} <= set(form), path.name
            assert all(part["type"] in ("textarea", "input", "dropdown") for part in form["body"])
