"""Measure the links of a job: latency and bandwidth inside and across nodes, and all-reduce time against size.

Pairs of nodes are measured in the rounds of a tournament, disjoint pairs at the same time. Between two nodes, one
connection is measured first and then the connections of all their workers together, which shows the capacity of the
nodes' network interfaces. Inside a node, all its pairs of workers are measured together. At last all nodes exchange
with two others at the same time, as gossip does: connections that share an interface, and begin after a pause, do not
use all of it.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gossamer.comm.cost_probe import CpuMeter, machine, probe_processing
from gossamer.comm.gloo import Edge, GlooTransport
from gossamer.comm.launcher import layout_of, node_name
from gossamer.comm.process_groups import PrefixStore, default_store, rank_and_size, worker_group
from gossamer.comm.transport import clock
from gossamer.topology import Layout

PINGS = 30
FIRST_BYTES = 2**16
MOST_BYTES = 2**28
MOST_SHARED = 2**26  # bytes of a message while all workers exchange: each of them has three
ALLREDUCE_BYTES = tuple(2**e for e in range(14, 27, 2))
SIZES = (2**12, 2**14, 2**16, 2**18, 2**20)  # bytes of single messages
LONG = 0.1  # seconds; larger messages are not timed once one takes this long
PAUSE = 0.3  # seconds without traffic after which TCP begins anew to find out how fast it may send
_calls = itertools.count()  # all workers probe equally often


@dataclass(frozen=True)
class LinkSample:
    """A link between two nodes, or inside one: latency and bandwidth of one connection, bandwidth of all together."""

    nodes: tuple[int, int]
    latency_s: float
    flow_bytes_per_s: float
    link_bytes_per_s: float
    flows: int
    by_size: tuple[tuple[int, float], ...] = ()  # bytes swapped, seconds
    cpu_s_per_byte: float = 0.0  # CPU time of a worker per byte that it sends and receives


@dataclass(frozen=True)
class AllReduce:
    """All-reduces of all workers: seconds by bytes, CPU seconds per byte, and bf16's time over fp32's per byte."""

    seconds: dict[int, float]
    cpu_s_per_byte: float
    bf16_slowdown: float


@dataclass(frozen=True)
class Links:
    """All measurements; the same on every worker."""

    per_node: tuple[int, ...]
    intra: tuple[LinkSample, ...]
    inter: tuple[LinkSample, ...]
    allreduce: AllReduce | None
    shared: float  # part of the nodes' bandwidth that exchanges with two other nodes at a time reach
    processing: dict[str, Any]  # see Processing: the slowest worker's
    cores: tuple[float, ...]  # of each node

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
    store = PrefixStore(f"gossamer/probe-{next(_calls)}", default_store())
    transport = GlooTransport(store, worker_group(None), timeout)
    layout = layout_of(transport.share("node", node_name()))
    machines = transport.share("machine", machine())
    here = {m for m, members in enumerate(layout.members) if machines[members[0]] == machines[rank]}
    edges: dict[int, Edge] = {}
    samples: list[dict[str, Any]] = []

    def measure(a: int, b: int, stage: str, active: int) -> None:
        """Take part in measuring the link between nodes a and b, or inside node a if b = a, while `active` workers of
        this machine do such a thing."""
        ours, theirs = layout.members[a], layout.members[b]
        flows = list(zip(ours[::2], ours[1::2], strict=False) if a == b else zip(ours, theirs, strict=False))
        mine = next((f for f in flows if rank in f), None)
        edge = None
        if mine is not None:
            peer = mine[1] if rank == mine[0] else mine[0]
            edge = edges.setdefault(peer, transport.edge(peer))
        first = mine is not None and mine == flows[0]
        leads = first and rank == flows[0][0]
        latency = flow = cpu = 0.0
        by_size: list[tuple[int, float]] = []
        if edge is not None and first:
            latency = _latency(edge, leads)
            by_size = _by_size(edge)
            flow, cpu = _bandwidth(edge, leads, seconds, CpuMeter(active))
        said = [json.loads(t) for t in transport.share(f"{stage}/flow", json.dumps([leads, [a, b], flow]))]
        each = int(max(f for lead, nodes, f in said if lead and nodes == [a, b]) * seconds / len(flows)) + 1
        elapsed = 0.0
        if edge is not None and len(flows) > 1:  # share() has just brought all workers together
            elapsed = _swap(edge, *_buffers(each))
        took = [json.loads(t) for t in transport.share(f"{stage}/all", json.dumps([[a, b], elapsed]))]
        if leads:
            slowest = max(t for nodes, t in took if nodes == [a, b])
            together = len(flows) * each / slowest if len(flows) > 1 else flow
            # inside a node: a worker's own path while all its workers use theirs; else that of the whole interface
            together = min(flow, together / len(flows)) if a == b else max(flow, together)
            samples.append(asdict(LinkSample((a, b), latency, flow, together, len(flows), tuple(by_size), cpu)))

    def sit_out(stage: str) -> None:
        transport.share(f"{stage}/flow", json.dumps([False, [-1, -1], 0.0]))
        transport.share(f"{stage}/all", json.dumps([[-1, -1], 0.0]))

    node = layout.node[rank]
    if max(layout.per_node) > 1:
        if len(layout.members[node]) > 1:
            measure(node, node, "inside", 2 * sum(layout.per_node[m] > 1 for m in here))
        else:
            sit_out("inside")
    for at, pairs in enumerate(tournament(layout.nodes) if layout.nodes > 1 else []):
        mine = next((p for p in pairs if node in p), None)
        if mine is None:
            sit_out(f"round-{at}")
        else:
            measure(*mine, f"round-{at}", sum(m in here for pair in pairs for m in pair))
    shared = _shared(transport, layout, rank, samples, seconds) if layout.nodes > 1 else 1.0
    allreduce = _allreduce(seconds, CpuMeter(machines.count(machines[rank]))) if size > 1 else None
    own = probe_processing(lambda name: transport.share(f"meet/{name}", "")).to_dict()
    said = transport.share("samples", json.dumps([samples, own, usable_cores()]))
    gathered = [json.loads(t) for t in said]
    found = [_sample(s) for texts, _, _ in gathered for s in texts]
    cores = tuple(max(gathered[w][2] for w in members) for members in layout.members)
    transport.close()
    return Links(
        layout.per_node,
        tuple(s for s in found if s.nodes[0] == s.nodes[1]),
        tuple(sorted((s for s in found if s.nodes[0] != s.nodes[1]), key=lambda s: s.nodes)),
        allreduce,
        shared,
        _slowest([p for _, p, _ in gathered]),
        cores,
    )


def usable_cores() -> float:
    """Cores that this process may use."""
    return float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _sample(said: dict[str, Any]) -> LinkSample:
    sizes = tuple((int(b), float(t)) for b, t in said.pop("by_size"))
    return LinkSample(nodes=tuple(said.pop("nodes")), by_size=sizes, **said)


def _slowest(each: list[dict[str, Any]]) -> dict[str, Any]:
    """The smallest rate of any worker, field by field: gossip waits for its slowest member."""
    return {
        key: {name: min(p[key][name] for p in each) for name in value}
        if isinstance(value, dict)
        else min(p[key] for p in each)
        for key, value in each[0].items()
    }


def _by_size(edge: Edge) -> list[tuple[int, float]]:
    """Seconds to swap single messages, the best of five. Both sides stop at the same size."""
    found: list[tuple[int, float]] = []
    for size in SIZES:
        there, back = _buffers(size)
        took = min(_swap(edge, there, back) for _ in range(5))
        found.append((size, took))
        mine, theirs = torch.tensor([took]), torch.zeros(1)
        for work in (edge.recv(theirs, 4), edge.send(mine, 4)):
            work.wait(timedelta(seconds=300))
        if max(float(theirs), float(mine)) > LONG:
            break
    return found


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


def _bandwidth(edge: Edge, leads: bool, seconds: float, meter: CpuMeter) -> tuple[float, float]:
    """Bytes per second in each direction while both are in use, and CPU seconds per byte sent and received. The message
    grows until it takes `seconds`."""
    control = torch.zeros(1, dtype=torch.int64)
    size, best = FIRST_BYTES, (0.0, 0.0)
    while True:
        if leads:
            control[0] = size
            edge.send(control, 2).wait(timedelta(seconds=60))
        else:
            edge.recv(control, 2).wait(timedelta(seconds=60))
            size = int(control[0])
        if size == 0:
            return best
        there, back = _buffers(size)
        meter.start()
        elapsed = _swap(edge, there, back)
        best = size / elapsed, meter.seconds() / size
        enough = elapsed > 0.6 * seconds or size >= MOST_BYTES
        size = 0 if enough else min(MOST_BYTES, max(2 * size, int(size * seconds / max(elapsed, 1e-6) / 2)))


def _buffers(nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two buffers whose pages have been touched: a page fault is not a part of sending."""
    return torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)


def _swap(edge: Edge, there: torch.Tensor, back: torch.Tensor) -> float:
    """Seconds to send one buffer and receive the other at the same time."""
    start = clock()
    for work in (edge.recv(back, 3), edge.send(there, 3)):
        work.wait(timedelta(seconds=300))
    return clock() - start


def _shared(
    transport: GlooTransport, layout: Layout, rank: int, samples: list[dict[str, Any]], seconds: float
) -> float:
    """The part of the bandwidth that is reached while every node exchanges with the next and the previous one.

    With more than two nodes a pause goes before each exchange, because gossip uses a connection only in some rounds.
    """
    said = [json.loads(t) for t in transport.share("shared/links", json.dumps(samples))]
    rates = [s["link_bytes_per_s"] for own in said for s in own if s["nodes"][0] != s["nodes"][1]]
    node, flows = layout.node[rank], min(layout.per_node)
    index = layout.members[node].index(rank)
    size = min(MOST_SHARED, int(min(rates) * seconds / (2 * flows)) + 1)
    peers = [layout.members[(node + way) % layout.nodes][index] for way in (1, -1)] if index < flows else []
    took = []
    for turn in range(4):
        elapsed = 0.0
        if layout.nodes > 2:
            time.sleep(PAUSE)
        transport.share(f"shared/begin-{turn}", "")
        if peers:
            here, there = torch.zeros(2, size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
            start = clock()
            # messages to the next node have tag 5: with two nodes both go to the same worker
            works = [transport.edge(p).recv(here[way], 6 - way) for way, p in enumerate(peers)]
            works += [transport.edge(p).send(there, 5 + way) for way, p in enumerate(peers)]
            for work in works:
                work.wait(timedelta(seconds=300))
            elapsed = clock() - start
        took.append(max(float(t) for t in transport.share(f"shared/end-{turn}", repr(elapsed))))
    ideal = 2 * flows * size / float(min(rates))
    return min(1.0, ideal / statistics.median(took[1:]))  # the first one connects


def _allreduce(seconds: float, meter: CpuMeter) -> AllReduce:
    """All-reduces of growing size, the best of three each. Stops once one takes longer than `seconds`."""
    times: dict[int, float] = {}
    cpu = 0.0
    for nbytes in ALLREDUCE_BYTES:
        meter.start()
        times[nbytes] = _timed_allreduce(torch.zeros(nbytes // 4))
        cpu = meter.seconds() / 3 / nbytes
        if times[nbytes] > seconds:
            break
    half = _timed_allreduce(torch.zeros(nbytes // 4, dtype=torch.bfloat16))
    known = times.get(nbytes // 2) or (times[nbytes] + times.get(nbytes // 4, times[nbytes] / 4)) / 2.5
    shared = torch.tensor([cpu])
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return AllReduce(times, float(shared), max(1.0, half / known))


def _timed_allreduce(value: torch.Tensor) -> float:
    """Seconds of an all-reduce on the slowest worker, the best of three."""
    best = []
    for _ in range(3):
        dist.barrier()
        start = clock()
        dist.all_reduce(value)
        best.append(clock() - start)
    slowest = torch.tensor([min(best)])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)
