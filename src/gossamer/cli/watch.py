"""`gossamer watch`: the live page or the terminal view of a run, while it trains and afterwards."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gossamer.cli.common import Json, command_app, print_json
from gossamer.errors import InputError

if TYPE_CHECKING:
    from gossamer.report.watch.terminal import Ask, Update

app = command_app()

TOKEN_VARIABLE = "GOSSAMER_WATCH_TOKEN"


@app.command(epilog="Examples: gossamer watch runs/demo | gossamer watch 127.0.0.1:8474 --terminal")
def watch(
    what: Annotated[
        str,
        typer.Argument(metavar="DIR|HOST:PORT", help="The folder of a run, or the address that train --watch printed."),
    ],
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Show the run in the terminal, not in a browser.")
    ] = False,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Serve the page of DIR at this address. Default: 127.0.0.1, for this machine."
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(metavar="N", help="The page's port. Default: any free one.")] = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar=TOKEN_VARIABLE,
            metavar="TEXT",
            help="The token that a page beyond this machine asks for.",
            show_envvar=True,
        ),
    ] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    as_json: Json = False,
) -> None:
    """Watch a run: topology, workers, waiting, links, loss and consensus distance, live or replayed."""
    if Path(what).exists() or (":" not in what):
        _folder(Path(what), terminal, host, port, token, browser, as_json)
    else:
        if host is not None or port is not None:
            raise InputError(f"{what} already serves its page; leave --host and --port out")
        _address(what, terminal, token, browser, as_json)


def _folder(
    folder: Path, terminal: bool, host: str | None, port: int | None, token: str | None, browser: bool, as_json: bool
) -> None:
    from gossamer.report.watch.run import WatchedRun
    from gossamer.report.watch.server import LOCALHOST, serve

    if terminal or as_json:
        if host is not None or port is not None:
            raise InputError("--terminal and --json serve no page; leave --host and --port out")
        run = WatchedRun(folder)
        _without_page(lambda: run.facts.to_dict(), run.update, as_json)
        return
    with serve(folder, host=host or LOCALHOST, port=port or 0, token=token) as server:
        typer.echo(f"watching {folder} at {server.url} (Ctrl-C ends)")
        opened = browser and _open(server.url)
        if opened or not browser or not sys.stdout.isatty():
            _until_interrupted()
        else:  # no browser here: the terminal shows the run, and the page can be opened from elsewhere
            run = WatchedRun(folder)
            _show(lambda: run.facts.to_dict(), run.update, server.url)
            _until_interrupted()


def _address(what: str, terminal: bool, token: str | None, browser: bool, as_json: bool) -> None:
    from gossamer.report.watch.client import WatchAddress

    address = WatchAddress.parse(what, token)
    facts = address.facts()
    if terminal or as_json:
        _without_page(address.facts, address.update, as_json)
        return
    typer.echo(f"{facts['task']}, {facts['method']}: {address.url}")
    if browser and not _open(address.url) and sys.stdout.isatty():
        _show(address.facts, address.update, address.url)


def _without_page(ask: Ask, update: Update, as_json: bool) -> None:
    if not as_json:
        _show(ask, update, "")
        return
    found, facts = update(0, 0.0, 0), ask()
    shown = {k: facts[k] for k in ("folder", "task", "method", "kind", "workers", "node", "steps")}
    rest = {k: found[k] for k in ("status", "evaluations", "events", "notes", "seconds")}
    print_json({**shown, **rest, "frame": found["newest"]})


def _show(ask: Ask, update: Update, address: str) -> None:
    from rich.console import Console

    from gossamer.report.watch.terminal import TerminalView

    try:
        TerminalView(ask, update).run(Console(highlight=False, emoji=False), address=address)
    except KeyboardInterrupt:
        raise typer.Exit() from None


def _open(url: str) -> bool:
    """Open the page; returns False where there is no browser with a window."""
    import webbrowser

    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    return webbrowser.open(url)


def _until_interrupted() -> None:
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        raise typer.Exit() from None
