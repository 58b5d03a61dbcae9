"""`gossamer.probe` and `gossamer probe`: measure a job's links, processors and training step; write a cluster file."""

from __future__ import annotations

import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import gossamer
from gossamer.comm import process_groups
from gossamer.comm.link_probe import probe_links
from gossamer.engine.step_timer import measure_step
from gossamer.errors import InputError
from gossamer.predict.cluster import ClusterSpec, to_toml
from gossamer.predict.probed import cluster_from_probe, recorded, unknown

UPDATE_BYTES = 2**24
HIDDEN = 0.02  # seconds of pretended compute, in which tiny exchanges finish
CALLS = 12


def probe(
    model: nn.Module,
    optimizer: Optimizer,
    step: Callable[[], Any],
    out: str | os.PathLike[str] = "cluster.toml",
    *,
    steps: int = 20,
    seconds: float = 0.3,
) -> Path | None:
    """Measure your own training step, and the links and processors of the job, and write a cluster file.

    Put the call into a training script before DDP or `decentralize`, and start the script as for training:

        gossamer.probe(model, optimizer, lambda: train_step(batch))
        # torchrun --nproc-per-node 2 train.py && gossamer advise cluster.toml

    Model and optimizer are restored. With `out="compute.json"` only the step is measured, also on a single worker, for
    `gossamer probe --compute compute.json`. An earlier file is kept under another name.

    Args:
        step: Computes the loss, calls `backward()` and `optimizer.step()`.
        out: The file to write, on worker 0: .toml or .json.
        steps: Steps to measure, after three to warm up.
        seconds: Seconds for each bandwidth.

    Returns:
        The file, on worker 0; None on the others.
    """
    path = Path(out)
    if path.suffix not in (".toml", ".json"):
        raise InputError(f"out must be a .toml file (a cluster) or a .json file (compute times), got {str(out)!r}")
    joined = process_groups.initialized()
    if path.suffix == ".toml" and (not joined or process_groups.rank_and_size()[1] == 1):
        raise InputError(
            "a cluster file describes the links between workers, and this is a single worker; start the script by "
            "torchrun with at least two workers after init_process_group(), or measure the step alone with "
            "out='compute.json'"
        )
    rank = process_groups.rank_and_size()[0] if joined else 0
    if joined:
        process_groups.wait_for_all()  # all workers compute at the same time, as in training
    own = measure_step(model, optimizer, step, steps)
    if path.suffix == ".json":
        if rank == 0:
            write_kept(path, json.dumps(own) + "\n")
        return path if rank == 0 else None
    links = measure_links(seconds)
    if rank != 0:
        return None
    cluster = cluster_from_probe(links, recorded(own), None)
    kept = write_kept(path, file_text(cluster))
    print("\n".join(said(path, kept, cluster)))
    return path


def measure_links(seconds: float) -> dict[str, Any]:
    """Measure links, processing, optimizers and overheads among all workers of the job. Collective."""
    links = probe_links(seconds).to_dict()
    process_groups.wait_for_all()
    links["update"] = _smallest(
        {name: UPDATE_BYTES / _update(name) for name in ("adam", "gossipadam", "accumadam", "sgd")}
    )
    if process_groups.rank_and_size()[1] > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the workers of the tiny models have equal gradients
            links["overhead"] = _overheads(links["allreduce"])
    return links


def _smallest(rates: dict[str, float]) -> dict[str, float]:
    """The rates of the slowest worker. Collective."""
    return {name: -process_groups.largest(-rate) for name, rate in rates.items()}


def _update(name: str) -> float:
    """Seconds of one step of an optimizer on `UPDATE_BYTES` of parameters."""
    parameter = nn.Parameter(torch.randn(UPDATE_BYTES // 4))
    parameter.grad = torch.randn_like(parameter)
    optimizer: Optimizer
    if name == "adam":
        optimizer = torch.optim.Adam([parameter], lr=0.0, fused=True)
    elif name == "sgd":
        optimizer = torch.optim.SGD([parameter], lr=0.0, momentum=0.9, fused=True)
    elif name == "gossipadam":
        optimizer = gossamer.GossipAdam([parameter], lr=0.0)
        optimizer.set_replicas(2)
        optimizer.set_signal_shares({parameter: 0.5})  # the update of static jobs
    else:
        optimizer = gossamer.AccumAdam([parameter], lr=0.0)
    return statistics.median(_timed(optimizer.step) for _ in range(5))


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _overheads(allreduce: dict[str, Any]) -> dict[str, float]:
    """Microseconds that a step and a bucket of gossip, and a step of DDP, take from the training thread."""
    plain = _gossip_step(0)
    one, many = _gossip_step(1), _gossip_step(16)
    bucket = max(0.0, (many - one) / 15)
    alone, wrapped = _ddp_step(False), _ddp_step(True)
    smallest = min(allreduce["seconds"].values())
    return {
        "step_us": 1e6 * process_groups.largest(max(0.0, one - plain - bucket)),
        "bucket_us": 1e6 * process_groups.largest(bucket),
        "ddp_us": 1e6 * process_groups.largest(max(0.0, wrapped - alone - smallest)),
    }


def _gossip_step(buckets: int) -> float:
    """Seconds of `optimizer.step()` on a tiny model with so many buckets; 0: without gossip."""
    model = nn.ParameterList([torch.zeros(16 * 64)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gossip = None
    if buckets:
        exchange = gossamer.Exchange(bucket_mib=16 * 64 * 4 / buckets / 2**20)
        gossip = gossamer.decentralize(model, optimizer, topology="ring", gradients="worker", exchange=exchange)
    times = []
    for _ in range(CALLS):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        time.sleep(HIDDEN if gossip is not None else 0.0)
        times.append(_timed(optimizer.step))
    if gossip is not None:
        gossip.close()
    return statistics.median(times[2:])


def _ddp_step(wrap: bool) -> float:
    """Seconds of forward and backward of a tiny model, with or without DDP."""
    from gossamer.comm import baseline

    model: nn.Module = nn.Linear(32, 32)
    model = baseline.ddp(model) if wrap else model
    times = [_timed(lambda: model(torch.ones(1, 32)).sum().backward()) for _ in range(CALLS)]
    return statistics.median(times[2:])


def measure_here(seconds: float) -> tuple[int, dict[str, Any]]:
    """Join the job that a launcher started, measure it, and leave. Return this worker's rank and the measurements."""
    rank, size = process_groups.join_world()
    if size == 1:
        process_groups.leave_world()
        raise InputError(
            "probe measures links between workers, and the launcher started one; start at least two, for example "
            "torchrun --nproc-per-node 2 -m gossamer probe -o cluster.toml"
        )
    links = measure_links(seconds)
    process_groups.leave_world()
    return rank, links


def lab_worker(rank: int, seconds: float) -> dict[str, Any]:
    """Measure a job in the lab, as one of its workers."""
    return measure_here(seconds)[1]


def write_kept(path: Path, text: str) -> Path | None:
    """Write a file; return the name under which an earlier one is kept, if there was one."""
    kept = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            numbers = (path.with_name(f"{path.stem}.{n}{path.suffix}") for n in range(1, 10**6))
            kept = next(p for p in numbers if not p.exists())
            path.rename(kept)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r}: {error.strerror}; choose another file") from None
    return kept


def file_text(cluster: ClusterSpec) -> str:
    """Return the cluster file, with comments about what is not known."""
    return "".join(f"# {note}\n" for note in unknown(cluster)) + to_toml(cluster)


def said(path: Path, kept: Path | None, cluster: ClusterSpec) -> list[str]:
    """Return what to tell the user: the file, what is a guess or unknown, and the next command."""
    workers = f"{cluster.layout.n} workers on {cluster.nodes} node{'s' * (cluster.nodes > 1)}"
    lines = [f"wrote {path}: {workers}" + (f"; the earlier file is now {kept}" if kept else "")]
    lines += unknown(cluster)
    size = "" if cluster.model.source != "guess" else " --model-mb SIZE"
    lines.append(f"next: gossamer advise {path}{size}")
    return lines
