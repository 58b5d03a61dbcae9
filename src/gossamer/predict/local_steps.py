"""Simulated step times of local steps between exact averages (LocalSGD, DiLoCo).

All workers take `every` steps at their own pace, wait for the slowest, and all-reduce the parameters; nothing overlaps.
The time per step is (max_i Σ X_i + A) / every, with the compute times X_i and the time A of one all-reduce.
"""

from __future__ import annotations

import numpy as np

from gossamer.predict.costs import Costs, Floats
from gossamer.predict.simulator import TINY, Recorder, Result


def simulate_local(costs: Costs, compute: Floats, *, every: int, update: float = 0.0, trace_steps: int = 0) -> Result:
    """Simulate periods of `every` local steps and one all-reduce; `compute` has the compute times, [steps, workers]."""
    n = costs.layout.n
    periods = len(compute) // every
    reduce = costs.allreduce(1.0)
    recorder = Recorder(costs.layout, trace_steps) if trace_steps else None
    begin, ends = 0.0, np.zeros(periods)
    for p in range(periods):
        u = np.full(n, begin)
        for step in range(p * every, (p + 1) * every):
            if recorder is not None and step < trace_steps:
                recorder.compute(np.full(n, step), u, compute[step])
                recorder.update(np.full(n, step), u + compute[step], update)
            u = u + compute[step] + update
        slowest, last = int(u.argmax()), float(u.max())
        begin = last + reduce
        if recorder is not None and (p + 1) * every <= trace_steps:
            recorder.all_reduced((p + 1) * every - 1, p, u, last, begin, slowest)
        ends[p] = begin
    if recorder is not None:
        recorder.close()
    durations = np.diff(ends, prepend=0.0) / every
    mean = float(durations.mean())
    spans = tuple(recorder.spans) if recorder is not None else ()
    own = float(compute[: periods * every].mean()) + update
    return Result(mean, own, durations, spans, np.full(n, 1 / max(mean, TINY)), exchange_rate=1 / every)
