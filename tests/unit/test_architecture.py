"""ARCHITECTURE.md names files that exist, and every room of the package."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "gossamer"
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def _exists(name: str, room: str = "") -> bool:
    return any((folder / name).exists() for folder in (ROOT, SOURCE, SOURCE / room))


def test_every_file_that_it_names_exists():
    named = set(re.findall(r"`((?:[\w]+/)*[\w]+\.(?:py|md|svg))`", TEXT)) | set(re.findall(r"\]\(([^)#:]+)", TEXT))
    rows = re.findall(r"^\| `([\w/]+)/` \|.*\| ([^|]*) \|$", TEXT, flags=re.M)
    of_rooms = {(name, room) for room, cell in rows for name in re.findall(r"`([^`]+)`", cell)}
    in_rooms = {name for name, _ in of_rooms}
    assert len(named) > 40
    assert [n for n in sorted(named - in_rooms) if not _exists(n)] == []
    assert [(n, room) for n, room in sorted(of_rooms) if not (SOURCE / room / n).exists()] == []


def test_it_describes_every_room():
    rooms = {p.relative_to(SOURCE).as_posix() for p in SOURCE.rglob("*") if p.is_dir() and (p / "__init__.py").exists()}
    described = set(re.findall(r"^\| `([\w/]+)/` \|", TEXT, flags=re.M))
    parts = {f"{room}/{part}" for room in described for part in re.findall(r"`(\w+)/`", TEXT)}
    inner = {"recipes/data", "recipes/models", "report/plots"}  # parts of one room, without a duty of their own
    assert rooms - described - parts - inner == set()
    assert described - rooms == set()
