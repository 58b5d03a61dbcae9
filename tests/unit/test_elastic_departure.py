"""A signal asks a worker to leave: the loop ends in time, or the others are told at half of the grace period."""

import ctypes
import os
import signal
import socket
import threading
import time

import pytest

from elastic import LIMIT, finish, job, until
from gossamer import GossamerWarning, InputError
from gossamer.comm.tcp import Ask, DirectoryClient, Unreachable
from gossamer.comm.tcp.links import LinkTable
from gossamer.engine.elastic import state_transfer
from gossamer.engine.elastic.departure import Departure
from gossamer.engine.elastic.meetings import Meetings


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
    assert told.wait(300)
    departure.close()
    assert signal.getsignal(usual) is signal.SIG_IGN


def test_the_others_are_told_while_the_main_thread_is_inside_a_long_call_of_c_code(usual):
    """Where no Python handler runs: it writes more into a pipe than the pipe holds."""
    told, times, libc, text = threading.Event(), [], ctypes.CDLL(None), bytes(2**20)
    ear, mouth = os.pipe()
    departure = Departure(told.set, [usual], grace=0.02)

    def send():
        left = len(text) - len(os.read(ear, 1))  # the main thread is inside the call now
        signal.pthread_kill(threading.get_ident(), usual)  # to this thread, so that nothing interrupts the call
        times.append(told.wait(300))
        while left:
            left -= len(os.read(ear, left))

    thread = threading.Thread(target=send)
    thread.start()
    assert libc.write(mouth, text, len(text)) == len(text)
    thread.join()
    departure.close()
    os.close(ear)
    os.close(mouth)
    assert times == [True]
    assert departure.asked


def test_another_library_hears_signals_as_before(usual):
    ear, bell = socket.socketpair()
    bell.setblocking(False)
    ear.settimeout(LIMIT)
    before = signal.set_wakeup_fd(bell.fileno())
    departure = Departure(lambda: None, [usual], grace=3600.0)
    try:
        os.kill(os.getpid(), usual)
        assert ear.recv(64) == bytes([usual])
        until(lambda: departure.remaining is not None)
    finally:
        departure.close()
        assert signal.set_wakeup_fd(before) == bell.fileno()
        ear.close()
        bell.close()


def test_the_grace_period_bounds_how_long_slower_founders_are_waited_for(usual, monkeypatch):
    waits = []
    with job(monkeypatch, 1, topology="ring") as made:
        (worker,) = made.all(0, lambda gossip: gossip)
        (gossip,) = finish([worker])
    gossip._job.leave = waits.append
    gossip._leave()
    gossip._departure = Departure(lambda: None, [usual], grace=10.0)
    os.kill(os.getpid(), usual)
    until(lambda: gossip._departure.remaining is not None)
    gossip._leave()
    gossip._departure.close()
    assert waits[0] is None
    assert 0 <= waits[1] <= 5.0


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


def test_a_worker_that_has_left_meets_alone_and_the_others_without_it(monkeypatch):
    """It waits in a collective call when the timer tells the others that it leaves."""

    def end(gossip):
        with gossip.averaged():
            return gossip.met.ranks, gossip.met.alone

    warned = pytest.warns(GossamerWarning, match=r"used worker 1's parameters only: it has left the job")
    with job(monkeypatch, 3, topology="ring", soft_deadline=5.0, hard_deadline=20.0) as made, warned:
        workers = [made.start(rank, 5 if rank == 1 else 100000, end, pause=0.005) for rank in range(3)]
        for worker in workers:
            worker.until(5)
        until(lambda: workers[1].gossip._meetings.parked)
        workers[1].gossip._job.leave()
        assert finish([workers[1]]) == [((1,), True)]
        others = [workers[0], workers[2]]
        for worker in others:
            worker.steps = 0
        assert finish(others) == [((0, 2), False)] * 2


@pytest.mark.parametrize("known_by", ["its sign in the directory", "the rounds that it reports"])
def test_a_child_that_has_another_members_state_is_not_waited_for(monkeypatch, known_by):
    """Worker 2 does not get the initial state of worker 0, its parent in the tree."""
    fetch, ask, refused, cut = LinkTable.fetch, DirectoryClient.ask, [], set()

    def fetched(self, address, kind, *args):
        if self.rank == 2 and kind is Ask.INITIAL_STATE:
            refused.append(address)
            raise ConnectionResetError("the test broke it")
        return fetch(self, address, kind, *args)

    def asked(self, *args, **kwargs):
        if self in cut:
            raise Unreachable("cut off")
        return ask(self, *args, **kwargs)

    monkeypatch.setattr(LinkTable, "fetch", fetched)
    monkeypatch.setattr(DirectoryClient, "ask", asked)
    monkeypatch.setattr(state_transfer, "FAREWELL", 3600.0)
    by_sign = known_by == "its sign in the directory"
    n = 5 if by_sign else 3  # in the larger ring worker 2 is no neighbor of worker 0, and reports nothing to it
    with job(monkeypatch, n, topology="ring", soft_deadline=5.0, hard_deadline=20.0) as made:
        workers = made.all(100000, pause=0.005)
        for worker in workers:
            worker.until(5)
        if not by_sign:
            until(lambda: any(workers[0].gossip.members.links.peer(2).rounds))
            cut.add(workers[0].gossip.members.directory)
        workers[0].steps = 0
        finish(workers[:1])
        for worker in workers:
            worker.steps = 0
        finish(workers)
    assert len(refused) == 1


def test_a_slower_founder_gets_the_initial_state_before_its_parent_leaves(monkeypatch):
    fetch, seen, go, asks, looks = LinkTable.fetch, Meetings.seen, threading.Event(), [], []

    def fetched(self, address, kind, *args):
        asks.append(kind)
        assert go.wait(300)
        return fetch(self, address, kind, *args)

    def looked(self, processes):
        looks.append(seen(self, processes))
        return looks[-1]

    monkeypatch.setattr(LinkTable, "fetch", fetched)
    monkeypatch.setattr(Meetings, "seen", looked)
    monkeypatch.setattr(state_transfer, "FAREWELL", 3600.0)
    with job(monkeypatch, 2, topology="ring", soft_deadline=5.0, hard_deadline=20.0) as made:
        workers = [made.start(0, 0), made.start(1, 100000, pause=0.005)]
        until(lambda: asks and len(looks) > 10, "the parent does not wait")
        assert not any(looks)
        assert workers[0].gossip.members.record.ranks == (0, 1)
        go.set()
        finish(workers[:1])
        workers[1].until(5)
        assert asks == [Ask.INITIAL_STATE]
        workers[1].steps = 0
        finish(workers[1:])
