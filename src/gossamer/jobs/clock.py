"""Predicted times of training runs: the clock of virtual workers, and predictions beside measured step times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gossamer.lab import parse_rate
from gossamer.predict.cluster import (
    ClusterLinks,
    ClusterSpec,
    ComputeSpec,
    DdpSpec,
    LinkSpec,
    ModelSpec,
    from_dict,
    load,
)
from gossamer.predict.methods import Method, parse
from gossamer.predict.predict import default_policy, predict, predicted_trace
from gossamer.predict.simulator import ExchangePolicy, Result
from gossamer.recipes.config import RunConfig, make_config
from gossamer.recipes.run import write_config
from gossamer.report.runs import Group
from gossamer.topology import Layout
from gossamer.trace import Trace

TRACED = 6  # steps in a predicted timeline


def described(source: str | Mapping[str, Any]) -> ClusterSpec:
    """Return the cluster of a preset, of a file, or of the description in an earlier clock."""
    return load(source) if isinstance(source, str) else from_dict(source, "the cluster in the run's config.json")


def described_cluster(source: str | Mapping[str, Any], per_node: Sequence[int]) -> ClusterSpec:
    """Return the cluster with as many workers as the run has."""
    return described(source).resized(Layout.of(per_node))


def simulated_on(source: str | Mapping[str, Any], config: RunConfig) -> tuple[dict[str, Any], Trace]:
    """Like `simulated`, with the cluster's description in the clock, so that the run can be resumed at another size."""
    clock, trace = simulated(parse(config.method), config, described_cluster(source, config.per_node))
    return {**clock, "description": described(source).model_dump(mode="json")}, trace


def simulated(method: Method, config: RunConfig, cluster: ClusterSpec) -> tuple[dict[str, Any], Trace]:
    """Return the clock of a virtual run, with the predicted step time on the cluster, and a predicted timeline."""
    result, where = _predicted(method, config, _repeated(cluster, config.micro_batches), steps=200, trace_steps=TRACED)
    clock = {
        "kind": "simulated",
        "cluster": cluster.name,
        "layout": str(cluster.layout),
        "model_mb": cluster.model.mb,
        "step_seconds": result.step_time,
        "waiting": result.waiting,
    }
    return clock, predicted_trace(method, where, result)


def _predicted(
    method: Method, config: RunConfig, cluster: ClusterSpec, *, steps: int, trace_steps: int = 0
) -> tuple[Result, ClusterSpec]:
    """Predict a run with this configuration; also return the cluster of what gossips: its workers, or its nodes."""
    inside = bool(config.exact_inside) and method.algorithm != "ddp"
    where = cluster.resized(Layout.of([1] * len(config.per_node))) if inside else cluster
    policy = _policy(method, config, where)
    return predict(method, cluster, steps=steps, policy=policy, trace_steps=trace_steps, exact_inside=inside), where


def _policy(method: Method, config: RunConfig, cluster: ClusterSpec) -> ExchangePolicy:
    """Return how a run with this configuration exchanges on the cluster."""
    policy = default_policy(cluster, method, config.fragments)
    if method.algorithm == "awc":
        return replace(
            policy,
            every=config.every,
            staleness=config.staleness,
            combine=config.combine,
            average_every=config.average_every // config.every,
            outer=config.outer is not None,
        )
    return replace(policy, every=config.every) if method.algorithm == "local" else policy


def _repeated(cluster: ClusterSpec, batches: int) -> ClusterSpec:
    """Return the cluster for steps of several batches; DDP's gradients become ready in the last backward pass."""
    compute = cluster.compute
    many = None if compute.per_worker is None else tuple(batches * seconds for seconds in compute.per_worker)
    return cluster.changed(
        compute={
            "seconds": batches * compute.seconds,
            "fixed_seconds": batches * compute.fixed_seconds,
            "per_worker": many,
        },
        ddp={"backward_share": cluster.ddp.backward_share / batches},
    )


def predict_measured(groups: list[Group]) -> None:
    """Write the predicted step time beside each one measured on shaped links.

    The predicted compute time is the shortest measured step without waiting.
    """
    runs = [run for g in groups for run in g.runs]
    computes = [run.step_time * (1 - run.waiting) for run in runs if run.waiting is not None]
    rate = parse_rate(runs[0].clock.get("link"))
    if runs[0].clock["kind"] != "measured" or rate is None or not computes:
        return
    for g in groups:
        content = g.runs[0].content
        config = make_config(content["config"], str(g.runs[0].folder / "config.json"))
        layout = Layout.of(config.per_node)
        cluster = ClusterSpec(
            nodes=layout.nodes,
            per_node=layout.per_node,
            links=ClusterLinks(inter=LinkSpec(bandwidth_gbps=rate / 1e9), intra=LinkSpec(bandwidth_gbps=10)),
            compute=ComputeSpec(seconds=min(computes)),
            model=ModelSpec(mb=content["parameters"] * 4 / 1e6),
            ddp=DdpSpec(bucket_mb=config.ddp_bucket_mb or 25.0),
        )
        result, _ = _predicted(parse(content["method"]), config, cluster, steps=100)
        for run in g.runs:
            run.content["predicted_step_seconds"] = result.step_time
            write_config(run.folder, run.content)
