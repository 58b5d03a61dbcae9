"""The topology that advice would choose where everything else is given: `decentralize(topology="auto")`."""

from __future__ import annotations

from dataclasses import replace

from gossamer.errors import InputError
from gossamer.predict.advise import rank, row_of
from gossamer.predict.choices import BucketPlan, Choice, Gradients
from gossamer.predict.cluster import ClusterSpec
from gossamer.predict.methods import parse
from gossamer.topology import build, entries

STEPS = 60


def pick_topology(
    cluster: ClusterSpec,
    *,
    algorithm: str = "awc",
    wire: str = "fp32",
    gradients: Gradients = "worker",
    every: int = 1,
    staleness: int = 0,
    fragments: int = 1,
    outer: bool = False,
    bucket_mb: float | None = None,
) -> tuple[str, str]:
    """Return the name of the topology with the least time to the same loss, and why, in one sentence."""
    name = "dadam" if algorithm in ("awc", "atc") else algorithm
    usual = Choice(parse(name), algorithm, gradients, every, staleness, fragments, outer, BucketPlan(bucket_mb))
    ddp = Choice(parse("ddp"), "ddp")
    base = ddp.predict(cluster, STEPS, 0).step_time
    rows = []
    for e in entries():
        try:
            topology = build(e.name, usual.layout(cluster))
        except InputError:  # a topology that does not exist for so many workers
            continue
        if topology.connected:
            choice = replace(usual, method=parse(f"{name}:{e.name}:{wire}"))
            rows.append(row_of(cluster, choice, choice.predict(cluster, STEPS, 0), base, base, {}))
    rows.sort(key=rank)
    best, second = rows[0], rows[1]
    guess = " with compute taken to be as long as an all-reduce" if cluster.compute.source == "guess" else ""
    why = (
        f"{best.step_time * 1e3:.3g} ms per step are predicted{guess}, {second.step_time * 1e3:.3g} on "
        f"{second.choice.method.topology} and {base * 1e3:.3g} with DDP; its model {best.quality.words}"
    )
    if best.score > base:
        why += "; DDP is predicted to be as fast or faster here, see gossamer advise"
    return best.choice.method.topology or "", why
