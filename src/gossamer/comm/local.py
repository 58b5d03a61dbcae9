"""A transport for virtual workers, all in one process: no threads, deterministic.

A worker's exchange is complete when all workers of its group have launched theirs. Messages are passed by reference, so
n workers need no more memory than their models and receive buffers.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from torch import Tensor

from gossamer.comm.exchange import Batch, ExchangeSteps, Scratch
from gossamer.comm.transport import Channel, ChannelId, Job, PeerError, Transport, clock
from gossamer.errors import InputError


@dataclass(eq=False)
class _Message:
    value: Tensor
    sender: _Running
    to: int
    taken: bool = False


@dataclass(eq=False)
class _Running:
    """An exchange between two batches, with the messages that it still has to receive (`recvs`) and its own messages
    that its peers have not received (`unsent`)."""

    rank: int
    tag: tuple[ChannelId, int]
    job: Job
    steps: ExchangeSteps
    recvs: deque[tuple[int, Tensor]] = field(default_factory=deque)
    unsent: list[_Message] = field(default_factory=list)


class Hub:
    """The workers of one process and the messages between them."""

    def __init__(self, size: int):
        if size < 1:
            raise InputError(f"the number of workers must be a positive integer, got {size}; pass n >= 1")
        self.size = size
        self._mail: dict[tuple[int, int, tuple[ChannelId, int]], deque[_Message]] = defaultdict(deque)
        self._running: dict[tuple[int, tuple[ChannelId, int]], _Running] = {}  # by worker and tag
        self._shared: dict[str, dict[int, str]] = defaultdict(dict)

    def transport(self, rank: int) -> LocalTransport:
        return LocalTransport(self, rank)

    def start(self, rank: int, channel: ChannelId, job: Job) -> None:
        job.started = clock()
        running = _Running(rank, (channel, job.bucket), job, job.make(Scratch()))
        self._running[rank, running.tag] = running
        self._progress(deque([*self._advance(running), running]))

    def lagging(self, job: Job) -> list[int]:
        """The workers that a job waits for: senders of messages it has not received, receivers of its own messages."""
        for running in self._running.values():
            if running.job is job:
                return sorted({peer for peer, _ in running.recvs} | {m.to for m in running.unsent if not m.taken})
        return []

    def _progress(self, stirred: deque[_Running]) -> None:
        """Resume exchanges until none can continue: the given ones, and those that they send to or unblock."""
        while stirred:
            running = stirred.popleft()
            if running.job.done:
                continue
            stirred += self._receive(running)
            if not running.recvs and all(m.taken for m in running.unsent):
                stirred += self._advance(running)
                stirred.append(running)

    def _receive(self, running: _Running) -> list[_Running]:
        """Receive the messages that have arrived. Return the exchanges that sent them."""
        freed = []
        while running.recvs:
            peer, into = running.recvs[0]
            box = self._mail[peer, running.rank, running.tag]
            if not box:
                break
            message = box.popleft()
            into.copy_(message.value)
            message.taken = True
            running.recvs.popleft()
            freed.append(message.sender)
        return freed

    def _advance(self, running: _Running) -> list[_Running]:
        """Resume an exchange up to its next batch. Return the exchanges that it sent messages to."""
        try:
            batch: Batch = next(running.steps)
        except StopIteration as stop:
            running.job.result = stop.value
            running.job.finished = clock()
            del self._running[running.rank, running.tag]
            return []
        running.recvs = deque(batch.recvs)
        running.unsent = []
        for peer, value in batch.sends:
            running.job.count(peer, value)
            message = _Message(value, running, peer)
            running.unsent.append(message)
            self._mail[running.rank, peer, running.tag].append(message)
        sent_to = (self._running.get((peer, running.tag)) for peer, _ in batch.sends)
        return [r for r in sent_to if r is not None]


class LocalTransport(Transport):
    """One virtual worker's access to its hub."""

    threaded = False

    def __init__(self, hub: Hub, rank: int):
        self.hub, self.rank, self.size = hub, rank, hub.size

    def channel(self, channel: ChannelId, in_flight: int, timeout: float) -> Channel:
        return LocalChannel(self, channel)

    def share(self, name: str, text: str) -> list[str]:
        raise InputError("virtual workers are made together by VirtualCluster, which shares on their behalf")

    def broadcast(self, tensors: list[Tensor], among: tuple[tuple[int, ...], ...] | None = None) -> None:
        raise InputError("virtual workers are made together by VirtualCluster, which copies on their behalf")


class LocalChannel(Channel):
    def __init__(self, transport: LocalTransport, channel: ChannelId):
        self._transport, self._channel = transport, channel

    def launch(self, job: Job) -> None:
        self._transport.hub.start(self._transport.rank, self._channel, job)

    def wait(self, job: Job, timeout: float) -> bool:
        return job.done

    def stuck(self, job: Job) -> PeerError | None:
        if job.done:
            return None
        late = self._transport.hub.lagging(job)
        return PeerError(
            f"virtual worker {self._transport.rank} needs round {job.round} of worker(s) "
            f"{', '.join(map(str, late))}, which have not stepped yet; step every worker once before any steps "
            "again, or park() those that have no more data"
        )
