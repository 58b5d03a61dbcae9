"""What the workers of a job see of it, for `gossamer doctor --job`: the launcher, the nodes, and what is wrong."""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version

from gossamer.comm.launcher import find_launcher, launched_rank, node_name, torn_node
from gossamer.comm.process_groups import join_world, leave_world, share_in_world
from gossamer.comm.tcp import DirectoryClient
from gossamer.errors import GossamerError, InputError

TIMEOUT = 120.0  # seconds until the other workers must be there


@dataclass(frozen=True)
class SeenNode:
    """A node as its workers name it, its hosts (more than one only if GOSSAMER_NODE joins them), and its ranks."""

    name: str
    hosts: list[str]
    ranks: list[int]


@dataclass(frozen=True)
class SeenJob:
    """The workers that have met, from the view of worker `rank`. It is the same on all workers, except for `rank`."""

    rank: int
    workers: int
    launcher: str
    met_at: str
    nodes: list[SeenNode]
    problems: list[str]

    def to_dict(self) -> dict[str, object]:
        return {key: value for key, value in asdict(self).items() if key != "rank"}


def inspect_job() -> SeenJob:
    """Meet the other workers where they would meet to train, and return what they say about themselves. Collective."""
    found = find_launcher()
    if found is None:
        raise InputError(
            "no launcher has started this process as a worker; run the command under the launcher of your job, such as "
            "torchrun --nproc-per-node 2 -m gossamer doctor --job"
        )
    rank, size = launched_rank()
    me = {"node": node_name(), "host": socket.gethostname(), "versions": _versions()}
    where, texts = _share(rank, size, json.dumps(me))
    workers = [json.loads(text) for text in texts]
    started_by = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else found.name
    launcher = f"{started_by} ({found.rank}, {found.size})"
    return SeenJob(rank, size, launcher, where, _nodes(workers), _problems(workers))


def _share(rank: int, size: int, text: str) -> tuple[str, list[str]]:
    """All workers' `text`, by rank, and where they met: in a process group, or in the directory of an elastic job."""
    address = os.environ.get("GOSSAMER_DIRECTORY")
    if address is not None and "MASTER_ADDR" not in os.environ:
        directory = DirectoryClient.of_job(rank, TIMEOUT)
        try:
            texts = directory.share("doctor", rank, size, text, TIMEOUT)
        finally:
            directory.close()
        assert texts is not None
        return f"the directory {address}", texts
    try:
        join_world(timedelta(seconds=TIMEOUT))
        texts = share_in_world("doctor", text, TIMEOUT)
        leave_world()  # its barrier is a message between workers
    except RuntimeError as error:  # of torch: a store that nobody hosts, a connection that is refused
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise GossamerError(
            f"worker {rank} of {size} could not meet the others at {place}: {str(error).splitlines()[0]}; check that "
            "every worker was started, that MASTER_ADDR is worker 0's host, and that hosts can reach each other"
        ) from error
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", texts


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in ("torch", "gossamer")}}


def _nodes(workers: Sequence[dict[str, str]]) -> list[SeenNode]:
    nodes: dict[str, SeenNode] = {}
    for rank, worker in enumerate(workers):
        node = nodes.setdefault(worker["node"], SeenNode(worker["node"], [], []))
        node.ranks.append(rank)
        if worker["host"] not in node.hosts:
            node.hosts.append(worker["host"])
    return list(nodes.values())


def _problems(workers: Sequence[dict[str, object]]) -> list[str]:
    found = []
    if (torn := torn_node([str(worker["node"]) for worker in workers])) is not None:
        found.append(
            f"the ranks of node {torn!r} are not consecutive, which `gossamer train` refuses; let the launcher place "
            "ranks by block"
        )
    first = workers[0]["versions"]
    for rank, worker in enumerate(workers):
        if worker["versions"] != first:
            found.append(f"worker {rank} has other versions than worker 0: {worker['versions']} instead of {first}")
            break
    return found
