"""CPU use between two readings, and when it makes a result worthless."""

import pytest

from gossamer.lab.cpu import CpuMeter, CpuTimes, RunStats


def test_use_is_the_busy_share_of_all_cores():
    assert CpuTimes(busy=100, total=1000).use_until(CpuTimes(busy=130, total=1040)) == pytest.approx(0.75)


@pytest.mark.parametrize(("use", "saturated"), [(0.85, False), (0.86, True), (0.2, False), (None, False)])
def test_saturated_above_85_percent(use, saturated):
    assert RunStats(1.0, use, (0.5,)).saturated is saturated
    meter = CpuMeter()
    meter.use = use
    assert meter.saturated is saturated


def test_iowait_is_idle_and_stolen_time_is_busy(monkeypatch):
    line = "cpu  10 1 5 100 20 2 3 40 0 0\ncpu0 ...\n"  # user nice system idle iowait irq softirq steal
    monkeypatch.setattr("gossamer.lab.cpu.Path.read_text", lambda _: line)
    assert CpuTimes.now() == CpuTimes(busy=61, total=181)


def test_a_reading_of_this_machine_is_a_fraction():
    with CpuMeter() as meter:
        sum(range(200_000))
    assert meter.use is None or 0 <= meter.use <= 1
