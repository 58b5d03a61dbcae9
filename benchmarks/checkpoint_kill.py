"""kill -9 at random moments: is there always a checkpoint that loads, and does training go on as if nothing was?

    python benchmarks/checkpoint_kill.py --out benchmarks/records/checkpoint-kill

One run of gossiping workers on gloo, a checkpoint after every step, in one folder. Again and again it is started, goes
on from the newest checkpoint, and is killed at a random moment: all workers at once, or one of them (worker 0 too) and
the others, who meanwhile try to go on, a moment later, as a launcher does. After each kill every file of the newest
checkpoint is read and compared with its checksum. In the end the run goes on undisturbed and is compared, bit by bit,
with one that was never killed.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it, every worker for itself if it is not here before the fork
import torch.distributed as dist
from torch import nn

import gossamer
from gossamer.checkpoint import files
from gossamer.report.record import environment, write_record

FORK = multiprocessing.get_context("fork")  # torch is imported once
PATIENCE = 120.0  # seconds for a start and for an undisturbed end
GRACE = 2.0  # seconds between the first worker's end and the others'


def worker(rank: int, workers: int, port: int, folder: Path, width: int, until: int | None, save: bool) -> None:
    """Train from the newest checkpoint, saving after every step, until killed or after `until` steps."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(workers))
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RES_OPTIONS="timeout:1 attempts:1")
    if until is None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # neighbors of a killed worker say so
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1))
    optimizer = gossamer.AccumAdamW(model.parameters(), lr=1e-3, accumulate=3)
    gossip = gossamer.decentralize(model, optimizer, topology="ring", timeout=15)
    checkpoints = gossamer.Checkpoints(folder / "checkpoints", keep_last=2)
    step = 0
    if checkpoints.latest() is not None:
        step = checkpoints.load(gossip, model, optimizer).step
    (folder / f"ready-{rank}").touch()
    while until is None or step < until:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if save:
            checkpoints.save(gossip, model, optimizer)
    if not save:
        checkpoints.save(gossip, model, optimizer)
    checkpoints.wait()
    gossip.close()
    dist.barrier()  # worker 0 hosts the store: it leaves last
    dist.destroy_process_group()


def start(folder: Path, args: argparse.Namespace, until: int | None = None, save: bool = True) -> list[Any]:
    for mark in folder.glob("ready-*"):
        mark.unlink()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    gang = [
        FORK.Process(target=worker, args=(r, args.workers, port, folder, args.width, until, save), daemon=True)
        for r in range(args.workers)
    ]
    for process in gang:
        process.start()
    return gang


def finished(gang: list[Any], within: float = PATIENCE) -> bool:
    """Whether all ended by themselves; none is left."""
    deadline = time.monotonic() + within
    for process in gang:
        process.join(max(0.0, deadline - time.monotonic()))
    alive = [p for p in gang if p.is_alive()]
    for process in alive:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    return not alive


def verify(folder: Path) -> dict[str, Any]:
    """The newest checkpoint, read in full."""
    where = folder / "checkpoints"
    began = time.perf_counter()
    found: dict[str, Any] = {"left_unfinished": [p.name for p in where.glob(".step-*")], "checkpoint": None}
    try:
        found["checkpoint"] = files.latest_in(where)
        manifest = files.read_manifest(where, found["checkpoint"])
        states = [files.read_part(where, manifest, w) for w in range(manifest.workers)]
        found["loadable"] = all(torch.isfinite(v).all() for s in states for v in s["model"].values())
    except gossamer.GossamerError as error:
        found |= {"loadable": False, "error": str(error).replace(str(folder), "RUN")}
    return {**found, "read_s": time.perf_counter() - began}


def kill_once(folder: Path, args: argparse.Namespace, chance: random.Random) -> dict[str, Any]:
    """Start, go on, kill, look."""
    victim = chance.choice(["all", chance.randrange(args.workers)])
    delay = chance.uniform(0, args.within)
    first = verify(folder)["checkpoint"]
    gang = start(folder, args)
    deadline = time.monotonic() + PATIENCE
    while len(list(folder.glob("ready-*"))) < args.workers and time.monotonic() < deadline:
        time.sleep(0.005)
    # the very first kill comes when there is something to lose
    while first is None and not files.steps_in(folder / "checkpoints") and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(delay)
    for process in gang if victim == "all" else [gang[victim]]:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    finished(gang, GRACE)
    return {"victim": victim, "delay_s": delay, "before": first, **verify(folder)}


def same(a: Path, b: Path, step: int) -> bool:
    """Whether two runs hold the same model, optimizer state and gossip state after `step`, on every worker."""
    states = []
    for folder in (a / "checkpoints", b / "checkpoints"):
        manifest = files.read_manifest(folder, step)
        parts = [files.read_part(folder, manifest, w) for w in range(manifest.workers)]
        states.append([(p["model"], [o["state"] for o in p["optimizer"]], p["gossip"]) for p in parts])
    return _equal(*states)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--width", type=int, default=10_000, help="hidden units; a worker's file is 288 bytes a unit")
    parser.add_argument("--within", type=float, default=1.5, help="seconds after the start in which the kill falls")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    chance, facts = random.Random(args.seed), environment()
    with tempfile.TemporaryDirectory() as scratch:
        run, calm = Path(scratch) / "run", Path(scratch) / "calm"
        run.mkdir()
        calm.mkdir()
        samples = []
        for number in range(args.kills):
            samples.append({"kill": number, **kill_once(run, args, chance)})
            print(json.dumps(samples[-1]), flush=True)
        until = (samples[-1]["checkpoint"] or 0) + 5
        ended = finished(start(run, args, until)) and finished(start(calm, args, until, save=False))
        identical = ended and same(run, calm, until)
        newest = sorted((run / "checkpoints" / files.name_of(until)).glob("*.pt"))
        size = newest[0].stat().st_size if newest else 0
    summary = {
        "kills": args.kills,
        "loadable": sum(s["loadable"] for s in samples),
        "unfinished_left_behind": sum(bool(s["left_unfinished"]) for s in samples),
        "went_backwards": sum(s["before"] is not None and s["checkpoint"] < s["before"] for s in samples),
        "steps": until,
        "bytes_a_worker": size,
        "identical_to_the_undisturbed_run": identical,
    }
    print(json.dumps(summary))
    if args.out is not None:
        rows = [
            "| kills | newest checkpoint loads | half-written ones left (invisible) | went back | end state |",
            "|---|---|---|---|---|",
            f"| {args.kills} | {summary['loadable']} | {summary['unfinished_left_behind']} | "
            f"{summary['went_backwards']} | {'bit by bit' if identical else 'NOT'} that of a run never killed |",
        ]
        note = f"{args.workers} workers, {size / 1e6:.1f} MB a worker, a checkpoint after each of {until} steps."
        write_record(
            args.out,
            data={"summary": summary, "samples": samples},
            summary="\n".join(rows),
            note=note,
            environment=facts,
        )


if __name__ == "__main__":
    main()
