"""Exchanges that are slower than `rate`: workers must not drift apart, and must say so. No test waits for time."""

import heapq
import warnings

import pytest
import torch
from torch import nn

from gossamer.comm.local import Hub
from gossamer.engine.asynchronous import AsyncLane
from gossamer.engine.asynchronous import clock as clock_module
from gossamer.engine.build import open_lanes, prepare
from gossamer.engine.coordinator import Coordinator
from gossamer.engine.policies import ADPSGD, A2CiD2, Settings
from gossamer.errors import GossamerWarning
from gossamer.topology import Layout, Topology
from gossamer.topology.core import Round


class Nobody(Coordinator):
    def meet(self, lanes, call):
        raise AssertionError("no collective call here")


def path(n):
    halves = [[(i, i + 1) for i in range(start, n - 1, 2)] for start in (0, 1)]
    return Topology.of_rounds("path", Layout.flat(n), [Round.uniform(n, pairs) for pairs in halves])


class PacedWorkers:
    """Workers on the wall clock. A step takes one unit, at learning rate 0; an exchange takes `delay` units."""

    def __init__(self, monkeypatch, topology, policy, delay):
        self.time, self.delay = 0.0, delay
        monkeypatch.setattr(clock_module, "clock", lambda: self.time)
        n = topology.n
        hub, self.lanes, self.optimizers = Hub(n), [], []
        settings = Settings.of(algorithm=policy, gradients="worker")
        for rank in range(n):
            torch.manual_seed(rank)
            model = nn.Linear(4, 4, dtype=torch.float64)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            prepared = prepare(model, optimizer, topology, settings, None, Layout.flat(n), rank, range(n))
            (lane,) = open_lanes(prepared, AsyncLane, hub.transport(rank), Nobody(), None)
            lane.timetable.rewind()
            lane.clock.start(1.0)
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            self.lanes.append(lane)
            self.optimizers.append(optimizer)

    def distance(self):
        x = torch.stack([torch.cat([b.flatten() for b in lane.state.x]) for lane in self.lanes])
        return float((x - x.mean(0)).square().mean().sqrt())

    def run(self, until):
        """Every worker performs its events in order, one at a time."""
        free = [0.0] * len(self.lanes)
        due = [(float(t), 2, rank, None) for t in range(1, until) for rank in range(len(self.lanes))]
        for event in self.lanes[0].timetable.events.stream():
            start = max(event.time, free[event.i], free[event.j])
            if event.time > until:
                break
            free[event.i] = free[event.j] = start + self.delay
            due.append((start, 1, event.number, event))
        heapq.heapify(due)
        while due and due[0][0] < until:
            self.time, kind, which, what = heapq.heappop(due)
            if kind == 2:
                self.optimizers[which].step()
            elif kind == 1:
                jobs = [self.lanes[side].begin(what) for side in (what.i, what.j)]
                heapq.heappush(due, (self.time + self.delay, 0, which, (what, jobs)))
            else:
                event, jobs = what
                for side, launched in zip((event.i, event.j), jobs, strict=True):
                    self.lanes[side].end(event, launched)
                    self.lanes[side].timetable.advance()


@pytest.mark.parametrize("delay", [0.01, 3.0, 10.0])
@pytest.mark.parametrize("policy", [ADPSGD(), A2CiD2()], ids=["ad-psgd", "a2cid2"])
def test_slow_exchanges_do_not_drive_the_workers_apart(monkeypatch, policy, delay):
    workers = PacedWorkers(monkeypatch, path(12), policy, delay)
    start = workers.distance()
    mean = torch.stack([lane.state.x[0] for lane in workers.lanes]).mean(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GossamerWarning)
        workers.run(400)
    assert workers.distance() < start
    after = torch.stack([lane.state.x[0] for lane in workers.lanes]).mean(0)
    tilde = [lane.state.x_tilde for lane in workers.lanes]
    if tilde[0] is not None:  # x and x~ together are conserved
        after = (after + torch.stack([t[0] for t in tilde]).mean(0)) / 2
    torch.testing.assert_close(after, mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("delay", "warned"), [(0.01, 0), (0.5, 0), (10.0, 12)])
def test_a_growing_backlog_is_told_once_by_every_worker(monkeypatch, delay, warned):
    workers = PacedWorkers(monkeypatch, path(12), A2CiD2(), delay)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        workers.run(200)
    told = [str(w.message) for w in caught if "behind" in str(w.message)]
    assert len(told) == warned
    if warned:
        assert "rate=1" in told[0]
        assert "lower rate=" in told[0]
