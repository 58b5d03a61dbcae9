"""Descriptions of clusters for predictions: from a TOML or JSON file, a preset, or `gossamer probe`.

Field names say their units. A bandwidth is that of one direction of a full-duplex link. The link between nodes is a
node's network interface, which all exchanges of all its workers share.
"""

from __future__ import annotations

import json
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gossamer.errors import InputError
from gossamer.predict.compute import parse_jitter
from gossamer.topology import Layout
from gossamer.topology.schedule import bucket_count
from gossamer.trace import merge

# Limits far beyond real machines, so that a prediction can overflow neither numbers nor memory.
Seconds = Annotated[float, Field(ge=1e-9, le=1e6, allow_inf_nan=False)]
Gbps = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
Megabytes = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
MOST_WORKERS = 1 << 16
MOST_BUCKETS = 1 << 12
MOST_DDP_BUCKETS = 1 << 16
Count = Annotated[int, Field(ge=1, le=MOST_WORKERS)]
MiB = 2**20
DIFFERS = 0.25  # relative difference to the median from which a probed pair of nodes gets an entry of its own
MOST_SAMPLES = 512  # of a measured step time: enough for a distribution


class _Part(BaseModel):
    """A part of a description. It is immutable, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LinkSpec(_Part):
    """A link. `flow_gbps` is the bandwidth of one connection if it is less (bonded interfaces, busy CPU)."""

    bandwidth_gbps: Gbps
    latency_us: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.0
    flow_gbps: Gbps | None = None

    @property
    def bytes_per_second(self) -> float:
        return self.bandwidth_gbps * 1e9 / 8

    @property
    def flow_bytes_per_second(self) -> float:
        return min(self.flow_gbps or self.bandwidth_gbps, self.bandwidth_gbps) * 1e9 / 8

    @property
    def latency(self) -> float:
        return self.latency_us * 1e-6


class PairSpec(LinkSpec):
    """A link between two particular nodes that differs from the other links."""

    nodes: tuple[int, int]


class ClusterLinks(_Part):
    """All links. `intra` is a worker's path to the others on its node; `inter` is a node's network interface."""

    inter: LinkSpec
    intra: LinkSpec = LinkSpec(bandwidth_gbps=200, latency_us=5)
    pairs: tuple[PairSpec, ...] = ()


class ComputeSpec(_Part):
    """The time of one step's forward and backward pass.

    `jitter` is a distribution around the mean; `samples`, measured step times in seconds, replace it. `per_worker` has
    the means of unequal workers. With `reference_workers` the global batch is fixed (strong scaling): `seconds` is the
    time with that many workers, and all of it but `fixed_seconds` shrinks with more workers. `update_seconds` is the
    optimizer's part of a step: it follows the arrival of the exchange, so it overlaps with nothing.
    """

    seconds: Seconds
    jitter: str = "none"
    per_worker: Annotated[tuple[Seconds, ...], Field(min_length=1)] | None = None
    samples: Annotated[tuple[Seconds, ...], Field(min_length=1)] | None = None
    reference_workers: Count | None = None
    fixed_seconds: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    update_seconds: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        parse_jitter(self.jitter)
        if self.fixed_seconds > self.seconds:
            raise ValueError(f"fixed_seconds {self.fixed_seconds} must not exceed seconds {self.seconds}")
        return self

    def means(self, workers: int) -> np.ndarray:
        """Return the mean seconds of each worker."""
        if self.per_worker is not None:
            if len(self.per_worker) != workers:
                raise InputError(
                    f"compute.per_worker lists {len(self.per_worker)} means but the layout has {workers} workers; "
                    "list one mean per worker, or leave it out"
                )
            return np.array(self.per_worker)
        scale = 1.0 if self.reference_workers is None else self.reference_workers / workers
        return np.full(workers, self.fixed_seconds + (self.seconds - self.fixed_seconds) * scale)

    def draw(self, workers: int, steps: int, seed: int) -> np.ndarray:
        """Draw compute times, shape [steps, workers]."""
        means = self.means(workers)
        if self.samples is not None:
            values = np.array(self.samples)
            drawn = np.random.default_rng(seed).choice(values / values.mean(), size=(steps, workers))
            return np.asarray(drawn * means)
        return np.asarray(parse_jitter(self.jitter).sample(workers, steps, seed) * means)

    @property
    def relative_variance(self) -> float:
        """σ²: the variance of the compute time over its squared mean."""
        if self.samples is not None:
            values = np.array(self.samples)
            return float(values.var() / values.mean() ** 2)
        return float(parse_jitter(self.jitter).sample(64, 512, 0).var())


class ModelSpec(_Part):
    """The model: `mb` is the size of the fp32 parameters in 10^6 bytes, `buckets` how many buckets they are cut into
    (None: as many as the engine chooses)."""

    mb: Megabytes
    buckets: Annotated[int, Field(ge=1, le=MOST_BUCKETS)] | None = None

    @property
    def bytes(self) -> float:
        return self.mb * 1e6

    def buckets_for(self, period: int, fragments: int = 1) -> int:
        """Return the number of buckets: the given one, or the engine's up to `MOST_BUCKETS` (more change no
        prediction), rounded up to a multiple of `fragments`."""
        if self.buckets is not None:
            return -(-self.buckets // fragments) * fragments
        return min(bucket_count(self.bytes, period, fragments), MOST_BUCKETS // fragments * fragments)


class DdpSpec(_Part):
    """The baseline DDP: torch's bucket size in MiB (the first bucket is 1 MiB), and the algorithm of the all-reduce.

    `ring` sends 2(n-1)/n of the data through every link, as gloo does. `best` is NCCL's choice: on two nodes a tree
    sends the data once each way, like the hierarchical exchange; on more it is no better than the ring.
    `backward_share` is the part of the compute time during which gradients become ready.
    """

    bucket_mb: Megabytes = 25.0
    allreduce: Literal["ring", "best"] = "ring"
    backward_share: Annotated[float, Field(ge=0, le=1)] = 2 / 3


class ClusterSpec(_Part):
    """The description of a cluster. `layout` places the workers; `load` reads a file or a preset."""

    name: str = ""
    nodes: Count
    per_node: Count | tuple[Count, ...]
    links: ClusterLinks
    compute: ComputeSpec
    model: ModelSpec
    ddp: DdpSpec = DdpSpec()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not isinstance(self.per_node, int) and len(self.per_node) != self.nodes:
            raise ValueError(f"per_node lists {len(self.per_node)} nodes but nodes says {self.nodes}")
        workers = self.nodes * self.per_node if isinstance(self.per_node, int) else sum(self.per_node)
        if workers > MOST_WORKERS:
            raise ValueError(f"a cluster has at most {MOST_WORKERS} workers, got {workers}")
        if self.model.bytes / MiB > MOST_DDP_BUCKETS * self.ddp.bucket_mb:
            raise ValueError(
                f"ddp.bucket_mb {self.ddp.bucket_mb:g} cuts {self.model.mb:g} MB into more than {MOST_DDP_BUCKETS} "
                "buckets; use larger ones"
            )
        for pair in self.links.pairs:
            a, b = pair.nodes
            if a == b or not (0 <= a < self.nodes and 0 <= b < self.nodes):
                raise ValueError(f"links.pairs must join two of the nodes 0..{self.nodes - 1}, got {[a, b]}")
        if self.compute.per_worker is not None and self.compute.reference_workers is None:
            self.compute.means(self.layout.n)
        return self

    @property
    def layout(self) -> Layout:
        counts = [self.per_node] * self.nodes if isinstance(self.per_node, int) else list(self.per_node)
        return Layout.of(counts)

    def resized(self, layout: Layout) -> ClusterSpec:
        """Return a cluster of the same machines with another layout; `pairs` of missing nodes are dropped."""
        pairs = tuple(p for p in self.links.pairs if max(p.nodes) < layout.nodes)
        links = self.links.model_copy(update={"pairs": pairs})
        return self.model_copy(update={"nodes": layout.nodes, "per_node": layout.per_node, "links": links})

    def changed(self, **parts: dict[str, Any]) -> ClusterSpec:
        """Return a copy with some fields replaced: `changed(model={"mb": 500})`."""
        made = {part: getattr(self, part).model_copy(update=fields) for part, fields in parts.items()}
        changed = self.model_copy(update=made)
        from_dict(changed.model_copy(update={"compute": changed.compute.model_copy(update={"per_worker": None})}))
        return changed


def load(source: str | Path) -> ClusterSpec:
    """Load a preset by name, or a `.toml` or `.json` file."""
    from gossamer.predict.presets import PRESETS

    if str(source) in PRESETS:
        return PRESETS[str(source)]
    path = Path(source)
    if path.suffix not in (".toml", ".json"):
        raise InputError(
            f"unknown cluster {str(source)!r}; name a preset ({', '.join(PRESETS)}) or a .toml or .json file"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # a ValueError: not text, or not a path
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read cluster file {path}: {reason}; check the path and that it is text") from None
    try:
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:  # both parsers' errors are ValueErrors
        raise InputError(f"cluster file {path} is not valid {path.suffix[1:].upper()}: {error!s:.200}") from None
    return from_dict(data, str(path))


def from_dict(data: Any, where: str = "the cluster description") -> ClusterSpec:
    """Validate a description; the error is one sentence about the first problem."""
    try:
        return ClusterSpec.model_validate(data.model_dump() if isinstance(data, ClusterSpec) else data)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(p) for p in first["loc"] if p not in ("int", "tuple[constrained-int, ...]")) or "the file"
        if first["type"] == "extra_forbidden":
            raise InputError(f"{where} has an unknown key {at!r:.100}; {_known_keys(first['loc'])}") from None
        if first["type"] == "missing":
            raise InputError(f"{where} lacks {at!r}; add it (an example: gossamer simulate --help)") from None
        message = first["msg"].removeprefix("Value error, ")
        got = "" if isinstance(first["input"], dict) else f", got {first['input']!r:.60}"
        raise InputError(f"{where}: {at:.100}: {message:.400}{got}") from None


def _known_keys(loc: tuple[int | str, ...]) -> str:
    owner: Any = ClusterSpec
    for step in loc[:-1]:
        if isinstance(step, str):
            owner = {**ClusterLinks.model_fields, **ClusterSpec.model_fields}[step].annotation
            owner = PairSpec if step == "pairs" else owner
    return f"it takes {', '.join(owner.model_fields)}"


def to_toml(cluster: ClusterSpec) -> str:
    """Return the description as TOML, which `load` reads back."""
    data = cluster.model_dump(mode="json", exclude_none=True)
    lines: list[str] = []
    tables: list[tuple[str, dict[str, Any]]] = []
    pairs = data["links"].pop("pairs", [])
    for key, value in data.items():
        if isinstance(value, dict):
            nested = {k: v for k, v in value.items() if isinstance(v, dict)}
            tables += [(f"{key}.{k}", v) for k, v in nested.items()] or [(key, value)]
        else:
            lines.append(f"{key} = {json.dumps(value)}")
    for title, table in tables:
        lines += ["", f"[{title}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
    for pair in pairs:
        lines += ["", "[[links.pairs]]", *(f"{k} = {json.dumps(v)}" for k, v in pair.items())]
    return "\n".join(lines) + "\n"


def cluster_from_probe(links: Mapping[str, Any], compute: Mapping[str, Any], model_mb: float | None) -> ClusterSpec:
    """Describe a probed cluster: `links` as written by `gossamer probe`, `compute` as returned by `read_compute`."""
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
    if not samples:  # a single worker sends nothing, so any number will do
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
    """Read compute times: from seconds (`0.25`), a file written by `gossamer.probe`, or the traces of a run."""
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
