"""The start of a worker in an elastic job: it founds the job together with the others, or finds the job running."""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

from gossamer.comm.deadline import LET_READ, Deadline
from gossamer.comm.launcher import node_name
from gossamer.comm.tcp.directory import DirectoryClient, directory_address, look, settle
from gossamer.comm.tcp.frame import read_json
from gossamer.comm.tcp.record import Foundation, Member, Record


@dataclass(frozen=True)
class Arrival:
    """How a worker found the job: `me` is a member of `record`, unless the job was running and it is `joining`."""

    rank: int
    size: int
    lanes: int
    me: Member
    server: socket.socket  # listens on the address of `me`
    directory: DirectoryClient
    foundation: Foundation
    record: Record
    joining: bool


class Rendezvous:
    """Opens this worker's port and meets the other workers in the directory."""

    def __init__(self, rank: int, size: int, lanes: int, timeout: float):
        self.rank, self.size, self.lanes, self.timeout = rank, size, lanes, timeout
        self.directory = DirectoryClient.of_job(rank, timeout)
        # Peers may connect as soon as they know the address: the backlog holds them until a Listener accepts.
        self._server = socket.create_server((own_address(directory_address()), 0), backlog=128)
        host, port = self._server.getsockname()[:2]
        self._me = Member(secrets.token_hex(8), host, port, node_name())
        self._shared: dict[str, str] = {}

    def share(self, name: str, text: str) -> list[str]:
        """Return the first text of all workers for `name`, by rank.

        A replacement gets what the founders shared, whatever its own text is: it may be on another node than the worker
        that it replaces, and still describes the job as the founders did.
        """
        try:
            texts = self.directory.share(name, self.rank, self.size, text, self.timeout, write=settle, at_start=True)
        except BaseException:
            self.close()
            raise
        assert texts is not None
        self._shared |= {f"{name}/{rank}": text for rank, text in enumerate(texts)}
        return texts

    def found_or_join(self, description: str, agree: Callable[[list[str]], None]) -> Arrival:
        """Found the job once all workers are there, or find it running. `agree` raises if descriptions differ."""
        ask = self.directory.ask_at_start
        founding = None if self._record() else self._founding_record(description, agree)
        if founding is not None:
            current = ask(lambda store: settle(store, "record", founding.text()))
            ask(lambda store: settle(store, "founded", description))  # by all: any of them may die right now
        else:
            agree([ask(lambda store: store.get("founded").decode()), description])
            current = self._record()
        run = ask(lambda store: bytes.fromhex(settle(store, "run", secrets.token_hex(8))))
        record = ask(lambda _: Record.parse(current))  # nonsense is counted, and reported as that
        return Arrival(
            self.rank,
            self.size,
            self.lanes,
            self._me,
            self._server,
            self.directory,
            Foundation(run, description, self._shared),
            record,
            joining=record.members.get(self.rank) != self._me,
        )

    def close(self) -> None:
        """Give up the start: close the port and the connection to the directory."""
        with suppress(OSError):
            self._server.close()
        self.directory.close()

    def _record(self) -> str:
        """The record in the directory, or an empty text."""
        return self.directory.ask_at_start(lambda store: look(store, "record"))

    def _founding_record(self, description: str, agree: Callable[[list[str]], None]) -> Record | None:
        """The first record, once all workers are there. None if the job turns out to be running and only the
        directory to be new: its members have put back their record meanwhile."""

        def running() -> bool:
            return bool(self._record())

        def share(name: str, text: str) -> list[str] | None:
            return self.directory.share(name, self.rank, self.size, text, self.timeout, running, at_start=True)

        descriptions = share("description", description)
        if descriptions is None:
            return None
        self.directory.ask_at_start(lambda store: store.add("description/read", 1))
        try:
            agree(descriptions)
        except BaseException:
            self._let_others_read()
            raise
        entries = share("member", json.dumps(asdict(self._me)))
        if entries is None:
            return None
        members = self.directory.ask(lambda _: {r: Member.of(read_json(text)) for r, text in enumerate(entries)})
        return Record(1, members, [0] * self.lanes)

    def _let_others_read(self) -> None:
        """The directory may live in worker 0's process, which must not leave before the others have read why."""
        deadline = Deadline(LET_READ)
        while self.rank == 0 and deadline.sleep(0.002):
            if self.directory.ask(lambda store: store.add("description/read", 0)) >= self.size:
                return


def own_address(towards: tuple[str, int] | None) -> str:
    """The address of the interface that GLOO_SOCKET_IFNAME names, else of the one that leads to `towards`, else the one
    that this host's name stands for."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface:
            import fcntl

            answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
            return socket.inet_ntoa(answer[20:24])
        probe.connect(towards or (socket.gethostname(), 1))
        address: str = probe.getsockname()[0]
        return address
