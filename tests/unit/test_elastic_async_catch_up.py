"""Clocks that are behind follow the neighbor that is furthest; late exchanges of all are not made up in a burst."""

from itertools import islice

import pytest

from gossamer.engine.asynchronous.events import Timetable
from gossamer.engine.elastic.event_thread import FARTHEST, OWED, caught_up
from gossamer.topology import Layout, build
from gossamer.topology.events import Events

EVENTS = Events(build("ring", Layout.flat(6)), seed=3, first=40, start=7.0)
LIST = list(islice(EVENTS.stream(), 400))


def at(number):
    return LIST[number - EVENTS.first]


@pytest.fixture
def timetable():
    made = Timetable(EVENTS, 0, trial=False)
    made.rewind()
    return made


def test_the_time_of_an_event_of_anybody(timetable):
    assert timetable.time_of(39) is None  # of another sequence
    assert [timetable.time_of(k) for k in (40, 40, 55, 300)] == [at(k).time for k in (40, 40, 55, 300)]
    assert timetable.time_of(299) is None  # they are read forwards only
    timetable.rewind()
    assert timetable.time_of(299) == at(299).time


def test_a_clock_is_set_to_that_of_the_furthest_neighbor(timetable):
    first, now = timetable.next, 7.0
    ahead = first.number + 3
    assert caught_up(timetable, now, [(first.number - 1, 0.5)]) == now  # it is not further
    assert caught_up(timetable, now, [(ahead, 0.25)]) == at(ahead).time + 0.25
    further = first.number + 5
    assert caught_up(timetable, now, [(ahead, 0.0), (further, 9.0)]) == at(further).time + 1.0  # it may be busy
    assert caught_up(timetable, 90.0, []) == first.time  # all are late: exchanges are slow
    assert timetable.next == first


def test_a_clock_is_never_set_back_to_a_neighbors(timetable):
    first = timetable.next
    now = first.time + 0.5 * OWED
    assert caught_up(timetable, now, [(first.number + 1, 0.0)]) == max(now, at(first.number + 1).time)


def test_events_that_all_have_passed_are_left_out(timetable):
    far = next(e for e in LIST if e.time > timetable.next.time + 3 * OWED)
    now = caught_up(timetable, 7.0, [(far.number, 0.0)])
    assert now == far.time
    assert timetable.next.time >= now - OWED
    assert timetable.next == next(e for e in LIST if 0 in (e.i, e.j) and e.time >= now - OWED)


def test_news_that_cannot_be_true_is_ignored(timetable):
    assert caught_up(timetable, 7.0, [(timetable.next.number + FARTHEST, 0.0)]) == 7.0


def test_a_worker_that_is_alone_keeps_its_clock():
    timetable = Timetable(Events(build("ring", Layout.flat(1))), 0, trial=False)
    timetable.rewind()
    assert caught_up(timetable, 5.0, []) == 5.0
