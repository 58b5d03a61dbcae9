"""A cluster on one machine: nodes with links between them, and workers on the nodes."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from gossamer.errors import GossamerWarning, InputError
from gossamer.lab.bandwidth import Way, batches, measure
from gossamer.lab.cpu import RunStats
from gossamer.lab.namespaces import BRIDGE, DEVICE, LabUnavailable, Namespaces, clean_up, why_unavailable
from gossamer.lab.shaping import HUB_ADDRESS, LinkRates, address, format_rate, parse_rate
from gossamer.lab.workers.placement import Node, check_per_node
from gossamer.lab.workers.pool import WorkerPool

T = TypeVar("T")
Network = Literal["namespaces", "paced", "loopback"]
PACE = "GOSSAMER_PACE"  # the variable from which the transports of a paced cluster read the rates
MEASURE_SECONDS, RETRY_SECONDS = 0.25, (0.5, 1.0)  # how long a link is measured; longer if the first result is off
TOLERANCE = 0.2


class LabCluster:
    """A cluster on this machine: nodes, links of given rates between them, and workers. Exists inside its context.

        with LabCluster(nodes=4, per_node=2, link="50mbit", links={(0, 3): "10mbit"}) as cluster:
            results = cluster.run(fn, 1, 2)          # fn(rank, 1, 2) on 8 new workers, results by rank
            with cluster.pool() as pool: ...         # workers that stay

    `network` says how the links are made, and is part of every result (`describe()["network"]`):
    - "namespaces": real TCP over shaped virtual links (Linux, root). Traffic inside a node is not limited.
    - "paced": all workers use loopback, and the transport sleeps bytes/rate between nodes (see `pacing`).
    - "loopback": all workers use loopback, and links are not limited.
    """

    def __init__(
        self,
        nodes: int | None = None,
        per_node: int | Sequence[int] | None = None,
        *,
        link: str | float | None = None,
        links: Mapping[tuple[int, int], str | float | None] | None = None,
        network: Network = "namespaces",
        check: bool = True,
        env: Mapping[str, str] | None = None,
        verbose: bool = False,
    ) -> None:
        self.per_node = _check_nodes(nodes, per_node)
        if network not in ("namespaces", "paced", "loopback"):
            raise InputError(f"network must be namespaces, paced or loopback, got {network!r}; see docs/lab.md")
        self.links = LinkRates.parse(len(self.per_node), link, links)
        if network == "loopback" and (self.links.default or self.links.pairs):
            raise InputError("loopback has no link rates; leave link and links out, or use namespaces or paced")
        self.network: Network = network
        self.check, self.env, self.verbose = check, dict(env or {}), verbose
        self.measured: dict[Way, float] = {}
        self.dropped: int | None = None
        self.stats: RunStats | None = None
        self._namespaces: Namespaces | None = None
        self._pools: list[WorkerPool] = []
        self._entered = False

    @property
    def nodes(self) -> int:
        return len(self.per_node)

    @property
    def n(self) -> int:
        return sum(self.per_node)

    @property
    def pacing(self) -> dict[str, Any] | None:
        """The value of GOSSAMER_PACE: the node of every rank, and rates in bits per second (null: not limited).

        `{"nodes": [0, 0, 1, 1], "link": 5e7, "links": {"0-1": 1e7}}`: sending to a worker of another node takes at
        least bytes * 8 / rate; the workers of a node share `link`, in each direction.
        """
        if self.network != "paced":
            return None
        where = [node for node, count in enumerate(self.per_node) for _ in range(count)]
        pairs = {f"{a}-{b}": rate for (a, b), rate in self.links.pairs.items()}
        return {"nodes": where, "link": self.links.default, "links": pairs}

    def __enter__(self) -> LabCluster:
        if self.network == "namespaces":
            reason = why_unavailable()
            if reason is not None:
                raise LabUnavailable(
                    f'{reason}, or use network="paced" (the transport emulates the rates) or network="loopback"'
                )
            clean_up()
            self._namespaces = Namespaces(self.nodes, self.links)
            try:
                if self.check:
                    self._check_bandwidth()
            except BaseException:
                self._namespaces.remove()
                raise
        self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self._entered = False
        try:
            for pool in self._pools:
                pool.kill()
            self._note_drops()
        finally:
            if self._namespaces is not None:
                self._namespaces.remove()
                self._namespaces = None

    def pool(
        self,
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        grace: float = 2.0,
        setup: Callable[[int], Any] | None = None,
    ) -> WorkerPool:
        """A pool of workers on this cluster, which end with the cluster at the latest."""
        self._check_entered()
        pool = WorkerPool(
            per_node=self.per_node,
            nodes=self._nodes(),
            env={**self._worker_env(), **(env or {})},
            setup=setup,
            timeout=timeout,
            grace=grace,
            verbose=self.verbose,
        )
        self._pools.append(pool)
        return pool

    def run(self, fn: Callable[..., T], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[T]:
        """Call `fn(rank, *args, **kwargs)` on new workers; return the results by rank. `stats` describes the run."""
        with self.pool(timeout=timeout, grace=0.2) as pool:
            results = pool.run(fn, *args, **kwargs)
            self.stats = pool.stats
        self._pools.remove(pool)
        return results

    @contextlib.contextmanager
    def directory(self) -> Iterator[str]:
        """Host the directory of an elastic job in its own process; yields the value for GOSSAMER_DIRECTORY.

        All nodes reach the process. Without the directory no worker can join.
        """
        self._check_entered()
        node = Node() if self._namespaces is None else Node(HUB_ADDRESS, BRIDGE, self._namespaces.hub)
        with WorkerPool(1, nodes=[node]) as pool:
            yield f"{node.address}:{pool.run(_host_directory, node.address)[0]}"

    def cut(self, node: int, *, silently: bool = False) -> None:
        """Cut a node off: its link goes down, or (silently) its packets are lost. Traffic inside the node continues."""
        self._namespaces_with(node).cut(node, silently=silently)

    def mend(self, node: int) -> None:
        """Undo `cut`."""
        self._namespaces_with(node).mend(node)

    def cut_pair(self, a: int, b: int) -> None:
        """Lose all packets between nodes a and b, which still reach all others. One pair at a time."""
        if a == b:
            raise InputError(f"a pair is two different nodes, got {a} twice; name another one")
        self._namespaces_with(a)
        self._namespaces_with(b).cut_pair(a, b)

    def mend_pair(self) -> None:
        """Undo `cut_pair`."""
        self._namespaces_with(0).mend_pair()

    def slow(self, node: int, rate: str | float | None) -> None:
        """Change the rate of a node's link in both directions; None restores the original rate."""
        self._namespaces_with(node).slow(node, parse_rate(rate))

    def _namespaces_with(self, node: int) -> Namespaces:
        if self._namespaces is None:
            raise LabUnavailable(f"links cannot be cut or slowed on network={self.network!r}; use namespaces")
        if not 0 <= node < self.nodes:
            raise InputError(f"nodes are 0 to {self.nodes - 1}, got {node}; name one of them")
        return self._namespaces

    def traffic(self) -> list[dict[str, int]] | None:
        """Bytes sent and received and packets dropped since the start, per node; None without namespaces."""
        return self._namespaces.traffic() if self._namespaces is not None else None

    def describe(self) -> dict[str, Any]:
        """The network, with requested and measured rates; belongs into every result."""
        return {
            "network": self.network,
            "nodes": self.nodes,
            "per_node": list(self.per_node),
            "link": format_rate(self.links.default),
            "links": {f"{a}-{b}": format_rate(rate) for (a, b), rate in self.links.pairs.items()},
            "measured_bits_per_second": {f"{a}-{b}": round(rate) for (a, b), rate in self.measured.items()},
            "dropped_packets": self.dropped,
        }

    def _check_entered(self) -> None:
        if not self._entered:
            raise InputError("this cluster is not running; use it inside `with LabCluster(...) as cluster:`")

    def _worker_env(self) -> dict[str, str]:
        return self.env if self.pacing is None else {**self.env, PACE: json.dumps(self.pacing)}

    def _nodes(self) -> list[Node]:
        if self._namespaces is None:
            return [Node()] * self.nodes
        return [Node(address(node), DEVICE, name) for node, name in enumerate(self._namespaces.names)]

    def _check_bandwidth(self) -> None:
        """Measure both directions of a ring over the nodes and of every pair with its own rate."""
        assert self._namespaces is not None
        names = self._namespaces.names
        ring = [(a, (a + 1) % self.nodes) for a in range(self.nodes) if self.nodes > 1]
        requested: dict[Way, float] = {}
        for a, b in (*ring, *self.links.pairs):
            rate = self.links.rate(a, b)
            if rate is not None:
                requested[a, b] = requested[b, a] = rate

        def is_right(way: Way, seconds: float = MEASURE_SECONDS) -> bool:
            """Measure a way; whether its rate is the requested one."""
            self.measured[way] = measure(names, way[0], way[1], requested[way], seconds)
            return abs(self.measured[way] / requested[way] - 1) <= TOLERANCE

        off: list[Way] = []
        with ThreadPoolExecutor(self.nodes) as threads:
            for batch in batches(requested):
                off += [way for way, good in zip(batch, threads.map(is_right, batch), strict=True) if not good]
        for way in off:
            for seconds in RETRY_SECONDS:
                if is_right(way, seconds):
                    break
            else:
                raise LabUnavailable(
                    f"the link from node {way[0]} to node {way[1]} carries {format_rate(self.measured[way])} instead "
                    f"of {format_rate(requested[way])}; use slower links and longer compute (both by the same factor), "
                    "or check=False"
                )

    def _note_drops(self) -> None:
        traffic = self.traffic()
        if traffic is not None:
            self.dropped = sum(node["dropped"] for node in traffic)
            if self.dropped:
                warnings.warn(
                    f"the queues of the lab dropped {self.dropped} packets, so its links were slower than requested",
                    GossamerWarning,
                    stacklevel=3,
                )


def _host_directory(rank: int, address: str) -> int:
    """Host a directory at `address` for as long as this process lives; return its port."""
    from gossamer.comm.tcp import HostedDirectory

    _kept.append(HostedDirectory(address=address, one_job=True))
    return int(_kept[-1].port)


_kept: list[Any] = []


def _check_nodes(nodes: int | None, per_node: int | Sequence[int] | None) -> tuple[int, ...]:
    if nodes is not None and (isinstance(nodes, bool) or not isinstance(nodes, int) or not 1 <= nodes <= 250):
        raise InputError(f"a cluster has 1 to 250 nodes, got {nodes!r}; pass nodes=2 or more")
    if isinstance(per_node, Sequence):
        counts = check_per_node(None, per_node)
    else:
        counts = check_per_node(None, [1 if per_node is None else per_node] * (1 if nodes is None else nodes))
    if nodes is not None and len(counts) != nodes:
        raise InputError(
            f"workers per node {list(counts)} are for {len(counts)} nodes, not {nodes}; give one number per node"
        )
    return counts
