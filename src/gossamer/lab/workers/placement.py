"""Where workers run and what they find there: nodes, environment variables, ports."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gossamer.errors import InputError

MAX_WORKERS = 120  # a worker takes 4 file descriptors of the launcher, and the limit is often 1024

# Many workers share few cores, so each computes with one thread. RES_OPTIONS: a torch store looks up the name of
# every client that connects, and a name server that does not answer must not delay a run.
WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RES_OPTIONS": "timeout:1 attempts:1",
}


@dataclass(frozen=True)
class Node:
    """Where the workers of one node run: their address, and their network namespace (None: the host's)."""

    address: str = "127.0.0.1"
    interface: str = "lo"
    netns: str | None = None


@dataclass(frozen=True)
class WorkerSpec:
    """The rank of a worker, its environment variables and its network namespace (None: the host's)."""

    rank: int
    env: dict[str, str]
    netns: str | None = None


def worker_specs(per_node: Sequence[int], nodes: Sequence[Node], env: Mapping[str, str]) -> list[WorkerSpec]:
    """The workers by rank, with the variables that torchrun sets, the interface of the node, and `env`."""
    specs: list[WorkerSpec] = []
    for index, (count, node) in enumerate(zip(per_node, nodes, strict=True)):
        for local in range(count):
            own = {
                "RANK": len(specs),
                "WORLD_SIZE": sum(per_node),
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": count,
                "GROUP_RANK": index,
                "GROUP_WORLD_SIZE": len(per_node),
                "MASTER_ADDR": nodes[0].address,
                "GLOO_SOCKET_IFNAME": node.interface,
                "TP_SOCKET_IFNAME": node.interface,
            }
            text = {k: str(v) for k, v in own.items()}
            specs.append(WorkerSpec(len(specs), {**text, **env}, node.netns))
    return specs


def check_per_node(n: int | None, per_node: Sequence[int] | None) -> tuple[int, ...]:
    """The number of workers on each node, given as `n` (one node), as `per_node`, or as both."""
    counts = tuple(per_node) if per_node is not None else (n,)
    if not counts or any(isinstance(c, bool) or not isinstance(c, int) or c < 1 for c in counts):
        raise InputError(f"workers per node must be positive integers, got {list(counts)}; write e.g. [2, 2]")
    whole = tuple(c for c in counts if c is not None)
    if n is not None and sum(whole) != n:
        raise InputError(f"workers per node {list(whole)} add up to {sum(whole)}, not to n={n}; pass one of the two")
    if sum(whole) > MAX_WORKERS:
        raise InputError(f"the lab starts at most {MAX_WORKERS} workers, got {sum(whole)}; use fewer per node")
    return whole


_ports = itertools.cycle(range(29500, 32768))  # below the range that the kernel assigns from


@contextlib.contextmanager
def reserved_port(master: Node) -> Iterator[int]:
    """A port of the master node for a rendezvous, which no other process gets until the context ends.

    On the host a socket stays bound to the port without listening: with SO_REUSEADDR a store can still listen on the
    port, but the kernel does not assign it to another process. In a namespace of the lab, counting is enough.
    """
    if master.netns is not None:
        yield next(_ports)
        return
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((master.address, 0))
        yield holder.getsockname()[1]
