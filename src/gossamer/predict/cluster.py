"""A cluster description: what a prediction needs to know, from a TOML or JSON file, a preset, or `gossamer probe`.

Everything is in the units its field name says. Bandwidths are what one direction of a full-duplex link carries; the
inter-node link is a node's network interface, shared by all exchanges of all its workers.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gossamer.errors import InputError
from gossamer.predict.compute import parse_jitter
from gossamer.topology import Layout
from gossamer.topology.schedule import bucket_count

# Far outside of what exists, so that what is inside cannot overflow a prediction or the memory.
Seconds = Annotated[float, Field(ge=1e-9, le=1e6, allow_inf_nan=False)]
Gbps = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
Megabytes = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
MOST_WORKERS = 1 << 16
MOST_BUCKETS = 1 << 12
MOST_DDP_BUCKETS = 1 << 16
Count = Annotated[int, Field(ge=1, le=MOST_WORKERS)]
MiB = 2**20


class Part(BaseModel):
    """Immutable, and an unknown key is refused rather than ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Link(Part):
    """`flow_gbps`: what one connection reaches where it is less than the link (bonded interfaces, a busy CPU)."""

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


class Pair(Link):
    """A link between two nodes that differs from the others."""

    nodes: tuple[int, int]


class Links(Part):
    """`intra` is one worker's path to the others on its node; `inter` is a node's network interface."""

    inter: Link
    intra: Link = Link(bandwidth_gbps=200, latency_us=5)
    pairs: tuple[Pair, ...] = ()


class Compute(Part):
    """How long one step's forward and backward pass takes.

    `jitter` is a distribution around the mean; `samples`, measured step times in seconds, replace it. `per_worker`
    are means for unequal workers. With `reference_workers` the global batch is fixed (strong scaling): `seconds` holds
    for that many workers and all but `fixed_seconds` of it is divided among more. `update_seconds` is the optimizer's
    own part of a step: it comes after the exchange has arrived, so nothing overlaps it.
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
        """Mean seconds of each worker."""
        if self.per_worker is not None:
            if len(self.per_worker) != workers:
                raise InputError(
                    f"compute.per_worker lists {len(self.per_worker)} means but the layout has {workers} workers; "
                    "list one mean a worker, or leave it out"
                )
            return np.array(self.per_worker)
        scale = 1.0 if self.reference_workers is None else self.reference_workers / workers
        return np.full(workers, self.fixed_seconds + (self.seconds - self.fixed_seconds) * scale)

    def draw(self, workers: int, steps: int, seed: int) -> np.ndarray:
        """Compute times [steps, workers]."""
        means = self.means(workers)
        if self.samples is not None:
            values = np.array(self.samples)
            drawn = np.random.default_rng(seed).choice(values / values.mean(), size=(steps, workers))
            return np.asarray(drawn * means)
        return np.asarray(parse_jitter(self.jitter).sample(workers, steps, seed) * means)

    @property
    def relative_variance(self) -> float:
        """σ²: variance of the compute time in units of its mean squared."""
        if self.samples is not None:
            values = np.array(self.samples)
            return float(values.var() / values.mean() ** 2)
        return float(parse_jitter(self.jitter).sample(64, 512, 0).var())


class Model(Part):
    """`mb`: the fp32 parameters in 10^6 bytes; `buckets`: exchanges they are cut into (none: as the engine)."""

    mb: Megabytes
    buckets: Annotated[int, Field(ge=1, le=MOST_BUCKETS)] | None = None

    @property
    def bytes(self) -> float:
        return self.mb * 1e6

    def buckets_for(self, period: int) -> int:
        """As given, or the engine's own choice; beyond `MOST_BUCKETS` a finer cut changes no prediction."""
        return self.buckets if self.buckets is not None else min(bucket_count(self.bytes, period), MOST_BUCKETS)


class Ddp(Part):
    """The baseline: torch's bucket size in MiB (the first bucket is 1 MiB), and how the all-reduce is done.

    `ring` sends 2(n-1)/n of the data through every link, as gloo does. `best` is NCCL's choice: on two nodes a tree
    sends the data once each way, like the hierarchical exchange; on more it is no better than the ring.
    `backward_share` is the part of the compute time during which gradients become ready.
    """

    bucket_mb: Megabytes = 25.0
    allreduce: Literal["ring", "best"] = "ring"
    backward_share: Annotated[float, Field(ge=0, le=1)] = 2 / 3


class Cluster(Part):
    """The whole description. `layout_of` gives the workers' places; `load` reads a file or a preset."""

    name: str = ""
    nodes: Count
    per_node: Count | tuple[Count, ...]
    links: Links
    compute: Compute
    model: Model
    ddp: Ddp = Ddp()

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

    def resized(self, layout: Layout) -> Cluster:
        """The same machines in another number; overrides of nodes that no longer exist are dropped."""
        pairs = tuple(p for p in self.links.pairs if max(p.nodes) < layout.nodes)
        links = self.links.model_copy(update={"pairs": pairs})
        return self.model_copy(update={"nodes": layout.nodes, "per_node": layout.per_node, "links": links})

    def changed(self, **parts: dict[str, Any]) -> Cluster:
        """With some fields of some parts replaced: `changed(model={"mb": 500})`."""
        made = {part: getattr(self, part).model_copy(update=fields) for part, fields in parts.items()}
        changed = self.model_copy(update=made)
        from_dict(changed.model_copy(update={"compute": changed.compute.model_copy(update={"per_worker": None})}))
        return changed


def load(source: str | Path) -> Cluster:
    """A preset by name, or a `.toml` or `.json` file."""
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
    except (OSError, ValueError) as error:  # a ValueError: no text, or no path
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read cluster file {path}: {reason}; check the path and that it is text") from None
    try:
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:  # both parsers' errors are ValueErrors
        raise InputError(f"cluster file {path} is not valid {path.suffix[1:].upper()}: {error!s:.200}") from None
    return from_dict(data, str(path))


def from_dict(data: Any, where: str = "the cluster description") -> Cluster:
    """Validate; the first thing that is wrong becomes one sentence."""
    try:
        return Cluster.model_validate(data.model_dump() if isinstance(data, Cluster) else data)
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
    owner: Any = Cluster
    for step in loc[:-1]:
        if isinstance(step, str):
            owner = {**Links.model_fields, **Cluster.model_fields}[step].annotation
            owner = Pair if step == "pairs" else owner
    return f"it takes {', '.join(owner.model_fields)}"


def to_toml(cluster: Cluster) -> str:
    """The description as TOML that `load` reads back."""
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
