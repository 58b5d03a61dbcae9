"""A chaos run: train without faults and under a seeded sequence of faults, and compute a verdict.

verdict = run_chaos(ChaosConfig(per_node=(2, 2, 2, 2), seconds=120, faults=6, seed=1))
verdict["hangs"], verdict["restarts"], verdict["longest_stall_s"], verdict["final_loss"]
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from gossamer.errors import InputError
from gossamer.lab.chaos.job import JobRecord, run_job
from gossamer.lab.chaos.log import ProcessLog, last_steps
from gossamer.lab.chaos.plan import Fault, make_plan
from gossamer.lab.chaos.verdict import (
    false_drops,
    flatness,
    growth_problem,
    leaks,
    lost_shares,
    meetings,
    problems,
    rejoins,
    stall_limit,
    stalls,
)
from gossamer.lab.chaos.worker import LEARNING_RATES, ChaosJob, final_loss, train, train_ddp, warm
from gossamer.lab.cluster import LabCluster
from gossamer.lab.namespaces import NETNS, PREFIX, start_time
from gossamer.lab.workers.placement import Node, reserved_port
from gossamer.lab.workers.pool import run_workers
from gossamer.predict.methods import Method, parse

DDP_SECONDS = 60.0  # how long DDP runs after its fault
Progress = Callable[[str, float, float], None]  # called with an event, the seconds done, and the seconds of the run


@dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    """The settings of a chaos run. With `faults=0` it is a soak: memory, descriptors and threads must not grow."""

    per_node: tuple[int, ...] = (2, 2, 2, 2)
    seconds: float = 120.0
    faults: int = 6
    seed: int = 1
    calm_runs: int = 1
    calm_losses: tuple[float, ...] = ()  # final losses of earlier runs without faults
    ddp: bool = False  # also run torch's DDP under the first fault
    method: str = "dadam:aer"
    lr: float | None = None  # None: that of the method's optimizer in `LEARNING_RATES`
    compute: float = 0.15
    meet_every: int = 20  # steps between two collective calls; 0: none
    link: str | None = "100mbit"
    network: Literal["namespaces", "loopback"] = "namespaces"
    soft: float | None = None  # seconds; None: learned
    hard: float | None = None
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if not 10 <= self.seconds <= 86400:
            raise InputError(f"seconds must be from 10 to a day (86400), got {self.seconds:g}; pass e.g. 120")
        if self.seed < 0:
            raise InputError(f"the seed must be at least 0, got {self.seed}; pass e.g. 1")
        if not 0 <= self.calm_runs <= 20:
            raise InputError(f"calm runs must be 0 to 20, got {self.calm_runs}; pass e.g. 3")
        if not 0.01 <= self.compute <= 10:
            raise InputError(f"compute must be from 0.01 to 10 seconds per step, got {self.compute:g}; pass e.g. 0.15")
        if self.meet_every < 0:
            raise InputError(f"meet_every must be at least 0 steps, got {self.meet_every}; pass e.g. 20, or 0")
        if self.lr is not None and not 0 < self.lr <= 10:
            raise InputError(f"the learning rate must be above 0 and at most 10, got {self.lr:g}; pass e.g. 0.002")
        given = [d for d in (self.soft, self.hard, self.timeout) if d is not None]
        if not all(a < b for a, b in pairwise((0.0, *given))):
            got = ", ".join(f"{d:g}" for d in given)
            raise InputError(f"deadlines must satisfy 0 < soft < hard < timeout, got {got}; pass e.g. 0.5, 5 and 60")
        if self.parsed.algorithm == "ddp" or self.parsed.package != "gossamer":
            raise InputError(
                f"{self.method!r} does not continue when a worker fails; name a method of Gossamer, e.g. dadam:aer"
            )

    @property
    def parsed(self) -> Method:
        return parse(self.method)

    @property
    def learning_rate(self) -> float:
        return self.lr if self.lr is not None else LEARNING_RATES[self.parsed.optimizer]

    @property
    def plan(self) -> tuple[Fault, ...]:
        return make_plan(self.per_node, self.seconds, self.faults, self.seed, links=self.network == "namespaces")

    def cluster(self) -> LabCluster:
        link = self.link if self.network == "namespaces" else None
        return LabCluster(per_node=self.per_node, link=link, network=self.network, check=False)

    def job(self, folder: Path, seed: int, seconds: float) -> ChaosJob:
        return ChaosJob(
            folder=str(folder),
            method=self.parsed,
            seconds=seconds,
            lr=self.learning_rate,
            compute=self.compute,
            seed=seed,
            timeout=self.timeout,
            soft=self.soft,
            hard=self.hard,
            meet_every=self.meet_every,
        )


def run_chaos(chaos: ChaosConfig, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Run the training jobs and return the verdict; docs/reliability.md describes its fields."""
    plan = chaos.plan
    run_workers(1, warm)  # threads and processes that stay for good exist before the first count
    warm(0)
    before = _resources()
    calm: list[tuple[JobRecord, float | None]] = []
    ddp = None
    with chaos.cluster() as cluster:
        for k in range(chaos.calm_runs if plan else 0):
            label = f"calm run {k + 1} of {chaos.calm_runs}"
            calm.append(_train(chaos, cluster, (), chaos.seed + 1 + k, label, progress))
        label = f"{len(plan)} faults" if plan else "soak"
        record, loss = _train(chaos, cluster, plan, chaos.seed, label, progress)
        if chaos.ddp and plan:
            ddp = _under_ddp(chaos, cluster, plan[0], progress)
    after = _resources()
    own_leaks = {k: max(0, after[k] - before[k]) for k in before}
    return _verdict(chaos, record, loss, calm, ddp, cluster.describe(), own_leaks)


def _train(
    chaos: ChaosConfig, cluster: LabCluster, plan: Sequence[Fault], seed: int, label: str, progress: Progress
) -> tuple[JobRecord, float | None]:
    """One run, and the final loss of the mean of the models that reached the end."""

    def watch(at: float, event: str, logs: Sequence[ProcessLog]) -> None:
        steps = last_steps(logs)
        steps_text = f", step {min(steps.values())} to {max(steps.values())}" if steps else ""
        progress(f"{label}: {event}" if event else f"{label}{steps_text}", max(0.0, at), chaos.seconds)

    with tempfile.TemporaryDirectory(prefix="gossamer-chaos-") as folder, cluster.directory() as address:
        job = chaos.job(Path(folder), seed, chaos.seconds)
        record = run_job(cluster, job, train, plan, env={"GOSSAMER_DIRECTORY": address}, watch=watch)
    models = [value["parameters"] for value in record.values.values()]
    return record, final_loss(models, job.width) if models else None


def _under_ddp(chaos: ChaosConfig, cluster: LabCluster, fault: Fault, progress: Progress) -> dict[str, Any]:
    """Run torch's DDP under one fault; report how every rank ended, and how long after the fault."""
    seconds = fault.at + DDP_SECONDS

    def watch(at: float, event: str, logs: Sequence[ProcessLog]) -> None:
        if event:
            progress(f"DDP: {event}", at, seconds)

    with tempfile.TemporaryDirectory(prefix="gossamer-chaos-") as folder:
        job = chaos.job(Path(folder), chaos.seed, seconds)
        with reserved_port(Node()) as port:
            env = {"MASTER_PORT": str(port)}
            record = run_job(cluster, job, train_ddp, [fault], env=env, watch=watch, replace=False)
    hit = record.faults[0].at if record.faults else fault.at
    ranks: dict[int, dict[str, Any]] = {
        r: {"worker": r, "ending": "killed", "after_s": 0.0} for r in fault.victims if fault.kind == "kill"
    }
    for end in record.ended:
        why = end["why"].strip().rsplit("\n", 1)[-1]
        ranks[end["worker"]] = {
            "worker": end["worker"],
            "ending": end["ending"],
            "after_s": end["at"] - hit,
            "why": why,
        }
    for hung in record.hung:
        ranks[hung["worker"]] = {"worker": hung["worker"], "ending": "hung", "after_s": None, "why": hung["why"]}
    failed = sum(r["ending"] in ("killed", "died", "raised", "hung") for r in ranks.values())
    after = [log.steps[-1][0] - record.begin - hit for log in record.logs if log.steps]
    return {
        "fault": fault.describe(),
        "failed": failed,
        "of": cluster.n,
        "last_step_after_s": max(after, default=None),
        "ranks": [ranks[r] for r in sorted(ranks)],
    }


def _resources() -> dict[str, int]:
    """What this process, its fork server and its namespaces use now, to find leaks."""
    mine = f"{PREFIX}{os.getpid()}-{start_time(os.getpid())}-"
    spaces = [p.name for p in NETNS.iterdir() if p.name.startswith(mine)] if NETNS.is_dir() else []
    return {
        "processes": len(_descendants(os.getpid())),
        "threads": len(os.listdir("/proc/self/task")),
        "file_descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), *_children(os.getpid()))),
        "namespaces": len(spaces),
    }


def _children(pid: int) -> list[int]:
    """The processes that a process started: of the launcher, the fork server and the tracker of multiprocessing."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def _descendants(pid: int) -> list[int]:
    return [each for child in _children(pid) for each in (child, *_descendants(child))]


def _verdict(
    chaos: ChaosConfig,
    record: JobRecord,
    loss: float | None,
    calm: Sequence[tuple[JobRecord, float | None]],
    ddp: dict[str, Any] | None,
    cluster: dict[str, Any],
    own_leaks: dict[str, int],
) -> dict[str, Any]:
    rejoined = rejoins(record)
    stalled = stalls(record, 0.0)
    calm_losses = [*chaos.calm_losses, *(x for _, x in calm if x is not None)]
    kept = leaks(record)
    stats = {rank: value.get("stats") for rank, value in record.values.items()}
    verdict: dict[str, Any] = {
        "hangs": len(record.hung),
        "restarts": len(record.ended),
        "longest_stall_s": stalled[0]["seconds"] if stalled else None,
        "stall_limit_s": stall_limit(chaos.soft),
        **meetings(record),
        "rejoined": sum(r["seconds"] is not None for r in rejoined),
        "not_rejoined": sum(r["seconds"] is None for r in rejoined),
        "rejoin_s": [r["seconds"] for r in rejoined],
        "lost_shares": lost_shares(stats),
        "final_loss": loss,
        "calm_final_loss": calm_losses[0] if calm_losses else None,
        "calm_final_losses": calm_losses,
        "calm_meetings": [meetings(r)["meetings"] for r, _ in calm],
        "calm_longest_stalls_s": [s[0]["seconds"] for s in (stalls(r, 0.0) for r, _ in calm) if s],
        "leaks": {what: kept.get(what, 0) + own_leaks[what] for what in own_leaks},
        "faults": [{**f.fault.describe(), "at": f.at, "until": f.until} for f in record.faults],
        "valid": not record.saturated and len(record.faults) == len(chaos.plan),
        "saturated": record.saturated,
        "cpu_use": record.cpu_use,
        "steps": last_steps(record.logs),
        "calm_steps": [last_steps(r.logs) for r, _ in calm],
        "false_drops": false_drops(record),
        "seconds": record.seconds,
        "cluster": cluster,
        "job": {
            "lr": chaos.learning_rate,
            **{name: getattr(chaos, name) for name in ("method", "compute", "meet_every", "soft")},
            **{name: getattr(chaos, name) for name in ("hard", "timeout")},
            **{name: getattr(chaos, name) for name in ("seed", "calm_runs")},
        },
        "memory": flatness(record),
        "rejoins": rejoined,
        "stalls": stalled[:50],
        "hung": record.hung,
        "ended": record.ended,
        "ddp": ddp,
        "lives": [_log_entry(log, record.begin) for log in record.logs],
        "threads_left": {rank: value["threads"] for rank, value in record.values.items() if value.get("threads")},
        "stats": stats,
    }
    found = problems(verdict, soft=chaos.soft) + growth_problem(verdict["memory"], chaos.faults, chaos.seconds)
    return {"passed": not found, "problems": found, **verdict}


def _log_entry(log: ProcessLog, begin: float) -> dict[str, Any]:
    """The log of a process as it is written to the record, with the time and loss of every step."""
    return {
        "worker": log.rank,
        "generation": log.generation,
        "joined": log.joined,
        "events": {name: round(t - begin, 3) for name, t in log.events.items()},
        "members": [[round(t - begin, 3), epoch, list(ranks)] for t, epoch, ranks in log.members],
        "meetings": [
            [round(m.ended - begin, 3), round(m.seconds, 3), m.number, list(m.ranks), m.alone] for m in log.meetings
        ],
        "steps": [[round(t - begin, 3), step, round(loss, 4)] for t, step, _, loss in log.steps],
    }
