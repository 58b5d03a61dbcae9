"""What a meeting costs: the requests to the directory grow with the number of workers, not with its square."""

import json
import threading
import time

import pytest
from torch.distributed import HashStore

from gossamer.comm.tcp import Member, Record
from gossamer.engine.elastic import attendance
from gossamer.engine.elastic import meetings as module
from gossamer.engine.elastic.meeting import Attendee
from gossamer.engine.elastic.meetings import KEPT, Meetings

REQUESTS = ("set", "get", "check", "add", "compare_set", "multi_get", "delete_key")


class CountedStore:
    """A store that counts its requests, and the keys that meetings leave in it."""

    def __init__(self):
        self._store, self._lock = HashStore(), threading.Lock()
        self.requests = self.signs = 0

    def left(self):
        return sorted(key for key in self._store.list_keys() if "present/" not in key)

    def __getattr__(self, name):
        assert name in REQUESTS

        def request(*args):
            with self._lock:
                if "present/" in str(args[0]):
                    self.signs += 1  # one per worker and second, whether or not there is a meeting
                else:
                    self.requests += 1
                return getattr(self._store, name)(*args)

        return request


class Members:
    """A member of a job without links: news reach everybody at once."""

    def __init__(self, rank, record, store, everyone):
        self.rank, self.record, self.me, self.directory = rank, record, record.members[rank], self
        self.size = len(record.members)
        self.decided, self._news, self._store, self._everyone = -1, threading.Condition(), store, everyone
        everyone.append(self)

    def ask(self, request):
        return request(self._store)

    def announce(self, stage):
        for member in self._everyone if stage > self.decided else ():
            with member._news:
                member.decided = max(stage, member.decided)
                member._news.notify_all()

    def await_news(self, stage, seconds):
        with self._news:
            return self._news.wait_for(lambda: self.decided >= stage, seconds)


def cost(n, late=0.0):
    """Requests of a meeting of `n` threads, one of which comes `late` seconds after the others."""
    return meet(n, 3, late).requests / 3


def meet(n, times, late=0.0):
    """Let `n` threads meet so many times; return their directory."""
    record = Record(1, {r: Member(f"process-{r}", "127.0.0.1", 1 + r, "node") for r in range(n)}, [0])
    store, everyone, failures = CountedStore(), [], []
    everybody = [Members(rank, record, store, everyone) for rank in range(n)]

    def run(members):
        meetings = Meetings(members, 300.0, 7200.0)
        try:
            for k in range(times):
                if members.rank == n - 1:
                    time.sleep(late)
                here = Attendee(members.rank, members.me.incarnation, "node", [k + members.rank], k, "averaged()")
                meeting = meetings.gather("averaged()", lambda here=here: here, lambda: None)
                assert meeting.ranks == tuple(range(n))
                assert meeting.rounds == [k + n - 1]
                assert meetings.conclude(True)
                meetings.end_call()
        except BaseException as error:
            failures.append(error)
        finally:
            meetings.close()

    threads = [threading.Thread(target=run, args=(m,)) for m in everybody]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not failures, failures[0]
    assert not any(t.is_alive() for t in threads)
    return store


@pytest.fixture
def untimed(monkeypatch):
    """Nobody looks again because time has passed: threads of a busy machine may be late by seconds."""
    monkeypatch.setattr(module, "RECHECK", 3600.0)
    monkeypatch.setattr(module, "THOROUGH", 3600.0)


@pytest.mark.parametrize("n", [2, 8, 32, 64])
def test_a_meeting_costs_a_few_requests_per_worker(untimed, n):
    assert cost(n) <= 11 * n + 10


def test_waiting_for_a_late_worker_does_not_read_everything_again_and_again(untimed):
    assert cost(32, late=0.5) <= 11 * 32 + 10


def test_the_directory_forgets_meetings_that_are_over(untimed):
    few, many = meet(3, KEPT + 1), meet(3, 4 * KEPT)
    assert len(many.left()) == len(few.left())  # whatever the number of meetings
    assert "meeting/0" not in many.left()
    assert f"meeting/{4 * KEPT - 1}" in many.left()
    assert few.requests <= (KEPT + 1) * (16 * 3 + 10)


def test_one_worker_alone_leaves_no_keys_either():
    assert len(meet(1, 4 * KEPT).left()) == len(meet(1, KEPT + 1).left())


def test_waiting_inside_a_meeting_does_not_read_the_signs_of_all_again_and_again(monkeypatch):
    n, store = 64, CountedStore()
    monkeypatch.setattr(module, "WATCH", -1.0)  # look each time
    monkeypatch.setattr(attendance, "LOOK", -1.0)
    came = [Attendee(r, f"process-{r}", "node", [7], 7, "averaged()") for r in range(n)]
    store.set("meeting/0", json.dumps([1, came]))
    meetings = Meetings(member_of(store, n), 60.0, 3600.0)
    try:
        meetings.gather("averaged()", here, lambda: None)
        before = store.signs
        looks, begun = store.requests, time.monotonic()
        for _ in range(50):
            assert not meetings.failed()
        periods = 1 + (time.monotonic() - begun) / (module.THOROUGH * n)
        assert store.requests - looks == 50
        assert store.signs - before <= 2 * n * periods  # of 50 n; and this worker's own signs
        store.set("outcome/0", "failed")
        assert meetings.failed()
    finally:
        meetings.close()


def member_of(store, n=2):
    record = Record(1, {r: Member(f"process-{r}", "127.0.0.1", 1 + r, "node") for r in range(n)}, [0])
    return Members(0, record, store, [])


def here():
    return Attendee(0, "process-0", "node", [7], 7, "averaged()")


def test_a_worker_that_was_away_for_many_meetings_goes_on_with_one_that_is_remembered():
    store = CountedStore()
    store.set("meetings/oldest", "40")
    store.set("meeting/40", json.dumps([1, [here(), [1, "process-1", "node", [9], 9, "averaged()"]]]))
    meetings = Meetings(member_of(store), 60.0, 30.0)
    try:
        assert meetings.gather("averaged()", here, lambda: None).number == 40
        assert "meeting/0/0" not in store.left()  # nobody would have come
    finally:
        meetings.close()


def test_a_worker_that_slept_through_the_end_of_a_meeting_concludes_it_alone():
    store = CountedStore()
    store.set("meeting/0", json.dumps([1, [here(), [1, "process-1", "node", [9], 9, "averaged()"]]]))
    meetings = Meetings(member_of(store), 60.0, 30.0)
    try:
        meetings.gather("averaged()", here, lambda: None)
        store.set("meetings/oldest", "40")
        assert meetings.conclude(True)
        assert meetings.last.alone
    finally:
        meetings.close()


@pytest.mark.parametrize("text", ["nonsense", "[]", '[0, "process-0"]', '[0, "process-0", "node", [Infinity], 7, ""]'])
def test_what_cannot_be_read_counts_as_not_posted_until_it_is_posted_again(text):
    store, refusals = CountedStore(), []
    members = member_of(store)
    members.refuse = refusals.append
    store.set("meeting/0/1", text)
    store.set("present/1", text)
    meetings = Meetings(members, 60.0, 30.0)

    def meanwhile():
        if refusals:  # worker 1 posts again
            store.set("meeting/0/1", json.dumps([1, "process-1", "node", [9], 9, "averaged()"]))

    try:
        assert meetings.gather("averaged()", here, meanwhile).ranks == (0, 1)
    finally:
        meetings.close()
    assert refusals
