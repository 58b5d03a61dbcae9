"""A signal asks a worker to leave: the loop ends in time, or the others are told at half of the grace period."""

import os
import signal
import threading
import time

import pytest

from elastic import finish, job, until
from gossamer import InputError
from gossamer.engine.elastic.departure import Departure


@pytest.fixture
def usual():
    """SIGUSR1 as it was before."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, before)


def test_the_loop_is_asked_and_the_others_are_told_in_time(usual):
    told = threading.Event()
    departure = Departure(told.set, [usual], grace=0.02)
    assert not departure.asked
    os.kill(os.getpid(), usual)
    until(lambda: departure.asked)
    assert told.wait(20.0)
    departure.close()
    assert signal.getsignal(usual) is signal.SIG_IGN


def test_a_loop_that_ends_in_time_leaves_by_itself(usual):
    told = threading.Event()
    departure = Departure(told.set, [usual], grace=3600.0)
    os.kill(os.getpid(), usual)
    until(lambda: departure.asked)
    departure.close()
    assert not told.is_set()


def test_a_child_that_was_forked_later_ends_as_usual(usual):
    """A process of a data loader inherits the handler, and is ended by the same signal."""
    departure = Departure(lambda: None, [usual], grace=3600.0)
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), usual)
        time.sleep(60)  # the handler runs at the latest now, and ends the process
        os._exit(1)
    _, status = os.waitpid(child, 0)
    departure.close()
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == usual
    assert not departure.asked


def test_other_threads_cannot_set_handlers():
    errors = []

    def run():
        with pytest.raises(InputError, match="only the main thread can") as caught:
            Departure(lambda: None, [signal.SIGUSR1], 1.0)
        errors.append(caught.value)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors


def test_a_worker_that_was_told_to_leave_does_not_join_again(monkeypatch):
    with job(monkeypatch, 3, topology="ring", soft_deadline=5.0, hard_deadline=20.0) as made:
        workers = made.all(100000, pause=0.005)
        for worker in workers:
            worker.until(5)
        workers[1].gossip._job.leave()  # as the timer does; its loop goes on
        until(lambda: all(w.gossip.stats()["members"] == [0, 2] for w in (workers[0], workers[2])))
        workers[1].until(workers[1].gossip.stats()["steps"] + 30)
        assert workers[0].gossip.stats()["members"] == [0, 2]
        for worker in workers:
            worker.steps = 0
        finish(workers)
