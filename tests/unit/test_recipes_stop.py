"""Stopping together: whatever the interleaving, all workers end after the same step."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gossamer.recipes.graceful_stop import StopAlone, StopTogether, clear, request

WORKERS, STEPS = 4, 200


def play(folder, kind, *, seed, meet_every):
    """Threads that step like workers of one kind, and may be as far apart as these; where each stopped."""
    folder.mkdir(exist_ok=True)
    begun, done = [0] * WORKERS, [0] * WORKERS
    changed = threading.Condition()
    meeting = threading.Barrier(WORKERS)
    ended = [None] * WORKERS

    def can_end(rank, step):
        """Whether a worker can end the step that follows `step` steps."""
        if kind == "every 4":  # it needs the exchange of the last round
            return min(done) >= step - step % 4
        mate = rank ^ 1  # of the same node
        if kind == "exact inside" and begun[mate] <= step:
            return False
        return min(done) >= step and (kind != "lockstep" or min(begun) > step)

    def worker(rank):
        chance = random.Random(seed * 10 + rank)
        lockstep = kind == "lockstep"
        stop = StopTogether(folder, rank, WORKERS, lockstep=lockstep, ahead=4 if kind == "every 4" else 1)
        for step in range(STEPS):
            if stop(step):
                ended[rank] = step
                return
            with changed:
                begun[rank] += 1
                changed.notify_all()
            time.sleep(chance.random() * 0.002)
            if rank == seed % WORKERS and step == 7:
                request(folder)
            with changed:
                assert changed.wait_for(lambda at=step: can_end(rank, at), timeout=300)
                done[rank] += 1
                changed.notify_all()
            time.sleep(chance.random() * 0.002)
            if meet_every and (step + 1) % meet_every == 0:
                with stop.meeting(step + 1):
                    if not lockstep:
                        meeting.wait(timeout=300)
        stop.done(STEPS)
        ended[rank] = STEPS

    threads = [threading.Thread(target=worker, args=(r,)) for r in range(WORKERS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(400)
    return ended


@pytest.mark.parametrize("kind", ["gossip", "every 4", "exact inside", "lockstep"])
@pytest.mark.parametrize("meet_every", [0, 1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_all_workers_stop_after_the_same_step(tmp_path, kind, meet_every, seed):
    ended = play(tmp_path / "run", kind, seed=seed, meet_every=meet_every)
    assert None not in ended, "a worker hangs"
    assert len(set(ended)) == 1
    assert 7 <= ended[0] < 40


def test_a_worker_that_sees_the_request_takes_the_step_for_which_others_may_wait(tmp_path):
    """The other worker has looked before the request, and cannot look again before it has this one's next step."""
    behind, before = (StopTogether(tmp_path, rank, 2, lockstep=False) for rank in range(2))
    assert not before(3)
    request(tmp_path)
    with ThreadPoolExecutor() as pool:
        assert not pool.submit(behind, 3).result(timeout=300)
        waiting = pool.submit(behind, 4)
        assert not pool.submit(before, 4).result(timeout=300)
        assert not waiting.result(timeout=300)
        assert all(pool.map(lambda stop: stop(5), (behind, before)))


def test_a_cleared_request_is_forgotten(tmp_path):
    request(tmp_path)
    clear(tmp_path)
    assert not StopTogether(tmp_path, 0, 1, lockstep=False)(5)


def test_a_worker_that_is_done_delays_no_other(tmp_path):
    StopTogether(tmp_path, 1, 2, lockstep=False).done(9)
    request(tmp_path)
    other = StopTogether(tmp_path, 0, 2, lockstep=False)
    assert not other(6)
    assert other(9)


class Members:
    """Members of an elastic job: whose turn it is to leave, and who is still there."""

    def __init__(self, folder, ranks, grace=120.0):
        self.here, self.leaving = list(ranks), set()
        folder.mkdir(exist_ok=True)
        self.stops = {r: StopAlone(folder, r, lambda r=r: r in self.leaving, lambda: self.here, grace) for r in ranks}


def test_a_member_that_nobody_asks_does_not_stop_and_the_launcher_stops_it(tmp_path):
    job = Members(tmp_path, range(2))
    assert not job.stops[0](5)
    request(tmp_path)
    assert job.stops[0](6)


def test_a_member_that_leaves_alone_does_not_stop(tmp_path):
    job = Members(tmp_path, range(3), grace=0.1)
    job.leaving = {1}
    assert not job.stops[1](5)
    assert not list(tmp_path.rglob("leaving-*")), "it does not say so any more"
    job.here.remove(1)
    job.leaving = {0}
    assert not job.stops[0](5)
    job.here.remove(2)
    assert job.stops[0](6), "nobody is left to continue"


def test_members_that_are_all_asked_to_leave_stop_together(tmp_path):
    job = Members(tmp_path, range(4), grace=1200.0)
    for stop_of in job.stops.values():
        stop_of._called -= 60.0  # a step takes a minute, so each of them waits for the others for two of those
    job.leaving = set(range(4))
    stopped = dict.fromkeys(range(4))

    def stop(rank):
        time.sleep(0.05 * rank)
        stopped[rank] = job.stops[rank](7)

    threads = [threading.Thread(target=stop, args=(rank,)) for rank in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(400)
    assert all(stopped.values())


def test_a_replacement_does_not_find_the_mark_of_the_worker_before_it(tmp_path):
    (tmp_path / "stop").mkdir()
    (tmp_path / "stop" / "leaving-00001").touch()
    job = Members(tmp_path, range(2), grace=0.1)
    job.leaving = {0}
    assert not job.stops[0](5)
