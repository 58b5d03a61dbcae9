"""CPU use between two readings, and when it makes a result invalid."""

import pytest

from gossamer.lab import cpu
from gossamer.lab.cpu import CpuMeter, CpuTimes, RunStats, usable_cores

# user nice system idle iowait irq softirq steal; the sum first, then core by core
STAT = """cpu  30 1 5 200 20 2 3 40 0 0
cpu0 10 1 5 100 20 2 3 40 0 0
cpu1 20 0 0 100 0 0 0 0 0 0
intr 1 2 3
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of two cores, of which this process may use `cores`, in a control group job/step; `files` change it."""

    def make(cores, files):
        for name, text in {"stat": STAT, "cgroup": "0::/job/step\n", **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(cpu, "STAT", tmp_path / "stat")
        monkeypatch.setattr(cpu, "OWN_GROUP", tmp_path / "cgroup")
        monkeypatch.setattr(cpu, "GROUPS", tmp_path / "groups")
        monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda _: set(cores), raising=False)
        monkeypatch.setattr(cpu.time, "monotonic", lambda: 100.0)

    return make


def test_use_is_the_busy_share_of_the_cores():
    assert CpuTimes(busy=100, total=1000).use_until(CpuTimes(busy=130, total=1040)) == pytest.approx(0.75)


def test_a_used_up_quota_counts_even_if_the_cores_are_idle():
    before, after = CpuTimes(100, 1000, used=5.0, granted=20.0), CpuTimes(110, 1100, used=9.5, granted=25.0)
    assert before.use_until(after) == pytest.approx(0.9)
    assert before.use_until(CpuTimes(195, 1100, used=5.0, granted=25.0)) == pytest.approx(0.95)


@pytest.mark.parametrize(("use", "saturated"), [(0.85, False), (0.86, True), (0.2, False), (None, False)])
def test_saturated_above_85_percent(use, saturated):
    assert RunStats(1.0, use, (0.5,)).saturated is saturated
    meter = CpuMeter()
    meter.use = use
    assert meter.saturated is saturated


def test_iowait_is_idle_and_stolen_time_is_busy(machine):
    machine({0}, {})
    assert CpuTimes.now() == CpuTimes(busy=61, total=181)


def test_only_the_cores_of_this_process_count(machine):
    machine({1}, {})
    assert CpuTimes.now() == CpuTimes(busy=20, total=120)
    assert usable_cores() == 1.0
    machine({5, 6}, {})  # numbered anew: the sum of all is the best there is
    assert CpuTimes.now() == CpuTimes(busy=81, total=301)


def test_the_tightest_quota_of_the_control_groups_above_counts(machine):
    files = {
        "groups/job/step/cpu.max": "max 100000\n",
        "groups/job/cpu.max": "150000 100000\n",
        "groups/job/cpu.stat": "usage_usec 2500000\nuser_usec 1\n",
        "groups/cpu.max": "400000 100000\n",
    }
    machine({0, 1}, files)
    assert usable_cores() == 1.5
    now = CpuTimes.now()
    assert (now.used, now.granted) == (2.5, 150.0)
    machine({0}, files)
    assert usable_cores() == 1.0


def test_a_reading_of_this_machine_is_a_fraction():
    with CpuMeter() as meter:
        sum(range(200_000))
    assert meter.use is None or 0 <= meter.use <= 1
