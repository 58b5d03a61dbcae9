"""What a meeting costs: the requests to the directory grow with the number of workers, not with its square."""

import threading
import time

import pytest
from torch.distributed import HashStore

from gossamer.comm.tcp import Member, Record
from gossamer.engine.elastic.meeting import Attendee, Meetings

REQUESTS = ("set", "get", "check", "add", "compare_set", "multi_get", "delete_key")


class CountedStore:
    """A store that counts its requests."""

    def __init__(self):
        self._store, self._lock = HashStore(), threading.Lock()
        self.requests = self.signs = 0

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
    """Requests of three meetings of `n` threads, one of which comes `late` seconds after the others."""
    record = Record(1, {r: Member(f"process-{r}", "127.0.0.1", 1 + r, "node") for r in range(n)}, [0])
    store, everyone, failures = CountedStore(), [], []
    everybody = [Members(rank, record, store, everyone) for rank in range(n)]

    def run(members):
        meetings = Meetings(members, 60.0, 30.0)
        try:
            for k in range(3):
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
        thread.join(60.0)
    assert not failures, failures[0]
    assert not any(t.is_alive() for t in threads)
    return store.requests / 3


@pytest.mark.parametrize("n", [2, 8, 32, 64])
def test_a_meeting_costs_a_few_requests_per_worker(n):
    assert cost(n) <= 16 * n + 10  # 11 n, and some more where a thread is late by a second


def test_waiting_for_a_late_worker_does_not_read_everything_again_and_again():
    assert cost(32, late=0.5) <= 16 * 32 + 10
