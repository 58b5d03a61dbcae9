"""Exchanges of an accelerator's tensors through the host, on a simulated device; and which transport a job gets."""

import queue
import threading
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import gossamer
from gossamer import InputError
from gossamer.comm import Hub, Job, PeerError, Purpose, Turns, accelerator_of, choose_transport, wire_named
from gossamer.comm.accelerator import Accelerator, arrives
from gossamer.comm.exchange import Batch
from gossamer.comm.threaded import ThreadedChannel
from gossamer.comm.transport import ChannelId
from late_device import LateDevice, rounds_of

PARAMETERS = ChannelId(0, Purpose.PARAMETERS)


class QueueChannel(ThreadedChannel):
    """A communication thread that sends through queues, from whatever the memory holds at that moment."""

    def __init__(self, rank, queues, accelerator, fails=False):
        self.rank, self.queues, self.fails = rank, queues, fails
        super().__init__(PARAMETERS, 1, None, accelerator)

    def _carry(self, batch, job):
        if self.fails:
            raise PeerError("the peer is gone")
        for peer, message in batch.sends:
            self.queues[self.rank, peer].put(message.clone())
        for peer, message in batch.recvs:
            message.copy_(self.queues[peer, self.rank].get(timeout=300))

    def _cut(self):
        pass


@pytest.fixture
def devices():
    made = [LateDevice(seed) for seed in range(4)]
    yield made
    for device in made:
        device.close()


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(("topology", "per_node"), [("ring", [3]), ("aer", [2, 2]), ("complete", [2, 1])], ids=str)
def test_staged_exchanges_give_the_bits_of_virtual_workers(devices, topology, per_node, wire):
    n, hub, queues = sum(per_node), Hub(sum(per_node)), defaultdict(queue.SimpleQueue)
    plain = [hub.transport(rank).channel(PARAMETERS, 1, 60) for rank in range(n)]
    staged = [QueueChannel(rank, queues, devices[rank]) for rank in range(n)]
    expected = rounds_of(topology, per_node, 300, wire_named(wire), plain, None)
    found = rounds_of(topology, per_node, 300, wire_named(wire), staged, devices[:n])
    for channel in staged:
        channel.close(5.0)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_after_an_error_the_device_no_longer_reads_the_parameters(devices):
    device, x = devices[0], torch.ones(8)
    channel = QueueChannel(0, {}, device, fails=True)

    def make(scratch):
        y = x * 2  # queued on the device
        yield Batch([(1, y)], [(1, torch.empty(8))])
        return None

    job = Job(0, 0, make)
    with device.training():
        channel.launch(job)
    assert channel.wait(job, 300)
    assert isinstance(job.error, PeerError)
    assert all(not stream.entries for stream in device._streams)
    channel.close(1.0)


def test_tensors_on_the_host_pass_through():
    device, queues = LateDevice(0), defaultdict(queue.SimpleQueue)
    device.device = torch.device("meta")  # no tensor of this test is on it
    a, b = QueueChannel(0, queues, device), QueueChannel(1, queues, device)
    counts = [torch.tensor([[1, 2], [3, 4]]), torch.zeros(2, 2, dtype=torch.int64)]

    def make(peer, mine, theirs, scratch):
        yield Batch([(peer, mine)], [(peer, theirs)])
        return None

    jobs = [
        Job(0, 0, partial(make, 1, counts[0], counts[1])),
        Job(0, 0, partial(make, 0, counts[0], torch.empty(2, 2))),
    ]
    for channel, job in zip((a, b), jobs, strict=True):
        channel.launch(job)
    for channel, job in zip((a, b), jobs, strict=True):
        assert channel.wait(job, 300)
        assert job.error is None
        channel.close(1.0)
    assert counts[1].tolist() == [[1, 2], [3, 4]]
    device.close()


def test_threads_take_turns_on_streams_of_their_own(devices):
    device, x, lock = devices[0], torch.zeros(1), threading.Lock()
    turns = Turns(device)

    def beside():
        for _ in range(50):
            with lock, turns.beside():
                x.mul_(2).add_(1).sub_(1).div_(2).add_(1)

    thread = threading.Thread(target=beside)
    thread.start()
    with device.training():
        for _ in range(50):
            with lock, turns.training():
                x.mul_(4).add_(3).sub_(3).div_(4).add_(1)
    thread.join()
    device.synchronize()
    assert x.item() == 100


def test_polling_ends_at_its_time_limit(devices):
    with devices[0].holding():
        event = devices[0].mark()
        assert not arrives(event, 0)
        assert not arrives(event, 0.01)
    assert arrives(event, 300)


# -- the thin layer over torch ------------------------------------------------------------------------------------


class OneStream:
    """torch's stream API on a device that has one stream, no other, and no pinned memory (as MPS had)."""

    def __init__(self, monkeypatch):
        self.waits, self.marks = [], 0
        monkeypatch.setattr(torch, "Stream", self._refuse)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: self)
        empty = torch.empty

        def unpinned(*args, pin_memory=False, **kwargs):
            return self._refuse() if pin_memory else empty(*args, **kwargs)

        monkeypatch.setattr(torch, "empty", unpinned)

    def _refuse(self, *args, **kwargs):
        raise RuntimeError("not supported on this device")

    def record_event(self):
        self.marks += 1
        return SimpleNamespace(query=lambda: True)

    def wait_event(self, event):
        self.waits.append(event)


def test_a_device_with_one_stream_and_without_pinned_memory(monkeypatch):
    stream = OneStream(monkeypatch)
    accelerator = Accelerator(torch.device("mps"))
    assert accelerator.stream() is stream
    with accelerator.running_on(stream):
        accelerator.wait_for(accelerator.mark())
    assert (len(stream.waits), stream.marks) == (1, 1)
    memory = accelerator.host_memory(16)
    assert (memory.dtype, memory.numel(), memory.is_pinned()) == (torch.uint8, 16, False)
    asked = []
    target = SimpleNamespace(device=torch.device("mps"), copy_=lambda source, non_blocking: asked.append(non_blocking))
    accelerator.copy(target, memory)
    assert asked == [False], "memory that is not pinned must be copied before the call returns"


# -- the choice ---------------------------------------------------------------------------------------------------


def on(kind):
    return None if kind == "cpu" else SimpleNamespace(device=torch.device(kind, 0))


@pytest.mark.parametrize(
    ("device", "nccl", "elastic", "asynchronous", "expected"),
    [
        ("cpu", True, False, False, "gloo"),
        ("cpu", True, True, False, "tcp"),
        ("cuda", True, False, False, "nccl"),
        ("cuda", False, False, False, "host"),
        ("cuda", True, True, False, "host"),
        ("cuda", True, False, True, "host"),
        ("xpu", True, False, False, "host"),
        ("mps", False, True, False, "host"),
    ],
)
def test_auto(monkeypatch, device, nccl, elastic, asynchronous, expected):
    monkeypatch.setattr("gossamer.comm.choice.available_backends", lambda: {"nccl": nccl})
    chosen = choose_transport("auto", on(device), "awc", elastic=elastic, asynchronous=asynchronous)
    assert chosen == expected
    again = choose_transport("host", on(device), "awc", elastic=elastic, asynchronous=asynchronous)
    assert again == "host"


@pytest.mark.parametrize(
    ("asked", "device", "elastic", "asynchronous", "message"),
    [
        ("nccl", "cpu", False, False, "needs parameters on a CUDA or ROCm device, and they are on cpu"),
        ("nccl", "mps", False, False, "and they are on mps"),
        ("nccl", "cuda", True, False, "cannot be used with on_failure='continue'"),
        ("nccl", "cuda", False, True, "cannot be used with algorithm='ad-psgd'"),
        ("gloo", "cuda", False, False, "the parameters are on cuda; use transport='host'"),
        ("tcp", "xpu", True, False, "the parameters are on xpu; use transport='host'"),
        ("gloo", "cpu", True, False, "gloo cannot stop waiting for a peer; use transport='tcp'"),
    ],
)
def test_refusals(monkeypatch, asked, device, elastic, asynchronous, message):
    monkeypatch.setattr("gossamer.comm.choice.available_backends", lambda: {"nccl": True})
    with pytest.raises(InputError, match=message):
        choose_transport(asked, on(device), "ad-psgd", elastic=elastic, asynchronous=asynchronous)


def test_values_that_nccl_receives_cannot_be_checked(monkeypatch):
    monkeypatch.setattr("gossamer.comm.choice.available_backends", lambda: {"nccl": True})
    job = {"elastic": False, "asynchronous": False, "guarded": True}
    assert choose_transport("auto", on("cuda"), "awc", **job) == "host"
    with pytest.raises(InputError, match="cannot be used with a NeighborGuard"):
        choose_transport("nccl", on("cuda"), "awc", **job)


def test_nccl_without_nccl(monkeypatch):
    monkeypatch.setattr("gossamer.comm.choice.available_backends", lambda: {"nccl": False})
    with pytest.raises(InputError, match="needs a build of torch with NCCL; use transport='host'"):
        choose_transport("nccl", on("cuda"), "awc", elastic=False, asynchronous=False)


@pytest.mark.parametrize("value", ["ib", None, 3])
def test_unknown_names(value):
    with pytest.raises(InputError, match="transport must be one of auto, gloo, tcp, nccl, host, got"):
        gossamer.Exchange(transport=value)


def test_several_devices_are_refused():
    tensors = [SimpleNamespace(device=torch.device("cuda", i)) for i in (1, 0)]
    with pytest.raises(InputError, match="several devices \\(cuda:0, cuda:1\\)"):
        accelerator_of(tensors)
    assert accelerator_of([torch.zeros(1)]) is None
    assert accelerator_of(tensors[:1]).device == torch.device("cuda", 1)


def test_virtual_workers_need_no_transport():
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    with pytest.raises(InputError, match="virtual workers share one process and need no transport"):
        gossamer.VirtualCluster(2).decentralize(models, optimizers, exchange=gossamer.Exchange(transport="host"))
