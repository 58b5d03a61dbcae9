"""The index of errors and warnings, read from the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "gossamer"
KINDS = ("InputError", "GossamerError", "PeerError", "LabUnavailable", "WorkerFailed", "WorkerTimeout")
INTRODUCTION = """# Errors and warnings

An error of Gossamer names the value, the rule and the remedy. This page lists all of them as they stand in the source,
by the part of Gossamer that raises them; ‹…› stands for a value. Words of a message in the search box (press S) find
its entry. Hangs and surprises have a page of their own: [debugging](../howto/debugging.md).

| class | meaning |
|---|---|
| `gossamer.InputError` | a value that you passed is wrong; also a `ValueError` |
| `gossamer.PeerError` | another worker is gone, silent, or sent something else than expected |
| `gossamer.GossamerError` | the base of all errors that Gossamer raises on purpose |
| `gossamer.GossamerWarning` | this works, but is probably not what you meant |
"""


def page() -> str:
    """Return the page of all messages by room."""
    parts = [INTRODUCTION]
    rooms: dict[str, list[tuple[str, str, str]]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        room = path.relative_to(SOURCE).parts[0]
        found = [(kind, text, path.relative_to(SOURCE).as_posix()) for kind, text in _messages(path)]
        rooms.setdefault(room if room != path.name else "gossamer", []).extend(found)
    for room, found in rooms.items():
        if found:
            rows = [f"| {_cell(text)} | {kind} | `{path}` |" for kind, text, path in dict.fromkeys(found)]
            parts.append("\n".join([f"## {room}", "", "| message | kind | raised in |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _messages(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of every error and warning of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        warned = any(isinstance(a, ast.Name) and a.id == "GossamerWarning" for a in node.args[1:])
        if name in KINDS or (name == "warn" and warned):
            text = "".join(_text(node.args[0]))
            if len(text.replace("‹…›", "").split()) >= 3:
                yield ("warning" if name == "warn" else name), " ".join(text.split())


def _text(node: ast.expr) -> Iterator[str]:
    """Yield the pieces of a message, with a sign for every value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            yield from _text(value)
    elif isinstance(node, ast.BinOp):
        yield from _text(node.left)
        yield from _text(node.right)
    else:
        yield "‹…›"


def _cell(text: str) -> str:
    return re.sub(r"[\\|*_\[$]", r"\\\g<0>", text).replace("<", "&lt;")
