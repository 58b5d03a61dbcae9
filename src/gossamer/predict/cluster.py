"""Descriptions of clusters for predictions: from a TOML or JSON file, a preset, or `gossamer probe`.

Field names say their units. A bandwidth is that of one direction of a full-duplex link. The link between nodes is a
node's network interface, which all exchanges of all its workers share.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gossamer.errors import InputError
from gossamer.predict.compute import parse_jitter
from gossamer.topology import Layout
from gossamer.topology.schedule import bucket_count

# Limits far beyond real machines, so that a prediction can overflow neither numbers nor memory.
Seconds = Annotated[float, Field(ge=1e-9, le=1e6, allow_inf_nan=False)]
Gbps = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
Megabytes = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
MOST_WORKERS = 1 << 16
MOST_BUCKETS = 1 << 12
MOST_DDP_BUCKETS = 1 << 16
Count = Annotated[int, Field(ge=1, le=MOST_WORKERS)]
MiB = 2**20
Rate = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Source = Literal["given", "measured", "guess"]
# Outside of these a bandwidth is probably in another unit.
SLOWEST_GBPS, FASTEST_GBPS = 1e-4, 2e4
FASTEST_NODE_GBPS = 8e3  # of a node's network interfaces: eight of 1 Tbit/s


NO_LINK = (
    "the description has one node and no link between nodes (links.inter), so nothing is known about several nodes; "
    "pass --link RATE (for example --link 25gbit), or run gossamer probe on two nodes"
)
EXAMPLE = "write for example a file with gossamer probe, or see docs/predict.md"


class _Part(BaseModel):
    """A part of a description. It is immutable, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LinkSpec(_Part):
    """A link. `flow_gbps` is the bandwidth of one connection if it is less (bonded interfaces, busy CPU)."""

    bandwidth_gbps: Gbps
    latency_us: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.0
    flow_gbps: Gbps | None = None
    by_size: tuple[tuple[float, float], ...] = ()
    """Measured single messages: bytes and seconds, by size."""
    shared: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The part of the bandwidth that a node's exchanges with several nodes at the same time reach together."""

    @model_validator(mode="after")
    def _plausible(self) -> Self:
        if not SLOWEST_GBPS <= self.bandwidth_gbps <= FASTEST_GBPS:
            size = "small" if self.bandwidth_gbps < SLOWEST_GBPS else "large"
            raise ValueError(
                f"bandwidth_gbps is in gigabits per second, and {self.bandwidth_gbps:g} is suspiciously {size}: is it "
                "in another unit? Links between 0.1 Mbit/s (0.0001) and 20 Tbit/s (20000) are accepted"
            )
        return self

    def overhead(self, nbytes: float) -> float:
        """Return the seconds of a message beyond its bytes over the bandwidth of a connection."""
        if not self.by_size:
            return self.latency
        sizes = [size for size, _ in self.by_size]
        extra = [seconds - size / self.flow_bytes_per_second for size, seconds in self.by_size]
        return max(self.latency, float(np.interp(nbytes, sizes, extra)))

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

    inter: LinkSpec | None = None
    intra: LinkSpec = LinkSpec(bandwidth_gbps=200, latency_us=5)
    pairs: tuple[PairSpec, ...] = ()

    @property
    def between(self) -> LinkSpec:
        """The link between nodes."""
        if self.inter is None:
            raise InputError(NO_LINK)
        return self.inter


class ComputeSpec(_Part):
    """The time of one step's forward and backward pass.

    `jitter` is a distribution around the mean; `samples`, measured step times in seconds, replace it. `per_worker` has
    the means of unequal workers. With `reference_workers` the global batch is fixed (strong scaling): `seconds` is the
    time with that many workers, and all of it but `fixed_seconds` shrinks with more workers. `update_seconds` is the
    optimizer's part of a step: it follows the arrival of the exchange, so it overlaps with nothing; without it, the
    rates in `costs` count. `cores` are the cores that a worker's compute keeps busy (0: an accelerator computes), which
    communication competes for. `source` says where the numbers come from.
    """

    seconds: Seconds
    jitter: str = "none"
    per_worker: Annotated[tuple[Seconds, ...], Field(min_length=1)] | None = None
    samples: Annotated[tuple[Seconds, ...], Field(min_length=1)] | None = None
    reference_workers: Count | None = None
    fixed_seconds: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    update_seconds: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None = None
    cores: Annotated[float, Field(ge=0, le=1e4, allow_inf_nan=False)] = 0.0
    source: Source = "given"

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
    (None: as many as the engine chooses). `equal_layers`, if known, are parameters of equal size; DDP cuts none.
    """

    mb: Megabytes
    source: Source = "given"
    equal_layers: Annotated[int, Field(ge=1, le=MOST_BUCKETS)] | None = None
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
    """The baseline DDP: torch's bucket size in MiB, and the algorithm of the all-reduce.

    The first bucket is `first_bucket_mb`; without it, as in torch, 1 MiB with the default size of buckets, and like the
    others where `bucket_cap_mb` is passed to DDP.

    `ring` sends 2(n-1)/n of the data through every link, as gloo does. `best` is NCCL's choice: on two nodes a tree
    sends the data once each way, like the hierarchical exchange; on more it is no better than the ring.
    `backward_share` is the part of the compute time during which gradients become ready.
    """

    bucket_mb: Megabytes = 25.0
    first_bucket_mb: Megabytes | None = None
    allreduce: Literal["ring", "best"] = "ring"
    backward_share: Annotated[float, Field(ge=0, le=1)] = 2 / 3

    @property
    def first(self) -> float:
        """The size of the first bucket in MiB."""
        usual = 1.0 if self.bucket_mb == DdpSpec.model_fields["bucket_mb"].default else self.bucket_mb
        return min(self.bucket_mb, usual if self.first_bucket_mb is None else self.first_bucket_mb)


class AllReduceSpec(_Part):
    """Measured all-reduces of all workers of the probed layout: bytes and seconds, CPU, and bf16's time per byte over
    fp32's."""

    per_node: tuple[Count, ...]
    seconds: Annotated[tuple[tuple[float, float], ...], Field(min_length=1)]
    cpu_gb_per_s: Rate | None = None
    bf16_slowdown: Annotated[float, Field(ge=1, le=1e3)] = 1.0

    def at(self, nbytes: float) -> float:
        """Return the seconds of an all-reduce of `nbytes`."""
        sizes, times = (np.array(column) for column in zip(*self.seconds, strict=True))
        if nbytes > sizes[-1]:
            return float(times[-1] * nbytes / sizes[-1])
        return float(np.interp(nbytes, sizes, times))


class CostSpec(_Part):
    """What a worker's own processor and memory do in a step, as rates in 10^9 bytes of fp32 parameters per second.

    `encode_gb_per_s` and `merge_gb_per_s` are the work of an exchange before and after a message, by wire;
    `reduce_gb_per_s` adds another worker's values, `mix_gb_per_s` writes the result into the parameters,
    `update_gb_per_s` is an optimizer's step, by name. `transfer_cpu_gb_per_s` are bytes sent and received per second of
    CPU time. `bucket_us` and `step_us` are what a bucket and a step of gossip cost the training thread besides,
    `ddp_us` a step of DDP. `cores` are those of a worker. `assumed` says where the numbers come from if they were not
    measured.
    """

    encode_gb_per_s: dict[str, Rate] = {}
    merge_gb_per_s: dict[str, Rate]
    reduce_gb_per_s: Rate
    mix_gb_per_s: Rate
    update_gb_per_s: dict[str, Rate] = {}
    transfer_cpu_gb_per_s: Rate | None = None
    bucket_us: Annotated[float, Field(ge=0, le=1e7)] = 0.0
    step_us: Annotated[float, Field(ge=0, le=1e7)] = 0.0
    ddp_us: Annotated[float, Field(ge=0, le=1e7)] = 0.0
    cores: Annotated[float, Field(gt=0, le=1e4)] = 1.0
    allreduce: AllReduceSpec | None = None
    assumed: str = ""


class ClusterSpec(_Part):
    """The description of a cluster. `layout` places the workers; `load` reads a file or a preset."""

    name: str = ""
    nodes: Count
    per_node: Count | tuple[Count, ...]
    links: ClusterLinks
    compute: ComputeSpec
    model: ModelSpec
    ddp: DdpSpec = DdpSpec()
    costs: CostSpec | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.nodes > 1 and self.links.inter is None:
            raise ValueError(
                f"lacks 'links.inter', the link between its {self.nodes} nodes; add bandwidth_gbps and latency_us to "
                "[links.inter]"
            )
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
        if layout.nodes > 1:
            assert self.links.between
        pairs = tuple(p for p in self.links.pairs if max(p.nodes) < layout.nodes)
        links = self.links.model_copy(update={"pairs": pairs})
        return self.model_copy(update={"nodes": layout.nodes, "per_node": layout.per_node, "links": links})

    def changed(self, **parts: dict[str, Any] | None) -> ClusterSpec:
        """Return a copy with some fields replaced: `changed(model={"mb": 500})`."""
        made = {
            part: getattr(self, part).model_copy(update=fields) if fields is not None else None
            for part, fields in parts.items()
        }
        changed = self.model_copy(update=made)
        from_dict(changed.model_copy(update={"compute": changed.compute.model_copy(update={"per_worker": None})}))
        return changed


def load(source: str | Path, model_mb: float | None = None) -> ClusterSpec:
    """Load a preset by name, or a `.toml` or `.json` file. `model_mb` is for a file without a model."""
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
    if model_mb is not None and isinstance(data, dict):
        data.setdefault("model", {"mb": model_mb})
    made = from_dict(data, str(path))
    inter = made.links.inter
    if inter is not None and inter.bandwidth_gbps > FASTEST_NODE_GBPS:
        raise InputError(
            f"{path}: links.inter.bandwidth_gbps is in gigabits per second, and {inter.bandwidth_gbps:g} is "
            "suspiciously large for the network of a node: is it in megabits? Write 25 for a link of 25 Gbit/s"
        )
    return made


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
            raise InputError(f"{where} lacks {at!r}; add it; {EXAMPLE}") from None
        message = first["msg"].removeprefix("Value error, ")
        got = "" if isinstance(first["input"], dict) else f", got {first['input']!r:.60}"
        raise InputError(f"{where}: {at:.100}: {message:.400}{got}") from None


def _known_keys(loc: tuple[int | str, ...]) -> str:
    owner: Any = ClusterSpec
    for step in loc[:-1]:
        if isinstance(step, str):
            owner = {**ClusterLinks.model_fields, **ClusterSpec.model_fields}[step].annotation
            owner = next((t for t in get_args(owner) if t is not type(None)), owner)  # X | None
            owner = PairSpec if step == "pairs" else owner
    return f"it takes {', '.join(owner.model_fields)}"


def to_toml(cluster: ClusterSpec) -> str:
    """Return the description as TOML, which `load` reads back."""
    data = cluster.model_dump(mode="json", exclude_none=True)
    pairs = data["links"].pop("pairs", [])
    lines = _table("", data)
    for pair in pairs:
        lines += ["", "[[links.pairs]]", *(f"{k} = {json.dumps(v)}" for k, v in pair.items())]
    return "\n".join(lines).lstrip("\n") + "\n"


def _table(title: str, table: dict[str, Any]) -> list[str]:
    """Return a table's own lines, then those of the tables in it."""
    plain = [f"{k} = {json.dumps(v)}" for k, v in table.items() if not isinstance(v, dict)]
    lines = (["", f"[{title}]"] if title and plain else []) + plain
    for key, value in table.items():
        if isinstance(value, dict):
            lines += _table(f"{title}.{key}" if title else key, value)
    return lines
