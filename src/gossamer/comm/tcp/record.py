"""The record of an elastic job's members, and how it changes: by compare-and-set in the directory.

The record names the members (rank, process, address, node), the number of the epoch, and the round from which each
lane follows the plan for these members. A directory that was restarted is empty: members put back what it must hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gossamer.comm.process_groups import Store
from gossamer.comm.tcp.directory import DirectoryClient, Unreachable, look, settle
from gossamer.comm.tcp.frame import digest


@dataclass(frozen=True)
class Member:
    """A process of the job. A replacement with the same rank has another `incarnation`."""

    incarnation: str
    host: str
    port: int
    node: str

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port


@dataclass(frozen=True)
class Record:
    """The members of an epoch, by rank, and the round from which each lane follows their plan."""

    epoch: int
    members: dict[int, Member]
    starts: list[int]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.members))

    def text(self) -> str:
        members = {str(r): asdict(self.members[r]) for r in self.ranks}
        return json.dumps({"epoch": self.epoch, "members": members, "starts": self.starts})

    def plan(self, description: bytes) -> bytes:
        """Return the plan id that every message of this epoch carries."""
        return digest(description.hex(), self.text())

    @classmethod
    def parse(cls, text: str) -> Record:
        """Raise ValueError if `text` is not a record."""
        try:
            fields = json.loads(text)
            members = {int(r): Member(**m) for r, m in fields["members"].items()}
            return cls(int(fields["epoch"]), members, [int(s) for s in fields["starts"]])
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"it is not a record of members: {error!r}") from error


@dataclass(frozen=True)
class Foundation:
    """What a directory must hold besides the record, so that workers can join."""

    run: bytes
    description: str  # of model, optimizers and settings, as the founders agreed on it
    shared: Mapping[str, str]  # what the workers shared before they founded the job, by key

    def restore(self, store: Store) -> None:
        """Write everything to an empty directory."""
        store.set("run", self.run.hex())
        store.set("founded", self.description)
        for key, text in self.shared.items():
            settle(store, key, text)  # a joining worker may have written a newer text


class Agreement:
    """The record in the directory.

    Args:
        directory: Where the record is kept.
        foundation: What a restarted directory must hold besides the record.
        own: Returns the record this worker follows if it is one of its members, else None. A directory that holds an
            older record, or none, was restarted, and gets this one back.
    """

    def __init__(self, directory: DirectoryClient, foundation: Foundation, own: Callable[[], Record | None]):
        self._directory, self._foundation, self._own = directory, foundation, own

    def read(self) -> Record:
        """Return the current record. Raise Unreachable if there is none."""
        return self._read()[1]

    def change(self, propose: Callable[[Record], Record | None]) -> Record:
        """Replace the record by `propose(record)` and return the result.

        If another worker was faster, `propose` is called again with that worker's record. It returns None if no change
        is needed.
        """
        while True:
            text, record = self._read()
            proposed = propose(record)
            if proposed is None:
                return record
            wanted = proposed.text()
            if self._directory.ask(_compare_set(text, wanted)) == wanted:
                return proposed

    def _read(self) -> tuple[str, Record]:
        text, own = self._directory.ask(lambda store: look(store, "record")), self._own()
        try:
            record = Record.parse(text) if text else Record(0, {}, [])
            if own is not None and record.epoch < own.epoch:
                text = self._directory.ask(self._restored(text, own))
                record = Record.parse(text)
        except ValueError as error:
            raise Unreachable(
                f"the directory's record of the members cannot be read ({error}); keep other programs from its port"
            ) from error
        if not text:
            raise Unreachable(
                "the directory has lost its record of the members, and this worker is not a member; members restore "
                "the record as soon as they notice"
            )
        return text, record

    def _restored(self, held: str, record: Record) -> Callable[[Store], str]:
        """A request that puts back `record` and returns what the directory holds then."""

        def request(store: Store) -> str:
            if not held:
                self._foundation.restore(store)  # first: a worker that finds a record needs the rest
            return _compare_set(held, record.text())(store)

        return request


def _compare_set(expected: str, wanted: str) -> Callable[[Any], str]:
    return lambda store: str(store.compare_set("record", expected, wanted).decode())
