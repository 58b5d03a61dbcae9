"""Asynchronous workers that leave before anybody has connected with them, or come late: the others are told whom."""

import re
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from workers import loss_of, mlp, real, seeded

import gossamer
from elastic import until
from gossamer.comm import deadline


def step(model, optimizer, rank):
    loss_of(model, rank, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.002)


def leaves_early(rank, decentralize, clock, leaver, at):
    """The leaver raises before its step number `at`; what the others get."""
    model = seeded(0, mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with decentralize(model, optimizer, topology="ring", algorithm="ad-psgd", clock=clock):
            for number in range(10**6):
                if rank == leaver and number == at:
                    raise ValueError("boom")
                step(model, optimizer, rank)
    except (ValueError, gossamer.GossamerError) as error:
        # The store lives in worker 0's process: leave it time to tell the others, as a launcher's would have.
        torch.distributed.barrier()
        return type(error).__name__, str(error)


@pytest.mark.parametrize("clock", ["wall", "virtual"])
def test_a_worker_that_leaves_before_its_first_exchange_is_missed_at_once(pools, clock):
    results = pools(3).run(real, leaves_early, clock, 1, 0 if clock == "virtual" else 3)
    assert results[1][0] == "ValueError"
    for rank in (0, 2):
        kind, message = results[rank]
        assert kind == "PeerError"
        # the other worker may have ended as well by the time this one connects to it: worker 1 is named anyway
        assert f"worker {rank} lost worker 1" in message or "it did not connect; worker 1 has failed" in message
        assert "\n" not in message


def leaves_others_waiting(rank, decentralize):
    """Worker 1 leaves while worker 0 is in a collective call."""
    model = seeded(0, mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gossip = decentralize(model, optimizer, topology="ring", algorithm="ad-psgd")
    try:
        step(model, optimizer, rank)
        if rank == 1:
            gossip._stop(drain=0.0)
        else:
            gossip.close()
    except gossamer.GossamerError as error:
        return str(error)
    finally:
        torch.distributed.barrier()


def test_a_worker_that_left_is_missed_in_a_collective_call(pools):
    message = pools(2).run(real, leaves_others_waiting)[0]
    assert "worker 0 lost worker 1, which left the job without close()" in message


def late(rank, decentralize, told, expected, **settings):
    """Worker 1 takes its first step when worker 0 has been warned of what is expected, and has looked often since then;
    what the workers are warned of."""
    before, deadline.WARN_AFTER = deadline.WARN_AFTER, 0.4
    check, looks, told = deadline.PeerWait.check, [], Path(told)
    model = seeded(0, mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def counted(self, *args):
        looks.append(self)
        check(self, *args)

    def watch():
        until(lambda: all(any(sentence_of(w).startswith(start) for w in list(caught)) for start in expected))
        seen = len(looks)
        until(lambda: len(looks) > seen + 10)
        deadline.WARN_AFTER = before  # on a busy machine there may be more waits
        told.touch()

    deadline.PeerWait.check = counted
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with decentralize(model, optimizer, topology="ring", algorithm="ad-psgd", **settings):
                if rank == 0:
                    threading.Thread(target=watch, daemon=True).start()
                else:
                    until(told.exists)
                for _ in range(12):
                    step(model, optimizer, rank)
                until(told.exists)  # in close() worker 0 would wait for a collective call
    finally:
        deadline.WARN_AFTER, deadline.PeerWait.check = before, check
    return [sentence_of(w) for w in caught if issubclass(w.category, gossamer.errors.GossamerWarning)]


def sentence_of(warning):
    return re.sub(r"waited \d+ s", "waited # s", str(warning.message))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["worker 0 has waited # s for worker(s) 1 to agree on the unit of their exchanges"]),
        (
            {"max_staleness": 2},
            [
                "worker 0 has waited # s for worker(s) 1 to agree on the unit of their exchanges",
                "worker 0 has waited # s for worker 1, which is more than max_staleness=2 steps behind",
            ],
        ),
        (
            {"clock": "virtual"},
            [
                "worker 0 has waited # s for worker 1 (event 0)",
                "worker 0 has waited # s for worker 1, its partner in event 0",
            ],
        ),
    ],
)
def test_a_long_wait_is_told_with_whom_it_is_for(pools, tmp_path, settings, expected):
    sentences, _ = pools(2).run(real, late, str(tmp_path / "told"), expected, **settings)
    for start in expected:
        (sentence,) = {text for text in sentences if text.startswith(start)}
        assert sentence.endswith("; it gives up after timeout=300 s")
    assert len(sentences) < 5  # once a wait, not once a look
