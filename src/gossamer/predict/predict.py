"""`predict`: the step time of any method, on a described cluster or in the paper's abstract setting."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gossamer.errors import InputError
from gossamer.predict.asynchronous import simulate_async
from gossamer.predict.cluster import ClusterSpec, MiB
from gossamer.predict.compute import parse_jitter
from gossamer.predict.costs import AbstractCosts, ClusterCosts, Floats
from gossamer.predict.local_steps import simulate_local
from gossamer.predict.methods import Method, parse
from gossamer.predict.processing import allreduce_cpu, serial_seconds, update_seconds, with_competition
from gossamer.predict.simulator import PAPER, ExchangePolicy, Result, simulate, simulate_ddp
from gossamer.topology import Layout, Round, build
from gossamer.topology.schedule import Schedule
from gossamer.trace import Trace

STEPS = 400
MOST_ROUNDS = 32  # of a long period: enough for a mean
MOST_TIMES = 1 << 27  # compute times in memory: one gigabyte


@dataclass(frozen=True)
class Abstract:
    """The paper's abstract setting: γ, ω and a jitter, with times in mean compute times. See `closed_form`."""

    layout: Layout
    gamma: float
    omega: float = 1.0
    jitter: str = "none"
    backward_share: float = 2 / 3

    def __post_init__(self) -> None:
        for name in ("gamma", "omega"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{name} must be a finite number of at least 0, got {value}")
        parse_jitter(self.jitter)

    def resized(self, layout: Layout) -> Abstract:
        return replace(self, layout=layout)


Setting = ClusterSpec | Abstract


def default_policy(setting: Setting, method: Method | None = None, fragments: int = 1) -> ExchangePolicy:
    """Return the default policy: in the abstract setting the paper's, else the engine's or the peer package's.

    `fragments` is a setting of Gossamer's synchronous methods; the others keep 1.
    """
    if fragments < 1:
        raise InputError(f"fragments must be at least 1, got {fragments}; 1 exchanges the whole model at once")
    if method is None or method.package != "gossamer" or method.algorithm != "awc":
        fragments = 1
    if isinstance(setting, Abstract):
        return PAPER if fragments == 1 else replace(PAPER, buckets=fragments, fragments=fragments)
    if method is None or method.topology is None:
        return ExchangePolicy(setting.model.buckets_for(1))
    if method.package == "decent-dp":
        # torch's all-reduce in each group, one after another, with the same round for all buckets
        buckets = setting.model.buckets or math.ceil(setting.model.bytes / (25 * MiB))
        return ExchangePolicy(buckets, stagger=False, hierarchical=False, in_flight=1)
    period = build(method.topology, setting.layout).period
    return ExchangePolicy(setting.model.buckets_for(period, fragments), fragments=fragments)


def ddp_shares(setting: Setting, buckets: int = 1) -> Floats:
    """Return the shares of the model in DDP's buckets."""
    if isinstance(setting, Abstract):
        return np.full(buckets, 1 / buckets)
    total, cap, least = setting.model.bytes, setting.ddp.bucket_mb * MiB, setting.ddp.first * MiB
    layers = setting.model.equal_layers
    if layers is not None:  # the layer that fills a bucket closes it
        filled = [0.0]
        for _ in range(layers):
            if filled[-1] >= (least if len(filled) == 1 else cap):
                filled.append(0.0)
            filled[-1] += total / layers
        return np.array(filled) / total
    first = min(least, total)
    rest = total - first
    count = math.ceil(rest / cap)
    sizes = [first, *[cap] * (count - 1), *([rest - cap * (count - 1)] if count else [])]
    return np.array(sizes) / total


def predict(
    method: Method | str,
    setting: Setting,
    *,
    steps: int = STEPS,
    seed: int = 0,
    policy: ExchangePolicy | None = None,
    rate: float = 1.0,
    trace_steps: int = 0,
    exact_inside: bool = False,
) -> Result:
    """Simulate `steps` steps of a method; the same seed gives every method the same compute times.

    `rate` is the number of exchanges per gradient of an asynchronous method. The result has the spans of the first
    `trace_steps` steps. With `exact_inside`, gradients are averaged exactly inside the nodes of a cluster, and nodes
    gossip; the timeline then has nodes as its workers.
    """
    method = parse(method) if isinstance(method, str) else method
    if steps < 10:
        raise InputError(f"a prediction needs at least 10 steps to settle, got {steps}")
    if seed < 0:
        raise InputError(f"the seed must not be negative, got {seed}; pass for example 0")
    if trace_steps < 0:
        raise InputError(f"the steps in a timeline must not be negative, got {trace_steps}; pass for example 8")
    inside = 1
    if exact_inside and method.algorithm != "ddp":
        if isinstance(setting, Abstract):
            raise InputError("exact averages inside nodes need a described cluster; pass a cluster instead of gamma")
        inside = max(setting.layout.per_node)
        setting = of_nodes(setting, method, steps, seed)
    policy = policy or default_policy(setting, method)
    layout = setting.layout
    every = method.local_steps(policy.every)
    room = steps * (policy.staleness * (method.algorithm == "awc") + every)
    if room * layout.n > MOST_TIMES:
        raise InputError(
            f"{room} steps of {layout.n} workers are too many to simulate (at most {MOST_TIMES} in all); pass fewer"
        )
    if isinstance(setting, Abstract):
        draws = parse_jitter(setting.jitter).sample(layout.n, room, seed)
        costs: AbstractCosts | ClusterCosts = AbstractCosts(
            layout, setting.gamma, setting.omega, method.wire, policy.hierarchical
        )
        share, update, mixing = setting.backward_share, 0.0, 0.0
    else:
        draws = setting.compute.draw(layout.n, room, seed)
        costs = ClusterCosts(setting, method.wire, policy.hierarchical, method.package == "decent-dp", inside)
        share = setting.ddp.backward_share
        update, mixing = serial_seconds(
            setting,
            method,
            buckets=policy.buckets,
            fragments=policy.fragments,
            copies=policy.outer or policy.staleness > 0,
        )
    if method.algorithm == "ddp":
        shares = ddp_shares(setting, policy.buckets)
        if isinstance(setting, ClusterSpec):  # the last bucket is reduced when compute has ended
            hidden = allreduce_cpu(setting, setting.model.bytes, method.wire) * (1 - float(shares[-1]))
            draws = with_competition(setting, draws, hidden)
        return simulate_ddp(costs, draws, shares, backward_share=share, update=update, trace_steps=trace_steps)
    if method.algorithm == "local":
        return simulate_local(costs, draws, every=every, update=update, trace_steps=trace_steps)
    topology = build(method.topology or "", layout)
    schedule = Schedule(topology)
    if isinstance(setting, ClusterSpec) and setting.costs is not None:
        draws = with_competition(setting, draws, _cpu_per_step(schedule, costs, policy))
    if method.asynchronous:
        return simulate_async(topology, costs, draws + update, rate=rate, seed=seed, trace_steps=trace_steps)
    return simulate(schedule, costs, draws, policy, rounds=steps, update=update, mixing=mixing, trace_steps=trace_steps)


def _cpu_per_step(schedule: Schedule, costs: AbstractCosts | ClusterCosts, policy: ExchangePolicy) -> float:
    """Return the CPU seconds of a worker's communication per step."""
    rounds = [schedule.topology.round(k) for k in range(min(schedule.topology.period, MOST_ROUNDS))]
    each = [float(costs.exchange(r, 1.0).cpu.mean()) for r in rounds]
    return sum(each) / len(each) / policy.every / policy.fragments


def of_nodes(cluster: ClusterSpec, method: Method, steps: int = STEPS, seed: int = 0) -> ClusterSpec:
    """Return the cluster whose workers are the nodes of `cluster`, each of which averages gradients exactly inside.

    The compute times of a node are the steps of DDP among the workers of its largest node, without the update.
    """
    layout = cluster.layout
    mean = float(cluster.compute.means(layout.n).mean())
    same: dict[str, Any] = {"reference_workers": None, "fixed_seconds": 0.0, "per_worker": None}
    local = cluster.changed(compute={**same, "seconds": mean}).resized(Layout.of([max(layout.per_node)]))
    ddp = predict("ddp", local, steps=max(200, min(steps, 400)), seed=seed)
    update, _ = serial_seconds(local, parse("ddp"))
    durations = tuple(float(d) for d in (ddp.durations - update)[:400])
    nodes = cluster.resized(Layout.of([1] * layout.nodes))
    return nodes.changed(compute={**same, "seconds": float(np.mean(durations)), "samples": durations, "jitter": "none"})


def predicted_trace(method: Method | str, setting: Setting, result: Result) -> Trace:
    """Return a result's spans as a trace, which can be written, drawn or compared with a measured one."""
    return Trace(result.spans, setting.layout.node, f"{method} (predicted)")


def derived(setting: ClusterSpec) -> dict[str, float]:
    """Return γ, ω and σ² of a cluster, and the times they come from.

    γ is the time of an all-reduce over the compute time, ω that of an exchange between two nodes over an all-reduce,
    σ² the relative variance of compute times.
    """
    compute = float(setting.compute.means(setting.layout.n).mean()) + update_seconds(setting, parse("ddp"))
    costs = ClusterCosts(setting)
    allreduce = costs.allreduce(1.0)
    layout = setting.layout
    pair = [w for m in layout.members[:2] for w in m] if layout.nodes > 1 else list(range(min(2, layout.n)))
    e = costs.exchange(Round.uniform(layout.n, [pair]), 1.0)
    exchange = float(e.jobs.least.max(initial=0.0) + (e.local + e.latency).max())
    return {
        "compute_seconds": compute,
        "allreduce_seconds": allreduce,
        "exchange_seconds": exchange,
        "gamma": allreduce / compute,
        "omega": exchange / allreduce if allreduce else float("nan"),
        "sigma2": setting.compute.relative_variance,
    }
