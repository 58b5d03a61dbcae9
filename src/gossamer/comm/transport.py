"""The one small interface behind which bytes move, so that gloo, NCCL, one process and a fault injector plug in."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from gossamer.comm.exchange import ExchangeSteps, Mixed, Scratch
from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from gossamer.comm.accelerator import Accelerator

clock = time.perf_counter


class Event(Protocol):
    """A point in a stream of an accelerator."""

    def query(self) -> bool:
        """Whether all work before this point is done."""
        ...


class PeerError(GossamerError):
    """A peer is dead, late or cut off. The message names the peer, the round and what to do."""


class Purpose(IntEnum):
    """What the messages of a channel are for."""

    CONTROL = 0  # small averages in collective calls, for all lanes together
    PARAMETERS = 1  # the rounds of a lane
    SKETCH = 2  # a lane's sketches of the consensus distance
    MEETING = 3  # a lane's exact averages in a meeting of an elastic job
    SIGNAL = 4  # a lane's samples of the gradients


class ChannelId(NamedTuple):
    """Names a channel; the same on all workers."""

    lane: int
    purpose: Purpose

    @property
    def number(self) -> int:
        """A small integer for this channel, for transports that number their messages."""
        return self.lane * len(Purpose) + self.purpose


@dataclass(frozen=True)
class Stamp:
    """The header of a job's messages: the epoch of the membership, the plan, and the peers that may take part."""

    epoch: int
    plan: bytes
    peers: frozenset[int]
    meeting: bool = False  # part of a collective call, numbered by it and not by rounds
    sent: Counter[int] = field(default_factory=Counter)  # messages so far, by peer
    received: Counter[int] = field(default_factory=Counter)


@dataclass
class Job:
    """An exchange in flight. The driver fills it in; the training thread waits for it and applies the result.

    States: launched (`started` set) -> done (`finished` set; `result` or `error`).
    """

    round: int
    bucket: int
    make: Callable[[Scratch], ExchangeSteps]
    launched: float = field(default_factory=clock)
    started: float | None = None
    finished: float | None = None
    result: Mixed | None = None
    error: BaseException | None = None
    blocked_on: int | None = None  # the peer the driver is waiting for right now
    blocked: list[tuple[int, float, float]] = field(default_factory=list)  # (peer, from, to)
    sent: dict[int, int] = field(default_factory=dict)  # bytes by peer
    stamp: Stamp | None = None  # where messages carry a header
    ready: Event | None = None  # on an accelerator: the parameters are as they are to be sent
    given_up: bool = False  # the training thread no longer waits for it
    left_out: set[int] = field(default_factory=set)  # peers without which a round of an elastic job was carried out
    turn: int | None = None  # jobs with the same turn are carried out in launch order; None: the bucket

    @property
    def done(self) -> bool:
        return self.finished is not None

    def count(self, peer: int, message: Tensor) -> None:
        self.sent[peer] = self.sent.get(peer, 0) + message.numel() * message.element_size()

    @contextmanager
    def waiting_for(self, peer: int) -> Iterator[None]:
        self.blocked_on = peer
        since = clock()
        try:
            yield
        finally:
            self.blocked.append((peer, since, clock()))
            self.blocked_on = None


class Channel(ABC):
    """Carries the exchanges of one lane, in the order they are launched."""

    @abstractmethod
    def launch(self, job: Job) -> None:
        """Start the job; returns at once."""

    @abstractmethod
    def wait(self, job: Job, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the job. Return whether it is done."""

    def stuck(self, job: Job) -> PeerError | None:
        """The reason why waiting longer cannot help, if that is known (when all workers share one thread)."""
        return None

    def close(self, drain: float) -> None:  # noqa: B027 - most have nothing to close
        """Let jobs in flight finish for up to `drain` seconds, end the others, and free threads."""


class Transport(ABC):
    """The connections of a worker to the other workers."""

    rank: int
    size: int
    threaded = True  # False: all workers share one thread, and a VirtualCluster drives the exchanges
    accelerator: Accelerator | None = None  # whose tensors are copied through the host

    def staged(self, channel: ChannelId) -> Accelerator | None:
        """The accelerator that the messages of `channel` may be on; small control values are always on the host."""
        return self.accelerator if channel.purpose is Purpose.PARAMETERS else None

    @abstractmethod
    def channel(self, channel: ChannelId, in_flight: int, timeout: float) -> Channel:
        """Open `channel`, with up to `in_flight` exchanges under way at once."""

    @abstractmethod
    def share(self, name: str, text: str) -> list[str]:
        """Return all workers' `text` for `name`, by rank. Collective."""

    def broadcast(self, tensors: list[Tensor], among: tuple[tuple[int, ...], ...] | None = None) -> None:
        """Copy worker 0's values into the tensors of all workers, or in each group of `among` those of its first
        worker. Collective."""
        raise NotImplementedError(f"{type(self).__name__} cannot broadcast")

    def lost(self) -> int | None:
        """The worker that the job lost first, None as long as no worker has noticed a loss."""
        return None

    def fail(self) -> None:  # noqa: B027 - most have nobody to tell
        """Tell the other workers that this one has failed and does not come: they stop waiting for it."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Release sockets and threads."""

    def environment(self) -> dict[str, Any]:
        """A description of this transport for traces and bug reports."""
        return {"transport": type(self).__name__, "rank": self.rank, "size": self.size}
