"""One worker's view of the members of an elastic job.

A worker that finds a member dead (its port is closed, or it was silent for `hard_deadline` seconds), as another
observer of that member does, proposes the next record without it; a joining worker proposes one with itself. Records
also travel on the links, so a worker learns of a change as soon as a neighbor knows it. Without the directory nothing
is agreed, and every worker continues with the members it can reach.

Note [Why a plan starts at an announced round]: workers learn of a new record at different times. If each followed its
plan at once, neighbors would expect messages of different plans and lose the round. A proposal therefore names, for
each lane, a round that lies some rounds (at least MARGIN, and more if steps are short) beyond the furthest round its
worker has heard of: until then all follow the old plan. A worker that learns of the record later than that loses the
rounds in between, but mixes nothing wrong: messages carry the id of their plan, and a message of another plan is
refused. If the members change again before that round, the earlier plan is still followed in the rounds between the
two: some workers may be in them already.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from gossamer.comm.process_groups import Store
from gossamer.comm.tcp.directory import Ended, Unreachable
from gossamer.comm.tcp.edge_deadlines import SILENT, EdgeDeadlines
from gossamer.comm.tcp.frame import Ask, FrameHeader, Hello, Kind, Refused, Verdict, read_json, whole_numbers
from gossamer.comm.tcp.link import Peer
from gossamer.comm.tcp.links import LinkTable
from gossamer.comm.tcp.listener import Listener, NotMember
from gossamer.comm.tcp.liveness import Liveness
from gossamer.comm.tcp.record import Agreement, Member, Record
from gossamer.comm.tcp.rendezvous import Arrival
from gossamer.comm.tcp.suspicion import Suspicions
from gossamer.comm.transport import ChannelId, Purpose

LOOK = 0.5  # seconds between reads of the record
LEAP = 10**7  # rounds that a peer can be ahead: a worker was away for that long
LONGEST_LOOK = 1.5  # the same when the directory does not answer
KEPT = 16  # records: as many changes of the members may be announced at a time
MARGIN = 2  # see Note [Why a plan starts at an announced round]


class Membership:
    """The members of the job, the links with them, and this worker's part in agreeing on them.

    Args:
        arrival: How this worker found the job. If it is joining, call `admit` once it has a member's state.
        longest: The largest message, in bytes, that this job can have.
        soft_deadline: Seconds to wait for a peer in an exchange; None: learned per edge.
        hard_deadline: Seconds of silence after which a member counts as dead; None: learned from its heartbeats.
        serve: Takes over a connection over which another worker asks for this worker's state.
        observers: Returns the ranks of a record that watch a given rank. Default: all of them.
        margin: Returns the rounds, or events, until the plan for new members is followed, given the seconds of a step.
    """

    def __init__(
        self,
        arrival: Arrival,
        longest: int,
        soft_deadline: float | None,
        hard_deadline: float | None,
        serve: Callable[[socket.socket, Ask], None],
        observers: Callable[[Record, int], set[int]] = lambda record, rank: set(record.members),
        margin: Callable[[float], int] = lambda step: MARGIN,
    ):
        self.rank, self.size, self.me = arrival.rank, arrival.size, arrival.me
        self.directory, self.run = arrival.directory, arrival.foundation.run
        self.record = Record(0, {}, [0] * arrival.lanes)
        self._announced: tuple[Record, ...] = ()  # the latest first; some may not be followed yet
        self._rounds = [0] * arrival.lanes
        self._serve, self._margin = serve, margin
        self._left = False
        self._ended = False  # the job is over, and another one has begun
        self.recoveries = 0  # how often the directory has answered again
        self._observers = observers
        self.deadlines = EdgeDeadlines(soft_deadline)
        self.decided = -1  # the latest stage of a meeting that is decided, as far as this worker has heard
        self._heeded = -1  # the latest stage whose news has ended a wait
        self._news = threading.Condition()
        self._stopped = threading.Event()
        self._hurry = threading.Event()  # read the record now
        self._following = threading.Lock()
        self.links = LinkTable(
            self.rank, self.run, longest, self._hello, self._on_frame, self._on_closed, self.deadlines.arrived
        )
        self._liveness = Liveness(
            self.links, hard_deadline, lambda: self.record.members, self._heartbeat, self._hurry.set
        )
        self._agreement = Agreement(
            self.directory, arrival.foundation, lambda: None if self.excluded else self.record, self._check
        )
        self._suspicions = Suspicions(
            self.rank,
            self.directory,
            observers,
            lambda member: self.links.is_alive(member.address, member.incarnation),
            2 * (SILENT if hard_deadline is None else hard_deadline),
        )
        if not arrival.joining:
            self._follow(arrival.record)
        self._listener = Listener(arrival.server, self.run, self._hello, self._accept, self.links.refused)
        self._thread = threading.Thread(target=self._run, name="gossamer-agree", daemon=True)
        self._thread.start()

    # -- joining and leaving -----------------------------------------------------------------------------------

    @property
    def excluded(self) -> bool:
        """Whether the others continue without this worker: it is joining, was silent for too long, or cut off."""
        return self._ended or self.record.members.get(self.rank) != self.me

    @property
    def closed(self) -> bool:
        """Whether this worker has closed its connections."""
        return self._stopped.is_set()

    def current(self) -> Record:
        """The record in the directory. Raise Unreachable if there is none, and Ended if the job is over."""
        return self._agreement.read()

    def donors(self) -> list[Member]:
        """Members that can serve their state: those of this node first, and different ones for different ranks."""
        members = self.current().members
        others = [(m.node != self.me.node, (r - self.rank) % self.size, m) for r, m in members.items()]
        return [m for _, distance, m in sorted(others, key=lambda entry: entry[:2]) if distance]

    def admit(self, rounds: list[int]) -> None:
        """Become a member, as a new process, with a state that has `rounds` rounds of each lane."""
        self._rounds = list(rounds)
        self._begin_anew()
        self._change(self._with_me)

    def admit_alone(self, gone: Record) -> None:
        """Become the only member, with the state that this worker has, in place of the members of `gone`, who are all
        gone. Nothing changes if the members have changed since: then there may be one whose state to take."""
        self._begin_anew()
        mine = {self.rank: self.me}
        self._change(lambda now: self._next(now, mine) if now.members == gone.members else None)

    def _begin_anew(self) -> None:
        self.me = replace(self.me, incarnation=secrets.token_hex(8))
        self.links.forget_lasting()
        self._liveness.restart_silence()

    def leave(self) -> None:
        """Tell the others that this worker leaves, so that nobody waits for it."""
        self._left = True
        self.links.send_all(FrameHeader(Kind.LEAVING, self.run))
        with suppress(Unreachable, Ended):
            self._change(lambda record: self._without(record, self.rank, self.me))
        for peer in list(self.links.peers.values()):
            peer.dead = peer.dead or "is in a job that this worker has left"
        self.links.inbox.wake()

    def close(self) -> None:
        """Close all connections without a word to the others, as the death of the process would; `leave` first."""
        self._stopped.set()
        self._hurry.set()
        self._listener.close()
        self.links.close()
        self.directory.close()
        self._liveness.close()
        self._thread.join(timeout=1.0)

    # -- progress ------------------------------------------------------------------------------------------------

    def advance(self, lane: int, rounds: int, *, jump: bool = False) -> None:
        """Report that this worker has launched `rounds` rounds of `lane`. `jump`: it skips the rounds since its last
        report, and nobody should wait for it in them."""
        self._rounds[lane] = rounds
        if jump:
            rounds_after = [k + (at == lane) for at, k in enumerate(self._rounds)]
            payload = json.dumps(rounds_after).encode()
            self.links.send_all(FrameHeader(Kind.JUMPED, self.run, len(payload), epoch=self.record.epoch), payload)

    def announce(self, stage: int, *, heard: bool = False) -> None:
        """Tell the members that a stage of a meeting is decided; the news travels on the links. A worker that has found
        it out tells all that it has links with. One that has `heard` it passes it on to its neighbors in rounds only,
        or n workers that are all linked would send n^2 frames; those that it does not reach read the directory."""
        with self._news:
            if stage <= self.decided:
                return  # passed on already
            self.decided = stage
            self._news.notify_all()
        to = (self._liveness.neighbors or None) if heard else None
        self.links.send_all(FrameHeader(Kind.DECIDED, self.run, epoch=self.record.epoch, round=stage), to=to)

    def await_news(self, stage: int, seconds: float) -> bool:
        """Wait at most `seconds` for the news that `stage`, or a later one, is decided.

        The news is a hint that ends one wait: who asks for the same stage again has found nothing decided, so the news
        was wrong, and waits for all of `seconds`.
        """
        with self._news:
            if self._heeded >= stage:
                self._news.wait(seconds)
                return False
            if not self._news.wait_for(lambda: self.decided >= stage, seconds):
                return False
            self._heeded = stage
            return True

    def begun(self, lane: int, reached: int) -> Record | None:
        """The latest record with this worker whose plan has begun where `lane` has reached this round, or event."""
        mine = (record for record in self._announced if record.members.get(self.rank) == self.me)
        return next((record for record in mine if record.starts[lane] <= reached), None)

    def hard_deadline(self, rank: int) -> float:
        """Seconds of silence after which this member counts as dead."""
        return self._liveness.hard_deadline(self.links.peer(rank))

    def judge(self, rank: int, lane: int, verdict: Verdict) -> None:
        """Tell a peer what became of this worker's asynchronous exchanges with it."""
        payload, channel = verdict.pack(), ChannelId(lane, Purpose.PARAMETERS)
        header = FrameHeader(Kind.VERDICT, self.run, len(payload), channel=channel, epoch=self.record.epoch)
        self.links.send_all(header, payload, to=[rank])

    def furthest(self, lane: int) -> int:
        """The furthest round of `lane` that any peer was heard to be in."""
        peers = list(self.links.peers.values())
        return max((p.rounds[lane] for p in peers if p.rounds and not p.dead), default=0)

    def watch(self, ranks: Iterable[int]) -> None:
        """Have links with these members as long as they are this worker's neighbors, and watch whether they live."""
        self._liveness.watch(set(ranks) - {self.rank})

    def watch_founders(self, record: Record) -> None:
        """Watch this worker's neighbors among the founders, before there is a plan to follow: founders may die while
        others wait for the initial state."""
        self.watch(self._observers(record, self.rank))

    def connect_to(self, rank: int) -> None:
        """Have a link with this member, too, for a while."""
        self._liveness.also_watch(rank)

    # -- agreement -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Read the record now and then, and propose to continue without the members that are dead."""
        pause = LOOK
        while not self._stopped.is_set():
            if pause == LOOK:
                self._hurry.wait(LOOK)
                self._hurry.clear()
            else:  # the directory is gone: do not hurry
                self._stopped.wait(pause)
            try:
                self._follow(self._agreement.read())
                if pause > LOOK:  # perhaps this worker was cut off, not the others
                    self._liveness.restart_silence()
                    self.recoveries += 1
                pause = LOOK
                self._drop_dead()
            except Unreachable:
                pause = min(2 * pause, LONGEST_LOOK)
            except Ended:
                self._ended = True
                return
            except Exception as error:  # without this thread nobody would be dropped or admitted, and nobody told
                self.directory.refuse(f"the record of the members cannot be followed: {error!r:.200}")
                pause = min(2 * pause, LONGEST_LOOK)

    def _drop_dead(self) -> None:
        """Propose to continue without the members that enough observers find dead."""
        dead = [] if self.excluded else self._liveness.dead()
        self._suspicions.withdraw(member.incarnation for _, member in dead)
        for rank, member in dead:
            record = self.record
            known = record.members.get(rank) == member and record.members.get(self.rank) == self.me
            if known and self._suspicions.confirmed(record, rank):
                self._change(lambda now, r=rank, m=member: self._without(now, r, m))  # type: ignore[misc]
                self.directory.ask(partial(_forget_suspicions, record, rank))

    def _change(self, propose: Callable[[Record], Record | None]) -> None:
        self._follow(self._agreement.change(propose))

    def _with_me(self, record: Record) -> Record | None:
        if record.members.get(self.rank) == self.me:
            return None
        return self._next(record, {**record.members, self.rank: self.me})

    def _without(self, record: Record, rank: int, member: Member) -> Record | None:
        if record.members.get(rank) != member or record.members.get(self.rank) != self.me:
            return None  # it is gone already, or this worker is not a member any more
        return self._next(record, {r: m for r, m in record.members.items() if r != rank})

    def _next(self, record: Record, members: dict[int, Member]) -> Record:
        furthest = [max(own, self.furthest(lane)) for lane, own in enumerate(self._rounds)]
        margin = self._margin(self.deadlines.step)
        return Record(record.epoch + 1, members, [k + margin for k in furthest])

    def _check(self, record: Record) -> None:
        """Raise ValueError if `record` cannot be this job's. A job without members is one that all have left, as far
        as a worker can tell that is no member itself."""
        record.check(self.size, len(self._rounds), empty=self._left or self.excluded)

    def _follow(self, record: Record) -> None:
        """Follow a newer record and pass it on."""
        with self._following:  # records come from several threads, and must not overtake each other
            if record.epoch > self.record.epoch:
                self._replace(record)

    def _replace(self, record: Record) -> None:
        gone = [r for r in self.record.members if r not in record.members and r != self.rank]
        self.record = record
        self._announced = (record, *self._announced[: KEPT - 1])
        text = record.text().encode()
        self.links.send_all(FrameHeader(Kind.RECORD, self.run, len(text), epoch=record.epoch), text)
        for rank, member in record.members.items():
            if rank != self.rank:
                self.links.know(rank, member.incarnation, member.address)
        if not self.excluded:
            for rank in gone:
                peer = self.links.peer(rank)
                peer.dead = peer.dead or "is not a member any more"
                if peer.link is not None:
                    peer.link.close("it is not a member any more")
        self.links.inbox.replan(record.epoch, record.starts, record.members)
        self._liveness.hurry()

    # -- what links need -----------------------------------------------------------------------------------------

    def _hello(self) -> Hello:
        return Hello(self.run.hex(), self.rank, self.me.incarnation, self._rounds)

    def _heartbeat(self) -> tuple[FrameHeader, bytes]:
        payload = json.dumps(self._rounds).encode()
        return FrameHeader(Kind.HEARTBEAT, self.run, len(payload), epoch=self.record.epoch), payload

    def _accept(self, connection: socket.socket, hello: Hello) -> None:
        """Take over a connection of another worker; a link must be of a member of the current epoch."""
        if hello.ask not in (Ask.LINK, Ask.NOTICE):
            self._serve(connection, hello.ask)
            return
        member = self.record.members.get(hello.rank)
        known = member is not None and member.incarnation == hello.incarnation
        if hello.ask is Ask.NOTICE:
            connection.close()
            (self._liveness.hurry if known else self._hurry.set)()
            return
        if not known:
            self._hurry.set()  # its record may be newer than this worker's
            raise NotMember(f"worker {hello.rank} is not a member of epoch {self.record.epoch}")
        if len(hello.rounds) != len(self._rounds):
            raise Refused(f"worker {hello.rank} has {len(hello.rounds)} lanes, this worker {len(self._rounds)}")
        peer = self.links.peer(hello.rank)
        peer.report(hello.rounds)
        self.links.install(peer, connection)

    def _on_closed(self, peer: Peer) -> None:
        self._liveness.hurry()

    def _on_frame(self, peer: Peer, header: FrameHeader, payload: bytes) -> None:
        try:
            if header.kind in (Kind.HEARTBEAT, Kind.JUMPED):
                rounds = whole_numbers(read_json(payload))
                if len(rounds) != len(self._rounds):
                    raise ValueError(f"it has {len(rounds)} lanes, this worker {len(self._rounds)}")
                if max(rounds) > max(*self._rounds, *self.record.starts) + LEAP:
                    raise ValueError(f"round {max(rounds)} cannot have been reached")
                if header.kind is Kind.HEARTBEAT:
                    peer.beat()
                    peer.report(rounds)
                self.links.inbox.jump(peer.rank, [k - 1 for k in rounds])  # the last round it launched is under way
                if header.epoch > self.record.epoch:
                    self._hurry.set()
            elif header.kind is Kind.RECORD:
                record = Record.parse(payload.decode())
                self._check(record)
                self._follow(record)
            elif header.kind is Kind.DECIDED:
                self.announce(header.round, heard=True)
            elif header.kind is Kind.LEAVING:
                peer.dead = "has left"
                self.links.inbox.lose(peer.rank, "it has left")
        except ValueError as error:
            raise Refused(f"a frame of worker {peer.rank} cannot be read: {error}") from error


def _forget_suspicions(record: Record, rank: int, store: Store) -> None:
    """Delete the suspicions that members of `record` have posted of `rank`, and those that it has posted of them."""
    for other, member in record.members.items():
        store.delete_key(f"suspect/{record.members[rank].incarnation}/{other}")
        store.delete_key(f"suspect/{member.incarnation}/{rank}")
