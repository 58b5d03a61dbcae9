"""Frames and handshake of the TCP links between the members of an elastic job.

A connection begins with a handshake, in which both sides prove that they know the job's token (HMAC over the other
side's nonce). Then it carries frames: a fixed header and a payload of raw bytes. Received bytes are never unpickled.
The header names the run and the plan of a message, so a message of another run or plan is refused, not mixed in.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from gossamer.comm.deadline import Deadline
from gossamer.comm.transport import ChannelId, Purpose
from gossamer.errors import GossamerError

MAGIC = b"GSM1"
NONCE = 16
LONGEST_HELLO = 4096
HANDSHAKE = 2.0  # seconds for the whole handshake
HEADER = struct.Struct("!4sBBHIQIHQ8s8s")
CONTROL = ChannelId(0, Purpose.CONTROL)
_VERDICT = struct.Struct("!qq")
MOST_ROUNDS = 2**53  # a number of rounds, events or steps beyond this is nonsense


class Refused(GossamerError):
    """The other side belongs to another run or plan, has a wrong token, or does not speak this protocol."""


class Kind(IntEnum):
    """What a frame says; "I" is the sender."""

    DATA = 1  # a message of an exchange
    HEARTBEAT = 2  # I am alive; payload: the rounds of my lanes
    SKIPPED = 3  # I will send nothing more for this channel and bucket, up to and including this round
    RECORD = 4  # the members have changed; payload: their record
    STATE = 5  # my state, for a worker that asked for it
    LEAVING = 6  # I leave the job
    JUMPED = 7  # I skip all rounds before these; payload: the rounds of my lanes
    DECIDED = 9  # a stage of a meeting is decided: the round is its number
    VERDICT = 8  # what became of my asynchronous exchanges with you; payload: a Verdict


@dataclass(frozen=True)
class FrameHeader:
    kind: Kind
    run: bytes
    length: int = 0
    plan: bytes = bytes(8)
    channel: ChannelId = CONTROL
    epoch: int = 0
    round: int = 0
    bucket: int = 0
    part: int = 0  # sequence number of the message within the exchange

    def pack(self) -> bytes:
        return HEADER.pack(
            MAGIC,
            self.kind,
            self.channel.purpose,
            self.channel.lane,
            self.epoch,
            self.round,
            self.bucket,
            self.part,
            self.length,
            self.run,
            self.plan,
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview, run: bytes, longest: int) -> FrameHeader:
        """Return the header in `data`. Raise Refused if there is none, if it belongs to another run, if it announces
        more than `longest` bytes, or if its round cannot be true: no earlier round would be waited for after it."""
        magic, kind, purpose, lane, epoch, round, bucket, part, length, theirs, plan = HEADER.unpack(data)
        if magic != MAGIC or kind not in set(Kind) or purpose not in set(Purpose):
            raise Refused(f"what arrived is not a message of Gossamer: it begins with {bytes(data[:8]).hex()}")
        if theirs != run:
            raise Refused(f"a message of run {theirs.hex()} arrived in run {run.hex()}; are two jobs on one port?")
        if length > longest:
            raise Refused(f"a message announces {length} bytes, more than the {longest} this job can need")
        if round >= MOST_ROUNDS:
            raise Refused(f"a message names round {round}, which cannot be true")
        channel = ChannelId(lane, Purpose(purpose))
        return cls(Kind(kind), run, length, plan, channel, epoch, round, bucket, part)


class Verdict(NamedTuple):
    """What a worker says about its asynchronous exchanges with one peer, in one lane.

    Note [Why an exchange has a verdict]: an exchange conserves the pair's sum only if both sides apply it. A side that
    has everything says `done`, and applies the exchange once the other side has said so too. A side that gives up says
    `skipped`, and never `done` afterwards. Each link begins with the latest verdict, so that a broken connection cannot
    leave the two sides with different answers: only the death of one of them can.
    """

    done: int = -1  # number of the last exchange for which this side has everything
    skipped: int = -1  # exchanges up to this number that are not done will not be

    def pack(self) -> bytes:
        return _VERDICT.pack(*self)

    @classmethod
    def unpack(cls, payload: bytes) -> Verdict:
        """Raise Refused if `payload` is not a verdict."""
        if len(payload) != _VERDICT.size:
            raise Refused(f"a verdict has {_VERDICT.size} bytes, got {len(payload)}")
        return cls(*_VERDICT.unpack(payload))

    def on(self, number: int) -> bool | None:
        """Whether exchange `number` is done; None if that is still open."""
        if self.done >= number:
            return True
        return False if self.skipped >= number else None


class Ask(IntEnum):
    """What a worker opens a connection for."""

    LINK = 1  # to exchange frames from now on
    STATE = 2  # to receive the other worker's state at the end of its step
    INITIAL_STATE = 3  # to receive the parameters and buffers from which all workers start
    NOTICE = 4  # to be connected to: the worker with the higher rank opens links


@dataclass(frozen=True)
class Hello:
    """What a worker says about itself in the handshake."""

    run: str
    rank: int
    incarnation: str
    rounds: list[int]
    ask: Ask = Ask.LINK

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> Hello:
        """Raise Refused for anything that is not a Hello."""
        try:
            (rank,) = whole_numbers([fields["rank"]])
            ask = Ask(fields["ask"])
            return cls(str(fields["run"]), rank, str(fields["incarnation"]), whole_numbers(fields["rounds"]), ask)
        except (KeyError, ValueError) as error:
            raise Refused(f"a hello cannot be read: {error}") from error


def read_json(text: str | bytes) -> Any:
    """Return what the JSON `text` of another process says. Raise ValueError if it is not JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def whole_numbers(values: Any) -> list[int]:
    """Return `values`, which another process says are whole numbers. Raise ValueError if they are not: JSON also knows
    Infinity, true and 1.5."""
    fine = isinstance(values, list) and all(type(value) is int and 0 <= value < MOST_ROUNDS for value in values)
    if not fine:
        raise ValueError(f"{str(values)[:100]} are not whole numbers from 0 to 2^53")
    return list(values)


def digest(*parts: str) -> bytes:
    """Return eight bytes that stand for these texts."""
    return hashlib.sha256("\0".join(parts).encode()).digest()[:8]


def token() -> bytes:
    """The secret that every worker of a job must know: GOSSAMER_TOKEN, empty if it is not set."""
    return os.environ.get("GOSSAMER_TOKEN", "").encode()


def meet(connection: socket.socket, mine: Hello, *, first: bool, seconds: float = HANDSHAKE) -> Hello:
    """Perform the handshake and return the other side's Hello."""
    return Hello.parse(greet(connection, asdict(mine), first=first, seconds=seconds))


def greet(
    connection: socket.socket, mine: dict[str, Any], *, first: bool, seconds: float = HANDSHAKE
) -> dict[str, Any]:
    """Exchange JSON objects with proof of the token and return the other side's. `first`: this side connected.

    Both sides send a nonce; then each sends its object with HMAC(token, the other's nonce + role + object). The side
    that connected goes first. Raises Refused for a wrong proof or for bytes that are not such an object, and
    TimeoutError when the handshake as a whole takes longer than `seconds`. Changes the timeout of `connection`.
    """
    deadline = Deadline(seconds)
    connection.settimeout(seconds)
    nonce = os.urandom(NONCE)
    connection.sendall(MAGIC + nonce)
    theirs = read_exactly(connection, len(MAGIC) + NONCE, deadline)
    if theirs[: len(MAGIC)] != MAGIC:
        raise Refused(f"the other side does not speak Gossamer: it began with {bytes(theirs[:8]).hex()}")
    other = bytes(theirs[len(MAGIC) :])
    if first:
        _show(connection, mine, other, b"opened")
        return _read_shown(connection, nonce, b"accepted", deadline)
    hello = _read_shown(connection, nonce, b"opened", deadline)
    _show(connection, mine, other, b"accepted")
    return hello


def read_exactly(connection: socket.socket, size: int, deadline: Deadline | None = None) -> bytearray:
    data = bytearray(size)
    read_into(connection, memoryview(data), deadline)
    return data


def read_into(connection: socket.socket, view: memoryview, deadline: Deadline | None = None) -> None:
    """Fill `view`. Raise ConnectionError if the other side hangs up first, TimeoutError at the deadline."""
    while len(view):
        if deadline is not None:
            if deadline.expired:
                raise TimeoutError("the other side was too slow")
            connection.settimeout(max(deadline.remaining, 1e-3))  # a timeout of 0 means non-blocking
        got = connection.recv_into(view)
        if got == 0:
            raise ConnectionError("the other side closed the connection")
        view = view[got:]


def _show(connection: socket.socket, hello: dict[str, Any], nonce: bytes, role: bytes) -> None:
    text = json.dumps(hello).encode()
    connection.sendall(struct.pack("!I", len(text)) + text + _proof(nonce, role, text))


def _read_shown(connection: socket.socket, nonce: bytes, role: bytes, deadline: Deadline) -> dict[str, Any]:
    (length,) = struct.unpack("!I", read_exactly(connection, 4, deadline))
    if not 0 < length <= LONGEST_HELLO:
        raise Refused(f"a hello must have 1 to {LONGEST_HELLO} bytes, got {length}")
    text = bytes(read_exactly(connection, length, deadline))
    proof = bytes(read_exactly(connection, hashlib.sha256().digest_size, deadline))
    if not hmac.compare_digest(proof, _proof(nonce, role, text)):
        raise Refused("the other side does not know this job's token; set the same GOSSAMER_TOKEN on every worker")
    try:
        hello = read_json(text)
    except ValueError as error:
        raise Refused("a hello must be JSON") from error
    if not isinstance(hello, dict):
        raise Refused("a hello must be a JSON object")
    return hello


def _proof(nonce: bytes, role: bytes, text: bytes) -> bytes:
    return hmac.new(token(), nonce + role + text, hashlib.sha256).digest()
