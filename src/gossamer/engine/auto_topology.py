"""`topology="auto"`: measure the links at the start, or read a cluster file, and choose as `gossamer advise` would.

"auto" measures for a few seconds. "auto:cluster.toml" reads the file if it exists, and else measures and writes it; so
a resumed job makes the same choice. Worker 0 decides, and all workers take its choice.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from gossamer.comm import Transport, rank_and_size
from gossamer.comm.link_probe import probe_links
from gossamer.engine.policies import AWC, Settings, Synchronous
from gossamer.errors import InputError
from gossamer.predict.cluster import ClusterSpec, from_dict, load, to_toml
from gossamer.predict.costs import ClusterCosts
from gossamer.predict.pick import pick_topology
from gossamer.predict.probed import cluster_from_probe
from gossamer.topology import Layout

AUTO = "auto"
SECONDS = 0.1  # per bandwidth


def asks(topology: Any) -> bool:
    """Whether a user leaves the topology to us."""
    return isinstance(topology, str) and (topology == AUTO or topology.startswith(f"{AUTO}:"))


def refuse_elastic(topology: Any) -> None:
    """Raise an error if the topology of an elastic job is to be measured."""
    if asks(topology):
        raise InputError(
            f"topology={topology!r} measures the links of a job whose workers are fixed, and on_failure='continue' "
            "lets them change; name a topology, for example the one that gossamer advise recommends"
        )


def choose_topology(asked: str, model: nn.Module, settings: Settings, layout: Layout, transport: Transport) -> str:
    """Choose a topology and say why, on worker 0. Collective."""
    file = asked.partition(":")[2]
    cluster: ClusterSpec | None = None

    def read() -> bool:
        nonlocal cluster
        cluster = _read(file, layout) if file else None
        return cluster is not None

    def pick() -> str:
        assert cluster is not None
        if file and not known:
            _write(file, cluster)
        chosen, why = _pick(cluster, model, settings)
        print(f"gossamer: topology={asked!r} chose {chosen!r}: {why}", file=sys.stderr)
        return chosen

    known = _by_first(transport, "auto-known", read)
    if not known:
        cluster = _measured(model, layout)
    name: str = _by_first(transport, "auto-choice", pick)
    return name


def _by_first(transport: Transport, name: str, work: Callable[[], Any]) -> Any:
    """Do `work` on worker 0 and return its result on every worker; all raise its error. Collective."""
    said: dict[str, Any] = {}
    if transport.rank == 0:
        try:
            said = {"result": work()}
        except Exception as error:  # the others wait for an answer
            said = {"error": str(error) if isinstance(error, InputError) else f"worker 0 failed: {error!r}"}
    found = json.loads(transport.share(name, json.dumps(said))[0])
    if "error" in found:
        raise InputError(found["error"])
    return found["result"]


def _write(file: str, cluster: ClusterSpec) -> None:
    try:
        Path(file).write_text(to_toml(cluster), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write the cluster file {file!r}: {error.strerror}; choose another place") from None


def _read(file: str, layout: Layout) -> ClusterSpec | None:
    """The cluster of a file for this layout; None if there is no file yet."""
    if not Path(file).exists():
        return None
    return load(file).resized(layout)


def _measured(model: nn.Module, layout: Layout) -> ClusterSpec:
    """Measure this job. Collective. The compute time is not known: it is taken to be that of an all-reduce."""
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise InputError(
            "topology='auto' measures links over gloo, which says nothing about a GPU's; describe the cluster in a "
            "file and pass topology='auto:cluster.toml'"
        )
    if rank_and_size()[1] != layout.n:
        raise InputError(
            "topology='auto' measures the links of all workers, and process_group= selects some; pass "
            "topology='auto:cluster.toml' with a description of these, or name a topology"
        )
    links = probe_links(SECONDS).to_dict()
    made = cluster_from_probe(links, {"seconds": 0.1, "source": "guess"}, _megabytes(model))
    seconds = max(1e-6, ClusterCosts(made).allreduce(1.0))
    return from_dict(made.changed(compute={"seconds": seconds}))


def _megabytes(model: nn.Module) -> float:
    return max(1e-6, sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6)


def _pick(cluster: ClusterSpec, model: nn.Module, settings: Settings) -> tuple[str, str]:
    policy, layout = settings.algorithm, cluster.layout
    equal = layout.nodes > 1 and layout.per_node[0] > 1 and len(set(layout.per_node)) == 1
    inside = settings.gradients == "node" or (settings.gradients == "auto" and equal and not settings.asynchronous)
    several = inside and layout.nodes > 1
    rounds: dict[str, Any] = {}
    if isinstance(policy, Synchronous):
        rounds = {"every": policy.every, "fragments": policy.fragments, "outer": policy.outer is not None}
        rounds |= {"staleness": policy.staleness} if isinstance(policy, AWC) else {}
    return pick_topology(
        cluster.changed(model={"mb": _megabytes(model), "source": "given"}),
        algorithm=policy.name,
        wire=settings.wire,
        gradients="node" if several else "worker",
        bucket_mb=settings.exchange.bucket_mib,
        **rounds,
    )
