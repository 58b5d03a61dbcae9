"""Precomputed answers to "what if": step times on a grid of links, nodes and jitter, and of γ, ω and σ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gossamer.predict import paste
from gossamer.predict.advise import Advice, Row
from gossamer.predict.changes import with_bandwidth
from gossamer.predict.choices import baselines
from gossamer.predict.closed_form import contour
from gossamer.predict.cluster import ClusterSpec
from gossamer.topology import Layout, build

STEPS = 40
LINKS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # times the bandwidth between nodes
NODES = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the nodes
JITTERS = (None, 0.0, 0.1, 0.2, 0.4)  # None: as described
MOST_WORKERS = 128
RIVALS = 4
GAMMAS = tuple(float(f"{g:.3g}") for g in np.geomspace(0.1, 8, 17))
OMEGAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2)
SIGMAS = (0.0, 0.1, 0.2, 0.3)
FORM_STEPS, FORM_WORKERS = 60, 32


def what_if(cluster: ClusterSpec, advice: Advice, *, seed: int = 0, worth: float) -> dict[str, Any]:
    """Predict the best all-reduce and the rivals of an advice on every cluster of the grid.

    Quality factors are those of the advice: the grid changes times, not the number of steps to the same loss.
    `times[link][nodes][jitter]` has the step time of the best all-reduce, then of each rival, in seconds.
    """
    rivals = rivals_of(advice)
    links = LINKS if cluster.nodes > 1 else (1.0,)
    sizes = _sizes(cluster)
    times = [
        [[_times(_changed(cluster, link, m, jitter), rivals, seed) for jitter in JITTERS] for m in sizes]
        for link in links
    ]
    inter = cluster.links.inter
    return {
        "worth": worth,
        "links": [{"factor": f, "gbps": inter.bandwidth_gbps * f if inter is not None else None} for f in links],
        "nodes": [{"nodes": m, "workers": _layout(cluster, m).n} for m in sizes],
        "jitter": list(JITTERS),
        "rivals": [
            {
                "method": r.method,
                "options": r.choice.options,
                "factor": r.score / r.step_time,  # steps to the loss of all-reduce, relative to all-reduce
                "lines": paste.lines(r.choice),
            }
            for r in rivals
        ],
        "ddp_lines": paste.lines(baselines(cluster)[0]),
        "times": times,
        "own_workers": cluster.layout.n,
        "form": _form(cluster, rivals, seed),
    }


def rivals_of(advice: Advice) -> list[Row]:
    """Return a few different gossip rows: the recommended one, then the best of each kind."""
    own = [r for r in advice.shortest() if r.choice.gossips]
    chosen = advice.recommendation["best_gossip"]
    first = next((r for r in own if r.method == chosen), own[0])
    kept: dict[tuple[str, str], Row] = {(first.choice.algorithm, first.choice.gradients): first}
    for r in own:
        kept.setdefault((r.choice.algorithm, r.choice.gradients), r)
    return list(kept.values())[:RIVALS]


def _sizes(cluster: ClusterSpec) -> list[int]:
    per_node = cluster.layout.per_node
    if cluster.nodes == 1 or len(set(per_node)) > 1 or cluster.compute.per_worker is not None:
        return [cluster.nodes]
    wanted = sorted({max(2, round(cluster.nodes * factor)) for factor in NODES})
    return [m for m in wanted if m == cluster.nodes or m * per_node[0] <= MOST_WORKERS]


def _layout(cluster: ClusterSpec, nodes: int) -> Layout:
    return cluster.layout if nodes == cluster.nodes else Layout.of([cluster.layout.per_node[0]] * nodes)


def _changed(cluster: ClusterSpec, link: float, nodes: int, jitter: float | None) -> ClusterSpec:
    made = cluster if link == 1.0 else with_bandwidth(cluster, link)
    if nodes != cluster.nodes:
        made = made.resized(_layout(cluster, nodes))
    if jitter is None:
        return made
    kind = "none" if jitter == 0 else f"gaussian:{jitter:g}"
    return made.changed(compute={"jitter": kind, "samples": None})


def _times(cluster: ClusterSpec, rivals: Sequence[Row], seed: int) -> list[float]:
    known = [c for c in baselines(cluster) if cluster.costs is not None or c.method.wire == "fp32"]
    found = [min(c.predict(cluster, STEPS, seed).step_time for c in known)]
    found += [r.choice.predict(cluster, STEPS, seed).step_time for r in rivals]
    return [float(f"{t:.4g}") for t in found]


def _form(cluster: ClusterSpec, rivals: Sequence[Row], seed: int) -> dict[str, Any]:
    """Return the saving over γ, ω and σ by the closed form and the simulator, for a topology of the cluster's size."""
    name = next((r.choice.method.topology for r in rivals if r.choice.synchronous), None) or "aer"
    layout = cluster.layout if cluster.layout.n <= FORM_WORKERS else Layout.of([4] * (FORM_WORKERS // 4))
    topology = build(name, layout)
    made = [contour(topology, np.array(GAMMAS), np.array(OMEGAS), sigma=s, steps=FORM_STEPS, seed=seed) for s in SIGMAS]
    saving = [[[round(v, 3) for v in row] for row in c.saving] for c in made]
    return {
        "topology": name, "layout": str(layout), "gamma": GAMMAS, "omega": OMEGAS, "sigma": SIGMAS, "saving": saving,
    }  # fmt: skip
