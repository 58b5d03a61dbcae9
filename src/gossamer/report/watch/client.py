"""A job that serves its own page (`gossamer train --watch`), asked over HTTP."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gossamer.errors import InputError

TIMEOUT = 5.0  # seconds for an answer
MOST_BYTES = 1 << 27


@dataclass(frozen=True)
class WatchAddress:
    """Where a job serves its page."""

    host: str
    port: int
    token: str | None = None

    @classmethod
    def parse(cls, text: str, token: str | None = None) -> WatchAddress:
        """Parse HOST:PORT or the URL that the job printed, which may hold the token."""
        url = urlsplit(text if "//" in text else f"//{text}")
        try:
            port = url.port
        except ValueError:
            port = None
        if not url.hostname or port is None or url.scheme not in ("", "http"):
            raise InputError(
                f"{text!r} is neither a folder nor HOST:PORT; pass the folder of a run, or the address that "
                "gossamer train --watch printed"
            )
        return cls(url.hostname, port, token or parse_qs(url.query).get("token", [None])[0])

    @property
    def url(self) -> str:
        """The address to open in a browser."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/" + (f"?token={self.token}" if self.token else "")

    def facts(self) -> dict[str, Any]:
        """Return the facts of the job's run; raises `InputError` if no Gossamer job answers."""
        found = self._ask("/api/run")
        if found.get("gossamer_watch") != 1:
            raise InputError(f"{self.host}:{self.port} answers, but it is no Gossamer job; check the address")
        return found

    def update(self, version: int = 0, every: float = 0.0, begin: int = 0) -> dict[str, Any]:
        """Return what `WatchedRun.update` returns."""
        return self._ask(f"/api/frames?version={version}&every={every!r}&begin={begin}")

    def _ask(self, path: str) -> dict[str, Any]:
        where = f"{self.host}:{self.port}"
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self.token}"} if self.token else {})
            answer = connection.getresponse()
            status, data = answer.status, answer.read(MOST_BYTES)
        except http.client.HTTPException:
            raise InputError(f"{where} speaks something else than HTTP; check the port") from None
        except ConnectionResetError:
            raise InputError(f"{where} closed the connection: it is no Gossamer job; check the port") from None
        except OSError as error:
            raise InputError(
                f"nobody answers at {where} ({error.strerror or error}): the job has ended or is out of reach; "
                "gossamer watch DIR shows the folder of a run, also of one that has ended"
            ) from None
        finally:
            connection.close()
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if status == http.client.FORBIDDEN and isinstance(found, dict) and "error" in found:
            raise InputError(f"{where} refuses: {found['error']} (--token, or the whole address)")
        if not isinstance(found, dict) or status not in (http.client.OK, http.client.CONFLICT):
            raise InputError(f"{where} answers, but it is no Gossamer job; check the address")
        if status == http.client.CONFLICT:
            raise InputError(str(found.get("error")))
        return found
