"""What commands share: options such as the layout, and printing (strict JSON for machines, tables for people)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.errors import InputError
from gossamer.recipes.metrics import finite

if TYPE_CHECKING:
    from rich.table import Table

    from gossamer.topology import Layout

WIDEST = 400  # columns of a table that is not on a terminal
MAX_WORKERS = 65536  # a mistyped number must not exhaust the memory

Nodes = Annotated[str | None, typer.Option("--nodes", metavar="M", help="Number of nodes (hosts).")]
PerNode = Annotated[
    str | None,
    typer.Option("--per-node", metavar="L", help="Workers on each node: 4, or 4,4,2 for unequal nodes."),
]
N = Annotated[str | None, typer.Option("--n", metavar="N", help="Number of workers, all on one node.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")]


def command_app(**settings: Any) -> typer.Typer:
    """Return the `app` of a command file."""
    return typer.Typer(add_completion=False, no_args_is_help=True, **settings)


def layout_from(nodes: int | str | None, per_node: str | None, n: int | str | None) -> Layout:
    """Return the layout that `--nodes`, `--per-node` and `--n` describe."""
    from gossamer.topology import Layout

    if n is not None:
        if nodes is not None or per_node is not None:
            other = "--nodes" if nodes is not None else "--per-node"
            raise InputError(
                f"--n {n} puts all workers on one node and cannot be combined with {other}; "
                "write either --n, or --nodes with --per-node"
            )
        return Layout.flat(_count("--n", n))
    count = None if nodes is None else _count("--nodes", nodes)
    if per_node is None:
        if nodes is not None:
            raise InputError(f"--nodes {nodes} needs --per-node; add for example --per-node 4")
        raise InputError("the number of workers is missing; write --nodes 4 --per-node 4, --per-node 4,4,2 or --n 16")
    counts = [_per_node(per_node, piece) for piece in per_node.split(",")]
    if len(counts) == 1:
        if count is None:
            raise InputError(f"--per-node {per_node} needs --nodes; add for example --nodes 4")
        counts *= count
    elif count not in (None, len(counts)):
        raise InputError(f"--per-node {per_node} lists {len(counts)} nodes but --nodes says {nodes}; leave --nodes out")
    _count("--nodes times --per-node", sum(counts))
    return Layout.of(counts)


def _count(option: str, value: int | str) -> int:
    count = _integer(value)
    if count is None or not 1 <= count <= MAX_WORKERS:
        shown = value if count is not None else repr(value)
        raise InputError(f"{option} must be between 1 and {MAX_WORKERS}, got {shown}; pass a positive whole number")
    return count


def _integer(value: int | str) -> int | None:
    try:
        return int(value)
    except ValueError:
        return None


def _per_node(written: str, piece: str) -> int:
    count = _integer(piece)
    if count is None or count < 1:
        raise InputError(
            f"--per-node must be a positive number or a comma list of them, got {written!r}; "
            "write for example --per-node 4 or --per-node 4,4,2"
        )
    return count


def refuse_launcher(command: str) -> None:
    """Raise `InputError` if a launcher such as torchrun has started this command, which starts its own workers."""
    from gossamer.comm.launcher import find_launcher, launched

    found = find_launcher()
    if found is not None and launched():
        raise InputError(
            f"gossamer {command} starts its own workers, but {found.rank} is set, so a launcher has started this "
            "process; run it once, without a launcher, or unset the variable"
        )


def note_paced_links(link: str | None) -> None:
    """Say on standard error that links are emulated by sleeping, where network namespaces cannot be used."""
    from gossamer.lab import why_unavailable

    reason = why_unavailable() if link is not None else None
    if reason is not None:
        print(f"gossamer: the links are paced by sleeping instead of shaped by the kernel: {reason}", file=sys.stderr)


# -- printing ---------------------------------------------------------------------------------------------------------


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
        made.add_column(column, no_wrap=k == 0, overflow="fold")  # names are not wrapped, and nothing is cut off
    return made


def print_rich(*what: Any) -> None:
    """Print tables and lines of text to standard output; a table in a file or a pipe is as wide as it needs to be."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    console = Console(highlight=False, emoji=False)  # a method such as ddp:ring:bf16 is not an emoji
    free = not console.is_terminal and "COLUMNS" not in os.environ
    for each in what:
        if free and isinstance(each, Table):
            wide = Console(highlight=False, emoji=False, width=WIDEST)
            wide.width = max(console.width, Measurement.get(wide, wide.options, each).maximum)
            wide.print(each)
        else:
            console.print(each, soft_wrap=isinstance(each, str))


def count_of(number: int, noun: str) -> str:
    """Return "1 step", "2 steps"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def rank_ranges(group: Sequence[int]) -> str:
    """Return the ranks, with three or more consecutive ones as a range: `0-3+8-11`."""
    runs: list[list[int]] = []
    for worker in group:
        if runs and worker == runs[-1][1] + 1:
            runs[-1][1] = worker
        else:
            runs.append([worker, worker])
    pieces = [str(a) if a == b else f"{a}+{b}" if b == a + 1 else f"{a}-{b}" for a, b in runs]
    return "+".join(pieces[:8]) + ("+..." if len(pieces) > 8 else "")
