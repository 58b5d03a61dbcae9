"""The cluster and the emulated model of a benchmark, and the bucket sizes to try."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gossamer.comm import torchft_peer
from gossamer.errors import InputError
from gossamer.lab.cluster import LabCluster, Network
from gossamer.lab.emulate import EmulatedModel
from gossamer.lab.shaping import LinkRates, format_rate
from gossamer.predict.cluster import ClusterSpec
from gossamer.predict.compute import ComputeTime, Table, parse_jitter
from gossamer.predict.methods import Method
from gossamer.predict.predict import derived

MiB = 2**20
MODEL_MB = 4.0
BUCKETS = (16, 8, 4, 2)  # numbers of buckets to try
SECONDS_PER_WORKER = 0.05  # compute time of a dilated cluster: two cores then stay less than half busy
DECENT_DP = {  # names of topologies in Decent-DP
    "aer": "alternating-exp-ring",
    "one-peer-exponential": "one-peer-exp",
    "ring": "ring",
    "complete": "complete",
}


@dataclass(frozen=True)
class Setup:
    """One cluster and one model. Rates are written as for `LabCluster`; `compute` is the mean in seconds per step."""

    per_node: tuple[int, ...] = (2, 2, 2, 2)
    link: str | float | None = "50mbit"
    links: Mapping[tuple[int, int], str | float | None] = field(default_factory=dict)
    compute: float = 0.4
    jitter: str = "none"
    model_mb: float = MODEL_MB
    layers: int = 8
    network: Network = "namespaces"
    name: str = ""
    dilation: Mapping[str, float] = field(default_factory=dict)  # the factors by which a preset was scaled
    busy: bool = False  # compute keeps a core busy instead of sleeping
    means: tuple[float, ...] = ()  # each worker's mean compute time relative to `compute`; empty: all are equal

    def __post_init__(self) -> None:
        if not (math.isfinite(self.compute) and self.compute >= 0):
            raise InputError(f"the compute time must be at least 0 seconds and finite, got {self.compute}; pass 0.4")
        if not (math.isfinite(self.model_mb) and 0 < self.model_mb <= 4096):
            raise InputError(f"the model must have between 0 and 4096 MB, got {self.model_mb}; pass e.g. 4")
        if not 1 <= self.layers <= 4096:
            raise InputError(f"the model must have 1 to 4096 layers, got {self.layers}; pass e.g. 8")
        parse_jitter(self.jitter)
        self.cluster()  # checks nodes and rates

    @property
    def n(self) -> int:
        return sum(self.per_node)

    @property
    def model_bytes(self) -> int:
        return 4 * round(self.model_mb * 1e6 / 4)

    @property
    def rates(self) -> LinkRates:
        """The rates of the links in bits per second."""
        return LinkRates.parse(len(self.per_node), self.link, self.links)

    def cluster(self) -> LabCluster:
        return LabCluster(per_node=self.per_node, link=self.link, links=self.links, network=self.network)

    def table(self, steps: int, seed: int) -> Table:
        """Compute times [steps, workers], the same for all methods."""
        drawn = ComputeTime(self.compute, parse_jitter(self.jitter)).sample(self.n, steps, seed)
        return drawn * self.means if self.means else drawn

    def gamma(self) -> float | None:
        """γ: the time of a ring all-reduce, in which 2 (n-1)/n S bytes leave every node, over the compute time."""
        rate = self.rates.default
        if rate is None or not self.compute or len(self.per_node) == 1:
            return None
        return 2 * (self.n - 1) / self.n * self.model_bytes * 8 / rate / self.compute

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "compute_seconds": self.compute,
            "jitter": self.jitter,
            "busy": self.busy,
            "model_mb": self.model_mb,
            "layers": self.layers,
            "gamma": self.gamma(),
            "dilation": dict(self.dilation),
        }


def dilated(cluster: ClusterSpec, *, compute: float | None = None, model_mb: float | None = None) -> Setup:
    """Scale a described cluster to the lab: a smaller model, longer compute, slower links, the same γ.

    By default a step computes for 0.05 s times the number of workers, and the model has 4 MB. The rate of the links
    follows from γ, the time of a ring all-reduce over the compute time c: 2 (n-1)/n S / (γ c). Pairs keep their ratio
    to the other links. Latency, the limit of one connection, and links inside a node are not emulated.
    """
    if cluster.compute.samples is not None:
        raise InputError("a cluster with compute.samples has no jitter to emulate; use jitter = 'replay:FILE'")
    layout, facts = cluster.layout, derived(cluster)
    means = cluster.compute.means(layout.n)
    mean = float(means.mean())
    setup = Setup(
        per_node=layout.per_node,
        link=None,
        compute=SECONDS_PER_WORKER * layout.n if compute is None else compute,
        jitter=cluster.compute.jitter,
        model_mb=MODEL_MB if model_mb is None else model_mb,
        name=cluster.name,
        means=tuple(float(m) / mean for m in means) if cluster.compute.per_worker else (),
    )
    if layout.nodes == 1 or not facts["gamma"] > 0 or not setup.compute:
        return setup
    rate = 2 * (layout.n - 1) / layout.n * setup.model_bytes * 8 / (facts["gamma"] * setup.compute)
    factor = rate / (cluster.links.between.bandwidth_gbps * 1e9)
    pairs = {p.nodes: p.bandwidth_gbps * 1e9 * factor for p in cluster.links.pairs}
    dilation = {
        "gamma": facts["gamma"],
        "compute": setup.compute / mean,
        "model": setup.model_bytes / cluster.model.bytes,
        "bandwidth": factor,
    }
    return replace(setup, link=rate, links=pairs, dilation=dilation)


def parse_links(text: str) -> dict[tuple[int, int], str]:
    """Parse `0-3=10mbit,1-2=none` into the argument `links` of `LabCluster`."""
    made: dict[tuple[int, int], str] = {}
    for piece in filter(None, (p.strip() for p in text.split(","))):
        pair, equals, rate = piece.partition("=")
        ends = pair.split("-")
        if not equals or len(ends) != 2 or not all(e.strip().isdigit() for e in ends):
            raise InputError(f"links are written FROM-TO=RATE, got {piece!r}; write e.g. 0-3=10mbit,1-2=none")
        a, b = sorted(map(int, ends))
        if (a, b) in made:
            raise InputError(f"the link {a}-{b} is listed twice in {text!r}; give it one rate, for both directions")
        made[a, b] = rate.strip()
    return made


def format_links(setup: Setup) -> str:
    rates = setup.rates
    pairs = ", ".join(f"{a}-{b} {format_rate(rate)}" for (a, b), rate in rates.pairs.items())
    return format_rate(rates.default) + (f" ({pairs})" if pairs else "")


def bucket_sizes(method: Method, setup: Setup, counts: Sequence[int] = BUCKETS) -> tuple[float | None, ...]:
    """Bucket sizes in MiB to try: first the default of the package, then sizes that give `counts` buckets.

    Asynchronous methods exchange the whole model at once, and torchft one parameter at a time, so they have no size to
    choose. DDP and Decent-DP do not cut parameters: the parameter that fills a bucket closes it, so there are at most
    as many buckets as layers. Their sizes are 1 % smaller, so that a bucket takes whole layers and not one layer more.
    """
    whole = setup.model_bytes / MiB
    if method.asynchronous or method.algorithm == "local":
        return (None,)
    if method.package != "gossamer":
        counts = sorted({min(c, setup.layers) for c in counts}, reverse=True)
        own = 25.0  # the default of both packages
        return (own, *(0.99 * whole / c for c in counts if 0.99 * whole / c < own and c > 1))
    return (None, *(1.01 * whole / c for c in counts))  # Gossamer cuts parameters; 1 % larger avoids a tiny last bucket


def why_not(method: Method, setup: Setup) -> str | None:
    """Why a method of another package cannot be measured here, as a sentence; None if it can."""
    if method.package == "torchft":
        return torchft_peer.missing()
    if method.package != "decent-dp":
        return None
    missing = [name for name in ("decent_dp", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        package = missing[0].replace("_", "-")
        return f"{package} is not installed; pip install {package}"
    if setup.network == "paced":
        return "its exchanges cannot be paced; it needs --network namespaces (Linux, root)"
    known = DECENT_DP.get(method.topology or "")
    if known is None:
        return f"it has no topology {method.topology}; it knows {', '.join(DECENT_DP)}"
    nodes, counts = len(setup.per_node), set(setup.per_node)
    if len(counts) > 1:
        return f"it needs equally many workers on every node, got {list(setup.per_node)}"
    if known == "alternating-exp-ring" and (nodes < 2 or nodes & (nodes - 1) or counts == {1}):
        return f"its aer needs 2, 4, 8, ... nodes of at least 2 workers, got {nodes} of {min(counts)}"
    if known == "one-peer-exp" and (setup.n < 2 or setup.n & (setup.n - 1)):
        return f"its one-peer-exponential needs 2, 4, 8, ... workers, got {setup.n}"
    if setup.n < 2 or (known == "ring" and setup.n % 2):
        return f"it needs an even number of workers, got {setup.n}"
    return None


def emulated(setup: Setup, seconds: list[float]) -> EmulatedModel:
    return EmulatedModel(setup.model_mb, setup.layers, seconds, busy=setup.busy)
