"""Asynchronous members keep their events at the same time: after a rejoin, a pause and a collective call."""

import time

import pytest

from elastic import end_now, job, until

PAUSE = 0.3  # seconds of a step
SOFT = 0.15  # seconds that a worker waits for a partner
ALGORITHMS = ["ad-psgd", "a2cid2"]


def mixes_again(workers, exchanges):
    """Wait until each worker has made so many further exchanges. Clocks that stay apart never let it."""
    before = [w.gossip.stats()["rounds"] for w in workers]

    def done():
        assert all(w.error is None for w in workers)
        return all(w.gossip.stats()["rounds"] >= k + exchanges for w, k in zip(workers, before, strict=True))

    until(done)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_newcomer_exchanges_with_all_of_its_neighbors(monkeypatch, algorithm):
    with job(monkeypatch, 4, topology="ring", algorithm=algorithm, soft_deadline=SOFT) as made:
        workers = made.all(10**6, pause=PAUSE)
        workers[0].until(12)
        workers[1].kill()
        others = [workers[0], *workers[2:]]
        until(lambda: all(w.gossip.stats()["members"] == [0, 2, 3] for w in others))
        newcomer = made.start(1, 10**6, pause=PAUSE)
        until(lambda: newcomer.gossip is not None)
        members = [newcomer, *others]
        until(lambda: all(w.gossip.stats()["members"] == [0, 1, 2, 3] for w in members))
        mixes_again(members, 8)
        end_now(members)


def test_workers_that_enter_a_collective_call_at_different_times_exchange_after_it(monkeypatch):
    with job(monkeypatch, 3, topology="ring", algorithm="ad-psgd", soft_deadline=SOFT) as made:
        met = made.train

        def train(rank, step, model, optimizer):
            met(rank, step, model, optimizer)
            if step == 12:
                time.sleep(1.0 * rank)  # the clocks of the first ones stand still for that long
                with workers[rank].gossip.averaged():
                    pass

        made.train = train
        workers = made.all(10**6, pause=PAUSE)
        for worker in workers:
            worker.until(14)
        mixes_again(workers, 8)
        end_now(workers)


def test_a_worker_that_stood_still_exchanges_with_the_others_again(monkeypatch):
    with job(monkeypatch, 3, topology="ring", algorithm="ad-psgd", soft_deadline=SOFT) as made:
        workers = made.all(10**6, pause=PAUSE)
        workers[0].until(12)
        lane = workers[1].gossip.lanes[0]
        with lane._lock:  # neither its steps nor its events can go on
            at = workers[0].gossip.stats()["steps"]
            workers[0].until(at + 8)
        mixes_again(workers, 8)
        end_now(workers)
