"""Workers that are only linked, for tests of links: sockets, handshakes and frames are real, and there is no job."""

from __future__ import annotations

import socket
import time
from functools import partial

import pytest

from gossamer.comm.tcp import DirectoryClient, links, listener
from gossamer.comm.tcp.frame import Ask, FrameHeader, Hello, Kind, meet
from gossamer.comm.tcp.inbox import Key
from gossamer.comm.tcp.links import LinkTable
from gossamer.comm.tcp.listener import Listener
from gossamer.comm.transport import ChannelId, Purpose

RUN = bytes(range(8))
PLAN = b"the plan"
CHANNEL = ChannelId(0, Purpose.PARAMETERS)
LIMIT = 300.0  # seconds until something counts as hung


@pytest.fixture(autouse=True, scope="module")
def patient():
    """Handshakes without a time limit, in modules that import this: a busy machine may stop a process for seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (links, listener):
            patch.setattr(module, "meet", partial(meet, seconds=LIMIT))
        yield


class PatientClient(DirectoryClient):
    """A client that waits for the answers of a directory."""

    def ask(self, request, timeout=LIMIT):
        return super().ask(request, timeout)


class Worker(LinkTable):
    """The links of one worker and its port, without a job around them."""

    def __init__(self, rank, frames):
        self.says = Hello(RUN.hex(), rank, "abcdefgh"[rank], [0])

        def hello():
            return self.says

        def received(peer, header, payload):
            frames.append((peer.rank, header.kind, payload))

        super().__init__(rank, RUN, 2**27, hello, received, lambda peer: None)
        self.server = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address = self.server.getsockname()
        self.listener = Listener(self.server, RUN, hello, self._accept, self.refused)

    def _accept(self, connection, hello):
        if hello.ask is Ask.NOTICE:
            connection.close()
            return
        assert hello.ask is Ask.LINK
        self.install(self.peer(hello.rank), connection)

    def close(self):
        self.listener.close()
        super().close()


def a_pair():
    """Two workers, 1 connected with 0, and the frames that they received."""
    frames = []
    zero, one = Worker(0, frames), Worker(1, frames)
    one.know(0, "a", zero.address)
    zero.know(1, "b", one.address)
    assert one.connect(one.peer(0))
    until(lambda: zero.peer(1).link is not None)
    return zero, one, frames


def until(condition, seconds=LIMIT):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def slot(links, sender, round, size, *, epoch=1, plan=PLAN, bucket=0):
    buffer = bytearray(size)
    key = Key(sender, CHANNEL, bucket, 0)
    return buffer, links.inbox.post(key, epoch, round, plan, memoryview(buffer))


def send(links, to, round, payload, *, epoch=1, plan=PLAN, bucket=0, run=RUN):
    header = FrameHeader(Kind.DATA, run, len(payload), plan, CHANNEL, epoch, round, bucket, 0)
    links.peer(to).link.send(header, payload)
