"""What happens to a run besides training, as `events.jsonl` in its folder: it starts, ends, loses workers."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FILE = "events.jsonl"


class RunEvents:
    """The events of a run, one JSON object per line; the process that launched the run writes them."""

    def __init__(self, folder: Path):
        self._path = folder / FILE

    def write(self, event: str, **facts: Any) -> None:
        """Append an event. A full disk does not end the run: the events are only shown."""
        line = json.dumps({"time": round(time.time(), 3), "event": event, **facts})
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError:
            pass


@contextmanager
def run_events(folder: Path) -> Iterator[RunEvents]:
    """Note the start and the end of the run in `folder`, and why it failed if it did."""
    events = RunEvents(folder)
    events.write("started", pid=os.getpid(), host=socket.gethostname())
    try:
        yield events
    except BaseException as error:
        events.write("failed", why=(str(error).strip() or type(error).__name__).splitlines()[0][:300])
        raise
    events.write("ended")
