"""JSON lines that other processes append to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Tail:
    """The rows of a file that were appended since the last look. A file that does not exist yet has none."""

    def __init__(self, path: Path):
        self.path = path
        self.damaged = 0
        """Complete lines that are not JSON objects."""
        self._offset, self._inode = 0, 0

    def look(self) -> tuple[bool, list[Row]]:
        """Return whether the file was written anew since the last look, and the rows that are new."""
        try:
            with self.path.open("rb") as file:
                stat = self.path.stat()
                anew = bool(self._offset) and (stat.st_ino != self._inode or stat.st_size < self._offset)
                if anew:
                    self._offset = self.damaged = 0
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return False, []
        whole, newline, _ = data.rpartition(b"\n")  # a torn last line is completed later, or never
        self._offset += len(whole) + len(newline)
        self._inode = stat.st_ino
        rows = []
        for line in whole.splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                rows.append(row)
            else:
                self.damaged += 1
        return anew, rows
