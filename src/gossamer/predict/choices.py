"""Everything a user could choose, as predictions: methods, gradients, wires, frequency, staleness, bucket plans."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from gossamer.errors import InputError
from gossamer.predict.cluster import ClusterSpec, MiB
from gossamer.predict.costs import ClusterCosts
from gossamer.predict.evidence import has_record
from gossamer.predict.methods import ANCHORED, WIRES, Method, parse
from gossamer.predict.predict import predict
from gossamer.predict.simulator import ExchangePolicy, Result
from gossamer.topology import Layout, Topology, build, entries

SIZES = (10.0, 100.0)  # MiB, around the engine's own choice (at most 25)
IN_FLIGHT = (8,)  # fewer exchanges in flight than the engine's 4 are never faster in this model
EVERY = (2, 4, 8, 16, 32)
LOCAL = (8, 32)  # local steps of LocalSGD and DiLoCo
STALENESS = (1, 2)
FRAGMENTS = (2, 4, 8)
REFRESH = 64  # steps between the exact averages that wires relative to an anchor need
MOST_BUCKETS = 128  # more buckets only add latency, and time to predict
ENGINE = ExchangePolicy()
Gradients = Literal["worker", "node"]


@dataclass(frozen=True)
class BucketPlan:
    """How a model is cut into buckets and how many are in flight, where it differs from the engine's own choice.

    For DDP, `bucket_mb` is torch's `bucket_cap_mb`, and the rest has no meaning.
    """

    bucket_mb: float | None = None
    in_flight: int = ENGINE.in_flight
    stagger: bool = ENGINE.stagger

    @property
    def options(self) -> dict[str, Any]:
        """The fields that are not the defaults."""
        default = BucketPlan()
        names = ("bucket_mb", "in_flight", "stagger")
        return {n: getattr(self, n) for n in names if getattr(self, n) != getattr(default, n)}


@dataclass(frozen=True)
class Choice:
    """One way to train. `algorithm` is the engine's name, "ddp" or "local"; "atc" has no method name of its own."""

    method: Method
    algorithm: str
    gradients: Gradients = "worker"
    every: int = 1
    staleness: int = 0
    fragments: int = 1
    outer: bool = False
    plan: BucketPlan = BucketPlan()
    refresh: int = REFRESH
    """Steps between the exact averages of a wire that is relative to them (0: none, as in a short benchmark)."""
    averages: int = 0
    """Steps between exact averages that the user asks for, on any wire."""

    @property
    def ddp(self) -> bool:
        return self.algorithm == "ddp"

    @property
    def local(self) -> bool:
        """Whether it is another package's: local steps, then an all-reduce of parameters."""
        return self.algorithm == "local"

    @property
    def gossips(self) -> bool:
        return not self.ddp and not self.local

    @property
    def synchronous(self) -> bool:
        return self.algorithm in ("awc", "atc")

    @property
    def average_every(self) -> int:
        """Steps between exact averages: as asked for, or with a wire that is relative to them, at least `refresh`."""
        if self.averages:
            return self.averages
        if not self.synchronous or self.method.wire not in ANCHORED or not self.refresh:
            return 0
        return self.every * max(self.fragments, -(-self.refresh // self.every))

    @property
    def options(self) -> dict[str, Any]:
        """The settings besides the method that are not the defaults of `Choice`."""
        named: dict[str, Any] = {"algorithm": "atc"} if self.algorithm == "atc" else {}
        named |= {"gradients": "node"} if self.gradients == "node" else {}
        named |= {"every": self.every} if self.every > 1 else {}
        named |= {"staleness": self.staleness} if self.staleness else {}
        named |= {"fragments": self.fragments} if self.fragments > 1 else {}
        named |= {"average_every": self.average_every} if self.average_every else {}
        named |= {"outer": "nesterov"} if self.outer else {}
        return named | self.plan.options

    @property
    def unusual(self) -> tuple[tuple[str, int], ...]:
        """The settings by which a step exchanges less than all parameters of all workers, with their numbers."""
        named = {"every": self.every, "fragments": self.fragments, "staleness": self.staleness}
        found = [(name, number) for name, number in named.items() if number > (name != "staleness")]
        return (*found, *([("outer", self.every)] if self.outer else []))

    def layout(self, cluster: ClusterSpec) -> Layout:
        """The replicas that gossip: the workers, or the nodes."""
        return Layout.of([1] * cluster.nodes) if self.gradients == "node" else cluster.layout

    def topology(self, cluster: ClusterSpec) -> Topology:
        return build(self.method.topology or "", self.layout(cluster))

    def policy(self, cluster: ClusterSpec) -> ExchangePolicy:
        """Return what the engine does."""
        period = self.topology(cluster).period
        if self.plan.bucket_mb is not None:
            buckets = max(1, math.ceil(cluster.model.bytes / max(1, round(self.plan.bucket_mb * MiB))))
            buckets = -(-buckets // self.fragments) * self.fragments
        else:
            buckets = cluster.model.buckets_for(period, self.fragments)
        return ExchangePolicy(
            buckets,
            self.plan.stagger,
            in_flight=self.plan.in_flight,
            combine="atc" if self.algorithm == "atc" else "awc",
            every=self.every,
            staleness=self.staleness,
            fragments=self.fragments,
            outer=self.outer,
        )

    def predict(self, cluster: ClusterSpec, steps: int, seed: int) -> Result:
        """Predict this choice."""
        if self.ddp:
            cap = self.plan.bucket_mb
            size = {} if cap is None else {"bucket_mb": cap, "first_bucket_mb": cap}  # torch has no small first bucket
            return predict(self.method, cluster.changed(ddp=size), steps=steps, seed=seed)
        if self.local:
            return predict(self.method, cluster, steps=steps, seed=seed, policy=ExchangePolicy(every=self.every))
        if self.method.package != "gossamer" and self.plan.bucket_mb is not None:
            buckets = max(1, math.ceil(cluster.model.bytes / (self.plan.bucket_mb * MiB)))
            return predict(self.method, cluster.changed(model={"buckets": buckets}), steps=steps, seed=seed)
        own = self.method.package == "gossamer" and not self.method.asynchronous
        policy = self.policy(cluster) if own else None
        rounds = max(20, -(-steps // self.every), 4 * self.fragments)
        inside = self.gradients == "node"
        result = predict(self.method, cluster, steps=rounds, seed=seed, policy=policy, exact_inside=inside)
        if not self.average_every:
            return result
        # exact averages are rare, so they are charged as all-reduces in fp32 beyond the steps that they overlap
        overlap = 0.0 if self.algorithm == "atc" else self.fragments * result.compute_time
        late = max(0.0, ClusterCosts(cluster).allreduce(1.0) - overlap)
        each = late / self.average_every
        return replace(result, step_time=result.step_time + each, durations=result.durations + each)


def default_plan(cluster: ClusterSpec) -> BucketPlan:
    """Return the engine's plan, or one with the number of buckets in the cluster description."""
    wanted = cluster.model.buckets
    if wanted is None:
        return BucketPlan()
    exact = cluster.model.bytes / wanted / MiB
    return BucketPlan(bucket_mb=math.ceil(exact * 1e4) / 1e4)  # rounded up: not one bucket more


def baselines(cluster: ClusterSpec) -> list[Choice]:
    """Return DDP in fp32 and bf16, with several bucket sizes."""
    plans = [BucketPlan(), *(BucketPlan(bucket_mb=s) for s in SIZES if s != cluster.ddp.bucket_mb)]
    return [Choice(parse(f"ddp:{wire}"), "ddp", plan=p) for wire in ("fp32", "bf16") for p in plans]


def local_steps() -> list[Choice]:
    """Return the rivals on thin links: local steps between all-reduces of the parameters."""
    return [Choice(parse(name), "local", every=h) for name in ("localsgd", "diloco") for h in LOCAL]


def gossip(cluster: ClusterSpec) -> Iterator[Choice]:
    """Yield every topology, algorithm and kind of gradients in fp32, under the default plan."""
    plan = default_plan(cluster)
    several = cluster.nodes > 1 and cluster.layout.n > cluster.nodes
    kinds: tuple[Gradients, ...] = ("worker", "node") if several else ("worker",)
    for gradients in kinds:
        for e in entries():
            try:
                topology = build(e.name, Choice(parse("dadam"), "awc", gradients).layout(cluster))
            except InputError:  # a topology that does not exist for so many workers
                continue
            if not topology.connected:
                continue
            for algorithm in ("awc", "atc"):
                yield Choice(parse(f"gossipadam:{e.name}"), algorithm, gradients, plan=plan)
            if gradients == "worker":
                for name in ("ad-psgd", "a2cid2"):
                    yield Choice(parse(f"{name}:{e.name}"), name)


def coarser(choice: Choice) -> list[Choice]:
    """Return the choice on the wires that send fewer bytes."""
    name, topology = choice.method.name, choice.method.topology
    wires = [w for w in WIRES if w != "fp32" and not (w == "int4" and choice.method.asynchronous)]
    return [replace(choice, method=parse(f"{name}:{topology}:{w}")) for w in wires]


def refined(cluster: ClusterSpec, choice: Choice) -> list[Choice]:
    """Return the variants of a synchronous choice: fewer exchanges, staleness, other bucket plans.

    Outer steps make a step shorter, so they are offered only if a record says what they cost.
    """
    if not choice.synchronous:
        return []
    made = [replace(choice, every=k) for k in EVERY]
    if choice.algorithm == "awc":
        made += [replace(choice, staleness=s) for s in STALENESS]
        made += [replace(choice, every=k, outer=True) for k in EVERY if has_record("outer")]
        made += [replace(choice, fragments=f) for f in FRAGMENTS]
    own = choice.plan
    plans = [] if cluster.model.buckets is not None else [BucketPlan(bucket_mb=s) for s in SIZES]
    plans += [BucketPlan(own.bucket_mb, in_flight=f) for f in IN_FLIGHT] + [BucketPlan(own.bucket_mb, stagger=False)]
    seen = {_effect(choice, cluster)}
    for plan in plans:
        other = replace(choice, plan=plan)
        effect = _effect(other, cluster)
        if effect[0] <= MOST_BUCKETS and effect not in seen:
            seen.add(effect)
            made.append(other)
    return made


def rarer(choice: Choice) -> list[Choice]:
    """Return local steps and fragments together, for a choice with one of them whose exchanges do not fit yet."""
    if choice.algorithm != "awc" or choice.staleness or (choice.every == 1) == (choice.fragments == 1):
        return []
    if choice.every == 1:
        return [replace(choice, every=k) for k in EVERY]
    return [replace(choice, fragments=f) for f in FRAGMENTS]


def _effect(choice: Choice, cluster: ClusterSpec) -> tuple[int, int, bool]:
    """What a bucket plan changes in the prediction."""
    policy, period = choice.policy(cluster), choice.topology(cluster).period
    return policy.buckets, min(policy.in_flight, policy.buckets), policy.stagger and period > 1 and policy.buckets > 1
