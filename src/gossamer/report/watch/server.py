"""The page of a watched run over HTTP: by the job itself (`train --watch`), or for a folder (`gossamer watch`).

GET /            the page
GET /api/run     `Facts.to_dict`
GET /api/frames  `WatchedRun.update` of the query's version, every and begin

Files are read when a page asks, so a run that nobody watches pays nothing.
"""

from __future__ import annotations

import hmac
import html
import ipaddress
import json
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gossamer.errors import GossamerError, InputError
from gossamer.report.watch.run import WatchedRun

LOCALHOST = "127.0.0.1"


@dataclass(frozen=True)
class WatchServer:
    """A server that is running."""

    host: str
    port: int
    token: str | None

    @property
    def url(self) -> str:
        """The address to open in a browser; a server on all addresses is named by this machine."""
        name = socket.gethostname() if self.host in ("", "0.0.0.0", "::") else self.host
        host = f"[{name}]" if ":" in name else name
        return f"http://{host}:{self.port}/" + (f"?token={self.token}" if self.token else "")


def is_local(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def serve(folder: Path, *, host: str = LOCALHOST, port: int = 0, token: str | None = None) -> Iterator[WatchServer]:
    """Serve the page of the run in `folder` from a thread until the block ends.

    Port 0 is any free port. An address that other machines can reach needs a token, which is made if none is given.
    """
    run = WatchedRun(folder)
    if token is None and not is_local(host):
        token = secrets.token_urlsafe(16)
    server = _listen(host, port)
    server.run, server.token, server.wanted_host = run, token, host
    found = WatchServer(host, server.server_address[1], token)
    thread = threading.Thread(target=server.serve_forever, args=(0.2,), name="gossamer-watch", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5.0)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = False  # two runs must not share a port
    run: WatchedRun
    token: str | None
    wanted_host: str


def _listen(host: str, port: int) -> _Server:
    try:
        return _Server((host, port), _Handler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot listen on {host}:{port}: {why}; choose another address or port, 0 for any") from None


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "gossamer-watch"
    sys_version = ""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        problem = self._refused(query)
        if problem:
            self._send(HTTPStatus.FORBIDDEN, json.dumps({"error": problem}), "application/json")
        elif url.path == "/":
            self._send(HTTPStatus.OK, watch_page(self.server.run), "text/html")
        elif url.path == "/api/run":
            self._answer(self.server.run.facts.to_dict())
        elif url.path == "/api/frames":
            try:
                version, every, begin = (query.get(name, ["0"])[0] for name in ("version", "every", "begin"))
                self._answer(self.server.run.update(int(version), float(every), max(0, int(begin))))
            except ValueError:
                self._answer({"error": "version, every and begin must be numbers"}, HTTPStatus.BAD_REQUEST)
            except GossamerError as error:  # the folder was damaged or removed meanwhile
                self._answer({"error": str(error)}, HTTPStatus.CONFLICT)
        else:
            self._answer({"error": f"there is no {url.path}"}, HTTPStatus.NOT_FOUND)

    def _refused(self, query: dict[str, list[str]]) -> str:
        token = self.server.token
        if token is not None:
            given = query.get("token", [""])[0] or self.headers.get("Authorization", "").removeprefix("Bearer ")
            same = hmac.compare_digest(given.encode(), token.encode())
            return "" if same else "the token is wrong or missing; use the address that the job printed"
        # without a token a web page of another site must not read the run by a name that resolves to this machine
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        local = is_local(host) or host == self.server.wanted_host
        return "" if local else "only this machine may read the run; open it at 127.0.0.1"

    def _answer(self, content: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(status, json.dumps(content, separators=(",", ":")), "application/json")

    def _send(self, status: HTTPStatus, text: str, kind: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        with suppress(ConnectionError):  # the page was closed
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the job's terminal belongs to the job."""


def watch_page(run: WatchedRun) -> str:
    """Return the page, which is complete: it loads nothing but the run's data."""
    static = files("gossamer.report") / "static"
    body = (static / "watch.html").read_text(encoding="utf-8")
    style = "".join((static / name).read_text(encoding="utf-8") for name in ("page.css", "watch.css"))
    script = "\n".join((static / name).read_text(encoding="utf-8") for name in ("watch.js", "watch_chart.js"))
    title = html.escape(f"{run.facts.folder.name}: {run.facts.method}")
    return body.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script).replace("TITLE", title)
