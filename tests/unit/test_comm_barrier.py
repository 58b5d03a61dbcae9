"""The meeting of a collective call: different calls, missing workers and lost workers are named, and nothing hangs."""

import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from gossamer.comm import PeerError, RoundBarrier, Transport
from gossamer.errors import GossamerWarning


class Worker(Transport):
    """A transport that carries nothing and loses `missing` when the test says so."""

    def __init__(self, rank, size):
        self.rank, self.size, self.missing = rank, size, None

    def channel(self, channel, in_flight, timeout):
        raise NotImplementedError

    def share(self, name, text):
        raise NotImplementedError

    def lost(self):
        return self.missing


class Lane:
    def __init__(self, k):
        self.k = k

    def mix_only(self):
        self.k += 1

    def serve(self):
        self.k += 1
        return True

    def verify(self):
        pass

    def freeze(self):
        return self.k

    def run_to(self, number):
        self.k = number


def barriers(size, timeout=300.0, **options):
    store = HashStore()
    return [RoundBarrier(store, Worker(rank, size), timeout, **options) for rank in range(size)]


def together(calls):
    """Run each worker's call in a thread; return what each raised."""

    def outcome(call):
        try:
            call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


@pytest.mark.parametrize("meet", ["meet", "meet_events"])
def test_all_workers_run_to_the_furthest_round(meet):
    lanes = [[Lane(k)] for k in (4, 0, 2)]
    pairs = list(zip(barriers(3), lanes, strict=True))
    for _ in range(2):
        assert together([lambda b=b, w=w: getattr(b, meet)(w, "averaged()") for b, w in pairs]) == [None] * 3
        assert [w[0].k for w in lanes] == [4, 4, 4]


@pytest.mark.parametrize("meet", ["meet", "meet_events"])
def test_different_calls_raise_on_every_worker_and_the_next_call_works(meet):
    pairs = [(barrier, [Lane(1)]) for barrier in barriers(3)]
    calls = ["averaged()", "state_dict()", "averaged()"]
    errors = together([lambda b=b, w=w, c=c: getattr(b, meet)(w, c) for (b, w), c in zip(pairs, calls, strict=True)])
    assert [type(e) for e in errors] == [type(errors[0])] * 3
    assert isinstance(errors[0], PeerError)
    assert "worker 0 is in averaged(), worker 1 is in state_dict()" in str(errors[0])
    assert "worker 1 is in state_dict(), worker 0 is in averaged()" in str(errors[1])
    assert together([lambda b=b, w=w: getattr(b, meet)(w, "close()") for b, w in pairs]) == [None] * 3


def test_a_call_of_one_worker_is_named_by_a_warning_and_then_by_the_error(monkeypatch):
    now = [100.0]  # time passes only in sleep()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    made = barriers(3, timeout=0.5, warn_after=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(PeerError) as error:
            made[0].meet([Lane(1)], "averaged()")
    (said,) = [str(w.message) for w in caught if issubclass(w.category, GossamerWarning)]
    assert "worker 0 has waited 0.1 s in averaged() for worker(s) 1, 2. The call is collective: make it on" in said
    assert "worker 0 is in averaged() but worker(s) 1, 2 did not call it within 0.5 s" in str(error.value)
    assert "outside of any `if rank == 0`" in str(error.value)


def test_a_worker_that_gave_up_is_not_counted():
    """Worker 0 gives up averaged() and calls close(): it must not take its first post for another worker's."""
    made = barriers(2, timeout=0.3)
    for call in ("averaged()", "close()"):
        with pytest.raises(PeerError, match=r"worker\(s\) 1 did not call it within 0.3 s"):
            made[0].meet([Lane(1)], call)
    with pytest.raises(PeerError, match=r"worker\(s\) 0 did not call it within 0.3 s"):
        made[1].meet([Lane(1)], "averaged()")


def test_a_lost_worker_ends_the_wait():
    made = barriers(3)
    threading.Timer(0.2, lambda: setattr(made[0]._transport, "missing", 2)).start()
    with pytest.raises(PeerError, match=r"worker 0 is in averaged\(\) and lost worker 2, which died or left"):
        made[0].meet([Lane(1)], "averaged()")


def test_a_worker_that_met_the_others_and_left_is_not_lost():
    """Worker 1 posts, meets worker 0 and leaves between two looks of worker 0."""
    near, far = barriers(2)

    def lost():
        far._store.set("0/at/1", near._store.get("0/at/0"))
        return 1

    near._transport.lost = lost
    near.meet([Lane(1)], "close()")
