"""The live page of a run that trains: `gossamer train --watch`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gossamer.errors import InputError
from gossamer.report.watch.server import LOCALHOST, serve


@dataclass(frozen=True)
class Serving:
    """Whether and where the live page is served. Port 0 is any free one."""

    wanted: bool = False
    host: str = LOCALHOST
    port: int = 0

    @classmethod
    def of(cls, wanted: bool, at: str | None) -> Serving:
        """Parse `--watch` and `--watch-at ADDRESS[:PORT]`, which implies `--watch`."""
        if at is None:
            return cls(wanted)
        host, colon, port = at.rpartition(":") if at.count(":") == 1 or at.startswith("[") else (at, "", "")
        if not colon or at.endswith("]"):
            host, port = at, "0"
        if not host or not port.isdecimal() or int(port) > 65535:
            raise InputError(f"--watch-at {at!r} is not ADDRESS or ADDRESS:PORT; write for example 0.0.0.0:8474")
        return cls(True, host.strip("[]"), int(port))

    @contextmanager
    def page(self, folder: Path) -> Iterator[None]:
        """Serve the page of the run in `folder` during the block, and print its address."""
        if not self.wanted:
            yield
            return
        token = os.environ.get("GOSSAMER_WATCH_TOKEN") or None
        with serve(folder, host=self.host, port=self.port, token=token) as server:
            print(f"watch this run at {server.url}", file=sys.stderr, flush=True)
            yield
