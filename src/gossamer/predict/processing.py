"""What a step costs a worker's own processor and memory: encoding, reducing, mixing, updating, handing over buckets.

Two kinds of time matter. *Serial* time is spent by the training thread between two computations: the optimizer's
update, the pass that writes the mixed values, a fixed part per bucket and step. *Communication* time is spent by
communication threads: it is a part of the exchange, which overlaps with compute, and it takes cores from compute that
runs on the same cores. A worker has C cores, its compute of X seconds keeps k of them busy, and communication needs c
seconds of CPU time per step; then a step computes for at least

    max(X, (k X + c) / C)

All rates come from `costs` in the cluster description, as `gossamer probe` measured them. Without them nothing is
charged.
"""

from __future__ import annotations

import math

import numpy as np

from gossamer.predict.cluster import ClusterSpec, CostSpec
from gossamer.predict.methods import Method
from gossamer.topology.plan import Traffic

GB = 1e9


def exchange_seconds(
    costs: CostSpec | None, traffic: Traffic, nbytes: float, wire: str, part: float = 1.0
) -> np.ndarray:
    """Return the seconds of a worker's communication threads for an exchange of `nbytes` of fp32 parameters.

    `part` is the share of the bucket that a worker exchanges where the workers of a node hold one replica.
    """
    wired = traffic.intra_wired + traffic.inter_wired
    if costs is None:
        return np.zeros(len(wired))
    passes = np.zeros(len(wired))
    merge = _rate(costs.merge_gb_per_s, wire)
    if wire == "fp32":  # one swap of whole buckets is left to the pass that mixes
        passes += np.where(traffic.steps > 1, wired / merge, 0.0)
    else:
        passes += wired / merge + wired / _rate(costs.encode_gb_per_s, wire)
    # Half of what is sent inside a node is reduced there, the other half gathered; so is what several nodes spread.
    passes += (traffic.intra_plain / 2 + traffic.inter_plain) / costs.reduce_gb_per_s
    return np.asarray(passes * part * nbytes / GB)


def _rate(rates: dict[str, float], wire: str) -> float:
    """The rate of a wire; one that was not measured is charged as the slowest that was."""
    return rates.get(wire) or min(rates.values(), default=math.inf)


def serial_seconds(
    cluster: ClusterSpec, method: Method, *, buckets: int = 1, fragments: int = 1, copies: bool = False
) -> tuple[float, float]:
    """Return the training thread's seconds: at the end of every step, and in addition where it mixes.

    With staleness or outer steps the engine `copies` the values that it sends, and corrects by them.
    """
    update = update_seconds(cluster, method)
    costs = cluster.costs
    if costs is None or method.package == "decent-dp":  # the presets' compute times are fitted to that package's
        return update, 0.0
    if method.exact:
        return update + costs.ddp_us * 1e-6 * (method.algorithm == "ddp"), 0.0
    mix = (3 if copies else 1) * cluster.model.bytes / GB / costs.mix_gb_per_s + buckets * costs.bucket_us * 1e-6
    return update + costs.step_us * 1e-6, mix / fragments


def update_seconds(cluster: ClusterSpec, method: Method) -> float:
    """Return the optimizer's step: as measured with the user's own, or by the measured rate of the method's.

    No optimizer is charged less than Adam, the baseline's: a cheaper update is no merit of gossip.
    """
    own, costs = cluster.compute.update_seconds, cluster.costs
    rates = {} if costs is None else costs.update_gb_per_s
    size = cluster.model.bytes / GB
    if own is None:
        known = [rates[name] for name in (method.optimizer, "adam") if name in rates]
        return size / min(known) if known else 0.0
    if method.optimizer in rates and "adam" in rates:  # the user's own optimizer is charged where it is kept
        return own + max(0.0, size / rates[method.optimizer] - size / rates["adam"])
    return own


def with_competition(cluster: ClusterSpec, compute: np.ndarray, cpu: float) -> np.ndarray:
    """Return the compute times while communication takes `cpu` seconds of CPU time per step from the same cores."""
    if cluster.costs is None or cpu <= 0:
        return compute
    cores, busy = cluster.costs.cores, min(cluster.compute.cores, cluster.costs.cores)
    return np.asarray(np.maximum(compute, (busy * compute + cpu) / cores))


def allreduce_cpu(cluster: ClusterSpec, nbytes: float, wire: str) -> float:
    """Return the CPU seconds of a worker for an all-reduce of `nbytes` of fp32 gradients."""
    costs = cluster.costs
    if costs is None or costs.allreduce is None or costs.allreduce.cpu_gb_per_s is None:
        return 0.0
    sent = nbytes / GB / costs.allreduce.cpu_gb_per_s
    return sent if wire == "fp32" else sent / 2 + compression_seconds(costs, nbytes, wire)


def compression_seconds(costs: CostSpec | None, nbytes: float, wire: str) -> float:
    """Return the seconds in which DDP's communication hook compresses and decompresses a bucket."""
    if costs is None or wire not in costs.encode_gb_per_s:
        return 0.0
    return 2 * nbytes / GB / costs.encode_gb_per_s[wire]
