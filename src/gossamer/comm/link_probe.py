"""Measure the links of a job: latency and bandwidth inside and across nodes, and all-reduce time against size.

Pairs of nodes are measured in the rounds of a tournament, disjoint pairs at the same time. Between two nodes, one
connection is measured first and then the connections of all their workers together, which shows the capacity of the
nodes' network interfaces.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gossamer.comm.gloo import Edge, GlooTransport
from gossamer.comm.launcher import layout_of, node_name
from gossamer.comm.process_groups import PrefixStore, default_store, rank_and_size, worker_group
from gossamer.comm.transport import clock

PINGS = 30
FIRST_BYTES = 2**16
MOST_BYTES = 2**28
ALLREDUCE_BYTES = tuple(2**e for e in range(14, 27, 2))


@dataclass(frozen=True)
class LinkSample:
    """A link between two nodes, or inside one: latency and bandwidth of one connection, bandwidth of all together."""

    nodes: tuple[int, int]
    latency_s: float
    flow_bytes_per_s: float
    link_bytes_per_s: float
    flows: int


@dataclass(frozen=True)
class Links:
    """All measurements; the same on every worker."""

    per_node: tuple[int, ...]
    intra: tuple[LinkSample, ...]
    inter: tuple[LinkSample, ...]
    allreduce_s: dict[int, float]  # by bytes

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def tournament(nodes: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs in which every two nodes meet once (the circle method)."""
    places = [*range(nodes), *([-1] if nodes % 2 else [])]
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(p), max(p)) for p in pairs if -1 not in p])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def probe_links(seconds: float = 0.5, timeout: float = 300.0) -> Links:
    """Measure all links, for about `seconds` per bandwidth. Collective: every worker of the job calls it."""
    rank, size = rank_and_size()
    transport = GlooTransport(PrefixStore("gossamer/probe", default_store()), worker_group(None), timeout)
    layout = layout_of(transport.share("node", node_name()))
    edges: dict[int, Edge] = {}
    samples: list[dict[str, Any]] = []

    def measure(a: int, b: int, stage: str) -> None:
        """Take part in measuring the link between nodes a and b, or inside node a if b = a."""
        ours, theirs = layout.members[a], layout.members[b]
        flows = [(ours[0], ours[1])] if a == b else list(zip(ours, theirs, strict=False))
        mine = next((f for f in flows if rank in f), None)
        edge = None
        if mine is not None:
            peer = mine[1] if rank == mine[0] else mine[0]
            edge = edges.setdefault(peer, transport.edge(peer))
        first = mine is not None and mine == flows[0]
        leads = first and rank == flows[0][0]
        latency = flow = 0.0
        if edge is not None and first:
            latency = _latency(edge, leads)
            flow = _bandwidth(edge, leads, seconds)
        said = [json.loads(t) for t in transport.share(f"{stage}/flow", json.dumps([leads, [a, b], flow]))]
        each = int(max(f for lead, nodes, f in said if lead and nodes == [a, b]) * seconds / len(flows)) + 1
        elapsed = 0.0
        if edge is not None and len(flows) > 1:  # share() has just brought all workers together
            elapsed = _swap(edge, each)
        took = [json.loads(t) for t in transport.share(f"{stage}/all", json.dumps([[a, b], elapsed]))]
        if leads:
            slowest = max(t for nodes, t in took if nodes == [a, b])
            together = len(flows) * each / slowest if len(flows) > 1 else flow
            samples.append(asdict(LinkSample((a, b), latency, flow, max(together, flow), len(flows))))

    def sit_out(stage: str) -> None:
        transport.share(f"{stage}/flow", json.dumps([False, [-1, -1], 0.0]))
        transport.share(f"{stage}/all", json.dumps([[-1, -1], 0.0]))

    node = layout.node[rank]
    if max(layout.per_node) > 1:
        if len(layout.members[node]) > 1:
            measure(node, node, "inside")
        else:
            sit_out("inside")
    for at, pairs in enumerate(tournament(layout.nodes) if layout.nodes > 1 else []):
        mine = next((p for p in pairs if node in p), None)
        if mine is None:
            sit_out(f"round-{at}")
        else:
            measure(*mine, f"round-{at}")
    times = _allreduce(seconds) if size > 1 else {}
    gathered = [json.loads(t) for t in transport.share("samples", json.dumps([samples, times]))]
    found = [LinkSample(tuple(s.pop("nodes")), **s) for texts, _ in gathered for s in texts]
    allreduce = {int(b): max(t[1][b] for t in gathered) for b in gathered[0][1]}
    transport.close()
    return Links(
        layout.per_node,
        tuple(s for s in found if s.nodes[0] == s.nodes[1]),
        tuple(sorted((s for s in found if s.nodes[0] != s.nodes[1]), key=lambda s: s.nodes)),
        allreduce,
    )


def _latency(edge: Edge, leads: bool) -> float:
    """Half of the median round-trip time of a few bytes."""
    ball = torch.zeros(8, dtype=torch.uint8)
    times = []
    for _ in range(PINGS):
        start = clock()
        for move in (edge.send, edge.recv) if leads else (edge.recv, edge.send):
            move(ball, 1).wait(timedelta(seconds=60))
        times.append(clock() - start)
    return statistics.median(times) / 2


def _bandwidth(edge: Edge, leads: bool, seconds: float) -> float:
    """Bytes per second in each direction while both are in use. The message grows until it takes `seconds`."""
    control = torch.zeros(1, dtype=torch.int64)
    size, best = FIRST_BYTES, 0.0
    while True:
        if leads:
            control[0] = size
            edge.send(control, 2).wait(timedelta(seconds=60))
        else:
            edge.recv(control, 2).wait(timedelta(seconds=60))
            size = int(control[0])
        if size == 0:
            return best
        elapsed = _swap(edge, size)
        best = size / elapsed
        enough = elapsed > 0.6 * seconds or size >= MOST_BYTES
        size = 0 if enough else min(MOST_BYTES, max(2 * size, int(size * seconds / max(elapsed, 1e-6) / 2)))


def _swap(edge: Edge, nbytes: int) -> float:
    """Seconds to send and receive `nbytes` at the same time."""
    there, back = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    start = clock()
    for work in (edge.recv(back, 3), edge.send(there, 3)):
        work.wait(timedelta(seconds=300))
    return clock() - start


def _allreduce(seconds: float) -> dict[str, float]:
    """Seconds of an all-reduce by size in bytes, the best of three. Stops once one takes longer than `seconds`."""
    times = {}
    for nbytes in ALLREDUCE_BYTES:
        value = torch.zeros(nbytes // 4)
        best = []
        for _ in range(3):
            dist.barrier()
            start = clock()
            dist.all_reduce(value)
            best.append(clock() - start)
        slowest = torch.tensor([min(best)])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        times[str(nbytes)] = float(slowest)
        if float(slowest) > seconds:
            break
    return times
