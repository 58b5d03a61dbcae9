"""Who takes part: members of an epoch, agreed by compare-and-set in the directory; who is alive, by what is heard.

A *record* names the members (rank, process, address, node), the epoch's number, and the round from which each lane
follows the plan for these members. Whoever finds a member dead (its port is closed, or it was silent for
`hard` seconds) proposes the next record without it; a newcomer proposes one with itself. Records also travel on the
links, so a worker learns of a change as soon as a neighbor knows it. Without the directory nothing is agreed, and
everybody goes on with the members it can reach. One that was restarted is empty: members put back what it must hold.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from gossamer.comm.process_groups import node_name
from gossamer.comm.tcp.directory import ANSWER, Directory, Unreachable, found_at, look
from gossamer.comm.tcp.frame import Header, Kind, Refused, digest
from gossamer.comm.tcp.link import Links, NotMember, Peer
from gossamer.comm.transport import PeerError

BEAT = 0.1  # seconds between signs of life
LOOK = 0.5  # seconds between looks at the directory
LONGEST_LOOK = 1.5  # when it does not answer
RETRY = 0.2  # seconds between attempts to connect
MARGIN = 2  # rounds between a proposal and its start


@dataclass(frozen=True)
class Member:
    incarnation: str
    host: str
    port: int
    node: str


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
        """What stands in every message of this epoch."""
        return digest(description.hex(), self.text())

    @classmethod
    def parse(cls, text: str) -> Record:
        """ValueError, KeyError or TypeError for anything else."""
        told = json.loads(text)
        members = {int(r): Member(**m) for r, m in told["members"].items()}
        return cls(int(told["epoch"]), members, [int(s) for s in told["starts"]])


class Membership:
    """One worker's view. `rounds` is what it tells others of its progress; the engine keeps it up to date."""

    def __init__(self, rank: int, size: int, lanes: int, most: int, timeout: float, hard: float):
        self.rank, self.size, self.timeout, self.hard = rank, size, timeout, hard
        self.rounds = [0] * lanes
        self.record = Record(0, {}, [0] * lanes)
        self.directory = Directory.of_job(rank, timeout)
        self.run = bytes.fromhex(self._ask_patiently(lambda s: _settle(s, "run", secrets.token_hex(8))))
        self.serve: Callable[[socket.socket, dict[str, Any]], None] = lambda c, _: c.close()
        self.left: set[int] = set()  # ranks that said goodbye
        self._shared: dict[str, list[str]] = {}  # what a newcomer asks for before it enters
        self._description = ""
        self._wanted: set[int] = set()
        self._connecting: set[int] = set()
        self._hurry, self._hurry_connect = threading.Event(), threading.Event()
        self._stopped = False
        self._halt = threading.Event()
        self.links = Links(
            rank,
            self.run,
            own_address(),
            most,
            self._hello,
            self._accept,
            self._told,
            lambda connection, hello: self.serve(connection, hello),
            lambda peer: self._hurry_connect.set(),
        )
        self.me = Member(secrets.token_hex(8), *self.links.address, node_name())
        self._threads = [
            threading.Thread(target=self._beat, name="gossamer-beat", daemon=True),
            threading.Thread(target=self._agree, name="gossamer-agree", daemon=True),
        ]

    # -- entering and leaving ----------------------------------------------------------------------------------

    def share(self, name: str, text: str) -> list[str]:
        """Everybody's latest `text` for `name`, by rank."""
        self._shared[name] = self._share(name, text, lambda: False) or []
        return self._shared[name]

    def _share(self, name: str, text: str, needless: Callable[[], bool]) -> list[str] | None:
        """The same; None when somebody is missing and that turns out to be `needless`."""
        deadline = time.monotonic() + self.timeout
        self._ask_patiently(lambda s: s.set(f"{name}/{self.rank}", text))
        keys = [f"{name}/{r}" for r in range(self.size)]
        while True:
            missing = self.directory.ask(lambda s: [r for r, key in enumerate(keys) if not s.check([key])])
            if not missing:
                return self.directory.ask(lambda s: [s.get(key).decode() for key in keys])
            if needless():
                return None
            if time.monotonic() > deadline:
                raise PeerError(
                    f"worker(s) {', '.join(map(str, missing))} did not show up within {self.timeout:g} s; check that "
                    "every worker was started and calls decentralize()"
                )
            time.sleep(0.02)

    def enter(self, description: str, agree: Callable[[list[str]], None]) -> bool:
        """Found the job with the others, or find it running: then True, and `admit` once its state is here."""
        self._description = description
        founding = None if self._look() else self._founding(description, agree)
        if founding is not None:
            current = self.directory.ask(lambda s: _settle(s, "record", founding.text()))
            if self.rank == 0:
                self.directory.ask(lambda s: s.set("founded", description))
        else:
            agree([self._ask_patiently(lambda s: s.get("founded").decode()), description])
            current = self._look()
        settled = self.directory.ask(lambda s: _settle(s, "run", self.run.hex()))
        self.run = self.links.run = bytes.fromhex(settled)  # another one if the directory was empty when we came
        record = Record.parse(current)
        joins = record.members.get(self.rank) != self.me
        if not joins:
            self._apply(record)
        self.known = record
        for thread in self._threads:
            thread.start()
        return joins

    def _founding(self, description: str, agree: Callable[[list[str]], None]) -> Record | None:
        """The first record, when everybody is here; None when the job turns out to be running, and only the directory
        to be new: its members have put back their record meanwhile."""
        descriptions = self._share("description", description, lambda: bool(self._look()))
        if descriptions is None:
            return None
        agree(descriptions)
        entries = self._share("member", json.dumps(asdict(self.me)), lambda: bool(self._look()))
        if entries is None:
            return None
        return Record(1, {r: Member(**json.loads(text)) for r, text in enumerate(entries)}, [0] * len(self.rounds))

    def donors(self) -> list[Member]:
        """Members who may hand over their state, those of this node first."""
        _, record = self._current()
        others = [(m.node != self.me.node, r, m) for r, m in record.members.items() if r != self.rank]
        return [m for _, _, m in sorted(others, key=lambda entry: entry[:2])]

    def admit(self, rounds: list[int]) -> None:
        """Become a member, as a new process, with a state that is `rounds` old."""
        self.rounds = list(rounds)
        self.me = replace(self.me, incarnation=secrets.token_hex(8))
        self.links.begin_anew()
        self._listen_anew()
        self._change(lambda record: self._with_me(record))

    def _with_me(self, record: Record) -> Record | None:
        if record.members.get(self.rank) == self.me:
            return None
        return self._next(record, {**record.members, self.rank: self.me})

    @property
    def excluded(self) -> bool:
        """The others go on without this worker: it was silent for too long, or cut off."""
        return self.record.members.get(self.rank) != self.me

    def leave(self) -> None:
        """Say goodbye: the others go on without waiting for this worker."""
        self.links.send_all(Header(Kind.BYE, self.run))
        with suppress(Unreachable):
            self._change(lambda record: self._without(record, self.rank, self.me))

    def close(self) -> None:
        self._stopped = True
        self._halt.set()
        self._hurry.set()
        self._hurry_connect.set()
        self.links.close()
        self.directory.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=1.0)

    # -- what the engine asks ------------------------------------------------------------------------------------

    def ahead(self, lane: int) -> int:
        """The furthest round that any member was heard to be in."""
        return max((p.rounds[lane] for p in list(self.links.peers.values()) if p.rounds and not p.dead), default=0)

    def want(self, rank: int) -> None:
        """Have a link with this member."""
        if rank not in self._wanted:
            self.links.peer(rank).heard = time.monotonic()
            self._wanted.add(rank)
            self._hurry_connect.set()

    def moved(self, lane: int) -> None:
        """Tell the others that this worker skips what lies before its round of `lane`."""
        told = json.dumps([k + (at == lane) for at, k in enumerate(self.rounds)]).encode()
        self.links.send_all(Header(Kind.MOVED, self.run, len(told), epoch=self.record.epoch), told)

    def neighbors(self, ranks: Iterable[int]) -> None:
        """Have links with exactly these members, and watch whether they live."""
        wanted = set(ranks) - {self.rank}
        for rank in wanted - self._wanted:
            self.links.peer(rank).heard = time.monotonic()  # nobody listened to it so far: its silence begins now
        self._wanted = wanted
        self._hurry_connect.set()

    # -- agreement -----------------------------------------------------------------------------------------------

    def _change(self, proposal: Callable[[Record], Record | None]) -> None:
        """Propose until it is agreed or no longer needed; `proposal` makes the next record of the current one."""
        while True:
            text, record = self._current()
            following = proposal(record)
            if following is None:
                self._apply(record)
                return
            wanted = following.text()
            if self.directory.ask(lambda s: s.compare_set("record", text, wanted).decode()) == wanted:  # noqa: B023
                self._apply(following)
                return

    def _look(self) -> str:
        """The record in the directory as it is; empty when there is none."""
        return self.directory.ask(lambda s: look(s, "record"))

    def _current(self) -> tuple[str, Record]:
        """The record in the directory. If that is lost, or older than what a member knows, the directory was restarted,
        and the member puts back its own."""
        text, own = self._look(), self.record
        try:
            record = Record.parse(text) if text else Record(0, {}, [])
            if record.epoch < own.epoch and own.members.get(self.rank) == self.me:
                text = self.directory.ask(lambda s: self._restore(s, text, own))
                record = Record.parse(text)
        except (ValueError, KeyError, TypeError) as error:
            raise Unreachable(
                f"the directory's record of the members cannot be read ({error}); keep other programs from its port"
            ) from error
        if not text:
            raise Unreachable(
                "the directory has lost its record of the members, and this worker is none; it is put back as soon as "
                "a member finds out"
            )
        return text, record

    def _restore(self, store: Any, held: str, record: Record) -> str:
        """Put back what a new directory must hold, the record last: whoever finds it needs the rest. What is there."""
        if not held:
            store.set("run", self.run.hex())  # also in place of one that a newcomer has made up
            store.set("founded", self._description)
            for name, texts in self._shared.items():
                for rank, text in enumerate(texts):
                    _settle(store, f"{name}/{rank}", text)
        now: str = store.compare_set("record", held, record.text()).decode()
        return now

    def _next(self, record: Record, members: dict[int, Member]) -> Record:
        furthest = [max(own, self.ahead(lane)) for lane, own in enumerate(self.rounds)]
        return Record(record.epoch + 1, members, [k + MARGIN for k in furthest])

    def _without(self, record: Record, rank: int, member: Member) -> Record | None:
        if record.members.get(rank) != member or record.members.get(self.rank) != self.me:
            return None  # it is gone already, or this worker has no say any more
        return self._next(record, {r: m for r, m in record.members.items() if r != rank})

    def _apply(self, record: Record) -> None:
        """Follow a newer record, and pass it on."""
        if record.epoch <= self.record.epoch:
            return
        gone = [r for r in self.record.members if r not in record.members and r != self.rank]
        self.record = record
        text = record.text().encode()
        self.links.send_all(Header(Kind.EPOCH, self.run, len(text), epoch=record.epoch), text)
        for rank, member in record.members.items():
            if rank != self.rank:
                self.links.know(rank, member.incarnation, (member.host, member.port))
        if not self.excluded:
            for rank in gone:
                peer = self.links.peer(rank)
                peer.dead = peer.dead or "is no longer a member"
                if peer.link is not None:
                    peer.link.close("it is no longer a member")
        self.links.inbox.replanned(record.epoch, record.starts)
        self._hurry_connect.set()

    def _agree(self) -> None:
        """Look at the directory now and then, and propose to go on without the dead."""
        pause = LOOK
        while not self._stopped:
            if pause == LOOK:
                self._hurry.wait(LOOK)
                self._hurry.clear()
            else:  # it is gone: do not hammer its port
                self._halt.wait(pause)
            try:
                _, record = self._current()
                self._apply(record)
                if pause > LOOK:  # perhaps it was this worker that was cut off: nobody is silent yet
                    self._listen_anew()
                pause = LOOK
                for rank, member in self._dead():
                    self._change(lambda record, r=rank, m=member: self._without(record, r, m))  # type: ignore[misc]
            except Unreachable:
                pause = min(2 * pause, LONGEST_LOOK)

    def _dead(self) -> list[tuple[int, Member]]:
        """Members that this worker watches and that are dead or silent, right now."""
        if self.excluded:
            return []
        now, found = time.monotonic(), []
        for rank, member in self.record.members.items():
            peer = self.links.peer(rank)
            if rank in self._wanted and peer.incarnation == member.incarnation and self._is_gone(peer, now):
                found.append((rank, member))
        return found

    def _listen_anew(self) -> None:
        """Everybody's silence begins now."""
        for peer in list(self.links.peers.values()):
            peer.heard = time.monotonic()

    def _is_gone(self, peer: Peer, now: float) -> bool:
        return bool(peer.dead) or now - peer.heard > self.hard

    def _ask_patiently(self, request: Callable[[Any], Any]) -> Any:
        """At the start the directory itself may be late."""
        return self.directory.ask(request, self.timeout + ANSWER)

    # -- signs of life -------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        last = time.monotonic()
        gone: set[str] = set()
        while not self._stopped:
            now = time.monotonic()
            if now - last > 10 * BEAT:  # it was this worker that stood still
                self._listen_anew()
            last = now
            told = json.dumps(self.rounds).encode()
            self.links.send_all(Header(Kind.BEAT, self.run, len(told), epoch=self.record.epoch), told)
            members = self.record.members
            for rank in sorted(self._wanted & set(members)):
                peer, member = self.links.peer(rank), members[rank]
                if peer.incarnation != member.incarnation:
                    continue
                if peer.link is None and not peer.dead and rank not in self._connecting:
                    self._connecting.add(rank)
                    threading.Thread(target=self._connect, args=(peer,), name="gossamer-connect", daemon=True).start()
                if self._is_gone(peer, now):
                    if peer.link is not None:
                        peer.link.close(f"it was silent for {self.hard:g} s")
                    if member.incarnation not in gone:
                        gone.add(member.incarnation)
                        self._hurry.set()
            self._hurry_connect.wait(BEAT)
            self._hurry_connect.clear()

    def _connect(self, peer: Peer) -> None:
        try:
            if not self.links.connect(peer) and not peer.dead:
                self._hurry.set()  # perhaps we are no longer a member
            time.sleep(RETRY)  # also after a connection that the other side may close at once
        finally:
            self._connecting.discard(peer.rank)

    def _hello(self) -> dict[str, Any]:
        return {
            "run": self.run.hex(),
            "rank": self.rank,
            "incarnation": self.me.incarnation,
            "epoch": self.record.epoch,
            "rounds": self.rounds,
        }

    def _accept(self, hello: dict[str, Any]) -> None:
        """Raise Refused unless a member of the current epoch is there."""
        member = self.record.members.get(int(hello["rank"]))
        if member is None or member.incarnation != hello["incarnation"]:
            self._hurry.set()  # perhaps it is newer than what we know
            raise NotMember(f"worker {hello['rank']} is not a member of epoch {self.record.epoch}")
        self.links.peer(int(hello["rank"])).rounds = [int(k) for k in hello["rounds"]]

    def _told(self, peer: Peer, header: Header, payload: bytes) -> None:
        try:
            if header.kind in (Kind.BEAT, Kind.MOVED):
                rounds = [int(k) for k in json.loads(payload)]
                if len(rounds) != len(self.rounds):
                    raise ValueError(f"{len(rounds)} lanes where there are {len(self.rounds)}")
                if header.kind is Kind.BEAT:
                    peer.goes_on(rounds)
                self.links.inbox.moved(peer.rank, [k - 1 for k in rounds])  # the last that it launched is under way
                if header.epoch > self.record.epoch:
                    self._hurry.set()
            elif header.kind is Kind.EPOCH:
                self._apply(Record.parse(payload.decode()))
            elif header.kind is Kind.BYE:
                self.left.add(peer.rank)
                peer.dead = "has left"
                self.links.inbox.lost(peer.rank, "it has left")
        except (ValueError, KeyError, TypeError) as error:
            raise Refused(f"what worker {peer.rank} says of itself cannot be read: {error}") from error


def own_address() -> str:
    """The address of the interface that GLOO_SOCKET_IFNAME names, else of the one that leads to the directory."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
        return socket.inet_ntoa(answer[20:24])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(found_at())
        address: str = probe.getsockname()[0]
        return address


def _settle(store: Any, key: str, value: str) -> str:
    """The first value that anybody gave this key."""
    held: str = store.compare_set(key, "", value).decode()
    return held
