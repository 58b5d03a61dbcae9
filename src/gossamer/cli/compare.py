"""`gossamer compare`: train a task by several methods with the same iteration budget; quality and time in one table."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli.common import command_app, note_paced_links, print_json, print_rich, refuse_launcher
from gossamer.cli.run_options import OUTPUT, WORKERS, RunFlags, with_run_flags
from gossamer.errors import GossamerError, InputError

if TYPE_CHECKING:
    from gossamer.recipes.config import RunConfig

app = command_app()

EXAMPLE = (
    "Examples: gossamer compare translate --virtual 8 --methods ddp,dadam:aer,gossipadam:aer --steps 200 --seeds 2 "
    "--out runs/numbers | gossamer compare vision --workers 4 --link 20mbit --methods ddp,gossipadam:aer"
)


@app.command(epilog=EXAMPLE)
@with_run_flags(without=("method",))
def compare(
    flags: RunFlags,
    *,
    methods: Annotated[
        str,
        typer.Option(metavar="LIST", help="NAME[:TOPOLOGY[:WIRE]], separated by commas.", rich_help_panel="Method"),
    ] = "ddp,gossipadam:aer",
    seeds: Annotated[
        int, typer.Option(metavar="S", help="Number of runs of each method.", rich_help_panel="Method")
    ] = 1,
    seed: Annotated[int, typer.Option(metavar="N", help="The first seed.", rich_help_panel="Method")] = 0,
    lr: Annotated[
        str | None,
        typer.Option(
            metavar="LR",
            help="Peak learning rate, or one per method: ddp=1e-3,dadam:aer=2e-3.",
            rich_help_panel="Optimization",
        ),
    ] = None,
    lr_sweep: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Try these rates with every method and keep the best rate of each.",
            rich_help_panel="Optimization",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            metavar="J", help="Virtual runs side by side. Default: the number of cores.", rich_help_panel=WORKERS
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as well.", rich_help_panel=OUTPUT)
    ] = None,
    more: Annotated[
        bool,
        typer.Option(
            "--continue",
            help="Keep the finished runs of --out and train what is missing: the rest of an interrupted comparison, "
            "further methods or seeds.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
) -> None:
    """Train by every method and seed, with equal steps, and compare quality, time, bytes and consensus."""
    from gossamer.jobs.compare import Sweep, Trainer, best, reuse_sweep, slug, summarize, sweep
    from gossamer.jobs.prepare import default_folder
    from gossamer.jobs.signals import Stopped
    from gossamer.predict.methods import parse, parse_list

    refuse_launcher("compare")
    chosen = parse_list(methods)
    if not chosen or len({str(m) for m in chosen}) < len(chosen):
        raise InputError(f"--methods {methods!r} must name one or more methods, each once; e.g. ddp,gossipadam:aer")
    if html is not None:
        from gossamer.report.plots import check_matplotlib

        check_matplotlib()  # before the training, not after
    if seeds < 1:
        raise InputError(f"--seeds must be at least 1, got {seeds}")
    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs must be at least 1, got {jobs}; leave it out to use all cores")
    if lr is not None and lr_sweep is not None:
        raise InputError("--lr gives the rates and --lr-sweep finds them; pass one of them")
    names = [str(m) for m in chosen]
    rates = _rates(lr, names)
    tried = None if lr_sweep is None else _numbers(lr_sweep)

    def configured(method: str, rate: float | None, number: int = seed) -> RunConfig:
        inside = {"exact_inside": False} if parse(method).exact else {}
        return flags.configured(defaults={"save_final": False}, method=method, seed=number, lr=rate, **inside)

    first, *_ = [configured(m, None) for m in names]  # all of them: none is refused after others have trained
    if first.on_failure == "continue":
        raise InputError(
            "--on-failure continue is for gossamer train: compare uses one pool of workers for all runs; leave it out"
        )
    folder = flags.out or default_folder(f"compare-{first.task}")
    if more and flags.out is None:
        raise InputError("--continue needs the folder of the comparison; pass it as --out DIR")
    if not more and (folder / "compare.json").exists():
        raise InputError(f"{folder} already holds a comparison; pass --continue to add to it, or choose another --out")
    if not more and any(folder.rglob("config.json")):
        raise InputError(
            f"{folder} already holds runs, which would be compared too; pass --continue if they belong to this "
            "comparison, or choose another --out"
        )
    note_paced_links(flags.link)
    swept: Sweep = {}
    try:
        with Trainer(first, flags.cluster, flags.link, jobs, flags.as_json) as trainer:
            if tried is not None:
                swept = sweep(trainer, names, tried, configured, folder / "sweep")
                higher = trainer.higher_is_better
                rates = {name: best(found, name, higher_is_better=higher) for name, found in swept.items()}
            wanted = [
                (configured(m, rates.get(m), seed + s), folder / slug(m) / f"seed-{seed + s}")
                for m in names
                for s in range(seeds)
            ]
            reuse_sweep(wanted, folder / "sweep")
            failed = trainer.run(wanted)
    except Stopped as stopped:
        typer.echo(str(stopped), err=True)
        raise typer.Exit(130) from None
    if len(failed) == len(wanted):
        diverged = ", ".join(f"{config.method} seed {config.seed}" for config, _ in wanted)
        raise GossamerError(f"every run diverged ({diverged}); lower --lr, or lengthen the warm-up (--warmup)")
    content = summarize(folder, swept, failed, html)
    if flags.as_json:
        print_json(content)
    else:
        _print(content, html)


def _rates(text: str | None, methods: list[str]) -> dict[str, float]:
    """Return the learning rate of each method: one number for all, or METHOD=RATE pairs."""
    if text is None:
        return {}
    if "=" not in text:
        rate, *more = _numbers(text)
        if more:
            raise InputError(
                f"--lr takes one rate for all methods, or METHOD=RATE for each, got {text!r}; to try several rates use "
                "--lr-sweep"
            )
        return dict.fromkeys(methods, rate)
    from gossamer.predict.methods import parse

    rates: dict[str, float] = {}
    for piece in re.split(r",(?![^()]*\))", text):  # commas inside parentheses belong to the topology's options
        name, _, value = piece.rpartition("=")
        method = str(parse(name or piece))
        if method not in methods or method in rates:
            why = "named twice" if method in rates else f"not among the methods {', '.join(methods)}"
            raise InputError(f"--lr {text!r}: {method} is {why}; name each method at most once, as in --methods")
        (rates[method],) = _numbers(value)
    return rates


def _numbers(text: str) -> list[float]:
    try:
        values = [float(piece) for piece in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < v < math.inf for v in values) or len({f"{v:g}" for v in values}) < len(values):
        raise InputError(
            f"learning rates must be positive numbers separated by commas, each once, got {text!r}; e.g. 1e-3,2e-3"
        )
    return values


def _edge(tried: dict[str, float | None], content: dict[str, Any]) -> str | None:
    """Return "smallest" or "largest" if the best rate of a sweep is at its edge."""
    from gossamer.jobs.compare import best

    rates = sorted(map(float, tried))
    found = best(tried, "", higher_is_better=content["higher_is_better"])
    return None if len(rates) < 2 else {rates[0]: "smallest", rates[-1]: "largest"}.get(found)


def _print(content: dict[str, Any], html: Path | None) -> None:
    from gossamer.cli.report import print_table

    print_table(content["methods"])
    print_rich(content["noise"])
    for name, tried in content["lr_sweep"].items():
        found = ", ".join(f"{rate} {'diverged' if v is None else f'{v:.4g}'}" for rate, v in tried.items())
        print_rich(f"sweep of {name}: {found}")
        if (edge := _edge(tried, content)) is not None:
            print_rich(f"[yellow]the best rate of {name} is the {edge} that was tried: try rates beyond it[/]")
    for where, why in content["failed"].items():
        print_rich(f"{where}: {why}")
    report = html or f"gossamer report {content['folder']} --html report.html"
    print_rich(f"[bold]{content['verdict']}[/]", f"report: {report}")
