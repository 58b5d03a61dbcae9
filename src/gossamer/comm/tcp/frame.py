"""What travels on a link between two workers that survive each other: a handshake, then frames.

A frame is a fixed header and a payload of raw bytes; nothing that arrives is ever unpickled. The header says which run
and which plan it belongs to, so that a message of another run or of another plan is refused and not mixed in.
The handshake proves that both sides know the run's token (HMAC over the other side's nonce); garbage ends it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from gossamer.comm.transport import ChannelId, Purpose
from gossamer.errors import GossamerError

MAGIC = b"GSM1"
NONCE = 16
LONGEST_HELLO = 4096
HANDSHAKE = 2.0  # seconds for all of it
HEADER = struct.Struct("!4sBBHIQIHQ8s8s")


CONTROL = ChannelId(0, Purpose.CONTROL)


class Refused(GossamerError):
    """The other side is not one of us: another run, another plan, a wrong token, or no Gossamer at all."""


class Kind(IntEnum):
    DATA = 1  # a piece of an exchange
    BEAT = 2  # I am alive; epoch and rounds
    PASSED = 3  # I will send nothing more for this channel, bucket and round, or an earlier one
    EPOCH = 4  # the members have changed
    PULL = 5  # give me your state
    STATE = 6  # here it is
    BYE = 7  # I leave
    MOVED = 8  # I take part in no round before these


@dataclass(frozen=True)
class Header:
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
    def unpack(cls, data: bytes | bytearray | memoryview, run: bytes, most: int) -> Header:
        """The header in `data`; refused when it is none, of another run, or announces more than `most` bytes."""
        magic, kind, purpose, lane, epoch, round, bucket, part, length, theirs, plan = HEADER.unpack(data)
        if magic != MAGIC or kind not in set(Kind) or purpose not in set(Purpose):
            raise Refused(f"what arrived is not a message of Gossamer: it begins with {bytes(data[:8]).hex()}")
        if theirs != run:
            raise Refused(f"a message of run {theirs.hex()} arrived in run {run.hex()}; are two jobs on one port?")
        if length > most:
            raise Refused(f"a message announces {length} bytes, more than the {most} this job can need")
        return cls(Kind(kind), run, length, plan, ChannelId(lane, Purpose(purpose)), epoch, round, bucket, part)


def digest(*parts: str) -> bytes:
    """Eight bytes that stand for these texts."""
    return hashlib.sha256("\0".join(parts).encode()).digest()[:8]


def token() -> bytes:
    """The secret that every worker of a job must know: GOSSAMER_TOKEN, empty when there is none."""
    return os.environ.get("GOSSAMER_TOKEN", "").encode()


def greet(
    connection: socket.socket, mine: dict[str, Any], *, first: bool, seconds: float = HANDSHAKE
) -> dict[str, Any]:
    """Exchange hellos with proof of the token; the other side's. `first`: this side opened the connection.

    Both send a nonce; then each sends its hello with HMAC(token, the other's nonce + hello). The side that opened
    shows itself first. Raises Refused for a wrong proof or for bytes that are no hello, TimeoutError when all that is
    not over within `seconds`, however it is spread. The timeout of `connection` is to be set anew afterwards.
    """
    deadline = time.monotonic() + seconds
    connection.settimeout(seconds)
    nonce = os.urandom(NONCE)
    connection.sendall(MAGIC + nonce)
    theirs = read_exactly(connection, len(MAGIC) + NONCE, deadline)
    if theirs[: len(MAGIC)] != MAGIC:
        raise Refused(f"whoever connected does not speak Gossamer: it began with {bytes(theirs[:8]).hex()}")
    other = bytes(theirs[len(MAGIC) :])
    if first:
        _show(connection, mine, other, b"opened")
        return _hear(connection, nonce, b"accepted", deadline)
    hello = _hear(connection, nonce, b"opened", deadline)
    _show(connection, mine, other, b"accepted")
    return hello


def read_exactly(connection: socket.socket, size: int, deadline: float | None = None) -> bytearray:
    data = bytearray(size)
    read_into(connection, memoryview(data), deadline)
    return data


def read_into(connection: socket.socket, view: memoryview, deadline: float | None = None) -> None:
    """Fill `view`; ConnectionError when the other side hangs up first, TimeoutError at the deadline if there is one."""
    while len(view):
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the other side was too slow")
            connection.settimeout(left)
        got = connection.recv_into(view)
        if got == 0:
            raise ConnectionError("the other side closed the connection")
        view = view[got:]


def _show(connection: socket.socket, hello: dict[str, Any], nonce: bytes, role: bytes) -> None:
    text = json.dumps(hello).encode()
    connection.sendall(struct.pack("!I", len(text)) + text + _proof(nonce, role, text))


def _hear(connection: socket.socket, nonce: bytes, role: bytes, deadline: float) -> dict[str, Any]:
    (length,) = struct.unpack("!I", read_exactly(connection, 4, deadline))
    if not 0 < length <= LONGEST_HELLO:
        raise Refused(f"a hello of {length} bytes is none of ours")
    text = bytes(read_exactly(connection, length, deadline))
    proof = bytes(read_exactly(connection, hashlib.sha256().digest_size, deadline))
    if not hmac.compare_digest(proof, _proof(nonce, role, text)):
        raise Refused("whoever connected does not know this job's token; set the same GOSSAMER_TOKEN on every worker")
    try:
        hello = json.loads(text)
    except ValueError as error:
        raise Refused("a hello that is not JSON") from error
    if not isinstance(hello, dict):
        raise Refused("a hello that is not an object")
    return hello


def _proof(nonce: bytes, role: bytes, text: bytes) -> bytes:
    return hmac.new(token(), nonce + role + text, hashlib.sha256).digest()
