"""Paced links: how long sending takes on emulated links."""

import json
import time

import pytest
import torch

from gossamer.comm.pace import VARIABLE, Pace

NODES = [0, 0, 1, 1]


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def test_a_worker_has_an_equal_part_of_the_link_of_its_node(clock):
    pace = Pace(0, NODES, 8e6, {})
    with pace([(2, torch.zeros(250))]):
        pass
    assert clock[0] - 100 == pytest.approx(1000 * 8 * 2 / 8e6)


def test_inside_a_node_and_free_links_take_no_time(clock):
    with Pace(0, NODES, 8e6, {})([(1, torch.zeros(250))]), Pace(0, NODES, None, {})([(2, torch.zeros(250))]):
        pass
    assert clock[0] == 100


def test_transfers_under_way_queue(clock):
    pace = Pace(0, NODES, 8e6, {})
    assert pace.reserve(2, 1e6) == pytest.approx(102)
    assert pace.reserve(3, 1e6) == pytest.approx(104)


def test_a_pair_has_its_own_rate(clock):
    pace = Pace(0, [0, 1, 2], 8e6, {"0-2": 1e6})
    assert pace.reserve(2, 1e6) == pytest.approx(108)
    assert pace.reserve(1, 1e6) == pytest.approx(101)


def test_an_all_reduce_goes_around_a_ring(clock):
    assert Pace(0, NODES, 8e6, {}).reserve_allreduce(1e6) == pytest.approx(100 + 1.5)
    assert Pace(0, [0, 0], 8e6, {}).reserve_allreduce(1e6) == 0


def test_the_rates_are_read_from_the_environment(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Pace.from_environment(0) is None
    monkeypatch.setenv(VARIABLE, json.dumps({"nodes": NODES, "link": 5e7, "links": {"0-1": None}}))
    pace = Pace.from_environment(3)
    assert (pace.node, pace.sharers, pace.reserve(0, 1e9)) == (1, 2, 0.0)
