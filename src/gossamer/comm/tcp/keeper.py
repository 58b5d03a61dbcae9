"""Keeps a directory's contents beyond the life of its process, and forgets a job whose workers are all gone."""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from gossamer.errors import InputError

EVERY = 1.0  # seconds between two looks at the store
SUSPICIONS = "gossamer/suspect/"
SIGNS = "gossamer/present/"  # what each worker renews while it lives


class Keeper:
    """Copies `store` into `file` when it changes, and empties it when no worker has given a sign for a while.

    The constructor restores what `file` holds.

    Args:
        file: Where the contents are kept; None: nowhere.
        forget_after: Seconds without a sign of any worker after which a job is over; None: never.
    """

    def __init__(self, store: Store, file: Path | None, forget_after: float | None):
        self._store, self._file, self._forget_after = store, file, forget_after
        self._saved: dict[str, bytes] = {}
        self._signs: dict[str, bytes] = {}
        self._changed = time.monotonic()  # when a sign last changed
        if file is not None:
            self._restore(file)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gossamer-keeper", daemon=True)
        self._thread.start()

    def look(self, now: float) -> None:
        """Write the contents if they have changed; forget the job if all of its workers are gone at time `now`."""
        # Suspicions are withdrawn, and reading a key that is gone would wait for it.
        keys = [key for key in self._store.list_keys() if not key.startswith(SUSPICIONS)]
        held = {key: self._store.get(key) for key in keys}
        signs = {key: value for key, value in held.items() if key.startswith(SIGNS)}
        kept = {key: value for key, value in held.items() if key not in signs}
        if signs != self._signs or not signs:
            self._signs, self._changed = signs, now
        elif self._forget_after is not None and now - self._changed > self._forget_after:
            for key in held:
                self._store.delete_key(key)
            self._signs, kept = {}, {}
        if self._file is not None and kept != self._saved:
            self._write(self._file, kept)

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=2 * EVERY)

    def _run(self) -> None:
        while not self._stopped.wait(EVERY):
            self.look(time.monotonic())
        self.look(time.monotonic())

    def _write(self, file: Path, kept: dict[str, bytes]) -> None:
        text = json.dumps({key: base64.b64encode(value).decode() for key, value in sorted(kept.items())})
        beside = file.with_name(f".{file.name}.{os.getpid()}")
        beside.write_text(text)
        beside.replace(file)
        self._saved = kept

    def _restore(self, file: Path) -> None:
        try:
            text = file.read_text()
        except FileNotFoundError:
            return
        try:
            held = {str(key): base64.b64decode(value, validate=True) for key, value in json.loads(text).items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise InputError(
                f"{file} is not the file of a directory ({error}); name another file, or delete it"
            ) from None
        for key, value in held.items():
            self._store.set(key, value)  # type: ignore[arg-type]  # bytes are fine
        self._saved = held
