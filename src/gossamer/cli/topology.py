"""`gossamer topology`: list the families, inspect one on a layout, draw it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli.common import (
    Json,
    N,
    Nodes,
    Output,
    PerNode,
    command_app,
    layout_from,
    print_json,
    print_rich,
    rank_ranges,
    table,
)
from gossamer.errors import InputError

if TYPE_CHECKING:
    from gossamer.topology import Round, Topology

app = command_app(help="Topologies: which workers average with each other in every round.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="A family as in 'aer' or 'base(k=2)', or a .json file.")]
K = Annotated[int | None, typer.Option("--k", metavar="K", help="Peers per round, for families that take k (base).")]

MATRIX_LIMIT = 64  # workers; with more, JSON leaves the matrices out
LISTED_IN_JSON = 1 << 20  # workers times rounds
LISTED_IN_TABLE = 16  # rounds
LISTED_GROUPS = 16
GREEK = {"χ1": "chi1", "χ2": "chi2", "η": "eta", "α̃": "alpha_tilde"}


@app.command("list", epilog="Example: gossamer topology list --nodes 4 --per-node 4")
def list_(nodes: Nodes = None, per_node: PerNode = None, n: N = None, as_json: Json = False) -> None:
    """List the families; with a layout, also how fast each one averages and what it sends."""
    from gossamer.topology import analyze, build, entries

    if nodes is None and per_node is None and n is None:
        if as_json:
            keys = ("name", "aliases", "options", "summary")
            print_json({"topologies": [{key: getattr(e, key) for key in keys} for e in entries()]})
            return
        rows = table("name", "also", "options", "what it is")
        for e in entries():
            rows.add_row(e.name, ", ".join(e.aliases), ", ".join(e.options), e.summary)
        print_rich(rows)
        return
    layout = layout_from(nodes, per_node, n)
    found = [analyze(build(e.name, layout), model_bytes=1.0).to_dict() for e in entries()]
    if as_json:
        print_json({"topologies": found})
        return
    rows = table("name", "period", "exact", "contraction", "to 1e-3", "inside", "across")
    for f in found:
        figures = ("period", "exact_after", "contraction", "rounds_to_1e-3", "bytes_intra", "bytes_inter")
        rows.add_row(f["name"], *(_number(f[key]) for key in figures))
    print_rich(f"{layout}; inside and across: model sizes a worker sends in a round", rows)


@app.command(epilog="Example: gossamer topology show aer --nodes 4 --per-node 4 --json")
def show(
    name: Name,
    nodes: Nodes = None,
    per_node: PerNode = None,
    n: N = None,
    k: K = None,
    model_mb: Annotated[
        float, typer.Option("--model-mb", metavar="S", help="Model size in MB (1e6 bytes), for the bytes sent.")
    ] = 100.0,
    as_json: Json = False,
) -> None:
    """Show a topology: its rounds, how fast it averages, what it sends, its constants for A2CiD2."""
    from gossamer.topology import analyze

    if not (math.isfinite(model_mb) and model_mb > 0):
        raise InputError(f"--model-mb must be a positive number of megabytes, got {model_mb}; try --model-mb 100")
    topology = _topology(name, nodes, per_node, n, k)
    figures = analyze(topology, model_bytes=model_mb * 1e6).to_dict()
    if as_json:
        print_json(_as_json(topology, figures))
    else:
        _show(topology, figures)


@app.command(epilog="Example: gossamer topology plot aer --nodes 4 --per-node 4 -o aer.svg")
def plot(
    name: Name,
    output: Output,
    nodes: Nodes = None,
    per_node: PerNode = None,
    n: N = None,
    k: K = None,
    as_json: Json = False,
) -> None:
    """Draw a topology to an .svg, .png or .html file, one panel per round."""
    from gossamer.report.plots import draw_topology

    drawn = draw_topology(_topology(name, nodes, per_node, n, k), output)
    if as_json:
        print_json({"file": str(output), "title": drawn})
    else:
        typer.echo(f"{output}: {drawn}")


def _topology(name: str, nodes: str | None, per_node: str | None, n: str | None, k: int | None) -> Topology:
    from gossamer.topology import from_json, resolve

    is_file = name.endswith(".json")
    if k is not None:
        if is_file or "(" in name:
            raise InputError(
                f"--k {k} cannot be combined with {name!r}; write all options in the name, as in 'base(k=2)'"
            )
        name = f"{name}(k={k})"
    if is_file and nodes is None and per_node is None and n is None:
        return from_json(Path(name))
    return resolve(Path(name) if is_file else name, layout_from(nodes, per_node, n))


def _as_json(topology: Topology, figures: dict[str, Any]) -> dict[str, Any]:
    from gossamer.topology.resolve import round_to_dict

    listed = min(topology.period, max(1, LISTED_IN_JSON // topology.n))
    small = topology.n <= MATRIX_LIMIT
    rounds = [round_to_dict(topology.round(k), matrix=small) for k in range(listed)]
    return {**figures, "rounds_omitted": topology.period - listed, "rounds": rounds}


def _show(topology: Topology, figures: dict[str, Any]) -> None:
    from rich.markup import escape

    megabytes = {key: value / 1e6 for key, value in figures.items() if key.startswith("bytes") or key == "model_bytes"}
    rows = table("", "")
    rows.show_header = False
    for label, text in (
        ("period", _rounds(figures["period"])),
        ("exact average", _exactness(figures)),
        ("contraction", f"{_number(figures['contraction'])} a round"),
        ("to 1e-3 of the distance", _rounds(figures["rounds_to_1e-3"])),
        (
            f"sent for {_number(megabytes['model_bytes'])} MB",
            "by a worker in a round, hierarchical (direct)",
        ),
        ("  inside a node", _sent(megabytes, "intra")),
        ("  across nodes", _sent(megabytes, "inter")),
        ("  busiest node, a round", _sent(megabytes, "busiest_link")),
        ("A2CiD2", "  ".join(f"{sign} {_number(figures[key])}" for sign, key in GREEK.items())),
    ):
        rows.add_row(label, text)
    if figures["estimated"]:
        rows.add_row("estimated", ", ".join(figures["estimated"]))
    schedule = table("round", "groups that average")
    shown = min(topology.period, LISTED_IN_TABLE)
    for k in range(shown):
        schedule.add_row(str(k), _groups(topology.round(k)))
    rest = [f"... and {topology.period - shown} more rounds (--json lists them)"] if shown < topology.period else []
    print_rich(f"[bold]{escape(topology.name)}[/] on {topology.layout}", rows, schedule, *rest)


def _sent(megabytes: dict[str, float], where: str) -> str:
    return f"{_number(megabytes[f'bytes_{where}'])} MB ({_number(megabytes[f'bytes_{where}_direct'])})"


def _number(value: float | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"


def _rounds(count: int | None) -> str:
    return "-" if count is None else f"{count} round{'s' * (count != 1)}"


def _exactness(figures: dict[str, Any]) -> str:
    after, offsets = figures["exact_after"], figures["exact_after_by_offset"]
    if after is None:
        return "never, it is approached"
    worst = max(offsets or [after])
    return f"after {_rounds(after)}" + (f" ({worst} from the worst offset)" if worst != after else "")


def _groups(made: Round) -> str:
    """Return the groups as ranges of ranks, and the number of workers that average with no other."""
    groups = [g for g in made.groups if len(g) > 1]
    alone = len(made.groups) - len(groups)
    text = "  ".join(rank_ranges(g) for g in groups[:LISTED_GROUPS])
    if len(groups) > LISTED_GROUPS:
        text += f"  ... {len(groups) - LISTED_GROUPS} more"
    if made.weights is not None:
        text += f"  ({len(made.weights)} weighted links)"
    if alone:
        text += f"  ({alone} sit{'s' * (alone == 1)} out)" if groups else "none"
    return text
