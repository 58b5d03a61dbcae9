"""`gossamer advise`: whether gossip is faster on a cluster, with which method, and whether it is as good on a task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.common import Json, N, Nodes, PerNode, command_app, print_json, print_rich, table
from gossamer.errors import InputError

app = command_app()

SHOWN = 12
EXAMPLE = "Examples: gossamer advise cluster.toml --model-mb 260 --json | gossamer advise --run runs/numbers"


@app.command(epilog=EXAMPLE, no_args_is_help=False)
def advise(
    cluster: Annotated[
        str | None, typer.Argument(metavar="CLUSTER", help="A .toml or .json file, or a40, a100, t4.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The --out of train or compare: will gossip be as good on this task?"),
    ] = None,
    nodes: Nodes = None,
    per_node: PerNode = None,
    n: N = None,
    model_mb: Annotated[float | None, typer.Option(metavar="S", help="Parameters in MB (1e6 bytes).")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps to simulate for each method.", show_default="120; 60 beyond 64 workers")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the compute times.")] = 0,
    as_json: Json = False,
) -> None:
    """Rank every topology, algorithm, wire and bucket plan for a cluster, and recommend one, or DDP.

    With --run, predict instead whether gossip will be as good as all-reduce, from the noise scale measured in a run.
    """
    if run is not None:
        given = {"CLUSTER": cluster, "--nodes": nodes, "--per-node": per_node, "--n": n, "--model-mb": model_mb}
        unused = [name for name, value in {**given, "--steps": steps, "--seed": seed or None}.items() if value]
        if unused:
            raise InputError(
                f"--run {run} predicts the quality on a task, and {', '.join(unused)} the speed on a cluster; pass "
                "either --run or a cluster"
            )
        _quality(run, as_json)
        return
    if cluster is None:
        raise InputError(
            "nothing to advise on; pass a cluster (a file, a40, a100 or t4) to predict the speed, or --run DIR to "
            "predict the quality"
        )
    from rich.text import Text  # a method's colons are not emoji

    from gossamer.cli.simulate import cluster_from
    from gossamer.predict.advise import advise as make

    advice = make(cluster_from(cluster, nodes, per_node, n, None, model_mb), steps=steps, seed=seed)
    if as_json:
        print_json(advice.to_dict())
        return
    chosen = advice.recommendation
    rows = table("method", "ms", "saving", "to 1e-3", "memory", "options")
    shown = [r for i, r in enumerate(advice.table) if i < SHOWN or r.ddp]
    for r in shown:
        mixed = "-" if r.seconds_to_1e3 is None else f"{r.seconds_to_1e3:.2g} s"
        options = {"algorithm": r.algorithm} if r.algorithm == "atc" else {}
        said = ", ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in (options | r.options).items())
        rows.add_row(Text(r.method), f"{r.step_time * 1e3:.1f}", f"{r.saving:.1%}", mixed, f"+{r.memory:g}", said)
    changes = table("if there were", "ddp ms", "ms", "saving", "")
    for s in advice.sensitivity:
        cells = (f"{s['ddp_step_time'] * 1e3:.1f}", f"{s['step_time'] * 1e3:.1f}", f"{s['saving']:.1%}")
        changes.add_row(s["if"], *cells, "go" if s["go"] else "stay with DDP")
    print_rich(
        Text(f"{chosen['method']}: saves {chosen['saving']:.0%} of the step time", style="bold"),
        Text(chosen["why"]),
    )
    typer.echo(f"\n    {chosen['line']}\n")  # never wrapped, so that it can be copied
    print_rich(
        f"The best of {len(advice.table)} (to 1e-3: until differences between workers shrink to a thousandth):",
        rows,
        "What would change the answer for the best gossip:",
        changes,
    )


def _quality(folder: Path, as_json: bool) -> None:
    """Predict the quality from the noise scale that the runs in a folder have measured."""
    from gossamer.report.noise import NOT_MEASURED, measured
    from gossamer.report.runs import find_runs, grouped

    found = measured(grouped(find_runs(folder).runs))
    if not found:
        raise InputError(f"{folder}: {NOT_MEASURED}")
    advice = [noise.to_dict() for noise in found if noise.workers > 1]
    if not advice:
        raise InputError(
            f"{folder} was trained by a single worker; gossip takes several: add --virtual 4 or --workers 4"
        )
    if as_json:
        print_json({"folder": str(folder), "advice": advice})
    else:
        print_rich(*(line for each in advice for line in (each["noise"], f"[bold]{each['sentence']}[/]")))
