"""What an elastic job derives from its steps and its members: the usual step time, and the schedules that it keeps."""

import gc
import weakref
from types import SimpleNamespace

import pytest

from gossamer.comm import Job
from gossamer.comm.tcp import Member, Record
from gossamer.comm.tcp.edge_deadlines import EdgeDeadlines
from gossamer.engine import metrics as module
from gossamer.engine.elastic.coordinator import ElasticCoordinator, Plans
from gossamer.engine.metrics import Metrics, UsualStep
from gossamer.topology import Layout, build, schedule
from gossamer.topology.schedule import Schedule


class Steps:
    """A worker with `lanes` lanes whose steps take as long as a test says."""

    def __init__(self, monkeypatch, lanes=1):
        self.now = 100.0
        monkeypatch.setattr(module, "clock", lambda: self.now)
        self.lanes = [SimpleNamespace(metrics=Metrics(0, Layout.of([2]), None)) for _ in range(lanes)]
        self.deadlines = EdgeDeadlines(None)
        self._job = SimpleNamespace(
            members=SimpleNamespace(deadlines=self.deadlines, excluded=False),
            _transfer=SimpleNamespace(between_steps=lambda progress: None),
            _leaving=False,
            _usual_step=UsualStep(),
        )

    def take(self, seconds, waits=0.0, lane=0):
        metrics = self.lanes[lane].metrics
        metrics.waited_for(Job(0, 0, lambda scratch: None), self.now, self.now + waits)
        self.now += seconds + waits
        for each in self.lanes:
            each.metrics.stepped()
        self.look()

    def look(self):
        ElasticCoordinator.between_steps(self._job, self.lanes)


def test_one_pause_between_steps_does_not_lengthen_the_deadlines(monkeypatch):
    """An evaluation of five minutes among steps of 0.1 s."""
    steps = Steps(monkeypatch)
    for _ in range(10):
        steps.take(0.1)
    steps.now += 300.0
    for _ in range(10):
        steps.take(0.1)
        assert steps.deadlines.step == pytest.approx(0.1)
        assert steps.deadlines.shortest == 0.25


@pytest.mark.parametrize("lane", [0, 1])
def test_waits_for_peers_do_not_lengthen_the_deadlines_of_later_waits(monkeypatch, lane):
    steps = Steps(monkeypatch, lanes=2)
    steps.take(2.0)
    for _ in range(100):
        steps.take(2.0, waits=steps.deadlines.shortest, lane=lane)
    assert steps.deadlines.step == pytest.approx(2.0)


def test_steps_that_become_slower_for_good_lengthen_the_deadlines(monkeypatch):
    steps = Steps(monkeypatch)
    for _ in range(60):
        steps.take(0.1)
    for _ in range(60):
        steps.take(3.0)
    assert steps.deadlines.step == pytest.approx(3.0)


def test_a_worker_that_waits_in_a_collective_call_takes_no_steps(monkeypatch):
    steps = Steps(monkeypatch)
    for _ in range(3):
        steps.take(1.0)
    for _ in range(1000):
        steps.now += 0.05
        steps.look()
    steps.take(1.0)
    assert steps.deadlines.step == pytest.approx(1.0)


def test_a_step_that_compiles_is_outvoted_by_the_next_one(monkeypatch):
    steps = Steps(monkeypatch)
    steps.take(60.0)
    steps.take(60.0)
    steps.take(0.1)
    assert steps.deadlines.step == pytest.approx(0.1)


def record(epoch, ranks):
    return Record(epoch, {r: Member(f"process-{r}", "127.0.0.1", 1 + r, f"node-{r}") for r in ranks}, [0])


def test_schedules_and_programs_of_former_members_are_freed():
    n = 8
    plans = Plans("ring", Schedule(build("ring", Layout.of([1] * n))), b"")
    schedule._program.cache_clear()
    made, most = [], 0
    for epoch in range(1, 101):
        ranks = [r for r in range(n) if r == 0 or epoch >> r - 1 & 1]
        now = record(epoch, ranks)
        found = plans.schedule(now)
        assert found.ranks == tuple(ranks)
        made.append(weakref.ref(found))
        for size in (1000, 1001):
            found.program(0, 0, 0, size)
        del found
        most = max(most, schedule._program.cache_info().currsize)
    gc.collect()
    assert sum(ref() is not None for ref in made) <= 8
    assert most <= 2 * 9


def test_the_schedule_of_members_that_were_there_lately_is_the_same():
    plans = Plans("ring", Schedule(build("ring", Layout.of([1] * 4))), b"")
    first = plans.schedule(record(1, range(4)))
    assert plans.schedule(record(2, range(3))) is not first
    assert plans.schedule(record(3, range(4))) is first
