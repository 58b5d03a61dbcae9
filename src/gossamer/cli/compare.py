"""`gossamer compare`: train a task by several methods with the same iteration budget; quality and time in one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli.options import command_app
from gossamer.cli.output import finite, print_json, print_rich
from gossamer.cli.run_options import EXTRA, RunFlags, with_run_flags
from gossamer.errors import InputError

if TYPE_CHECKING:
    from gossamer.recipes.config import RunConfig
    from gossamer.runtime.methods import Method

app = command_app()

EXAMPLE = (
    "Examples: gossamer compare translate --virtual 8 --methods ddp,dadam:aer,accumadam:aer --steps 200 --seeds 2 "
    "--out runs/numbers | gossamer compare vision --workers 4 --link 20mbit --methods ddp,accumadam:aer"
)


@app.command(epilog=EXAMPLE, context_settings=EXTRA)
@with_run_flags
def compare(
    flags: RunFlags,
    *,
    methods: Annotated[
        str, typer.Option(metavar="LIST", help="NAME[:TOPOLOGY[:WIRE]], separated by commas.")
    ] = "ddp,accumadam:aer",
    seeds: Annotated[int, typer.Option(metavar="S", help="Runs of each method.")] = 1,
    lr: Annotated[
        str | None, typer.Option(metavar="LR", help="Peak learning rate, or a method each: ddp=1e-3,dadam:aer=2e-3.")
    ] = None,
    lr_sweep: Annotated[
        str | None, typer.Option(metavar="LIST", help="Try these rates with every method, keep each one's best.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    jobs: Annotated[int | None, typer.Option(metavar="J", help="Virtual runs side by side (default: cores).")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as well.")] = None,
) -> None:
    """Train by every method and seed, with equal steps, and compare quality, time, bytes and consensus."""
    from gossamer.cli.comparing import Trainer, best, slug, sweep
    from gossamer.cli.training import default_folder
    from gossamer.runtime.methods import parse_list

    chosen = parse_list(methods)
    if not chosen or len({str(m) for m in chosen}) < len(chosen):
        raise InputError(f"--methods {methods!r} must name one or more methods, each once; e.g. ddp,accumadam:aer")
    if seeds < 1:
        raise InputError(f"--seeds must be at least 1, got {seeds}")
    rates = _rates(lr, chosen)
    tried = None if lr_sweep is None else _numbers(lr_sweep)

    def configured(method: Method, number: int, rate: float | None) -> RunConfig:
        inside = {"exact_inside": False} if method.algorithm == "ddp" else {}
        return flags.configured(method=str(method), seed=number, lr=rate, **inside)

    first = configured(chosen[0], seed, None)
    folder = flags.out or default_folder(f"compare-{first.task}")
    if (folder / "compare.json").exists():
        raise InputError(f"{folder} already holds a comparison; choose another --out, or remove it")
    swept: dict[str, dict[str, float | None]] = {}
    with Trainer(first, flags.cluster, flags.link, jobs, flags.as_json) as trainer:
        if tried is not None:
            swept = sweep(trainer, chosen, seed, tried, configured, folder / "sweep")
            rates = {name: best(found, name) for name, found in swept.items()}
        wanted = [
            (configured(m, seed + s, rates.get(str(m))), folder / slug(str(m)) / f"seed-{seed + s}")
            for m in chosen
            for s in range(seeds)
        ]
        failed = trainer.run(wanted)
    _finish(folder, swept, failed, html, flags.as_json)


def _rates(text: str | None, methods: Any) -> dict[str, float]:
    """Learning rates by method: one number for all, or METHOD=RATE pairs."""
    if text is None:
        return {}
    if "=" not in text:
        return {str(m): rate for m in methods for rate in _numbers(text)[:1]}
    from gossamer.runtime.methods import parse

    pairs = [piece.partition("=") for piece in text.split(",")]
    return {str(parse(name)): _numbers(rate)[0] for name, _, rate in pairs}


def _numbers(text: str) -> list[float]:
    try:
        values = [float(piece) for piece in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) <= 0:
        raise InputError(f"learning rates must be positive numbers separated by commas, got {text!r}; e.g. 1e-3,2e-3")
    return values


def _finish(
    folder: Path, swept: dict[str, dict[str, float | None]], failed: dict[str, str], html: Path | None, as_json: bool
) -> None:
    from gossamer.cli.predicted import predict_measured
    from gossamer.cli.report import print_table
    from gossamer.report.record import command_line
    from gossamer.report.runs import grouped, load_runs, summary
    from gossamer.report.verdict import verdict

    groups = grouped([r for r in load_runs(folder) if str(r.folder) not in failed])
    predict_measured(groups)
    rows, sentence = summary(groups), verdict(groups)
    content = {
        "command": command_line(),
        "verdict": sentence,
        "methods": rows,
        "lr_sweep": swept,
        "failed": failed,
        "folder": str(folder),
    }
    (folder / "compare.json").write_text(json.dumps(finite(content), indent=1) + "\n")
    if html is not None:
        from gossamer.report.page import write_html

        write_html(folder, html)
    if as_json:
        print_json(content)
        return
    print_table(rows)
    for name, tried in swept.items():
        print_rich(
            f"sweep of {name}: " + ", ".join(f"{r} {'diverged' if v is None else f'{v:.4g}'}" for r, v in tried.items())
        )
    for where, why in failed.items():
        print_rich(f"{where}: {why}")
    print_rich(
        f"[bold]{sentence}[/]", f"report: {html}" if html else f"report: gossamer report {folder} --html report.html"
    )
