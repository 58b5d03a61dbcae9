"""From measured links and step times to a cluster description."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.errors import InputError
from gossamer.predict.cluster import Cluster, from_dict
from gossamer.trace import merge

DIFFERS = 0.25  # a pair of nodes that much off the median gets an entry of its own
MOST_SAMPLES = 512  # of the step time: enough for a distribution


def cluster_from_probe(links: Mapping[str, Any], compute: Mapping[str, Any], model_mb: float | None) -> Cluster:
    """`links` as `gossamer.comm.link_probe.Links.to_dict()`, `compute` as `read_compute` returns it."""
    per_node = list(links["per_node"])
    inter = list(links["inter"])
    intra = list(links["intra"])
    size = model_mb if model_mb is not None else compute.get("model_mb")
    if size is None:
        raise InputError("the size of the model is not known; pass --model-mb, or --compute with a recorded file")
    data: dict[str, Any] = {
        "name": "probed",
        "nodes": len(per_node),
        "per_node": per_node[0] if len(set(per_node)) == 1 else per_node,
        "links": {"inter": _link(inter or intra)},
        "compute": {k: v for k, v in compute.items() if k != "model_mb"},
        "model": {"mb": size},
    }
    if intra:
        data["links"]["intra"] = _link(intra)
    middle = statistics.median(s["link_bytes_per_s"] for s in inter) if inter else 0.0
    odd = [s for s in inter if abs(s["link_bytes_per_s"] / middle - 1) > DIFFERS]
    if odd:
        data["links"]["pairs"] = [{"nodes": list(s["nodes"]), **_link([s])} for s in odd]
    return from_dict(data, "the probe's result")


def _link(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    if not samples:  # a single worker: nothing to measure, nothing that matters
        return {"bandwidth_gbps": 100.0}
    whole = statistics.median(s["link_bytes_per_s"] for s in samples)
    flow = statistics.median(s["flow_bytes_per_s"] for s in samples)
    link = {
        "bandwidth_gbps": whole * 8e-9,
        "latency_us": statistics.median(s["latency_s"] for s in samples) * 1e6,
    }
    if flow < 0.9 * whole:
        link["flow_gbps"] = flow * 8e-9
    return {k: float(f"{v:.4g}") for k, v in link.items()}


def read_compute(source: str | None) -> dict[str, Any]:
    """Compute times from seconds (`0.25`), a file of `gossamer.probe`, or the traces of a run."""
    if source is None:
        return {"seconds": 0.1}
    try:
        return {"seconds": float(source)}
    except ValueError:
        path = Path(source)
    if path.is_dir():
        return _from_trace(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        samples = [float(s) for s in data["samples"]]
        more = {k: float(data[k]) for k in ("model_mb", "update_seconds") if k in data}
    except OSError as error:
        raise InputError(f"cannot read compute times from {source!r}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise InputError(
            f"{source!r} holds no compute times; it should be written by gossamer.probe(optimizer, {source!r})"
        ) from None
    return _distribution(samples, more)


def _distribution(samples: list[float], more: dict[str, Any]) -> dict[str, Any]:
    if not samples:
        raise InputError("there are no compute times to take a mean of; record more steps")
    kept = samples[:: -(-len(samples) // MOST_SAMPLES)]
    return {"seconds": statistics.mean(samples), "samples": [float(f"{s:.5g}") for s in kept], **more}


def _from_trace(folder: Path) -> dict[str, Any]:
    """Forward plus backward, and the optimizer's update, of every step of every worker but the first."""
    steps: dict[tuple[int, int], float] = {}
    updates = []
    for span in merge(folder).spans:
        if span.attrs.get("step", 0) == 0:
            continue
        if span.category == "step":
            updates.append(span.seconds)
        elif span.family == "compute":
            key = (span.worker, int(span.attrs["step"]))
            steps[key] = steps.get(key, 0.0) + span.seconds
    return _distribution(list(steps.values()), {"update_seconds": statistics.mean(updates)} if updates else {})
