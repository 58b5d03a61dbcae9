"""Advice: the predicted speed of every topology, algorithm, wire and bucket plan, and a recommendation in words."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from gossamer.errors import InputError
from gossamer.predict.cluster import ClusterSpec, LinkSpec, MiB
from gossamer.predict.methods import DDP_WIRES, Method, parse
from gossamer.predict.predict import derived, predict
from gossamer.predict.simulator import ExchangePolicy, Result
from gossamer.topology import Layout, analyze, build, entries
from gossamer.topology.analysis import Mixing

STEPS, MANY_WORKERS = 120, 64  # with more workers than this, half the steps give a steady mean
WIRES = ("fp32", "bf16", "int8")
WORTH_IT = 0.05  # a smaller saving is not worth leaving DDP for
# How much faster an option must be before it is preferred to the simpler one; mixing: per doubling of its rounds.
MARGINS = {"fp32": 0.0, "bf16": 0.03, "int8": 0.08, "asynchronous": 0.10, "mixing": 0.05, "plan": 0.02}
SLOWEST_MIXING = 1000  # rounds to 1e-3; with more the workers drift apart, and the margin is 100 %
FEWEST_EXCHANGES = 0.5  # per step; an asynchronous method with fewer is charged the time until it has them
MEMORY = {"ddp": 1.0, "awc": 1.0, "ad-psgd": 4.0, "a2cid2": 4.0}  # beyond the model, in parameter sizes
HOPELESS = 1.5  # times the fastest step; no bucket plan makes up for that
SIZES = (10.0, 100.0)  # MiB, around the engine's own choice (at most 25)
IN_FLIGHT = (8,)  # fewer exchanges in flight than the engine's 4 are never faster in this model
MOST_BUCKETS = 128  # more buckets only add latency, and time to predict
ENGINE = ExchangePolicy()


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

    def policy(self, cluster: ClusterSpec, method: Method, *, atc: bool = False) -> ExchangePolicy:
        """Return what the engine does under this plan."""
        if self.bucket_mb is not None:
            buckets = buckets_of(cluster, self.bucket_mb)
        else:
            buckets = cluster.model.buckets_for(build(method.topology or "", cluster.layout).period)
        return ExchangePolicy(buckets, self.stagger, in_flight=self.in_flight, combine="atc" if atc else "awc")


def buckets_of(cluster: ClusterSpec, bucket_mb: float) -> int:
    """Return the number of buckets of `bucket_mb` MiB."""
    return max(1, math.ceil(cluster.model.bytes / max(1, round(bucket_mb * MiB))))


def default_plan(cluster: ClusterSpec) -> BucketPlan:
    """Return the engine's plan, or one with the number of buckets in the cluster description."""
    wanted = cluster.model.buckets
    if wanted is None:
        return BucketPlan()
    exact = cluster.model.bytes / wanted / MiB
    return BucketPlan(bucket_mb=math.ceil(exact * 1e4) / 1e4)  # rounded up: not one bucket more


def other_plans(cluster: ClusterSpec, method: Method) -> list[BucketPlan]:
    """Return the alternative plans that change when data is exchanged, so that a prediction is worth its time."""
    own = default_plan(cluster)
    plans = [] if cluster.model.buckets is not None else [BucketPlan(bucket_mb=s) for s in SIZES]
    plans += [BucketPlan(own.bucket_mb, in_flight=f) for f in IN_FLIGHT]
    plans.append(BucketPlan(own.bucket_mb, stagger=False))
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


def _effect(policy: ExchangePolicy, period: int) -> tuple[int, int, bool]:
    return policy.buckets, min(policy.in_flight, policy.buckets), policy.stagger and period > 1 and policy.buckets > 1


@dataclass(frozen=True)
class Row:
    """One candidate under its best bucket plan.

    `score` is its step time with the margins added; the candidate with the lowest score is recommended. The margins are
    judgments, not measurements: how much faster a coarser wire, looser timing, slower mixing or options other than the
    defaults have to be.

    `contraction_per_second` is the factor by which the consensus distance shrinks per second. `lambda_term` is
    (1 + λ²)/(1 - λ²)², which the topology contributes to the convergence bound of DAdam, with λ the contraction of a
    whole period. `options` are those of the bucket plan that are not the defaults. `plans` has all predicted plans.
    """

    method: str
    algorithm: str
    options: dict[str, Any]
    step_time: float
    saving: float
    waiting: float
    exchanges_per_step: float
    seconds_to_1e3: float | None
    contraction_per_second: float | None
    lambda_term: float | None
    memory: float
    score: float
    plans: list[dict[str, Any]]

    @property
    def ddp(self) -> bool:
        return self.algorithm == "ddp"


@dataclass(frozen=True)
class Advice:
    """A recommendation, all candidates by score, its sensitivity to the cluster, and the derived figures."""

    recommendation: dict[str, Any]
    table: list[Row]
    sensitivity: list[dict[str, Any]]
    cluster: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return {
            "recommendation": self.recommendation,
            "cluster": self.cluster,
            "sensitivity": self.sensitivity,
            "table": [asdict(r) for r in self.table],
        }


@dataclass(frozen=True)
class Candidate:
    """A method with its algorithm (no method name stands for "atc"), and its predictions so far."""

    method: Method
    algorithm: str
    results: dict[BucketPlan, Result]
    mixing: Mixing | None = None

    def best(self) -> tuple[BucketPlan, Result]:
        """Return the best plan; another plan than the first, the default, must be faster by a margin."""
        default = next(iter(self.results))
        margin = {p: 1.0 if p == default else 1 + MARGINS["plan"] for p in self.results}
        plan = min(self.results, key=lambda p: self.results[p].step_time * margin[p])
        return plan, self.results[plan]


def advise(cluster: ClusterSpec, *, steps: int | None = None, seed: int = 0) -> Advice:
    """Predict all candidates on this cluster and recommend one."""
    layout = cluster.layout
    if layout.n == 1:
        raise InputError("the cluster has one worker, so there is nothing to average; train without decentralize()")
    length = steps if steps is not None else STEPS if layout.n <= MANY_WORKERS else STEPS // 2

    def run(method: Method, plan: BucketPlan, algorithm: str) -> Result:
        return run_plan(cluster, method, plan, algorithm, length, seed)

    baselines = [_ddp(wire, cluster, run) for wire in ("fp32", "bf16")]
    ddp = next(iter(baselines[0].results.values()))
    candidates = _gossip(cluster, run)
    fastest = min(next(iter(c.results.values())).step_time for c in [*baselines, *candidates])
    for c in candidates:
        default = next(iter(c.results.values()))
        # a candidate that waits less than the margin cannot gain from another plan
        if (
            c.algorithm in ("awc", "atc")
            and default.waiting > MARGINS["plan"]
            and default.step_time < HOPELESS * fastest
        ):
            c.results.update({p: run(c.method, p, c.algorithm) for p in other_plans(cluster, c.method)})
    mixings = [c.mixing for c in candidates if c.mixing is not None]
    fewest = min((m.rounds_to_1e3 for m in mixings if m.rounds_to_1e3), default=1)
    rows = sorted((_row(c, ddp, fewest) for c in [*baselines, *candidates]), key=lambda r: r.score)
    best = next(r for r in rows if not r.ddp)
    facts = derived(cluster)
    sensitivity = _sensitivity(cluster, best, length, seed)
    return Advice(_recommend(best, rows, ddp, facts), rows, sensitivity, facts)


def run_plan(cluster: ClusterSpec, method: Method, plan: BucketPlan, algorithm: str, steps: int, seed: int) -> Result:
    """Predict one method under a bucket plan."""
    if method.algorithm == "ddp":
        size = {"bucket_mb": plan.bucket_mb} if plan.bucket_mb is not None else {}
        return predict(method, cluster.changed(ddp=size), steps=steps, seed=seed)
    policy = None if method.asynchronous else plan.policy(cluster, method, atc=algorithm == "atc")
    return predict(method, cluster, steps=steps, seed=seed, policy=policy)


def _ddp(wire: str, cluster: ClusterSpec, run: Any) -> Candidate:
    assert wire in DDP_WIRES
    method = parse(f"ddp:{wire}")
    plans = [BucketPlan(), *(BucketPlan(bucket_mb=s) for s in SIZES if s != cluster.ddp.bucket_mb)]
    return Candidate(method, "ddp", {p: run(method, p, "ddp") for p in plans})


def _gossip(cluster: ClusterSpec, run: Any) -> list[Candidate]:
    """Predict every topology, algorithm and wire under the default plan."""
    own = default_plan(cluster)
    made = []
    for e in entries():
        topology = build(e.name, cluster.layout)
        if not topology.connected:
            continue
        mixing = analyze(topology).mixing
        for wire in WIRES:
            method = parse(f"accumadam:{e.name}:{wire}")
            made += [Candidate(method, a, {own: run(method, own, a)}, mixing) for a in ("awc", "atc")]
            pair = [parse(f"{name}:{e.name}:{wire}") for name in ("ad-psgd", "a2cid2")]
            result = run(pair[0], BucketPlan(), pair[0].algorithm)  # both send at the same times
            made += [Candidate(m, m.algorithm, {BucketPlan(): result}, mixing) for m in pair]
    return made


def _row(candidate: Candidate, ddp: Result, fewest: int) -> Row:
    method, mixing = candidate.method, candidate.mixing
    plan, result = candidate.best()
    margin = MARGINS[method.wire] + MARGINS["asynchronous"] * method.asynchronous
    margin += MARGINS["plan"] * (plan != next(iter(candidate.results)))
    seconds = contraction = term = None
    if mixing is not None:
        rounds = mixing.rounds_to_1e3
        margin += MARGINS["mixing"] * math.log2(rounds / fewest) if rounds else 0.0
        margin += 1.0 * (not rounds or rounds > SLOWEST_MIXING)
        if not method.asynchronous:  # the constants of asynchronous mixing are different
            seconds = rounds * result.step_time if rounds else None
            contraction = mixing.contraction ** (1 / result.step_time)
            square = min(1.0, mixing.contraction_period) ** 2
            term = (1 + square) / (1 - square) ** 2 if square < 1 else None
    # nodes must exchange with each other: exchanges inside them do not make up for those that slow links delay
    heard = max(min(result.exchange_rate, result.crossing), 1e-9)
    starved = max(1.0, FEWEST_EXCHANGES / heard) if method.asynchronous else 1.0
    return Row(
        str(method),
        candidate.algorithm,
        plan.options,
        result.step_time,
        1 - result.step_time / ddp.step_time,
        result.waiting,
        result.exchange_rate,
        seconds,
        contraction,
        term,
        MEMORY[method.algorithm],
        result.step_time * (1 + margin) * starved,
        [
            {**asdict(p), "step_time": r.step_time, "saving": 1 - r.step_time / ddp.step_time}
            for p, r in candidate.results.items()
        ],
    )


def _recommend(best: Row, rows: list[Row], ddp: Result, facts: dict[str, float]) -> dict[str, Any]:
    exposed = max(0.0, ddp.step_time - ddp.compute_time)
    links = (
        f"an all-reduce takes {facts['gamma']:.2g} times the compute, and of DDP's {ddp.step_time * 1e3:.0f} ms per "
        f"step {exposed / ddp.step_time:.0%} are not compute"
    )
    plain = next(r for r in rows if r.method == "ddp")
    if best.step_time > (1 - WORTH_IT) * plain.step_time:
        cause = "compute hides the all-reduce" if facts["gamma"] < 2 / 3 else "gossip has the same limit here"
        why = f"stay with DDP: {cause}; {links}, and the best gossip ({best.method}) would save {best.saving:.1%}"
        if plain.options:
            why += f", where buckets of {plain.options['bucket_mb']:g} MiB save DDP {plain.saving:.1%}"
        return {"method": "ddp", "saving": max(0.0, plain.saving), "why": why, "line": line(plain)}
    why = (
        f"{links}; {best.method} overlaps its exchanges with the whole step and waits only for those it averages with, "
        f"so {best.waiting:.0%} of its {best.step_time * 1e3:.0f} ms are not compute"
    )
    rival = min((r for r in rows if r.ddp), key=lambda r: r.step_time)
    if rival.step_time < best.step_time * 1.05:
        what = "bf16 gradients" if rival.method == "ddp:bf16" else "larger buckets"
        why += f"; DDP with {what} is about as fast ({rival.step_time * 1e3:.0f} ms): try it first"
    return {"method": best.method, "saving": best.saving, "why": why, "line": line(best)}


def line(row: Row) -> str:
    """Return the line of code to write instead of DDP(model), with every option that the prediction assumes."""
    method = parse(row.method)
    if row.ddp:
        size = f", bucket_cap_mb={row.options['bucket_mb']:g}" if row.options else ""
        return f"model = torch.nn.parallel.DistributedDataParallel(model{size})"
    options = {"topology": method.topology, "algorithm": row.algorithm, "wire": method.wire}
    usual = {"algorithm": "awc", "wire": "fp32"}
    arguments = [f"{k}={_written(v)}" for k, v in options.items() if usual.get(k) != v]
    if row.algorithm in ("awc", "atc"):  # the prediction is for gossip of all workers
        arguments.append('gradients="worker"')
    if row.options:
        names = {"bucket_mb": "bucket_mib"}
        inner = ", ".join(f"{names.get(k, k)}={_written(v)}" for k, v in row.options.items())
        arguments.append(f"exchange=gossamer.Exchange({inner})")
    return f"gossip = gossamer.decentralize(model, optimizer, {', '.join(arguments)})"


def _written(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else repr(value)


def _sensitivity(cluster: ClusterSpec, best: Row, steps: int, seed: int) -> list[dict[str, Any]]:
    """Return the saving of the recommended method on clusters that differ a little."""

    def scaled(link: LinkSpec, factor: float) -> LinkSpec:
        flow = link.flow_gbps and link.flow_gbps * factor
        return link.model_copy(update={"bandwidth_gbps": link.bandwidth_gbps * factor, "flow_gbps": flow})

    def faster(factor: float) -> ClusterSpec:
        pairs = tuple(scaled(pair, factor) for pair in cluster.links.pairs)
        return cluster.changed(links={"inter": scaled(cluster.links.inter, factor), "pairs": pairs})

    cases = [("twice the bandwidth", faster(2)), ("half the bandwidth", faster(0.5))]
    cases.append(("no jitter", cluster.changed(compute={"jitter": "none", "samples": None})))
    cases.append(("30 % jitter", cluster.changed(compute={"jitter": "gaussian:0.3", "samples": None})))
    per_node = cluster.layout.per_node
    if len(set(per_node)) == 1 and cluster.compute.per_worker is None:
        sizes = [("twice the nodes", 2 * cluster.nodes)]
        sizes += [("half the nodes", cluster.nodes // 2)] if cluster.nodes >= 4 else []
        cases += [(what, cluster.resized(Layout.of([per_node[0]] * m))) for what, m in sizes]
    method, plan = parse(best.method), replace(BucketPlan(), **best.options)
    rows = []
    for what, changed in cases:
        base = predict("ddp", changed, steps=steps, seed=seed).step_time
        own = run_plan(changed, method, plan, best.algorithm, steps, seed).step_time
        saving = 1 - own / base
        rows.append({"if": what, "ddp_step_time": base, "step_time": own, "saving": saving, "go": saving >= WORTH_IT})
    return rows
