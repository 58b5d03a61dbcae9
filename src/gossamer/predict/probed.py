"""From measurements to a cluster description: what `gossamer probe` measured, and the compute times of a step."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.errors import InputError
from gossamer.predict.cluster import ClusterSpec, from_dict
from gossamer.trace import merge

DIFFERS = 0.25  # relative difference to the median from which a probed pair of nodes gets an entry of its own
MOST_SAMPLES = 512  # of a measured step time: enough for a distribution
GUESS_SECONDS, GUESS_MB = 0.1, 100.0
ONE_NODE = (
    "one node was measured: nothing is known about links between nodes, so there is no advice about several nodes "
    "unless --link gives their rate"
)


def cluster_from_probe(links: Mapping[str, Any], compute: Mapping[str, Any], model_mb: float | None) -> ClusterSpec:
    """Describe a probed cluster: `links` as measured by `gossamer probe`, `compute` as returned by `read_compute`.

    `unknown` says what is a guess or could not be seen.
    """
    per_node = list(links["per_node"])
    inter = list(links["inter"])
    intra = list(links["intra"])
    size = model_mb if model_mb is not None else compute.get("model_mb")
    costs = _costs(links)
    own = {k: v for k, v in compute.items() if k not in ("model_mb", "backward_share")}
    if own.get("source") != "measured" and costs is not None:
        own.setdefault("cores", costs["cores"])  # unless it was measured, compute keeps its cores busy
    data: dict[str, Any] = {
        "name": "probed",
        "nodes": len(per_node),
        "per_node": per_node[0] if len(set(per_node)) == 1 else per_node,
        "links": {"inter": {**_link(inter), "shared": round(links.get("shared", 1.0), 3)}} if inter else {},
        "compute": own,
        "model": {"mb": GUESS_MB, "source": "guess"} if size is None else {"mb": size},
    }
    if intra:
        data["links"]["intra"] = _link(intra)
    if costs is not None:
        data["costs"] = costs
    if compute.get("backward_share"):
        data["ddp"] = {"backward_share": compute["backward_share"]}
    middle = statistics.median(s["link_bytes_per_s"] for s in inter) if inter else 0.0
    odd = [s for s in inter if abs(s["link_bytes_per_s"] / middle - 1) > DIFFERS]
    if odd:
        data["links"]["pairs"] = [{"nodes": list(s["nodes"]), **_link([s])} for s in odd]
    return from_dict(data, "the probe's result")


def unknown(cluster: ClusterSpec) -> list[str]:
    """Return what a description does not know or only guesses, as sentences for its file and for advice."""
    notes = []
    if cluster.compute.source == "guess":
        notes.append(
            f"compute is a guess ({cluster.compute.seconds:g} s per step): call gossamer.probe(model, optimizer, step) "
            "in your script, or pass --compute to gossamer probe"
        )
    elif cluster.costs is not None and not cluster.costs.assumed and cluster.compute.update_seconds is None:
        notes.append("the optimizer's step is charged by the rate of fused Adam, not measured with your own")
    if cluster.model.source == "guess":
        notes.append(f"the model's size is a guess ({cluster.model.mb:g} MB): pass --model-mb")
    if cluster.costs is None:
        notes.append(
            "the description has no [costs]: encoding, mixing and memory are not charged, so a coarser wire than fp32 "
            "is recommended only if it gains at 1 GB/s of encoding and decoding; gossamer probe measures them"
        )
    elif cluster.costs.assumed:
        notes.append(f"assumed, not measured: {cluster.costs.assumed}")
    if cluster.links.inter is None:
        notes.append(ONE_NODE)
    return notes


def _costs(links: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rates of a worker's processor, in 10^9 bytes of fp32 parameters per second; None if not measured."""
    if "processing" not in links:
        return None
    p, per_node = links["processing"], list(links["per_node"])
    cores = min(c / n for c, n in zip(links["cores"], per_node, strict=True))
    cpu = [s["cpu_s_per_byte"] for s in [*links["inter"], *links["intra"]] if s["cpu_s_per_byte"] > 0]
    made: dict[str, Any] = {
        "encode_gb_per_s": {k: v / 1e9 for k, v in p["encode"].items()},
        "merge_gb_per_s": {k: v / 1e9 for k, v in p["merge"].items()},
        "reduce_gb_per_s": p["reduce"] / 1e9,
        "mix_gb_per_s": p["mix"] / 1e9,
        "update_gb_per_s": {k: v / 1e9 for k, v in links.get("update", {}).items()},
        "cores": cores,
        **links.get("overhead", {}),
    }
    if cpu:
        made["transfer_cpu_gb_per_s"] = 1e-9 / statistics.median(cpu)
    found = links["allreduce"]
    if found is not None:
        times = sorted((float(size), seconds) for size, seconds in found["seconds"].items())
        made["allreduce"] = {
            "per_node": per_node,
            "seconds": times,
            "bf16_slowdown": found["bf16_slowdown"],
            **({"cpu_gb_per_s": 1e-9 / found["cpu_s_per_byte"]} if found["cpu_s_per_byte"] > 0 else {}),
        }
    rounded: dict[str, Any] = _rounded(made)
    return rounded


def _rounded(value: Any) -> Any:
    """Four digits of every number: a measurement has no more."""
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _link(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    whole = statistics.median(s["link_bytes_per_s"] for s in samples)
    flow = statistics.median(s["flow_bytes_per_s"] for s in samples)
    link: dict[str, Any] = {
        "bandwidth_gbps": whole * 8e-9,
        "latency_us": statistics.median(s["latency_s"] for s in samples) * 1e6,
    }
    if flow < 0.9 * whole:
        link["flow_gbps"] = flow * 8e-9
    sizes = [dict(s["by_size"]) for s in samples if s.get("by_size")]
    if sizes:
        common = sorted(set.intersection(*(set(s) for s in sizes)))
        link["by_size"] = [[float(b), statistics.median(s[b] for s in sizes)] for b in common]
    made: dict[str, Any] = _rounded(link)
    return made


def read_compute(source: str | None) -> dict[str, Any]:
    """Read compute times: from seconds (`0.25`), a file written by `gossamer.probe`, or the traces of a run."""
    if source is None:
        return {"seconds": GUESS_SECONDS, "source": "guess"}
    try:
        return {"seconds": float(source)}
    except ValueError:
        path = Path(source)
    if path.is_dir():
        return _from_trace(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return recorded(data)
    except OSError as error:
        raise InputError(f"cannot read compute times from {source!r}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise InputError(
            f"{source!r} holds no compute times; it should be written by gossamer.probe(model, optimizer, step, "
            f"{source!r})"
        ) from None


def recorded(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return compute times as `gossamer.probe` measured them, for `cluster_from_probe`."""
    samples = [float(s) for s in data["samples"]]
    known = ("model_mb", "update_seconds", "cores", "backward_share")
    return _distribution(samples, {k: float(data[k]) for k in known if data.get(k) is not None})


def _distribution(samples: list[float], more: dict[str, Any]) -> dict[str, Any]:
    if not samples:
        raise InputError("there are no compute times to take a mean of; record more steps")
    kept = samples[:: -(-len(samples) // MOST_SAMPLES)]
    times = {"seconds": statistics.mean(samples), "samples": [float(f"{s:.5g}") for s in kept]}
    return {**times, **more, "source": "measured"}


def _from_trace(folder: Path) -> dict[str, Any]:
    """Return the forward plus backward and the update times of all workers' steps but each worker's first."""
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
