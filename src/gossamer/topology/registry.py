"""Topologies by name: register a family with a decorator, build a topology from its name.

A registered builder is a function `(layout, **options) -> Topology`. A registered family appears on the command line
and is tested by the property suite (tests/unit/test_topology_properties.py).
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gossamer.errors import InputError
from gossamer.topology.core import Layout, Topology

Builder = Callable[..., Topology]


@dataclass(frozen=True)
class Entry:
    """A registered family: its name, its aliases, a summary of one line, and its builder."""

    name: str
    aliases: tuple[str, ...]
    summary: str
    builder: Builder

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.builder).parameters)[1:]


_ENTRIES: dict[str, Entry] = {}
_NAMES: dict[str, str] = {}  # every name and alias -> canonical name


def register(name: str, *aliases: str) -> Callable[[Builder], Builder]:
    """Register a topology builder under `name` and `aliases`; the first line of its docstring is the summary."""

    def decorate(builder: Builder) -> Builder:
        for known in (name, *aliases):
            if known in _NAMES:
                raise InputError(f"topology name {known!r} is taken by {_NAMES[known]!r}; choose another")
        summary = (inspect.getdoc(builder) or "").partition("\n")[0]
        _ENTRIES[name] = Entry(name, aliases, summary, builder)
        _NAMES.update(dict.fromkeys((name, *aliases), name))
        return builder

    return decorate


def entries() -> tuple[Entry, ...]:
    """Return all registered families, in the order of registration."""
    return tuple(_ENTRIES.values())


def entry(name: str) -> Entry:
    """Return the family of that name or alias; the error for an unknown name suggests a similar one."""
    if name not in _NAMES:
        near = difflib.get_close_matches(name, _NAMES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(f"unknown topology {name!r}; {hint}known are {', '.join(_ENTRIES)}, or a .json file")
    return _ENTRIES[_NAMES[name]]


def build(name: str, layout: Layout, **options: Any) -> Topology:
    """Build a topology by name. The name may contain options: `base(k=2)`, `random(seed=3)`."""
    family, written = parse(name)
    found = entry(family)
    options = {**written, **options}
    unknown = sorted(set(options) - set(found.options))
    if unknown:
        takes = f"it takes {', '.join(found.options)}" if found.options else "it takes none"
        raise InputError(f"topology {found.name!r} has no option {unknown[0]!r}; {takes}")
    return found.builder(layout, **options)


def parse(name: str) -> tuple[str, dict[str, Any]]:
    """Split `base(k=2)` into `("base", {"k": 2})`."""
    family, bracket, rest = name.strip().partition("(")
    if not bracket:
        return family, {}
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError(name)
        return family.rstrip(), {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError):
        raise InputError(f"cannot read topology {name!r}; write options as in 'base(k=2)'") from None
