"""`gossamer report`: what the runs in a folder say, as a table, a web page, Markdown or CSV."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gossamer.cli.options import Json, command_app
from gossamer.cli.output import print_json, print_rich

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
    from gossamer.cli.compare import print_table
    from gossamer.report.page import write_csv, write_html, write_markdown
    from gossamer.report.runs import grouped, load_runs, summary, verdict

    groups = grouped(load_runs(folder))
    rows, sentence = summary(groups), verdict(groups)
    files = {}
    for kind, path, write in (
        ("html", html, write_html),
        ("markdown", markdown, write_markdown),
        ("csv", csv, write_csv),
    ):
        if path is not None:
            files[kind] = str(write(folder, path))
    if as_json:
        print_json({"verdict": sentence, "methods": rows, "files": files})
        return
    print_table(rows)
    print_rich(f"[bold]{sentence}[/]", *(f"{kind}: {path}" for kind, path in files.items()))
