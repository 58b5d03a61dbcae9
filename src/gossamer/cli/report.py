"""`gossamer report`: compare the runs in a folder, as a table, a web page, Markdown or CSV."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gossamer.cli.common import Json, command_app, print_json, print_rich, table

app = command_app()


def _file(what: str) -> Any:
    return typer.Option(metavar="FILE", help=what)


@app.command(epilog="Example: gossamer report runs/numbers --html report.html --csv report.csv")
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The --out of gossamer train or compare.")],
    html: Annotated[Path | None, _file("Write one self-contained web page.")] = None,
    markdown: Annotated[Path | None, _file("Write Markdown.")] = None,
    csv: Annotated[Path | None, _file("Write the table as CSV.")] = None,
    as_json: Json = False,
) -> None:
    """Compare the runs in a folder: verdict, table, curves against steps and time, timelines."""
    from gossamer.report.noise import noise_line
    from gossamer.report.page import write_csv, write_html, write_markdown
    from gossamer.report.runs import find_runs, grouped, summary
    from gossamer.report.verdict import verdict

    found = find_runs(folder)
    groups = grouped(found.runs)
    rows, sentence, noise = summary(groups), verdict(groups), noise_line(groups)
    files = {}
    for kind, path, write in (
        ("html", html, write_html),
        ("markdown", markdown, write_markdown),
        ("csv", csv, write_csv),
    ):
        if path is not None:
            files[kind] = str(write(folder, path))
    if as_json:
        print_json({"verdict": sentence, "noise": noise, "left_out": found.left_out, "methods": rows, "files": files})
        return
    print_table(rows)
    print_rich(noise, f"[bold]{sentence}[/]", *([found.left_out] if found.left_out else []))
    print_rich(*(f"{kind}: {path}" for kind, path in files.items()))


def print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.text import Text  # a method's colons are not emoji

    metric = rows[0]["metric"]
    elastic = any(r.get("deadline_seconds") is not None for r in rows)
    columns = [
        "method",
        "lr",
        *([metric] if metric != "loss" else []),
        "loss",
        "ms/step",
        "time",
        "MB/step",
        "waits",
        *(["deadline"] if elastic else []),
        "spread",
    ]
    made = table(*columns)
    for r in rows:
        spread = r["seeds"] > 1

        def figure(key: str, row: dict[str, Any] = r, spread: bool = spread) -> str:
            return f"{row[key + '_mean']:.4g}" + (f"±{row[key + '_std']:.1g}" if spread else "")

        made.add_row(
            Text(r["method"]),
            f"{r['lr']:g}",
            *([figure("metric")] if metric != "loss" else []),
            figure("loss"),
            f"{r['step_seconds'] * 1e3:.1f}",
            "-" if r["relative_time"] is None else f"{r['relative_time']:.0%}",
            f"{r['bytes_per_step'] / 1e6:.3g}",
            "-" if r["waiting"] is None else f"{r['waiting']:.0%}",
            *(["-" if r.get("deadline_seconds") is None else f"{r['deadline_seconds']:.2g} s"] if elastic else []),
            "-" if r["consensus_distance"] is None else f"{r['consensus_distance']:.2g}",
        )
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(made)  # a file has no width
