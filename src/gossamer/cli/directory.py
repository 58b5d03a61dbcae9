"""`gossamer directory`: host the directory of an elastic job."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.common import Json, command_app, print_json, print_rich
from gossamer.errors import InputError

app = command_app()


@app.command(epilog="Example: gossamer directory --port 29400 --file directory.json --forget-after 120")
def directory(
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free port and prints it.")
    ],
    address: Annotated[
        str, typer.Option(metavar="IP", help="Address to listen on; 0.0.0.0 is all interfaces.")
    ] = "0.0.0.0",
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Start from this file, and keep the contents in it.")
    ] = None,
    forget_after: Annotated[
        float | None, typer.Option(min=10.0, metavar="S", help="Forget a job without a living worker after S seconds.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Host the directory of a job with on_failure="continue" until Ctrl-C: its members and their addresses.

    Run one per job, on a host that stays up: without the directory training continues, but no worker can join.
    """
    from gossamer.comm.tcp import HostedDirectory

    try:
        hosted = HostedDirectory(port, address, file=file, forget_after=forget_after)
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"cannot listen on port {port} of {address}: {why}; choose another --port") from None
    where = f"{socket.gethostname() if address == '0.0.0.0' else address}:{hosted.port}"
    if as_json:
        print_json({"address": where, "port": hosted.port})
    else:
        print_rich(f"directory at {where}; for every worker: export GOSSAMER_DIRECTORY={where}   (Ctrl-C to stop)")
    sys.stdout.flush()  # a program that reads this through a pipe waits for it
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        while not stop.wait(3600.0):
            pass
    except KeyboardInterrupt:
        pass
    finally:
        hosted.close()
