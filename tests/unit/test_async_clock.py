"""The unit of time of asynchronous gossip, from step times that are given."""

import pytest

from gossamer.engine.asynchronous import clock as module
from gossamer.engine.asynchronous.clock import LATER, WallClock


@pytest.fixture
def elapse(monkeypatch):
    """Let so many seconds pass."""
    time = [100.0]
    monkeypatch.setattr(module, "clock", lambda: time[0])

    def let_pass(seconds):
        time[0] += seconds

    return let_pass


def run(wall, elapse, steps):
    for seconds in steps:
        elapse(seconds)
        wall.lap()


@pytest.mark.parametrize("pause_at", range(6))
def test_one_slow_step_does_not_change_the_unit(elapse, pause_at):
    wall = WallClock()
    run(wall, elapse, [1.5 if step == pause_at else 0.012 for step in range(6)])
    assert wall.usual_lap() == pytest.approx(0.012)


def test_the_first_step_and_what_is_done_between_steps_do_not_count(elapse):
    wall = WallClock()
    assert wall.usual_lap() is None
    run(wall, elapse, [9.0])
    assert wall.usual_lap() is None  # it also set things up
    elapse(60.0)  # an evaluation
    wall.pause()
    run(wall, elapse, [0.02])
    assert wall.usual_lap() == pytest.approx(0.02)


def agreed(elapse, first, others):
    """A clock whose worker began with steps of `first` seconds, when the others' took `others`."""
    wall = WallClock()
    run(wall, elapse, [first] * 6)
    wall.said = wall.usual_lap()
    run(wall, elapse, [0.01] * 2)  # while it waited for the others
    wall.start(max(first, others))
    return wall


def test_a_slow_start_is_told_once_after_a_while(elapse):
    wall = agreed(elapse, 0.3, 0.3)
    for step in range(2 * LATER):
        run(wall, elapse, [0.01])
        slow = wall.slow_start()
        if step == LATER - 3:
            assert slow is not None
            assert slow == pytest.approx((0.3, 0.3, 0.01))
        else:
            assert slow is None


@pytest.mark.parametrize(
    ("first", "others", "now"),
    [
        (0.01, 0.3, 0.01),  # a fast worker among slow ones: as it should be
        (0.3, 0.3, 0.1),  # not far
        (0.01, 0.01, 0.3),  # slower now: more exchanges a step than asked for
    ],
)
def test_workers_of_other_speed_and_ordinary_change_are_not_told(elapse, first, others, now):
    wall = agreed(elapse, first, others)
    for _ in range(2 * LATER):
        run(wall, elapse, [now])
        assert wall.slow_start() is None
