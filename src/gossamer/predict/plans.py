"""Bucket plans: how a model is cut for its exchanges and how many travel at once, as `decentralize` takes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gossamer.predict.cluster import Cluster, MiB
from gossamer.predict.methods import Method
from gossamer.predict.simulator import Policy
from gossamer.topology import build

SIZES = (10.0, 100.0)  # MiB, around the engine's own choice (at most 25)
IN_FLIGHT = (8,)  # fewer than the engine's 4 are never faster in this model
MOST_BUCKETS = 128  # more of them only add latency, and time to predict
ENGINE = Policy()


@dataclass(frozen=True)
class Plan:
    """What differs from the engine's own choice. For DDP, `bucket_mb` is torch's `bucket_cap_mb`, the rest void."""

    bucket_mb: float | None = None
    in_flight: int = ENGINE.in_flight
    stagger: bool = ENGINE.stagger

    @property
    def options(self) -> dict[str, Any]:
        """As arguments of `decentralize`; empty: its defaults."""
        default = Plan()
        names = ("bucket_mb", "in_flight", "stagger")
        return {n: getattr(self, n) for n in names if getattr(self, n) != getattr(default, n)}

    def policy(self, cluster: Cluster, method: Method, *, atc: bool = False) -> Policy:
        """What the engine does under this plan; `bucket_mb` cuts as its `bucket_mb` does."""
        if self.bucket_mb is not None:
            buckets = buckets_of(cluster, self.bucket_mb)
        else:
            buckets = cluster.model.buckets_for(build(method.topology or "", cluster.layout).period)
        return Policy(buckets, self.stagger, in_flight=self.in_flight, combine="atc" if atc else "awc")


def buckets_of(cluster: Cluster, bucket_mb: float) -> int:
    return max(1, math.ceil(cluster.model.bytes / max(1, round(bucket_mb * MiB))))


def default_plan(cluster: Cluster) -> Plan:
    """The engine's, or the number of buckets that the cluster file asks for."""
    wanted = cluster.model.buckets
    if wanted is None:
        return Plan()
    exact = cluster.model.bytes / wanted / MiB
    return Plan(bucket_mb=math.ceil(exact * 1e4) / 1e4)  # rounded up: not one bucket more


def other_plans(cluster: Cluster, method: Method) -> list[Plan]:
    """The alternatives worth a prediction: those that change what is exchanged when."""
    own = default_plan(cluster)
    plans = [] if cluster.model.buckets is not None else [Plan(bucket_mb=s) for s in SIZES]
    plans += [Plan(own.bucket_mb, in_flight=f) for f in IN_FLIGHT]
    plans.append(Plan(own.bucket_mb, stagger=False))
    period = build(method.topology or "", cluster.layout).period
    seen = {_effect(own.policy(cluster, method), period)}
    kept = []
    for plan in plans:
        policy = plan.policy(cluster, method)
        effect = _effect(policy, period)
        if policy.buckets <= MOST_BUCKETS and effect not in seen:
            seen.add(effect)
            kept.append(plan)
    return kept


def _effect(policy: Policy, period: int) -> tuple[int, int, bool]:
    return policy.buckets, min(policy.in_flight, policy.buckets), policy.stagger and period > 1 and policy.buckets > 1
