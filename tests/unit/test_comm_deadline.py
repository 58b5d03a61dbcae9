"""Deadline: how much time is left, and whether a wait has to end."""

import time

import pytest

from gossamer.comm import Deadline


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only in sleep()."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def test_remaining_time_ends_at_zero(clock):
    deadline = Deadline(2.0)
    assert (deadline.remaining, deadline.expired) == (2.0, False)
    clock[0] += 5.0
    assert (deadline.remaining, deadline.expired) == (0.0, True)


def test_sleep_never_passes_the_deadline(clock):
    deadline = Deadline(1.0)
    assert deadline.sleep(0.75)
    assert deadline.sleep(0.75)
    assert clock[0] == 101.0
    assert not deadline.sleep(0.75)
    assert clock[0] == 101.0


def test_shorten_never_extends(clock):
    deadline = Deadline(1.0)
    deadline.shorten(5.0)
    assert deadline.remaining == 1.0
    deadline.shorten(0.25)
    assert deadline.remaining == 0.25
