"""Deadlines that set themselves: the same code for steps of 30 ms and of 30 s. Times are given, not waited for."""

import random

import pytest

from gossamer.comm.tcp import inbox as module
from gossamer.comm.tcp.edge_deadlines import (
    CONNECTING,
    ENOUGH,
    FIRST,
    SHORTEST,
    SILENT,
    SILENT_LONGEST,
    EdgeDeadlines,
    silence_bound,
    usual_bound,
)
from gossamer.comm.tcp.inbox import Inbox, Key
from gossamer.comm.transport import ChannelId, Purpose


def test_the_bound_is_the_median_and_six_robust_deviations():
    assert usual_bound([1.0, 2.0, 3.0, 4.0, 100.0]) == pytest.approx(3.0 + 6 * 1.4826 * 1.0)
    assert usual_bound([0.5]) == 0.5


@pytest.mark.parametrize("step", [0.03, 0.3, 3.0, 30.0])
@pytest.mark.parametrize("jitter", [0.02, 0.1, 0.3])
def test_steps_of_any_length_need_no_setting(step, jitter):
    """Two workers with jitter in rounds: hardly anything healthy is given up, and a stop costs about a step at most."""
    draw, edge = random.Random(0), EdgeDeadlines(None)
    edge.step = step
    mine = theirs = 0.0  # when each of them launched its last round
    given_up = 0
    for _ in range(2000):
        lag = max(0.0, theirs - mine)
        edge.arrived(1, lag)
        ready, their_ready = (t + step * draw.lognormvariate(0, jitter) for t in (mine, theirs))
        waits = max(edge.shortest, edge.of(1) - (ready - mine))
        given_up += theirs > ready + waits
        mine, theirs = max(ready, min(theirs, ready + waits)), max(their_ready, mine)
    assert given_up <= 40  # of 2000; 22 at the largest jitter
    stall = max(edge.shortest, edge.of(1) - step)
    assert stall <= max(1.0, 2.0 * step)


def test_one_long_pause_changes_nothing_and_a_lasting_change_is_followed():
    edge = EdgeDeadlines(None)
    for _ in range(32):
        edge.arrived(1, 0.01)
    edge.arrived(1, 9.0)
    assert edge.of(1) == SHORTEST
    for k in range(32):
        edge.arrived(1, 2.0 + 0.01 * (k % 3))
    assert 2.0 < edge.of(1) < 2.5


def test_an_edge_that_is_not_known_yet_is_given_time():
    edge = EdgeDeadlines(None)
    assert edge.of(3) == FIRST
    edge.step = 30.0
    assert edge.of(3) == 60.0
    for _ in range(ENOUGH):
        edge.arrived(3, 0.0)
    assert edge.of(3) == edge.shortest == 15.0


def learning(*lags):
    """Deadlines of a worker that knows one edge for each of `lags`."""
    edge = EdgeDeadlines(None)
    for peer, lag in enumerate(lags):
        for _ in range(ENOUGH):
            edge.arrived(peer, lag)
    return edge


def test_a_new_edge_begins_with_what_other_edges_have_shown():
    assert learning(0.01, 0.9).of(7) == pytest.approx(1.8)
    assert learning(0.01).of(7) == CONNECTING
    assert learning(30.0).of(7) == FIRST
    slow = learning(0.01)
    slow.step = 10.0
    assert slow.of(7) == slow.shortest == 5.0


def test_a_newcomer_begins_with_what_its_donor_has_learned():
    donor, newcomer = learning(0.01, 0.9), EdgeDeadlines(None)
    donor.step = 0.5
    assert newcomer.learned() is None
    newcomer.inherit(donor.learned(), donor.step)
    assert (newcomer.of(0), newcomer.step) == (pytest.approx(1.8), 0.5)
    assert newcomer.learned() == pytest.approx(0.9)  # which the next newcomer may take from it
    for _ in range(ENOUGH):
        newcomer.arrived(0, 0.1)
    assert newcomer.of(0) == SHORTEST
    assert newcomer.of(1) == CONNECTING  # its own edges say more than its donor's
    founder = EdgeDeadlines(None)
    founder.inherit(None, 0.0)
    assert founder.of(0) == FIRST


def test_a_deadline_of_the_user_is_kept():
    edge = EdgeDeadlines(0.5)
    edge.step = 30.0
    for _ in range(50):
        edge.arrived(1, 20.0)
    assert edge.of(1) == edge.shortest == 0.5


@pytest.mark.parametrize(
    ("gaps", "bound"), [([], SILENT), ([0.1] * 32, SILENT), ([1.0] * 32, 20.0), ([30.0] * 32, SILENT_LONGEST)]
)
def test_silence_is_judged_by_the_usual_heartbeats(gaps, bound):
    assert silence_bound(gaps) == pytest.approx(bound)


def test_arrivals_are_measured_also_when_they_were_given_up(monkeypatch):
    now, seen = [100.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    inbox = Inbox(lambda sender, lag: seen.append((sender, lag)))
    key = Key(4, ChannelId(0, Purpose.PARAMETERS), 0, 0)

    def wait_for(round):
        return inbox.post(key, 1, round, b"plan", memoryview(bytearray(2)))

    def message(round):
        slot = inbox.begin(key, 1, round, b"plan", 2)
        inbox.complete(slot)

    wait_for(0)
    now[0] += 3.0
    message(0)
    message(1)  # early
    now[0] += 1.0
    wait_for(1)
    late = wait_for(2)
    now[0] += 5.0
    inbox.cancel([late])  # given up
    now[0] += 2.0
    message(2)
    assert seen == [(4, 3.0), (4, 0.0), (4, 7.0)]
