"""The emulated training step without any communication: what a prediction has to add the methods' costs to."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from gossamer.comm import process_groups
from gossamer.lab.bench.setup import Setup, emulated
from gossamer.lab.bench.worker import optimizer_of

WARM_UP = 3


def alone(rank: int, setup: Setup, seconds: list[list[float]], optimizers: list[str]) -> dict[str, Any]:
    """Train without exchanges, all workers at the same time. Return the mean seconds of forward and backward beyond the
    emulated compute, those of an update by each optimizer, and the cores in use."""
    torch.set_num_threads(1)
    process_groups.join_world()
    over, cores = [], []
    updates: dict[str, float] = {}
    for name in optimizers:
        model = emulated(setup, seconds[rank])
        optimizer = optimizer_of(name, model.parameters())
        process_groups.wait_for_all()
        times = []
        for step in range(len(seconds[rank])):
            start, cpu = time.perf_counter(), time.process_time()
            model().backward()
            middle, used = time.perf_counter(), time.process_time() - cpu
            optimizer.step()
            optimizer.zero_grad()
            if step >= WARM_UP:
                over.append(middle - start - model.step_seconds)
                cores.append(used / max(1e-9, middle - start))
                times.append(time.perf_counter() - middle)
        updates[name] = statistics.fmean(times)
    process_groups.leave_world()
    return {"over": statistics.fmean(over), "cores": statistics.fmean(cores), "updates": updates}
