"""The NCCL channel on simulated devices: streams are late and overtake each other, and a peer may not come."""

import itertools
import threading
import time
from collections import defaultdict, deque
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import gossamer.comm.deadline as deadlines
from gossamer.comm import Hub, Job, PeerError, Plain, Purpose, clock, exchange, wire_named
from gossamer.comm.nccl import NcclChannel
from gossamer.comm.process_groups import WorkerGroup
from gossamer.comm.store_transport import StoreTransport
from gossamer.comm.threaded import ThreadedChannel
from gossamer.comm.transport import ChannelId
from gossamer.engine.lane import STALLED_AFTER, Lane
from gossamer.errors import GossamerWarning
from gossamer.topology import Layout, build
from gossamer.topology.schedule import Schedule
from late_device import LateDevice, rounds_of


class Network:
    """Point-to-point messages as NCCL carries them: a batch is done on the stream when both sides of all are there."""

    def __init__(self, monkeypatch, size, **device):
        self.devices = [LateDevice(seed, **device) for seed in range(size)]
        self.groups, self.firsts, self.aborted = [], [], []
        self._lock, self._boxes = threading.Lock(), defaultdict(deque)
        monkeypatch.setattr(dist, "new_group", self._new_group)
        monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: self.firsts.append(group.rank))
        monkeypatch.setattr(dist, "P2POp", lambda act, tensor, peer, group: (act, tensor, peer, group))
        monkeypatch.setattr(dist, "batch_isend_irecv", self._batch)
        self.transports = [
            SimpleNamespace(rank=r, lost=lambda: None, watch=lambda p: None, first_lost=lambda p: p, flights={})
            for r in range(size)
        ]
        for transport in self.transports:
            transport.loss = partial(StoreTransport.loss, transport)

    def channel(self, rank, ranks=None, timeout=300.0):
        self._opening = rank
        workers = WorkerGroup(rank, tuple(range(len(self.devices))) if ranks is None else ranks, None)
        return NcclChannel(self.transports[rank], workers, self.devices[rank], timeout)

    def sent_between(self):
        """The pairs (sender, receiver) of global ranks that a message was posted for."""
        with self._lock:
            return {pair for pair, box in self._boxes.items() if box}

    def close(self):
        for device in self.devices:
            device.close()

    def _new_group(self, ranks, **options):
        rank = self._opening
        self.groups.append((ranks, options))
        return SimpleNamespace(rank=rank, global_rank=ranks[rank], abort=lambda: self.aborted.append(rank))

    def _batch(self, operations):
        group = operations[0][3]
        sends = [(peer, [tensor]) for act, tensor, peer, _ in operations if act is dist.isend]
        recvs = [(peer, tensor) for act, tensor, peer, _ in operations if act is dist.irecv]
        mine, posted = group.global_rank, []

        def ready():
            with self._lock:
                if not posted:
                    posted.append(True)
                    for peer, message in sends:
                        self._boxes[mine, peer].append(message)
                while recvs and self._boxes[recvs[0][0], mine]:
                    message = self._boxes[recvs[0][0], mine].popleft()
                    recvs.pop(0)[1].copy_(message.pop())
                return not recvs and all(not message for _, message in sends)

        self.devices[group.rank]._current().put(lambda: None, ready)
        return [SimpleNamespace(wait=lambda: None)]


@pytest.fixture
def network(monkeypatch):
    made = []

    def make(size, **device):
        made.append(Network(monkeypatch, size, **device))
        return made[-1]

    yield make
    for network in made:
        network.close()


@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize(("topology", "per_node"), [("ring", [3]), ("aer", [2, 2]), ("complete", [2, 1])], ids=str)
def test_late_streams_give_the_bits_of_virtual_workers(network, topology, per_node, wire):
    n, elements = sum(per_node), 300
    net, hub = network(n), Hub(n)
    expected = rounds_of(
        topology,
        per_node,
        elements,
        wire_named(wire),
        [hub.transport(r).channel(ChannelId(0, Purpose.PARAMETERS), 1, 60) for r in range(n)],
        None,
    )
    found = rounds_of(topology, per_node, elements, wire_named(wire), [net.channel(r) for r in range(n)], net.devices)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def swap(x, scratch):
    """An exchange of a whole tensor with worker 1."""
    program = Schedule(build("ring", Layout.of([2]))).program(0, 0, 0, x.numel())
    return exchange(program, x, torch.empty(x.numel() + 2), Plain(), scratch)


def test_a_wait_ends_at_its_time_limit_and_not_before_the_peer_comes(network):
    net = network(2)
    channel = net.channel(0)
    job = Job(7, 0, partial(swap, torch.ones(4)))
    with net.devices[0].training():
        channel.launch(job)
    assert not channel.wait(job, 0.02)
    assert not channel.wait(job, 0)
    assert not job.done
    assert job.blocked_on == 1


def test_a_held_device_is_not_done(network):
    """Both sides are there, and the device has not come to it yet."""
    net = network(2)
    channels = [net.channel(0), net.channel(1)]
    with net.devices[0].holding():
        jobs = []
        for rank, channel in enumerate(channels):
            program = Schedule(build("ring", Layout.of([2]))).program(0, 0, rank, 4)
            out = torch.empty(6)
            jobs.append(Job(0, 0, partial(exchange, program, torch.full((4,), float(rank)), out, Plain())))
            with net.devices[rank].training():
                channel.launch(jobs[-1])
        assert not channels[0].wait(jobs[0], 0.02)
        assert jobs[0].blocked_on == 1
    assert channels[0].wait(jobs[0], 300)
    assert channels[1].wait(jobs[1], 300)
    assert jobs[0].result.out.tolist() == [1.0] * 4
    assert jobs[0].blocked_on is None


def waiting_lane(channel, timeout, stalled):
    """As much of a lane as `Lane.wait` needs."""
    return SimpleNamespace(
        rank=0,
        k=8,
        channel=channel,
        settings=SimpleNamespace(timeout=timeout),
        coordinator=SimpleNamespace(stalled=lambda lane, k, assist: stalled.append(k)),
        metrics=SimpleNamespace(waited_for=lambda job, since, until: None),
        _stalled=False,
    )


def test_unequal_data_nudges_warns_and_raises_like_every_transport(network, monkeypatch):
    monkeypatch.setattr(deadlines, "WARN_AFTER", 0.1)
    monkeypatch.setattr(deadlines, "clock", partial(next, itertools.count(0.0, 0.2)))  # each look is 0.2 s later
    net = network(2)
    channel, stalled = net.channel(0), []
    job = Job(7, 3, partial(swap, torch.ones(4)))
    with net.devices[0].training():
        channel.launch(job)
    with (
        pytest.warns(GossamerWarning, match=r"worker 1 \(round 7, bucket 3\)"),
        pytest.raises(PeerError, match=r"worker 0 waited .* for worker 1 \(round 7, bucket 3\) and gives up"),
    ):
        Lane.wait(waiting_lane(channel, 0.5, stalled), job)
    assert stalled
    assert set(stalled) == {8}


def test_a_dead_peer_ends_the_wait(network):
    net = network(2)
    channel = net.channel(0)
    net.transports[0].lost = lambda: 1
    job = Job(7, 0, partial(swap, torch.ones(4)))
    with net.devices[0].training():
        channel.launch(job)
    with pytest.raises(PeerError, match="worker 0 lost worker 1 in round 7, bucket 0"):
        Lane.wait(waiting_lane(channel, 300.0, []), job)


def test_every_channel_of_a_worker_waits_for_the_jobs_of_its_other_channels(network):
    """Collective calls wait for the exchanges of all lanes on the first lane's channel."""
    net = network(2)
    channels = [[net.channel(rank) for _ in range(2)] for rank in range(2)]  # by rank and lane
    jobs = []
    for rank in range(2):
        program = Schedule(build("ring", Layout.of([2]))).program(0, 0, rank, 4)
        jobs.append(Job(0, 0, partial(exchange, program, torch.full((4,), float(rank)), torch.empty(6), Plain())))
        assert not channels[rank][0].wait(jobs[rank], 0)
        with net.devices[rank].training():
            channels[rank][1].launch(jobs[rank])
    for rank in range(2):
        Lane.wait(waiting_lane(channels[rank][0], 300.0, []), jobs[rank])
        assert jobs[rank].done
        assert channels[rank][1].wait(jobs[rank], 0)
    assert not any(transport.flights for transport in net.transports)


def test_a_closed_channel_leaves_the_jobs_of_the_others_alone(network):
    net = network(2)
    closed, other = net.channel(0), net.channel(0)
    job = Job(7, 0, partial(swap, torch.ones(4)))
    with net.devices[0].training():
        other.launch(job)
    closed.close(0.0)
    assert not net.aborted
    assert not closed.wait(job, 0)
    assert job.blocked_on == 1


class HeldChannel(ThreadedChannel):
    """A channel of gloo whose jobs end when the test says so."""

    def __init__(self):
        self.release = threading.Event()
        super().__init__(ChannelId(0, Purpose.CONTROL), 1, None)

    def _carry(self, batch, job):
        assert self.release.wait(300)

    def _cut(self):
        pass


def test_a_job_of_a_gloo_channel_is_not_polled(network):
    """Each turn of the wait nudges the other workers and asks the store."""
    channel, control, turns = network(2).channel(0), HeldChannel(), []

    def stalled(lane, k, assist):
        turns.append(clock())
        if len(turns) == 4:
            control.release.set()

    lane = waiting_lane(channel, 300.0, [])
    lane.coordinator.stalled = stalled
    job = Job(1, 0, partial(swap, torch.ones(4)))
    control.launch(job)
    Lane.wait(lane, job)
    assert job.done
    assert turns[3] - turns[0] > 2.5 * STALLED_AFTER
    control.close(30.0)


@pytest.mark.parametrize("comes", [True, False])
def test_close_ends_what_is_in_flight(network, comes):
    net = network(2)
    channel = net.channel(0)
    job = Job(0, 0, partial(swap, torch.ones(4)) if not comes else lambda scratch: iter(()))
    with net.devices[0].training():
        channel.launch(job)
    channel.close(30.0 if comes else 0.05)
    assert net.aborted == ([] if comes else [0])


def test_a_sub_group_makes_its_own_communicator_and_sends_to_global_ranks(network):
    net, peers = network(2), []
    net.transports[0].watch = peers.append
    channel = net.channel(0, ranks=(1, 3), timeout=300)
    (made,) = net.groups
    assert made[0] == [1, 3]
    assert (made[1]["backend"], made[1]["use_local_synchronization"]) == ("nccl", True)
    assert made[1]["timeout"].total_seconds() > 60, "NCCL's watchdog would end the process before our error"
    assert net.firsts == [0], "all workers take part in the first operation of a communicator"
    with net.devices[0].training():
        channel.launch(Job(0, 0, partial(swap, torch.ones(2))))
    assert peers == [1]
    while (1, 3) not in net.sent_between():
        time.sleep(0.001)
