"""Exchanges with a peer that does not answer: it is waited for once, and a weighted round goes on without it."""

import threading
from types import SimpleNamespace

import pytest
import torch

from gossamer.comm import Plain, exchange, wire_named
from gossamer.comm.tcp.transport import TcpChannel
from gossamer.comm.transport import Job, PeerError, Stamp
from gossamer.topology import Layout, Round
from gossamer.topology.plan import program
from linked import CHANNEL, PLAN, Worker, patient, until

__all__ = ["patient"]

RING = Round.weighted(4, [(i, j % 4, 0.25) for i in range(4) for j in (i - 1, i + 1)])


class Four:
    """Four linked workers and their channels; `silent` pairs cannot connect."""

    def __init__(self, silent=()):
        self.silent = {frozenset(pair) for pair in silent}
        self.workers = [Worker(rank, []) for rank in range(4)]
        for worker in self.workers:
            for other in self.workers:
                if other is not worker:
                    worker.know(other.rank, other.says.incarnation, other.address)
        for worker in self.workers:
            for other in self.workers[: worker.rank]:
                if frozenset((worker.rank, other.rank)) not in self.silent:
                    assert worker.connect(worker.peer(other.rank))
                    until(lambda worker=worker, other=other: other.peer(worker.rank).link is not None)
        members = [SimpleNamespace(rank=w.rank, links=w, connect_to=lambda rank: None) for w in self.workers]
        self.channels = [TcpChannel(member, CHANNEL, 1, None) for member in members]

    def launch(self, rank, k, value, wire=None, round=RING):
        steps = program(round, Layout.of([1] * 4), rank, value.numel())
        peers = frozenset(p.peer for step in steps for p in (*step.sends, *step.recvs))
        out = torch.zeros(2 * value.numel())

        def make(scratch):
            return exchange(steps, value, out, wire or Plain(), scratch)

        job = Job(k, 0, make, stamp=Stamp(1, PLAN, peers))
        self.channels[rank].launch(job)
        return job

    def done(self, rank, job):
        until(lambda: self.channels[rank].wait(job, 0.05))
        return job

    def close(self):
        closing = [threading.Thread(target=channel.close, args=(0.0,)) for channel in self.channels]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        for worker in self.workers:
            worker.close()


@pytest.fixture
def four():
    made = []

    def of(*silent):
        made.append(Four(silent))
        return made[-1]

    yield of
    for each in made:
        each.close()


def values():
    return [torch.full((3,), 10.0**rank) for rank in range(4)]


def test_a_late_peer_without_a_link_is_not_waited_for_again(four):
    """Its link was closed after a long silence, and it cannot be dropped: the directory does not answer."""
    made = four((0, 1), (0, 3))
    x = values()[0]
    for k in range(2):  # once for each neighbor
        job = made.launch(0, k, x)
        until(lambda job=job: job.blocked_on is not None)
        assert not made.channels[0].wait(job, 0.1)  # it waits for the link
        made.channels[0].give_up(job)
        assert isinstance(made.done(0, job).error, PeerError)
    third = made.done(0, made.launch(0, 2, x))  # nobody gives it up
    assert "was late before" in str(third.error)


@pytest.mark.parametrize("sends", [True, False])
def test_a_peer_that_only_receives_is_late_too_if_it_has_no_link(four, sends):
    made = four((0, 1))
    directed = Round(((0, 1), (2,), (3,)), ((1, 0, 0.5),) if sends else ((0, 1, 0.5),))
    first = made.launch(0, 0, values()[0], round=directed)
    until(lambda: first.blocked_on is not None)
    made.channels[0].give_up(first)
    assert isinstance(made.done(0, first).error, PeerError)
    assert made.workers[0].peer(1).late


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_a_weighted_round_leaves_out_the_peer_that_cannot_be_reached(four, wire):
    """Each of the pair mixes with its other neighbor, and its weight for the missing one goes to itself."""
    made = four((0, 1))
    for a, b in ((0, 1), (1, 0)):
        made.workers[a].peer(b).late = True
    x = values()
    jobs = [made.launch(rank, 0, x[rank], wire_named(wire)) for rank in range(4)]
    for rank, job in enumerate(jobs):
        assert made.done(rank, job).error is None, job.error
    mixed = torch.stack([job.result.out[:3] for job in jobs])
    matrix = torch.tensor([[0.75, 0, 0, 0.25], [0, 0.75, 0.25, 0], [0, 0.25, 0.5, 0.25], [0.25, 0, 0.25, 0.5]])
    assert torch.allclose(mixed, matrix @ torch.stack(x), rtol=1e-2 if wire == "bf16" else 1e-6)
    assert [job.left_out for job in jobs] == [{1}, {0}, set(), set()]


def test_the_peer_that_was_left_out_goes_on_as_well(four):
    """Worker 1 is alive, and has not heard that worker 0 takes it for late."""
    made = four()
    made.workers[0].peer(1).late = True
    x = values()
    jobs = {rank: made.launch(rank, 0, x[rank]) for rank in (0, 2, 3)}
    until(lambda: 1 in jobs[0].left_out)
    jobs[1] = made.launch(1, 0, x[1])
    for rank, job in jobs.items():
        assert made.done(rank, job).error is None, job.error
    assert torch.allclose(jobs[0].result.out[:3], 0.75 * x[0] + 0.25 * x[3])
    assert torch.allclose(jobs[1].result.out[:3], 0.75 * x[1] + 0.25 * x[2])


def test_peers_of_a_round_that_was_given_up_are_late_only_if_they_were_waited_for(four):
    """Worker 0 gives up the wait for one neighbor; the other one is alive, and only has not sent yet."""
    made = four()
    (_, first), (_, second) = sorted(
        (at, step.recvs[0].peer) for at, step in enumerate(program(RING, Layout.of([1] * 4), 0, 3))
    )
    job = made.launch(0, 0, values()[0])
    until(lambda: job.blocked_on == first)
    made.channels[0].give_up(job)
    assert isinstance(made.done(0, job).error, PeerError)  # nobody answered, so it has no result
    assert made.workers[0].peer(first).late
    assert not made.workers[0].peer(second).late


def test_a_round_without_any_answer_fails(four):
    made = four((0, 1), (0, 3))
    for rank in (1, 3):
        made.workers[0].peer(rank).late = True
    job = made.done(0, made.launch(0, 0, values()[0]))
    assert isinstance(job.error, PeerError)
    assert job.result is None


def test_a_uniform_group_fails_as_a_whole(four):
    made = four((0, 1))
    everyone = Round.uniform(4, [range(4)])
    for a, b in ((0, 1), (1, 0)):
        made.workers[a].peer(b).late = True
    jobs = [made.launch(rank, 0, x, round=everyone) for rank, x in enumerate(values())]
    for rank, job in enumerate(jobs):
        assert isinstance(made.done(rank, job).error, PeerError)
