"""The NCCL channel without a GPU: its group and its peers, with CUDA and the network replaced."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist

from gossamer.comm import Job
from gossamer.comm.exchange import Batch
from gossamer.comm.nccl import NcclChannel
from gossamer.comm.process_groups import WorkerGroup


def swap(scratch):
    yield Batch([(1, torch.zeros(2))], [(1, torch.zeros(2))])
    return None


def test_a_sub_group_makes_its_own_communicator_and_sends_to_global_ranks(monkeypatch):
    made, peers = [], []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda s: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda s: None))
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: made.append((ranks, options)))
    monkeypatch.setattr(dist, "P2POp", lambda act, tensor, peer, group: peers.append(peer))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: [])
    channel = NcclChannel(WorkerGroup(rank=0, ranks=(1, 3), group=None))
    channel.launch(Job(0, 0, swap))
    assert made == [([1, 3], {"backend": "nccl", "use_local_synchronization": True})]
    assert peers == [3, 3]
