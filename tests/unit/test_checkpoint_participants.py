"""Checkpoints of an elastic job: parts of different meetings, departed workers, checkpoints of more workers."""

import pytest
import torch
from torch import nn

from gossamer import GossamerError, Participation, VirtualCluster
from gossamer.checkpoint import files
from gossamer.checkpoint.participants import Participants
from gossamer.comm.tcp import Member, Record
from gossamer.engine.elastic.meeting import Meeting
from gossamer.topology import Layout


def write(folder, step, workers, meeting=""):
    for worker in range(workers):
        files.write_part(folder, step, worker, {"meeting": meeting}, step, meeting)
    found = files.receipts(folder, step, workers, meeting)
    files.commit(folder, step, [(w,) for w in range(workers)], [found[w] for w in range(workers)])


def test_a_checkpoint_of_more_workers_is_not_replaced(tmp_path):
    write(tmp_path, 10, 3)
    with pytest.raises(GossamerError, match="there is a checkpoint of 3 workers, and this one has 2"):
        write(tmp_path, 10, 2)
    assert files.read_manifest(tmp_path, 10).workers == 3
    write(tmp_path, 10, 4)
    assert files.read_manifest(tmp_path, 10).workers == 4


def test_parts_of_another_meeting_are_ignored(tmp_path):
    for worker in range(3):
        files.write_part(tmp_path, 10, worker, {}, 10, "before")
    files.abandon(tmp_path, 10, "worker 1 is gone", "before")
    assert files.abandoned(tmp_path, 10, "before") == "worker 1 is gone"
    files.write_part(tmp_path, 10, 1, {}, 10, "now")
    assert list(files.receipts(tmp_path, 10, 2, "now")) == [1]
    assert files.abandoned(tmp_path, 10, "now") is None
    files.write_part(tmp_path, 10, 0, {}, 10, "now")
    ready = files.receipts(tmp_path, 10, 2, "now")
    files.commit(tmp_path, 10, [(0,), (1,)], [ready[0], ready[1]])
    assert files.read_manifest(tmp_path, 10).workers == 2
    assert not list((tmp_path / "step-00000010").glob("worker-*.json"))


class Handle:
    """The part of a handle that `Participants` needs to know who saves together."""

    joined = in_meeting = False
    steps = (3,)

    def __init__(self):
        self.met = Participation(2, (1,), ((0,), (1,)), steps=4, meeting="job/1", departed=lambda: {0: "worker 0 left"})

    def participation(self):
        return self.met

    def state_dicts(self):
        return [{}]


def test_participants_stay_those_of_their_own_meeting():
    """Files are written while training continues and the workers may already have met again."""
    handle, model = Handle(), nn.Linear(2, 2)
    workers = Participants(handle, model, torch.optim.SGD(model.parameters(), lr=0.1), None)
    workers.gossip_states()
    handle.met = Participation(1, (0,), ((0,),), steps=9, meeting="job/2")
    assert (workers.total, workers.places, workers.meeting, workers.leads) == (2, (1,), "job/1", False)
    assert workers.agree_on_step(3) == 4
    assert workers.departed() == {0: "worker 0 left"}
    workers.gossip_states()
    assert (workers.total, workers.places, workers.meeting, workers.leads) == (1, (0,), "job/2", True)
    assert workers.departed() == {}


def test_a_replacement_of_the_same_rank_does_not_hide_a_death():
    def record(epoch, **processes):
        return Record(epoch, {int(r[1:]): Member(p, "", 0, "") for r, p in processes.items()}, [0])

    meeting = Meeting(7, 3, ((0, "a"), (1, "b")), Layout.of([2]), [0], 10)
    assert meeting.gone(record(3, w0="a", w1="b", w2="c")) == set()
    assert meeting.gone(record(4, w0="a", w1="new")) == {1}
    assert meeting.gone(record(4, w0="a")) == {1}
    assert meeting.gone(record(2, w0="a")) == set(), "an older record does not know all of them yet"


def test_a_step_of_two_optimizers_is_one_step():
    models = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
    optimizers = [[torch.optim.SGD(layer.parameters(), lr=0.1) for layer in m] for m in models]
    gossips = VirtualCluster(per_node=[2]).decentralize(models, optimizers, topology="ring")
    for _ in range(3):
        for model, own in zip(models, optimizers, strict=True):
            model(torch.ones(1, 2)).sum().backward()
            for optimizer in own:
                optimizer.step()
    stats = gossips[0].stats()
    assert stats["steps"] == 3
    assert [lane["steps"] for lane in stats["lanes"]] == [3, 3]
