"""Which method, if any: predicted speed of every topology, wire and algorithm on a cluster, and a choice in words."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from gossamer.errors import InputError
from gossamer.runtime.cluster import Cluster
from gossamer.runtime.methods import Method, parse
from gossamer.runtime.predict import derived, predict
from gossamer.runtime.simulator import Result
from gossamer.topology import Layout, analyze, build, entries
from gossamer.topology.mixing import Mixing

STEPS = 120
WIRES = ("fp32", "bf16", "int8")
WORTH_IT = 0.05  # a smaller saving is not worth leaving DDP for
# How much faster an option must be before it is preferred to the plainer one.
MARGINS = {"fp32": 0.0, "bf16": 0.03, "int8": 0.08, "asynchronous": 0.10, "mixing": 0.05}  # mixing: a doubling
SLOWEST_MIXING = 1000  # rounds to 1e-3; beyond, workers drift apart between averages, and the margin is 100 %
FEWEST_EXCHANGES = 0.5  # a step; an asynchronous method that manages fewer is charged the time until it has them
MEMORY = {"ddp": 1.0, "awc": 1.0, "ad-psgd": 4.0, "a2cid2": 4.0}  # beyond the model, in parameter sizes


@dataclass(frozen=True)
class Row:
    """One candidate. `score` is its step time with the margins added; the least is recommended. The margins are
    judgments, not measurements: how much speed should buy a coarser wire, looser timing or slower mixing.

    `contraction_per_second`: the factor by which the consensus distance shrinks in a second. `lambda_term`:
    (1 + λ²)/(1 - λ²)², what the topology contributes to the convergence bound of DAdam, λ over a whole period.
    """

    method: str
    step_time: float
    saving: float
    waiting: float
    exchanges_per_step: float
    seconds_to_1e3: float | None
    contraction_per_second: float | None
    lambda_term: float | None
    memory: float
    score: float


@dataclass(frozen=True)
class Advice:
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


def advise(cluster: Cluster, *, steps: int = STEPS, seed: int = 0) -> Advice:
    """Rank everything we know for this cluster."""
    layout = cluster.layout
    if layout.n == 1:
        raise InputError("the cluster has one worker, so there is nothing to average; train it plainly")
    ddp = predict("ddp", cluster, steps=steps, seed=seed)
    rows = [_row(parse("ddp"), ddp, ddp, None, 1)]
    rows.append(_row(parse("ddp:bf16"), predict("ddp:bf16", cluster, steps=steps, seed=seed), ddp, None, 1))
    mixings: dict[str, Mixing] = {}
    for e in entries():
        topology = build(e.name, layout)
        if topology.connected:
            mixings[e.name] = analyze(topology).mixing
    fewest = min((m.rounds_to_1e3 for m in mixings.values() if m.rounds_to_1e3), default=1)
    for name, mixing in mixings.items():
        for wire in WIRES:
            method = parse(f"accumadam:{name}:{wire}")
            result = predict(method, cluster, steps=steps, seed=seed)
            rows.append(_row(method, result, ddp, mixing, fewest))
    for family in ("ad-psgd", "a2cid2"):
        for name in ("ring", "exp"):
            method = parse(f"{family}:{name}")
            result = predict(method, cluster, steps=steps, seed=seed)
            rows.append(_row(method, result, ddp, mixings[method.topology or ""], fewest))
    rows.sort(key=lambda r: r.score)
    best = next(r for r in rows if not r.method.startswith("ddp"))
    facts = derived(cluster)
    sensitivity = _sensitivity(cluster, best.method, steps, seed)
    return Advice(_recommend(best, rows, ddp, facts, layout), rows, sensitivity, facts)


def _row(method: Method, result: Result, ddp: Result, mixing: Mixing | None, fewest: int) -> Row:
    margin = MARGINS[method.wire] + MARGINS["asynchronous"] * method.asynchronous
    seconds = contraction = term = None
    if mixing is not None:
        rounds = mixing.rounds_to_1e3
        margin += MARGINS["mixing"] * math.log2(rounds / fewest) if rounds else 0.0
        margin += 1.0 * (not rounds or rounds > SLOWEST_MIXING)
        if not method.asynchronous:  # asynchronous mixing has other constants
            seconds = rounds * result.step_time if rounds else None
            contraction = mixing.contraction ** (1 / result.step_time)
            square = min(1.0, mixing.contraction_period) ** 2
            term = (1 + square) / (1 - square) ** 2 if square < 1 else None
    starved = max(1.0, FEWEST_EXCHANGES / max(result.exchange_rate, 1e-9)) if method.asynchronous else 1.0
    return Row(
        str(method),
        result.step_time,
        1 - result.step_time / ddp.step_time,
        result.waiting,
        result.exchange_rate,
        seconds,
        contraction,
        term,
        MEMORY[method.algorithm],
        result.step_time * (1 + margin) * starved,
    )


def _recommend(best: Row, rows: list[Row], ddp: Result, facts: dict[str, float], layout: Layout) -> dict[str, Any]:
    exposed = max(0.0, ddp.step_time - ddp.compute_time)
    links = (
        f"an all-reduce takes {facts['gamma']:.2g} times the compute, and of DDP's {ddp.step_time * 1e3:.0f} ms a step "
        f"{exposed / ddp.step_time:.0%} are not compute"
    )
    if best.saving < WORTH_IT:
        cause = "your links hide the all-reduce" if facts["gamma"] < 2 / 3 else "gossip meets the same limit here"
        return {
            "method": "ddp",
            "saving": 0.0,
            "why": f"stay with DDP: {cause}; {links}, and the best gossip ({best.method}) would save {best.saving:.1%}",
            "line": "model = torch.nn.parallel.DistributedDataParallel(model)",
        }
    halved = next(r for r in rows if r.method == "ddp:bf16")
    why = (
        f"{links}; {best.method} overlaps its exchanges with the whole step and waits only for those it averages with, "
        f"so {best.waiting:.0%} of its {best.step_time * 1e3:.0f} ms are not compute"
    )
    if halved.step_time < best.step_time * 1.05:
        why += f"; DDP with bf16 gradients is about as fast ({halved.step_time * 1e3:.0f} ms): try it first"
    return {"method": best.method, "saving": best.saving, "why": why, "line": line(parse(best.method))}


def line(method: Method) -> str:
    """What to write instead of DDP(model)."""
    if method.algorithm == "ddp":
        return "model = torch.nn.parallel.DistributedDataParallel(model)"
    arguments = [f'topology="{method.topology}"']
    if method.algorithm != "awc":
        arguments.append(f'algorithm="{method.algorithm}"')
    if method.wire != "fp32":
        arguments.append(f'wire="{method.wire}"')
    return f"gossip = gossamer.decentralize(model, optimizer, {', '.join(arguments)})"


def _sensitivity(cluster: Cluster, method: str, steps: int, seed: int) -> list[dict[str, Any]]:
    """The saving of the recommended method if the cluster were a little different."""
    inter = cluster.links.inter
    flow = inter.flow_gbps

    def faster(factor: float) -> Cluster:
        update = {"bandwidth_gbps": inter.bandwidth_gbps * factor, "flow_gbps": flow and flow * factor}
        return cluster.changed(links={"inter": inter.model_copy(update=update)})

    cases = [("twice the bandwidth", faster(2)), ("half the bandwidth", faster(0.5))]
    cases.append(("no jitter", cluster.changed(compute={"jitter": "none", "samples": None})))
    cases.append(("30 % jitter", cluster.changed(compute={"jitter": "gaussian:0.3", "samples": None})))
    per_node = cluster.layout.per_node
    if len(set(per_node)) == 1 and cluster.compute.per_worker is None:
        sizes = [("twice the nodes", 2 * cluster.nodes)]
        sizes += [("half the nodes", cluster.nodes // 2)] if cluster.nodes >= 4 else []
        cases += [(what, cluster.resized(Layout.of([per_node[0]] * m))) for what, m in sizes]
    rows = []
    for what, changed in cases:
        base = predict("ddp", changed, steps=steps, seed=seed).step_time
        own = predict(method, changed, steps=steps, seed=seed).step_time
        saving = 1 - own / base
        rows.append({"if": what, "ddp_step_time": base, "step_time": own, "saving": saving, "go": saving >= WORTH_IT})
    return rows
