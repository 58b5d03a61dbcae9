"""How noisy the gradients of a task are, estimated while it is trained with GossipAdam."""

from __future__ import annotations

import math
import statistics

import gossamer
from gossamer.recipes.strategy import Strategy


def noise(strategy: Strategy, worker_batch: float) -> dict[str, float | None]:
    """Return the task's noise scale and the batches to compare it with, in the task's unit (samples).

    `noise_scale` is b Σσ²/Σμ² of a replica, b being its batch and σ² the noise of that batch's gradient: the number of
    samples whose mean gradient holds as much signal as noise. `noise_share` is the share of noise, Σσ² / Σ(σ² + μ²), in
    a replica's gradient, averaged over the replicas of this process. Both are None if no optimizer is a GossipAdam that
    separates signal and noise. If no signal was found, the share is 1 and the scale None.

    `replica_batch` is the batch of one replica, `global_batch` that of all workers; `worker_batch` is that of a worker.
    """
    batches = [worker_batch * strategy.workers_of(r) for r in strategy.replicas]
    mean = statistics.fmean(batches)
    shares = []
    for replica, batch in zip(strategy.replicas, batches, strict=True):
        optimizer = replica.optimizer
        ratio = optimizer.noise_to_signal() if isinstance(optimizer, gossamer.GossipAdam) else None
        if ratio is not None:  # nodes may differ: the share that a batch of mean size would have
            shares.append(1.0 if math.isinf(ratio) else ratio * batch / (ratio * batch + mean))
    share = statistics.fmean(shares) if shares else None
    return {
        "noise_scale": None if share is None or share == 1 else mean * share / (1 - share),
        "noise_share": share,
        "replica_batch": mean,
        "global_batch": worker_batch * strategy.replicas[0].workers,
    }
