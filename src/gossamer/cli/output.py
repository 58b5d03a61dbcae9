"""Printing: strict JSON for machines, plain tables for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from gossamer.recipes.metrics import finite

if TYPE_CHECKING:
    from rich.table import Table


def print_json(value: Mapping[str, Any]) -> None:
    """Print strict JSON, one line per key and per object of a list; numbers that are not finite become null."""
    typer.echo("{\n" + ",\n".join(f"  {json.dumps(k)}: {_compact(v)}" for k, v in finite(value).items()) + "\n}")


def _compact(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"    {json.dumps(v, allow_nan=False)}" for v in value) + "\n  ]"
    return json.dumps(value, allow_nan=False)


def table(*columns: str) -> Table:
    """Return an empty table for `print_rich`. Cells are markup, so escape brackets."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for k, column in enumerate(columns):
        made.add_column(column, no_wrap=k == 0)  # names are not wrapped
    return made


def print_rich(*what: Any) -> None:
    """Print tables and lines of text to standard output."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False)  # a method such as ddp:ring:bf16 is not an emoji
    for each in what:
        console.print(each, soft_wrap=isinstance(each, str))
