"""`gossamer chaos`: kill, stop, cut off, slow down and replace workers of a training run, and judge the result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli.common import (
    Json,
    Nodes,
    PerNode,
    command_app,
    layout_from,
    print_json,
    print_rich,
    refuse_launcher,
    table,
)
from gossamer.errors import InputError
from gossamer.recipes.metrics import finite

if TYPE_CHECKING:
    from gossamer.lab.chaos import ChaosConfig

app = command_app()

EXAMPLE = (
    "Examples: gossamer chaos --nodes 4 --per-node 2 --seconds 120 --faults 6 --seed 1 --json | "
    "gossamer chaos --seconds 600 --faults 20 --calm-runs 3 --ddp --out record | "
    "gossamer chaos --faults 0 --seconds 900 --nodes 1 --per-node 4"
)
RAW = ("lives", "stalls", "rejoins", "stats", "hung", "ended")  # only in the record


@app.command(epilog=EXAMPLE, no_args_is_help=False)
def chaos(
    nodes: Nodes = None,
    per_node: PerNode = None,
    seconds: Annotated[float, typer.Option(metavar="S", help="Length of a run.")] = 120.0,
    faults: Annotated[int, typer.Option(help="Number of faults; 0 is a soak test.")] = 6,
    seed: Annotated[int, typer.Option(help="Seed of the faults and of the training.")] = 1,
    calm_runs: Annotated[int, typer.Option(help="Runs without faults, whose final loss is compared.")] = 1,
    calm_from: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR", help="A record of --faults 0 with the same job instead of a calm run; may be repeated."
        ),
    ] = None,
    ddp: Annotated[bool, typer.Option("--ddp", help="Try torch's DDP under the first fault as well.")] = False,
    method: Annotated[str, typer.Option(metavar="METHOD", help="NAME[:TOPOLOGY[:WIRE]].")] = "dadam:aer",
    lr: Annotated[float | None, typer.Option(help="Learning rate; default: 2e-3, or 0.1 with SGD.")] = None,
    compute: Annotated[float, typer.Option(metavar="S", help="Emulated seconds of compute per step.")] = 0.15,
    link: Annotated[str, typer.Option(metavar="RATE", help="Every node's link: 100mbit, or none.")] = "100mbit",
    soft_deadline: Annotated[
        float | None, typer.Option(metavar="S", help="Seconds that a step waits for a late neighbor; default: learned.")
    ] = None,
    hard_deadline: Annotated[
        float | None, typer.Option(metavar="S", help="Seconds of silence that mean death; default: learned.")
    ] = None,
    network: Annotated[
        str | None, typer.Option(metavar="KIND", help="namespaces, or loopback (no cuts); see docs/lab.md.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the timeline (.svg, .png, .pdf).")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a record: verdict, steps, timeline.")] = None,
    as_json: Json = False,
) -> None:
    """Train while workers are killed, stopped, cut off, slowed down and replaced; exit code 1 if the job suffers."""
    from gossamer.lab.chaos import ChaosConfig, run_chaos
    from gossamer.lab.chaos.calm import calm_loss
    from gossamer.lab.namespaces import why_unavailable
    from gossamer.lab.shaping import parse_rate
    from gossamer.report.plots import check_matplotlib, check_output
    from gossamer.report.record import check_record_folder, environment

    if network not in (None, "namespaces", "loopback"):
        raise InputError(f"--network must be namespaces or loopback, got {network!r}; see docs/lab.md")
    if plot is not None:
        check_output(plot)
    if out is not None:
        check_matplotlib()
    refuse_launcher("chaos")
    parse_rate(link)
    reason = why_unavailable() if network is None else None
    per_node = per_node if per_node is not None else "2"
    nodes = nodes if nodes is not None or "," in per_node else "4"
    asked = ChaosConfig(
        per_node=tuple(layout_from(nodes, per_node, None).per_node),
        seconds=seconds,
        faults=faults,
        seed=seed,
        calm_runs=calm_runs,
        ddp=ddp,
        method=method,
        lr=lr,
        compute=compute,
        link=link,
        soft=soft_deadline,
        hard=hard_deadline,
        network="loopback" if reason or network == "loopback" else "namespaces",
    )
    asked = replace(asked, calm_losses=tuple(calm_loss(folder, asked) for folder in calm_from or ()))
    planned = asked.plan  # bad input is an error before anything starts
    if out is not None:
        check_record_folder(out)
    if reason or (network == "loopback" and planned):
        note = f"cuts and slow links are skipped: {reason}" if reason else "cuts and slow links are skipped on loopback"
        print(f"gossamer: {note}", file=sys.stderr)
    machine = environment()
    with _progress(quiet=as_json) as tell:
        data = finite({**run_chaos(asked, tell), "environment": machine})
    _write(data, plot, out)
    if as_json:
        shown = {k: v for k, v in data.items() if k not in RAW}
        shown["memory"] = _without_samples(data["memory"])
        print_json(shown)
    else:
        print_rich(*_shown(data, asked))
    if not data["passed"]:
        raise typer.Exit(1)


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, float, float], None]]:
    """Show a bar on a terminal, else one line per event, on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    if not sys.stderr.isatty():

        def line(text: str, at: float, total: float) -> None:
            if not quiet and ": " in text:
                print(f"{at:6.1f} s  {text}", file=sys.stderr)

        yield line
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        shown = bar.add_task("starting the cluster", total=None)

        def live(text: str, at: float, total: float) -> None:
            if ": " in text:
                bar.console.print(f"{at:6.1f} s  {text}", markup=False, highlight=False)
            else:
                bar.update(shown, description=text, completed=at, total=total)

        yield live


def _write(data: dict[str, Any], plot: Path | None, out: Path | None) -> None:
    from gossamer.report.chaos import draw_chaos, draw_soak, markdown
    from gossamer.report.record import write_record

    draw = draw_chaos if data["faults"] else draw_soak
    if plot is not None:
        draw(data, plot)
    if out is not None:
        note = "" if data["valid"] else "INVALID: the cores were saturated, or not every fault could be carried out."
        write_record(out, data=data, summary=markdown(data), note=note, environment=data["environment"])
        if data["faults"]:
            draw_chaos(data, out / "timeline.svg")
        if data["memory"]["workers"]:
            draw_soak(data, out / "soak.svg")


def _without_samples(memory: dict[str, Any]) -> dict[str, Any]:
    return {**memory, "workers": [{k: v for k, v in w.items() if k != "samples"} for w in memory["workers"]]}


def _shown(data: dict[str, Any], asked: ChaosConfig) -> Iterator[Any]:
    from rich.text import Text

    from gossamer.report.chaos import ddp_sentence, memory_sentence, stall_sentence

    where = data["cluster"]
    yield Text(
        f"{sum(asked.per_node)} workers on {len(asked.per_node)} nodes ({where['network']}, links {where['link']}), "
        f"{asked.method}, {asked.seconds:g} s, seed {asked.seed}"
    )
    if data["faults"]:
        yield _faults(data)
    if data["memory"]["workers"]:
        yield _memory(data)
    calm = ", ".join(f"{x:.4f}" for x in data["calm_final_losses"]) or "-"
    loss = "-" if data["final_loss"] is None else f"{data['final_loss']:.4f}"
    yield Text(
        f"hangs {data['hangs']}, restarts {data['restarts']}, rejoined {data['rejoined']}, "
        f"final loss {loss} (calm: {calm})"
    )
    longest = "" if data["longest_meeting_s"] is None else f", the longest took {data['longest_meeting_s']:.2f} s"
    yield Text(f"meetings {data['meetings']}{longest}")
    yield Text(stall_sentence(data))
    yield Text(memory_sentence(data["memory"]))
    yield Text("left behind: " + ", ".join(f"{v} {k.replace('_', ' ')}" for k, v in data["leaks"].items()))
    if data["ddp"] is not None:
        yield Text(f"DDP under the first fault: {ddp_sentence(data['ddp'])}")
    if not data["valid"]:
        busy = "" if data["cpu_use"] is None else f" (the cores were {data['cpu_use']:.0%} busy)"
        yield Text(f"INVALID: the times say more about this machine{busy} than about the job", style="bold red")
    for problem in data["problems"]:
        yield Text(f"FAILED: {problem}", style="bold red")
    if data["passed"]:
        yield Text("passed" if data["valid"] else "passed, but the times are not valid", style="green")


def _faults(data: dict[str, Any]) -> Any:
    made = table("at", "fault", "victims", "undone", "back after")
    for fault in data["faults"]:
        back = [r["seconds"] for r in data["rejoins"] if r["at"] == fault["at"]]
        until = "-" if fault["until"] is None else f"{fault['until']:.1f} s"
        made.add_row(
            f"{fault['at']:.1f} s",
            f"{fault['kind']} {fault['how']}".strip(),
            ", ".join(map(str, fault["victim"])),
            until,
            ", ".join("never" if s is None else f"{s:.2f} s" for s in back) or "-",
        )
    return made


def _memory(data: dict[str, Any]) -> Any:
    from gossamer.report.chaos import process_name

    made = table("worker", "lived", "RSS", "growth", "bound", "descriptors", "threads", "flat")
    for w in data["memory"]["workers"]:
        made.add_row(
            process_name(w),
            f"{w['seconds']:.0f} s",
            f"{w['rss_mb']:.1f} MB",
            f"{w['rss_growth_mb']:+.2f} MB",
            f"{w['rss_bound_mb']:.1f} MB",
            f"{w['descriptors']:g} ({w['descriptors_growth']:+g})",
            f"{w['threads']:g} ({w['threads_growth']:+g})",
            "yes" if w["flat"] else "NO",
        )
    return made
