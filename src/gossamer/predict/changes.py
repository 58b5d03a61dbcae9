"""What would change the answer: the recommended method against DDP on clusters that differ a little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from gossamer.predict.choices import Choice, baselines
from gossamer.predict.cluster import ClusterSpec, LinkSpec
from gossamer.predict.costs import ClusterCosts
from gossamer.topology import Layout

L = TypeVar("L", bound=LinkSpec)


def cases(
    cluster: ClusterSpec,
    rivals: Sequence[Choice],
    judge: Callable[[ClusterSpec, Choice], tuple[float, float]],
    worth: float,
) -> list[dict[str, Any]]:
    """Return the best gossip of `rivals` and the best DDP on clusters that differ a little, where the model may speak.

    `judge` tells the step time and the score of a choice on a cluster. A cluster of one node says nothing about links
    and nodes.
    """
    rows = []
    for what, changed in _changed(cluster):
        ddp = [c for c in baselines(changed) if cluster.costs is not None or c.method.wire == "fp32"]
        base = min(judge(changed, c)[0] for c in ddp)
        judged = {c: judge(changed, c) for c in rivals}
        best = min(judged, key=lambda c: judged[c][1])
        step_time, score = judged[best]
        gain = 1 - score / base
        rows.append(
            {
                "if": what,
                "ddp_step_time": base,
                "method": str(best.method),
                "options": best.options,
                "step_time": step_time,
                "saving": 1 - step_time / base,
                "gain": gain,
                "go": gain >= worth,
            }
        )
    return rows


def _changed(cluster: ClusterSpec) -> list[tuple[str, ClusterSpec]]:
    made = []
    if cluster.nodes > 1:
        made += [
            ("twice the bandwidth", with_bandwidth(cluster, 2)),
            ("half the bandwidth", with_bandwidth(cluster, 0.5)),
        ]
        made += _resized(cluster)
    made += [("twice the compute", with_compute(cluster, 2)), ("half the compute", with_compute(cluster, 0.5))]
    quiet: dict[str, Any] = {"samples": None}
    made.append(("no jitter", cluster.changed(compute={"jitter": "none", **quiet})))
    scaled = [(what, with_jitter(cluster, f)) for what, f in (("twice the jitter", 2.0), ("half the jitter", 0.5))]
    if any(changed is None for _, changed in scaled):
        made.append(("30 % jitter", cluster.changed(compute={"jitter": "gaussian:0.3", **quiet})))
    return made + [(what, changed) for what, changed in scaled if changed is not None]


def _resized(cluster: ClusterSpec) -> list[tuple[str, ClusterSpec]]:
    per_node = cluster.layout.per_node
    if len(set(per_node)) > 1 or cluster.compute.per_worker is not None:
        return []
    sizes = [("twice the nodes", 2 * cluster.nodes)]
    sizes += [("half the nodes", cluster.nodes // 2)] if cluster.nodes >= 4 else []
    return [(what, cluster.resized(Layout.of([per_node[0]] * m))) for what, m in sizes]


def with_compute(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """Return the cluster with other compute times; the update stays, because the model does."""
    c = cluster.compute
    many = None if c.per_worker is None else tuple(factor * s for s in c.per_worker)
    drawn = None if c.samples is None else tuple(factor * s for s in c.samples)
    fields = {"seconds": factor * c.seconds, "fixed_seconds": factor * c.fixed_seconds}
    return cluster.changed(compute={**fields, "per_worker": many, "samples": drawn})


def with_jitter(cluster: ClusterSpec, factor: float) -> ClusterSpec | None:
    """Return the cluster with compute times that spread `factor` times as far; None if that has no meaning."""
    c = cluster.compute
    if c.samples is not None:
        mean = float(np.mean(c.samples))
        least = 0.01 * mean
        return cluster.changed(compute={"samples": tuple(max(least, mean + factor * (s - mean)) for s in c.samples)})
    kind, _, sigma = c.jitter.partition(":")
    if kind not in ("gaussian", "lognormal") or "+" in sigma:
        return None
    return cluster.changed(compute={"jitter": f"{kind}:{factor * float(sigma):g}"})


def with_bandwidth(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """Return the cluster with all links between nodes scaled, those of pairs and measured messages too."""
    links = cluster.links
    pairs = tuple(_scaled(p, factor) for p in links.pairs)
    changed = cluster.changed(links={"inter": _scaled(links.between, factor), "pairs": pairs})
    measured = cluster.costs.allreduce if cluster.costs is not None else None
    if measured is None:
        return changed
    probed = Layout.of(measured.per_node)
    if probed.nodes == 1:
        return changed
    before, after = ClusterCosts(cluster), ClusterCosts(changed)
    times = tuple(
        (size, seconds * after.formula(probed, size) / before.formula(probed, size))
        for size, seconds in measured.seconds
    )
    return changed.changed(costs={"allreduce": measured.model_copy(update={"seconds": times})})


def _scaled(link: L, factor: float) -> L:
    flow = link.flow_gbps and link.flow_gbps * factor
    update: dict[str, Any] = {"bandwidth_gbps": link.bandwidth_gbps * factor, "flow_gbps": flow}
    old, new = link.flow_bytes_per_second, link.flow_bytes_per_second * factor
    update["by_size"] = tuple((size, seconds - size / old + size / new) for size, seconds in link.by_size)
    return link.model_copy(update=update)
