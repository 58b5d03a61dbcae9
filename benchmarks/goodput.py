"""Useful work under failures: an elastic job beside torchft's DDP, and beside DDP that torchrun restarts.

    python benchmarks/goodput.py --out benchmarks/records/goodput          # about 30 minutes

Eight workers on loopback train an emulated model (real parameters and messages; a step sleeps for its compute time).
Every 30, 10 or 3 seconds one of them is killed with SIGKILL, chosen by a seed; its replacement starts `--delay` seconds
later. A kill meets nobody while the chosen worker waits for its replacement; such kills are counted as misses. Goodput
is the time of useful steps over 8 times the time of the run. A useful step counts as long as one worker alone, with no
other one to talk to, takes for it: its compute time, and the optimizer's. That is measured before the first run, and
goodput is stated for the compute time alone as well. A step that is repeated after a restart counts once, a step that
torchft does not commit or to which a worker did not contribute does not count, and neither does any time in which a
worker communicates, waits, starts or is away. The systems take turns at each rate of failures.

- gossamer: `on_failure="continue"`, AER, all deadlines learned. The last step of a killed worker may not have reached
  a neighbor, so one step per kill is subtracted. A worker that was dropped by mistake takes a member's state; the step
  in which it does so and the step before are lost and do not count.
- torchft: its DistributedDataParallel and Manager, each worker a replica group of its own, with a lighthouse. Its
  timeouts are lowered until it notices a death in a second (the defaults take five seconds and more). Its hook is
  repaired here: that of torchft 0.2.0 raises AssertionError in all survivors when an all-reduce over gloo fails.
- torchrun: torch's elastic agent, DDP, a checkpoint every `--checkpoint-every` steps; all workers start again from it.

All workers are forked from a process that has imported what they need, so that no system pays for imports.

With --out every result is added to `rows.jsonl` in that folder at once. The same command continues after an
interruption: it measures what is missing, and again what was measured on saturated cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import gossamer
from gossamer.lab import CpuMeter, LabCluster, warm_up
from gossamer.lab.emulate import EmulatedModel
from gossamer.report.record import environment, write_record

NODES = (2, 2, 2, 2)
WORKERS = sum(NODES)
SYSTEMS = ("gossamer", "torchft", "torchrun")
TARGET, TARGET_EVERY = 0.95, 10.0  # the goodput to reach, and the seconds between the failures under which it counts
ALONE_STEPS = 21
# Modules that a worker would otherwise import in its first steps, besides those that the lab's fork server imports.
POOL_MODULES = ("gossamer.engine.decentralize", "gossamer.engine.elastic", "torch.utils.serialization.config")
TORCHFT_MODULES = ("torchft", "torchft.coordination", "torchft.ddp")
TORCHRUN_MODULES = ("torch._dynamo", "torch.nn.parallel")


class Work(NamedTuple):
    """What a worker needs to know."""

    folder: str
    compute: float
    model_mb: float
    delay: float
    checkpoint_every: int
    lighthouse: str = ""


class Log:
    """The steps of one process, written to the kernel at once, so that a kill loses none.

    A worker makes its log before anything else: the name of the file says which process has the rank, and since when.
    """

    def __init__(self, work: Work, rank: int) -> None:
        name = f"{rank}-{os.getpid()}-{time.monotonic_ns()}.jsonl"
        self._file = (Path(work.folder) / name).open("ab", buffering=0)

    def __call__(self, step: int, *, lost: int = 0) -> None:
        """Add a step; the last `lost` steps of this process, with this one, are not useful."""
        self._file.write(json.dumps({"t": time.monotonic(), "step": step, "lost": lost}).encode() + b"\n")


def prepared(work: Work) -> tuple[EmulatedModel, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = EmulatedModel(work.model_mb, 8, work.compute)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)


def with_gossamer(rank: int, work: Work) -> None:
    log = Log(work, rank)
    model, optimizer = prepared(work)
    gossip = gossamer.decentralize(model, optimizer, topology="aer", on_failure="continue")
    gossip.acknowledge_join()  # of a replacement: from here on True means that this worker joined again
    while True:
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        log(gossip.stats()["steps"], lost=2 if gossip.acknowledge_join() else 0)


def alone(rank: int, work: Work) -> float:
    """The median time of a step of a worker that talks to nobody."""
    model, optimizer = prepared(work)
    times = []
    for _ in range(ALONE_STEPS):
        began = time.monotonic()
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.monotonic() - began)
    return statistics.median(times)


def with_torchft(rank: int, work: Work) -> None:
    log = Log(work, rank)
    from torchft import Manager, ProcessGroupGloo
    from torchft.ddp import DistributedDataParallel

    class RepairedDDP(DistributedDataParallel):
        @staticmethod
        def _comm_hook(state, bucket):  # torch refuses annotations that are strings
            reduced = state.allreduce(bucket.buffer())
            reduced.wait()
            future = getattr(reduced.get_future(), "_fut", None)
            if future is None:  # the all-reduce has failed, and the manager will not commit this step
                future = torch.futures.Future()
                future.set_result(bucket.buffer())
            return future

    model, optimizer = prepared(work)
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
    forward = RepairedDDP(manager, model)
    while True:
        manager.start_quorum()
        optimizer.zero_grad()
        forward().backward()
        if manager.should_commit():
            optimizer.step()
            log(manager.current_step(), lost=0 if manager.is_participating() else 1)


def with_torchrun(work: Work) -> None:
    # The agent's handler raises a Python exception, which a worker that waits in gloo would never reach.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt:
        time.sleep(work.delay)  # the replacements start now
    log = Log(work, int(os.environ["RANK"]))
    store, rank, workers = next(dist.rendezvous("env://"))
    # The store outlives an attempt: without a prefix gloo would connect to addresses of dead processes.
    store = dist.PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers, timeout=timedelta(seconds=30))
    model, optimizer = prepared(work)
    saved, step = Path(work.folder) / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    forward = torch.nn.parallel.DistributedDataParallel(model)
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
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in TORCHRUN_MODULES:
        import_module(name)
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
        logs_specs=DefaultLogsSpecs(log_dir=str(Path(work.folder) / "torchelastic")),  # removed with the folder
    )
    elastic_launch(config, with_torchrun)(work)


# -- the launcher -------------------------------------------------------------------------------------------------


class Steps:
    """The logs of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _logs(self) -> list[tuple[int, int, int, Path]]:
        """Start time, rank, process id and file of every process, in the order of their starts."""
        found = []
        for path in self._folder.glob("*-*-*.jsonl"):
            rank, pid, started = map(int, path.stem.split("-"))
            found.append((started, rank, pid, path))
        return sorted(found)

    def processes(self) -> dict[int, int]:
        """The newest process of each rank; it may have made no step yet, and it may be dead."""
        return {rank: pid for _, rank, pid, _ in self._logs()}

    def stepped(self) -> set[int]:
        """The ranks of which a process has made a step."""
        return {rank for _, rank, _, path in self._logs() if path.stat().st_size}

    def useful(self, begin: float, end: float) -> list[float]:
        """When the useful steps of all workers ended that ended between two times; a repeated step counts once."""
        first: dict[tuple[int, int], float] = {}
        for _, rank, _, path in self._logs():
            kept: list[dict[str, Any]] = []
            for line in path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):  # the process may have been killed while it wrote
                    kept.append(json.loads(line))
                    del kept[len(kept) - kept[-1]["lost"] :]
            for row in kept:
                first.setdefault((rank, row["step"]), row["t"])  # logs are in the order of their starts
        return sorted(t for t in first.values() if begin <= t <= end)


def alive(pid: int, parent: int) -> bool:
    """Whether a process runs, is no zombie, and is a child of `parent`; a number may belong to a stranger by now."""
    try:
        state, of = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return False
    return state not in "ZX" and int(of) == parent


@dataclass
class Job:
    """A running job: `kill(rank)` kills a worker and has it replaced after the delay, `tick()` starts what is due."""

    kill: Callable[[int], bool]
    tick: Callable[[], None]
    failed: list[int] = field(default_factory=list)  # the ranks of workers that ended without being killed


@contextmanager
def pooled(fn: Callable[[int, Work], None], work: Work) -> Iterator[Job]:
    """A job whose workers are replaced one by one."""
    with (
        LabCluster(per_node=NODES, network="loopback", check=False) as cluster,
        cluster.directory() as address,
        cluster.pool(env={"GOSSAMER_DIRECTORY": address}) as pool,
    ):
        due: dict[int, float] = {}
        failed: list[int] = []

        def kill(rank: int) -> bool:
            if rank in due:
                return False  # its replacement has not started
            pool.kill(rank)
            due[rank] = time.monotonic() + work.delay
            return True

        def tick() -> None:
            for worker in pool.poll(0.02):
                if not worker.killed:
                    print(f"worker {worker.rank} ended: {worker.why.strip()[-200:]}", file=sys.stderr)
                    failed.append(worker.rank)
                    due.setdefault(worker.rank, time.monotonic() + work.delay)
            for rank in [r for r, at in due.items() if at <= time.monotonic()]:
                del due[rank]
                pool.start(rank, fn, work)

        for rank in range(WORKERS):
            pool.start(rank, fn, work)
        yield Job(kill, tick, failed)
        pool.kill()


@contextmanager
def restarted(work: Work) -> Iterator[Job]:
    """A job that torchrun's agent restarts."""
    command = [sys.executable, __file__, "--agent", json.dumps(work)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (Path(work.folder) / "agent.txt").open("wb") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
    steps = Steps(Path(work.folder))

    def kill(rank: int) -> bool:
        pid = steps.processes()[rank]
        if not alive(pid, process.pid):
            return False  # its replacement has not started
        os.kill(pid, signal.SIGKILL)
        return True

    def tick() -> None:
        if process.poll() is not None:
            raise SystemExit(f"the agent of torchrun ended: {Path(output.name).read_text()[-2000:]}")
        time.sleep(0.02)

    try:
        yield Job(kill, tick)
    finally:
        process.send_signal(signal.SIGTERM)  # the agent ends its workers
        try:
            process.wait(60.0)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whoever is left of the session


def run(system: str, every: float | None, args: argparse.Namespace) -> dict[str, Any]:
    """One system under one rate of failures."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="gossamer-goodput-") as name:
        work = Work(name, args.compute, args.model_mb, args.delay, args.checkpoint_every)
        lighthouse = None
        if system == "torchft":
            os.environ.setdefault("RUST_LOG", "warn")  # a lighthouse prints several lines per step
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
            while len(steps.stepped()) < WORKERS:
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
        times = steps.useful(begin, end)
    if lighthouse is not None:
        lighthouse.shutdown()
    discarded = lost_by_kills(system, kills, len(times))
    by_second = [0] * math.ceil(args.seconds)
    for t in times:
        by_second[min(int(t - begin), len(by_second) - 1)] += 1
    return {
        "system": system,
        "failure_every_s": every,
        "useful_steps": len(times) - discarded,
        "subtracted_steps": discarded,
        "kills": kills,
        "kills_that_met_nobody": missed,
        "ended_by_themselves": len(job.failed),  # workers that failed without being killed; torchrun's are not counted
        "cpu_use": meter.use,
        "saturated": meter.saturated,
        "load_before": load,
        "steps_by_second": by_second,  # with those that were subtracted
    }


def step_alone(args: argparse.Namespace) -> float:
    """Seconds of a step of one worker alone."""
    work = Work("", args.compute, args.model_mb, args.delay, args.checkpoint_every)
    with LabCluster(per_node=(1,), network="loopback", check=False) as cluster, cluster.pool() as pool:
        found: float = pool.run(alone, work)[0]
    return found


def goodputs(row: dict[str, Any], step: float, args: argparse.Namespace) -> dict[str, float]:
    """The share of the workers' time in useful steps: for the time of a step alone, and for its compute time only."""
    shares = row["useful_steps"] / (WORKERS * args.seconds)
    return {"goodput": shares * step, "goodput_of_compute": shares * args.compute}


def lost_by_kills(system: str, kills: int, steps: int) -> int:
    """How many of the steps that were made are subtracted because no neighbor may have got them before a kill.

    An elastic job mixes a step during the next one. With torchft and torchrun a logged step is part of all models.
    """
    return min(kills, steps) if system == "gossamer" else 0


class Rows:
    """The results of a record, one line each in `rows.jsonl`; with no folder they are only kept."""

    def __init__(self, out: Path | None, settings: dict[str, Any]) -> None:
        self._file = None if out is None else out / "rows.jsonl"
        self._settings = settings
        self._found: dict[tuple[str, float | None], dict[str, Any]] = {}
        self.step_alone: float | None = None  # the seconds of a step of one worker alone, the same for all results
        if self._file is None or not self._file.exists():
            return
        complete, _, rest = self._file.read_text().rpartition("\n")
        if rest:  # the program was killed while it wrote a line
            self._file.write_text(f"{complete}\n" if complete else "")
        for line in complete.splitlines():
            row = json.loads(line)
            if row.pop("settings") != settings:
                raise SystemExit(f"{self._file} has results of other settings; choose another --out, or remove it")
            self.step_alone = row.pop("step_alone_s", None)
            self._found[row["system"], row["failure_every_s"]] = row

    def finished(self, system: str, every: float | None) -> bool:
        """Whether there is a valid result."""
        return (system, every) in self._found and not self._found[system, every]["saturated"]

    def add(self, row: dict[str, Any]) -> None:
        """Keep a result; a later one of the same system and rate replaces it."""
        self._found[row["system"], row["failure_every_s"]] = row
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(json.dumps({**row, "step_alone_s": self.step_alone, "settings": self._settings}) + "\n")

    def ordered(self) -> list[dict[str, Any]]:
        """The results by rate, the rarest failures first, and by system."""
        return [
            self._found[key] for key in sorted(self._found, key=lambda k: (-(k[1] or math.inf), SYSTEMS.index(k[0])))
        ]


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
    systems, before = args.systems.split(","), environment()
    if unknown := set(systems) - set(SYSTEMS):
        parser.error(f"--systems are of {', '.join(SYSTEMS)}, got {', '.join(sorted(unknown))}")
    if "torchft" in systems:
        before["versions"]["torchft"] = metadata.version("torchft")
    # There is one fork server, so it imports torchft before the first run.
    warm_up(*POOL_MODULES, *(TORCHFT_MODULES if "torchft" in systems else ()))
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "agent", "every", "systems")}
    rows = Rows(args.out, settings)
    step = rows.step_alone or step_alone(args)
    rows.step_alone = step
    print(f"one worker alone: {step:.4f} s per step", flush=True)
    for rate in args.every.split(","):
        every = None if rate == "none" else float(rate)
        for system in systems:
            if rows.finished(system, every):
                print(f"{system:10} a failure every {rate:>4} s: measured before", flush=True)
                continue
            row = run(system, every, args)
            row |= goodputs(row, step, args)
            rows.add(row)
            kills = f"{row['kills']} kills, {row['kills_that_met_nobody']} misses"
            print(
                f"{system:10} a failure every {rate:>4} s: goodput {row['goodput']:.1%}, {kills}, "
                f"{row['ended_by_themselves']} failed by themselves, cores {row['cpu_use'] or 0.0:.0%}"
                + (" SATURATED" if row["saturated"] else ""),
                flush=True,
            )
    print(target_sentence(rows.ordered()))
    if args.out:
        write(args.out, settings | {"step_alone_s": step}, rows.ordered(), before)


def target_sentence(rows: list[dict[str, Any]]) -> str:
    """The target, and whether it was reached."""
    text = f"The target is a goodput of at least {TARGET:.0%} at one failure every {TARGET_EVERY:g} s. "
    found = [r for r in rows if (r["system"], r["failure_every_s"]) == ("gossamer", TARGET_EVERY)]
    if not found:
        return text + "It was not measured."
    goodput, compute = found[0]["goodput"], found[0]["goodput_of_compute"]
    if found[0]["saturated"]:
        return text + f"The measurement is not valid, because the cores were saturated: {goodput:.1%}."
    reached = "reached" if goodput >= TARGET else "NOT reached"
    return text + f"It was {reached}: {goodput:.1%}, and {compute:.1%} if only the compute time of a step counts."


def write(out: Path, settings: dict[str, Any], rows: list[dict[str, Any]], before: dict[str, Any]) -> None:
    rates = list(dict.fromkeys(row["failure_every_s"] for row in rows))
    found = {(row["system"], row["failure_every_s"]): row for row in rows}
    heads = ["none" if rate is None else f"every {rate:g} s" for rate in rates]
    lines = [f"| Failures | {' | '.join(heads)} |", f"|---|{'---|' * len(rates)}"]
    for system in dict.fromkeys(row["system"] for row in rows):
        lines.append(f"| {system} | {' | '.join(cell(found.get((system, rate))) for rate in rates)} |")
    saturated = [row for row in rows if row["saturated"]]
    where = ", ".join(f"{row['system']} {heads[rates.index(row['failure_every_s'])]}" for row in saturated)
    text = (
        "Share of the workers' time in useful steps, each of which counts as long as one worker alone takes "
        f"for it, {settings['step_alone_s']:.4f} s; in brackets: its compute time only. A kill misses if the worker is "
        "not there:"
    )
    write_record(
        out,
        data={"settings": settings, "rows": rows},
        summary="\n".join([text, "", *lines, "", target_sentence(rows)]),
        note=f"INVALID where the cores were saturated: {where}." if saturated else "",
        environment=before,
    )


def cell(row: dict[str, Any] | None) -> str:
    """A result as it stands in the table."""
    if row is None:
        return "-"
    kills = f", {row['kills']} kills, {row['kills_that_met_nobody']} misses" if row["failure_every_s"] else ""
    share = f"{row['goodput']:.1%} ({row['goodput_of_compute']:.1%})"
    return f"{'INVALID ' if row['saturated'] else ''}{share}{kills}"


if __name__ == "__main__":
    main()
