"""Stopping together: whatever the interleaving, all workers end after the same step."""

import random
import threading
import time

import pytest

from gossamer.recipes.graceful_stop import StopTogether, clear, request

WORKERS, STEPS = 4, 200


def play(folder, *, lockstep, seed, meet_every):
    """Threads that step like gossiping workers (at most `lead` apart) or in lockstep; where each stopped."""
    folder.mkdir(exist_ok=True)
    done = [0] * WORKERS
    changed = threading.Condition()
    meeting = threading.Barrier(WORKERS)
    ended = [None] * WORKERS
    lead = 0 if lockstep else 3

    def worker(rank):
        chance = random.Random(seed * 10 + rank)
        stop = StopTogether(folder, rank, WORKERS, lockstep=lockstep)
        for step in range(STEPS):
            if stop(step):
                ended[rank] = step
                return
            if rank == seed % WORKERS and step == 7:
                request(folder)
            time.sleep(chance.random() * 0.002)
            with changed:
                # no worker finishes a step that another has not begun (lockstep) or is far behind of (gossip)
                begun = done[rank]
                assert changed.wait_for(lambda at=begun: at - min(done) <= lead, timeout=10)
                done[rank] += 1
                changed.notify_all()
                if lockstep:
                    assert changed.wait_for(lambda at=begun: min(done) > at, timeout=10)
            if meet_every and (step + 1) % meet_every == 0:
                with stop.meeting(step + 1):
                    if not lockstep:
                        meeting.wait(timeout=10)
        stop.done(STEPS)
        ended[rank] = STEPS

    threads = [threading.Thread(target=worker, args=(r,)) for r in range(WORKERS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    return ended


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("meet_every", [0, 1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_all_workers_stop_after_the_same_step(tmp_path, lockstep, meet_every, seed):
    ended = play(tmp_path / "run", lockstep=lockstep, seed=seed, meet_every=meet_every)
    assert None not in ended, "a worker hangs"
    assert len(set(ended)) == 1
    assert 7 <= ended[0] < 40


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
