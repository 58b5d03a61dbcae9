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
from gossamer.comm.tcp.directory import ENDED, DirectoryClient, Ended, Unreachable, look, settle
from gossamer.comm.tcp.frame import digest, read_json, whole_numbers

MOST_EPOCHS = 2**31  # the header of a message has 32 bits for the epoch


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

    @classmethod
    def of(cls, fields: Any) -> Member:
        """Return the member that `fields`, from the directory, describe. Raise ValueError if they describe none."""
        if not isinstance(fields, dict) or set(fields) != {"incarnation", "host", "port", "node"}:
            raise ValueError(f"{str(fields)[:100]} is not a member")
        names, port = [fields[key] for key in ("incarnation", "host", "node")], fields["port"]
        if not all(isinstance(name, str) for name in names) or type(port) is not int or not 0 < port < 2**16:
            raise ValueError(f"{str(fields)[:100]} is not a member")
        return cls(**fields)


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
        fields = read_json(text)
        try:
            members = {int(rank): Member.of(member) for rank, member in fields["members"].items()}
            starts = whole_numbers(fields["starts"])
            (epoch,) = whole_numbers([fields["epoch"]])
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"it is not a record of members: {error!r}") from error
        if epoch >= MOST_EPOCHS:
            raise ValueError(f"its epoch is {epoch}")
        return cls(epoch, members, starts)

    def check(self, size: int, lanes: int, *, empty: bool = False) -> None:
        """Raise ValueError if this cannot be a record of a job of `size` workers with `lanes` lanes. `empty`: it may
        have no members."""
        if not (self.members or empty):
            raise ValueError("it has no members")
        if not all(0 <= rank < size for rank in self.members):
            raise ValueError(f"its members are {list(self.ranks)[:20]} in a job of {size} workers")
        if len(self.starts) != lanes:
            raise ValueError(f"it has {len(self.starts)} lanes, this job {lanes}")


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
            older record, or none, was restarted, and gets this one back; one that holds nonsense gets it back, too.
        check: Raises ValueError for a record that cannot be this job's.
    """

    def __init__(
        self,
        directory: DirectoryClient,
        foundation: Foundation,
        own: Callable[[], Record | None],
        check: Callable[[Record], None] = lambda record: None,
    ):
        self._directory, self._foundation, self._own, self._check = directory, foundation, own, check

    def read(self) -> Record:
        """Return the current record. Raise Unreachable if there is none, and Ended if the job is over."""
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
        record = self._parsed(text, repairs=own is not None)
        if own is not None and (record is None or record.epoch < own.epoch):
            text = self._directory.ask(self._restored(text, own))
            record = self._parsed(text, repairs=False)
        if record is None:
            raise Unreachable(
                "the directory has lost its record of the members, and this worker is not a member; members restore "
                "the record as soon as they notice"
            )
        return text, record

    def _parsed(self, text: str, *, repairs: bool) -> Record | None:
        """The record in `text`; None if it is empty. Nonsense is counted, and raises Unreachable unless this worker
        `repairs` it."""
        if not text:
            return None
        if text == ENDED:
            raise Ended(
                "all other members have left the job, and new workers have begun another one in the directory; start "
                "this worker again, so that it takes part in that job"
            )
        try:
            record = Record.parse(text)
            self._check(record)
        except ValueError as error:
            why = f"the directory's record of the members cannot be read ({error}); keep other programs from its port"
            self._directory.refuse(why)
            if not repairs:
                raise Unreachable(why) from error
            return None
        return record

    def _restored(self, held: str, record: Record) -> Callable[[Store], str]:
        """A request that puts back `record` and returns what the directory holds then."""

        def request(store: Store) -> str:
            if not held:
                self._foundation.restore(store)  # first: a worker that finds a record needs the rest
            return _compare_set(held, record.text())(store)

        return request


def _compare_set(expected: str, wanted: str) -> Callable[[Any], str]:
    return lambda store: str(store.compare_set("record", expected, wanted).decode())
