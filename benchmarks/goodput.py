"""Useful work under failures: an elastic job beside torchft's DDP, and beside DDP that torchrun restarts.

    python benchmarks/goodput.py --out benchmarks/records/goodput          # about 25 minutes

Eight workers on loopback train an emulated model (real parameters and messages; a step sleeps for its compute time).
Every 30, 10 or 3 seconds one of them is killed with SIGKILL, chosen by a seed; its replacement starts `--delay` seconds
later. Goodput is the compute time of useful steps over 8 times the time of the run. A step that is repeated after a
restart counts once, a step that torchft does not commit or to which a worker did not contribute does not count, and
neither does any time in which a worker waits, starts or is away. The systems take turns at each rate of failures.

- gossamer: `on_failure="continue"`, AER, all deadlines learned.
- torchft: its DistributedDataParallel and Manager, each worker a replica group of its own, with a lighthouse. Its
  timeouts are lowered until it notices a death in a second (the defaults take five seconds and more).
- torchrun: torch's elastic agent, DDP, a checkpoint every `--checkpoint-every` steps; all workers start again from it.
  They are forked from a process that has imported torch, as the others are, so that no system pays for imports.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import gossamer
from gossamer.lab import CpuMeter, LabCluster
from gossamer.lab.emulate import EmulatedModel
from gossamer.report.record import environment, write_record

NODES = (2, 2, 2, 2)
WORKERS = sum(NODES)
SYSTEMS = ("gossamer", "torchft", "torchrun")


class Work(NamedTuple):
    """What a worker needs to know."""

    folder: str
    compute: float
    model_mb: float
    delay: float
    checkpoint_every: int
    lighthouse: str = ""


class Log:
    """The steps of one process, written to the kernel at once, so that a kill loses none."""

    def __init__(self, work: Work, rank: int) -> None:
        self._file = (Path(work.folder) / f"{rank}-{os.getpid()}.jsonl").open("ab", buffering=0)

    def __call__(self, step: int, *, useful: bool = True) -> None:
        self._file.write(json.dumps({"t": time.monotonic(), "step": step, "useful": useful}).encode() + b"\n")


def prepared(work: Work) -> tuple[EmulatedModel, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = EmulatedModel(work.model_mb, 8, work.compute)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)


def with_gossamer(rank: int, work: Work) -> None:
    model, optimizer = prepared(work)
    log = Log(work, rank)
    gossip = gossamer.decentralize(model, optimizer, topology="aer", on_failure="continue")
    while True:
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        log(gossip.stats()["steps"])


def with_torchft(rank: int, work: Work) -> None:
    from torchft import Manager, ProcessGroupGloo
    from torchft.ddp import DistributedDataParallel

    model, optimizer = prepared(work)
    log = Log(work, rank)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=5),
        quorum_timeout=timedelta(seconds=20),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=work.lighthouse,
        replica_id=f"worker-{rank}",
        hostname="127.0.0.1",
    )
    forward = DistributedDataParallel(manager, model)
    while True:
        manager.start_quorum()
        optimizer.zero_grad()
        forward().backward()
        if manager.should_commit():
            optimizer.step()
            log(manager.current_step(), useful=manager.is_participating())


def with_torchrun(work: Work) -> None:
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]):
        time.sleep(work.delay)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    model, optimizer = prepared(work)
    saved, step = Path(work.folder) / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    forward = torch.nn.parallel.DistributedDataParallel(model)
    log = Log(work, rank)
    while True:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        log(step)
        if rank == 0 and step % work.checkpoint_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)


def agent(work: Work) -> None:
    """Run torchrun's agent in this process; it forks the workers."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=WORKERS,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=1000,
        monitor_interval=0.1,
        start_method="fork",
        run_id="goodput",
    )
    elastic_launch(config, with_torchrun)(work)


# -- the launcher -------------------------------------------------------------------------------------------------


class Steps:
    """The steps in the logs of a run, by worker."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def rows(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Rank, process id and line of every step."""
        for path in sorted(self._folder.glob("*-*.jsonl")):
            rank, pid = map(int, path.stem.split("-"))
            for line in path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    yield rank, pid, json.loads(line)

    def useful(self, begin: float, end: float) -> int:
        """Number of different steps of workers that ended between two times."""
        return len({(r, row["step"]) for r, _, row in self.rows() if row["useful"] and begin <= row["t"] <= end})

    def processes(self) -> dict[int, int]:
        """The process of each rank that stepped last."""
        latest: dict[int, tuple[float, int]] = {}
        for rank, pid, row in self.rows():
            latest[rank] = max(latest.get(rank, (0.0, 0)), (row["t"], pid))
        return {rank: pid for rank, (_, pid) in latest.items()}


class Job(NamedTuple):
    """A running job: `kill(rank)` kills a worker and has it replaced after the delay, `tick()` starts what is due."""

    kill: Callable[[int], bool]
    tick: Callable[[], None]


@contextmanager
def pooled(fn: Callable[[int, Work], None], work: Work) -> Iterator[Job]:
    """A job whose workers are replaced one by one."""
    with (
        LabCluster(per_node=NODES, network="loopback", check=False) as cluster,
        cluster.directory() as address,
        cluster.pool(env={"GOSSAMER_DIRECTORY": address}) as pool,
    ):
        due: dict[int, float] = {}

        def kill(rank: int) -> bool:
            if rank in due:
                return False  # its replacement has not started
            pool.kill(rank)
            due[rank] = time.monotonic() + work.delay
            return True

        def tick() -> None:
            for worker in pool.poll(0.02):
                if not worker.killed:
                    print(f"worker {worker.rank} ended: {worker.why[-400:]}", file=sys.stderr)
                    due.setdefault(worker.rank, time.monotonic() + work.delay)
            for rank in [r for r, at in due.items() if at <= time.monotonic()]:
                del due[rank]
                pool.start(rank, fn, work)

        for rank in range(WORKERS):
            pool.start(rank, fn, work)
        yield Job(kill, tick)
        pool.kill()


@contextmanager
def restarted(work: Work) -> Iterator[Job]:
    """A job that torchrun's agent restarts."""
    command = [sys.executable, __file__, "--agent", json.dumps(work)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (Path(work.folder) / "agent.txt").open("wb") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output)
    steps = Steps(Path(work.folder))

    def kill(rank: int) -> bool:
        try:
            os.kill(steps.processes()[rank], signal.SIGKILL)
        except ProcessLookupError:
            return False  # the job is starting again
        return True

    def tick() -> None:
        if process.poll() is not None:
            raise SystemExit(f"the agent of torchrun ended: {Path(output.name).read_text()[-2000:]}")
        time.sleep(0.02)

    try:
        yield Job(kill, tick)
    finally:
        process.send_signal(signal.SIGTERM)  # the agent ends its workers
        process.wait()


def run(system: str, every: float | None, args: argparse.Namespace) -> dict[str, Any]:
    """One system under one rate of failures."""
    with tempfile.TemporaryDirectory(prefix="gossamer-goodput-") as name:
        work = Work(name, args.compute, args.model_mb, args.delay, args.checkpoint_every)
        lighthouse = None
        if system == "torchft":
            from torchft.coordination import LighthouseServer

            lighthouse = LighthouseServer(
                bind="[::]:0", min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=50, heartbeat_timeout_ms=1000
            )
            port = lighthouse.address().rsplit(":", 1)[1]
            work = work._replace(lighthouse=f"http://127.0.0.1:{port}")
        functions = {"gossamer": with_gossamer, "torchft": with_torchft}
        steps, draw = Steps(Path(name)), random.Random(f"{args.seed} {every}")
        started = time.monotonic()
        with pooled(functions[system], work) if system in functions else restarted(work) as job:
            while len(steps.processes()) < WORKERS:
                job.tick()
                if time.monotonic() > started + 120:
                    raise SystemExit(f"{system}: not all workers made a step within 120 s")
            begin = time.monotonic()
            end, kills, missed = begin + args.seconds, 0, 0
            due = begin + every / 2 if every else end
            with CpuMeter() as meter:
                while time.monotonic() < end:
                    if time.monotonic() >= due:
                        if job.kill(draw.randrange(WORKERS)):
                            kills += 1
                        else:
                            missed += 1
                        due += every or 0.0
                    job.tick()
        useful = steps.useful(begin, end)
        by_second = [steps.useful(begin + s, begin + s + 1) for s in range(int(args.seconds))]
    if lighthouse is not None:
        lighthouse.shutdown()
    return {
        "system": system,
        "failure_every_s": every,
        "goodput": useful * args.compute / (WORKERS * args.seconds),
        "useful_steps": useful,
        "kills": kills,
        "kills_that_met_nobody": missed,
        "cpu_use": meter.use,
        "saturated": meter.saturated,
        "steps_by_second": by_second,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the record")
    parser.add_argument("--seconds", type=float, default=120.0, help="of a run, after all workers have started")
    parser.add_argument("--every", default="none,30,10,3", help="seconds between failures, separated by commas")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--compute", type=float, default=0.4, help="seconds of a step")
    parser.add_argument("--model-mb", type=float, default=4.0)
    parser.add_argument("--delay", type=float, default=1.0, help="seconds until a replacement starts")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps; torchrun only")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--agent", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agent:
        agent(Work(*json.loads(args.agent)))
        return
    rows = []
    for rate in args.every.split(","):
        for system in args.systems.split(","):
            row = run(system, None if rate == "none" else float(rate), args)
            rows.append(row)
            print(
                f"{system:10} a failure every {rate:>4} s: goodput {row['goodput']:.1%}, {row['kills']} kills, "
                f"cores {row['cpu_use']:.0%}" + (" SATURATED" if row["saturated"] else ""),
                flush=True,
            )
    if args.out:
        settings = {key: value for key, value in vars(args).items() if key not in ("out", "agent")}
        write(args.out, settings, rows)


def write(out: Path, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    rates = list(dict.fromkeys(row["failure_every_s"] for row in rows))
    found = {(row["system"], row["failure_every_s"]): row for row in rows}
    heads = ["none" if rate is None else f"every {rate:g} s" for rate in rates]
    lines = [f"| Failures | {' | '.join(heads)} |", f"|---|{'---|' * len(rates)}"]
    for system in dict.fromkeys(row["system"] for row in rows):
        cells = [f"{found[system, rate]['goodput']:.1%}" for rate in rates]
        lines.append(f"| {system} | {' | '.join(cells)} |")
    write_record(
        out,
        data={"settings": settings, "rows": rows},
        summary="\n".join(["Share of the workers' time that went into useful steps:", "", *lines]),
        environment=environment(),
    )


if __name__ == "__main__":
    main()
