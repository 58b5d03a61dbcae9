"""Keeps a directory's contents beyond the life of its process, and forgets a job whose workers are all gone."""

from __future__ import annotations

import base64
import json
import os
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from gossamer.errors import GossamerWarning, InputError

EVERY = 1.0  # seconds between two looks at the store
NOTHING = "\0"  # a value that no key has
SUSPICIONS = "/suspect/"  # in keys
SIGNS = "/present/"  # in keys that each worker renews while it lives


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
        self._failing = False  # the last look failed
        self._orphaned = False  # the contents were restored, and no worker has given a sign since
        if file is not None:
            self._restore(file)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gossamer-keeper", daemon=True)
        self._thread.start()

    def look(self, now: float) -> None:
        """Write the contents if they have changed; forget the job if all of its workers are gone at time `now`."""
        keys = [key for key in self._store.list_keys() if SUSPICIONS not in key]
        # Workers delete keys, and `get` would wait for a key that is gone; this changes nothing, and does not wait.
        read = {key: self._store.compare_set(key, NOTHING, NOTHING) for key in keys}
        held = {key: value for key, value in read.items() if value != NOTHING.encode()}
        signs = {key: value for key, value in held.items() if SIGNS in key}
        kept = {key: value for key, value in held.items() if key not in signs}
        self._orphaned = self._orphaned and not signs
        if signs != self._signs or not (signs or self._orphaned):  # without signs a job is only beginning
            self._signs, self._changed = signs, now
        elif self._forget_after is not None and now - self._changed > self._forget_after:
            for key in self._store.list_keys():
                self._store.delete_key(key)
            self._signs, self._orphaned, kept = {}, False, {}
        if self._file is not None and kept != self._saved:
            self._write(self._file, kept)

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=2 * EVERY)

    def _run(self) -> None:
        while not self._stopped.wait(EVERY):
            self._try_to_look()
        self._try_to_look()

    def _try_to_look(self) -> None:
        """Look. A failure, such as a full disk, must not end this thread: the next look may succeed."""
        try:
            self.look(time.monotonic())
            self._failing = False
        except Exception as error:
            if not self._failing:
                self._failing = True
                text = f"the directory is not kept in {self._file} at present ({error}); it tries again and again"
                with suppress(GossamerWarning):  # where warnings are errors
                    warnings.warn(text, GossamerWarning, stacklevel=2)

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
        self._saved, self._orphaned = held, bool(held)
