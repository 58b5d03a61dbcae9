"""Collective calls that go wrong on real workers: different calls, a missing worker, a death, and close() after it."""

import os
import signal
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from test_engine_startup import in_child, parents, sgd
from workers import loss_of, mlp, real, seeded, vector

import gossamer

__all__ = ["parents"]


def caught(call):
    """The type and text of the error that `call` raises."""
    try:
        call()
    except gossamer.GossamerError as error:
        return type(error).__name__, str(error)
    return None, ""


def average(gossip):
    with gossip.averaged():
        pass


CALLS = {
    "averaged()": average,
    "state_dict()": lambda gossip: gossip.state_dict(),
    "consensus_distance()": lambda gossip: gossip.consensus_distance(),
}


def different(rank, decentralize, first, second, algorithm):
    model = seeded(rank, mlp)
    optimizer = sgd(model)
    gossip = decentralize(model, optimizer, broadcast=False, algorithm=algorithm)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    before = vector(model)
    kind, said = caught(lambda: CALLS[first if rank != 1 else second](gossip))
    unchanged = algorithm != "awc" or torch.equal(before, vector(model))
    with gossip.averaged():
        mean = vector(model)
    gossip.close()
    return kind, said, unchanged, mean


@pytest.mark.parametrize(
    ("first", "second", "algorithm"),
    [
        ("averaged()", "state_dict()", "awc"),
        ("consensus_distance()", "averaged()", "awc"),
        ("averaged()", "consensus_distance()", "ad-psgd"),
    ],
)
def test_different_calls_are_named_and_training_can_continue(pools, first, second, algorithm):
    results = pools(3).run(real, different, first, second, algorithm)
    for rank, (kind, said, unchanged, mean) in enumerate(results):
        assert kind == "DifferentCalls"
        assert f"worker {rank} is in {first if rank != 1 else second}" in said
        assert unchanged
        assert torch.equal(mean, results[0][3])


def death_in_a_collective(rank, decentralize, who, folder):
    """All workers but `who` are in averaged() with nothing in flight to it when it dies."""
    model = seeded(0, mlp)
    optimizer = sgd(model)
    gossip = decentralize(model, optimizer, topology="complete", algorithm="atc")
    for step in range(3):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    Path(folder, str(rank)).touch()
    if rank == who:
        while len(list(Path(folder).iterdir())) < 3:
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    return caught(lambda: average(gossip)), caught(gossip.close)


def test_a_death_is_noticed_by_workers_that_wait_in_a_collective_call(parents, tmp_path):
    results = parents.run(in_child, death_in_a_collective, 2, str(tmp_path), timeout=300)
    assert results[2] == ("exit", -signal.SIGKILL)
    for outcome, errors in results[:2]:
        assert outcome == "returned"
        for (kind, said), call in zip(errors, ("averaged()", "close()"), strict=True):
            assert kind == "PeerError"
            assert f"is in {call} and lost worker 2" in said  # and not: did not call it within the timeout


def close_after_failure(rank, decentralize, flag):
    model = seeded(0, mlp)
    gossip = decentralize(model, sgd(model))
    gossip.coordinator._barrier._timeout = 2.0
    if rank == 0:
        errors = caught(lambda: average(gossip)), caught(gossip.close)
        Path(flag).touch()
        return errors
    while not Path(flag).exists():  # alive, and not in any call, until worker 0 is done
        time.sleep(0.05)
    gossip.__exit__(RuntimeError, None, None)
    return None


def test_close_after_a_failed_collective_call_respects_the_timeout(pools, tmp_path):
    failed, closed = pools(2).run(real, close_after_failure, str(tmp_path / "closed"))[0]
    assert failed[0] == closed[0] == "PeerError"
    assert "worker 0 is in averaged() but worker(s) 1 did not call it within 2 s" in failed[1]
    assert "worker 0 is in close() but worker(s) 1 did not call it within 2 s" in closed[1]


def sockets():
    return sum(os.readlink(e).startswith("socket:") for e in Path("/proc/self/fd").iterdir() if e.is_symlink())


def connections(rank, decentralize):
    model = seeded(0, mlp)
    before = sockets()
    with decentralize(model, sgd(model), topology="complete") as gossip:
        opened = sockets() - before
        average(gossip)
        return opened, sockets() - before


def test_the_first_average_opens_no_store_connection_for_each_peer(pools):
    """Worker 0 hosts the store. The others open gloo's listener and one connection to each peer."""
    for opened, later in pools(5).run(real, connections)[1:]:
        assert opened <= 2  # one more client of the store
        assert later - opened <= 4 + 2


def load_foreign_state(rank, decentralize):
    model = seeded(0, mlp)
    gossip = decentralize(model, sgd(model))
    state = gossip.state_dict()
    given = {**state, "topology": "star"} if rank == 1 else state
    refused = caught(lambda: gossip.load_state_dict(given))
    gossip.load_state_dict(state)
    gossip.close()
    return refused


def test_a_state_that_one_worker_cannot_load_is_refused_by_all(pools):
    results = pools(3).run(real, load_foreign_state)
    assert [kind for kind, _ in results] == ["InputError"] * 3
    assert "topology 'star'" in results[1][1]
    assert all("worker(s) 1 cannot load the state" in said for _, said in (results[0], results[2]))


def nest(rank, decentralize):
    model = seeded(rank, mlp)
    gossip = decentralize(model, sgd(model), broadcast=False)
    before = vector(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no step was taken, and nothing was trained unseen
        with gossip.averaged():
            distance = gossip.consensus_distance()
            with gossip.averaged():
                pass
            inside = gossip.in_meeting
            kind, said = caught(gossip.close)
    restored = torch.equal(before, vector(model))
    gossip.close()
    gossip.close()
    return distance, inside, gossip.in_meeting, kind, said, restored


def test_averaged_blocks_nest_and_refuse_close(pools):
    for distance, inside, after, kind, said, restored in pools(2).run(real, nest):
        assert distance < 1e-6
        assert inside
        assert not after
        assert kind == "GossamerError"
        assert "leave the block first" in said
        assert restored


def endless(rank, decentralize, timeout):
    model = seeded(0, mlp)
    optimizer = sgd(model)
    with decentralize(model, optimizer, timeout=timeout) as gossip:
        for step in range(2):
            loss_of(model, rank, step).backward()
            optimizer.step()
        return gossip.consensus_distance()


@pytest.mark.parametrize("timeout", [1e10, timedelta.max])
def test_a_timeout_may_be_as_long_as_forever(pools, timeout):
    assert len(pools(2).run(real, endless, timeout)) == 2


def closed_differently(rank, decentralize):
    model = seeded(rank, mlp)
    optimizer = sgd(model)
    gossip = decentralize(model, optimizer, broadcast=False)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    own = vector(model)
    _, said = caught(lambda: gossip.close(average=rank != 1))
    return said, torch.equal(own, vector(model)), caught(lambda: average(gossip))[1]


def test_workers_must_agree_on_what_close_leaves(pools):
    for said, unchanged, after in pools(3).run(real, closed_differently):
        assert "close(average=False)" in said
        assert "close()" in said
        assert unchanged
        assert "after close()" in after
