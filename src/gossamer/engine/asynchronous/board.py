"""What workers tell each other outside of their exchanges: what all have to say to agree, and who has left."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from uuid import uuid4

from gossamer.comm import PrefixStore, Transport, default_store


class Board:
    """Notes in the store. Made collectively; afterwards nothing of it waits for anybody.

    Edges connect when they are first used: without a note, nobody would miss a worker that leaves before that.
    """

    def __init__(self, transport: Transport, name: str):
        self._rank, self._size = transport.rank, transport.size
        run = transport.share(f"{name}/board", uuid4().hex)[0]
        prefixed: Any = PrefixStore(f"gossamer/{run}", default_store())
        self._store = prefixed.clone()  # others may block on theirs

    def say(self, what: str, text: str) -> None:
        self._store.set(f"{what}/{self._rank}", text)

    def heard(self, what: str) -> list[str] | None:
        """What everybody has said, by rank; None while somebody has not."""
        keys = [f"{what}/{r}" for r in range(self._size)]
        return [self._store.get(key).decode() for key in keys] if self._store.check(keys) else None

    def silent(self, what: str) -> list[int]:
        """Who has not."""
        return [r for r in range(self._size) if not self._store.check([f"{what}/{r}"])]

    def leave(self) -> None:
        """This worker takes part in nothing any more, and the others do not expect it."""
        with suppress(RuntimeError):  # the store died with its worker, which is told by other means
            self._store.compare_set("left", "", str(self._rank))

    def first_left(self) -> int | None:
        """Who was the first to leave: others only follow it."""
        return int(self._store.get("left")) if self._store.check(["left"]) else None

    def close(self) -> None:
        self._store = None  # its socket with it; the handle itself may wait for the garbage collector
