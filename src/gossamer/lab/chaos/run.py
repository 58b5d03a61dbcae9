"""A chaos run: the same training twice, calm and under a seeded sequence of faults, and a verdict on what it survived.

told = run_chaos(ChaosConfig(per_node=(2, 2, 2, 2), seconds=120, faults=6, seed=1))
told["hangs"], told["restarts"], told["longest_stall_s"], told["final_loss"], told["calm_final_loss"]
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gossamer.errors import InputError
from gossamer.lab.chaos.job import JobRecord, run_job
from gossamer.lab.chaos.log import ProcessLog, last_steps
from gossamer.lab.chaos.plan import Fault, make_plan
from gossamer.lab.chaos.verdict import false_drops, flatness, leaks, problems, rejoins, stalls
from gossamer.lab.chaos.worker import ChaosJob, final_loss, train, train_ddp, warm
from gossamer.lab.cluster import LabCluster
from gossamer.lab.namespaces import NETNS, PREFIX, start_time
from gossamer.lab.workers.placement import Node, reserved_port
from gossamer.lab.workers.pool import run_workers
from gossamer.predict.methods import Method, parse

DDP_PATIENCE = 60.0  # seconds that DDP is watched after its fault
Progress = Callable[[str, float, float], None]  # what happens, seconds done, of how many


@dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    """What to do. `faults=0` is a soak: nothing goes wrong, and memory and descriptors must stay flat."""

    per_node: tuple[int, ...] = (2, 2, 2, 2)
    seconds: float = 120.0
    faults: int = 6
    seed: int = 1
    calm_runs: int = 1
    calm_losses: tuple[float, ...] = ()  # of calm runs that were made before
    ddp: bool = False
    method: str = "dadam:aer"
    lr: float = 2e-3
    compute: float = 0.15
    link: str | None = "100mbit"
    network: Literal["namespaces", "loopback"] = "namespaces"
    soft: float = 0.5
    hard: float = 5.0
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if not 10 <= self.seconds <= 86400:
            raise InputError(f"seconds must be from 10 to a day (86400), got {self.seconds:g}; pass e.g. 120")
        if self.seed < 0:
            raise InputError(f"the seed must be at least 0, got {self.seed}; pass e.g. 1")
        if not 0 <= self.calm_runs <= 20:
            raise InputError(f"calm runs must be 0 to 20, got {self.calm_runs}; pass e.g. 3")
        if not 0.01 <= self.compute <= 10:
            raise InputError(f"compute must be from 0.01 to 10 seconds a step, got {self.compute:g}; pass e.g. 0.15")
        if not 0 < self.soft < self.hard < self.timeout:
            raise InputError(
                f"deadlines must satisfy 0 < soft < hard < timeout, got {self.soft:g}, {self.hard:g} and "
                f"{self.timeout:g}; pass e.g. 0.5, 5 and 60"
            )
        if self.parsed.algorithm == "ddp" or self.parsed.package != "gossamer":
            raise InputError(f"{self.method!r} does not survive its workers; name a method that gossips: dadam:aer")

    @property
    def parsed(self) -> Method:
        return parse(self.method)

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
            lr=self.lr,
            compute=self.compute,
            seed=seed,
            timeout=self.timeout,
            soft=self.soft,
            hard=self.hard,
        )


def run_chaos(chaos: ChaosConfig, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """The verdict: see docs/reliability.md for its fields."""
    plan = chaos.plan
    run_workers(1, warm)  # what stays for good is there before the first count
    warm(0)
    before = _own()
    calm: list[tuple[JobRecord, float | None]] = []
    ddp = None
    with chaos.cluster() as cluster:
        for k in range(chaos.calm_runs if plan else 0):
            label = f"calm run {k + 1} of {chaos.calm_runs}"
            calm.append(_train(chaos, cluster, (), chaos.seed + 1 + k, label, progress))
        label = f"{len(plan)} faults" if plan else "soak"
        ran, loss = _train(chaos, cluster, plan, chaos.seed, label, progress)
        if chaos.ddp and plan:
            ddp = _under_ddp(chaos, cluster, plan[0], progress)
    after = _own()
    return _verdict(chaos, ran, loss, calm, ddp, cluster.describe(), {k: max(0, after[k] - before[k]) for k in before})


def _train(
    chaos: ChaosConfig, cluster: LabCluster, plan: Sequence[Fault], seed: int, label: str, progress: Progress
) -> tuple[JobRecord, float | None]:
    """One run, and the final loss of the mean of those that came to its end."""

    def watch(at: float, event: str, lives: Sequence[ProcessLog]) -> None:
        steps = last_steps(lives)
        far = f", step {min(steps.values())} to {max(steps.values())}" if steps else ""
        progress(f"{label}: {event}" if event else f"{label}{far}", max(0.0, at), chaos.seconds)

    with tempfile.TemporaryDirectory(prefix="gossamer-chaos-") as folder, cluster.directory() as address:
        job = chaos.job(Path(folder), seed, chaos.seconds)
        ran = run_job(cluster, job, train, plan, env={"GOSSAMER_DIRECTORY": address}, watch=watch)
    models = [value["parameters"] for value in ran.values.values()]
    return ran, final_loss(models, job.width) if models else None


def _under_ddp(chaos: ChaosConfig, cluster: LabCluster, fault: Fault, progress: Progress) -> dict[str, Any]:
    """torch's DDP under one fault: how every rank ended, and how long after the fault."""
    seconds = fault.at + DDP_PATIENCE

    def watch(at: float, event: str, lives: Sequence[ProcessLog]) -> None:
        if event:
            progress(f"DDP: {event}", at, seconds)

    with tempfile.TemporaryDirectory(prefix="gossamer-chaos-") as folder:
        job = chaos.job(Path(folder), chaos.seed, seconds)
        with reserved_port(Node()) as port:
            env = {"MASTER_PORT": str(port)}
            ran = run_job(cluster, job, train_ddp, [fault], env=env, watch=watch, replace=False)
    hit = ran.done[0].at if ran.done else fault.at
    ranks: dict[int, dict[str, Any]] = {
        r: {"worker": r, "ending": "killed", "after_s": 0.0} for r in fault.victims if fault.kind == "kill"
    }
    for end in ran.ended:
        why = end["why"].strip().rsplit("\n", 1)[-1]
        ranks[end["worker"]] = {
            "worker": end["worker"],
            "ending": end["ending"],
            "after_s": end["at"] - hit,
            "why": why,
        }
    for hung in ran.hung:
        ranks[hung["worker"]] = {"worker": hung["worker"], "ending": "hung", "after_s": None, "why": hung["why"]}
    failed = sum(r["ending"] in ("killed", "died", "raised", "hung") for r in ranks.values())
    after = [life.steps[-1][0] - ran.begin - hit for life in ran.lives if life.steps]
    return {
        "fault": fault.describe(),
        "failed": failed,
        "of": cluster.n,
        "last_step_after_s": max(after, default=None),
        "ranks": [ranks[r] for r in sorted(ranks)],
    }


def _own() -> dict[str, int]:
    """What this process, its fork server and its namespaces hold now."""
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
    ran: JobRecord,
    loss: float | None,
    calm: Sequence[tuple[JobRecord, float | None]],
    ddp: dict[str, Any] | None,
    cluster: dict[str, Any],
    ours: dict[str, int],
) -> dict[str, Any]:
    came = rejoins(ran)
    held = stalls(ran, 0.0)
    calm_losses = [*chaos.calm_losses, *(x for _, x in calm if x is not None)]
    kept = leaks(ran)
    told: dict[str, Any] = {
        "hangs": len(ran.hung),
        "restarts": len(ran.ended),
        "longest_stall_s": held[0]["seconds"] if held else None,
        "rejoined": sum(r["seconds"] is not None for r in came),
        "not_rejoined": sum(r["seconds"] is None for r in came),
        "rejoin_s": [r["seconds"] for r in came],
        "final_loss": loss,
        "calm_final_loss": calm_losses[0] if calm_losses else None,
        "calm_final_losses": calm_losses,
        "calm_longest_stalls_s": [s[0]["seconds"] for s in (stalls(r, 0.0) for r, _ in calm) if s],
        "leaks": {what: kept.get(what, 0) + ours[what] for what in ours},
        "faults": [{**d.fault.describe(), "at": d.at, "until": d.until} for d in ran.done],
        "valid": not ran.saturated and len(ran.done) == len(chaos.plan),
        "cpu_use": ran.cpu_use,
        "steps": last_steps(ran.lives),
        "calm_steps": [last_steps(r.lives) for r, _ in calm],
        "false_drops": false_drops(ran),
        "seconds": ran.seconds,
        "cluster": cluster,
        "job": {
            name: getattr(chaos, name)
            for name in ("method", "lr", "compute", "soft", "hard", "timeout", "seed", "calm_runs")
        },
        "memory": flatness(ran),
        "rejoins": came,
        "stalls": held[:50],
        "hung": ran.hung,
        "ended": ran.ended,
        "ddp": ddp,
        "lives": [_drawn(life, ran.begin) for life in ran.lives],
        "threads_left": {rank: value["threads"] for rank, value in ran.values.items() if value.get("threads")},
        "stats": {rank: value.get("stats") for rank, value in ran.values.items()},
    }
    found = problems(told, soft=chaos.soft)
    if not chaos.faults and not told["memory"]["flat"]:
        found.append("memory or descriptors grew during the soak")
    return {"passed": not found, "problems": found, **told}


def _drawn(life: ProcessLog, begin: float) -> dict[str, Any]:
    """A process as it goes into the record: every step's time and loss."""
    return {
        "worker": life.rank,
        "generation": life.generation,
        "joined": life.joined,
        "events": {name: round(t - begin, 3) for name, t in life.events.items()},
        "members": [[round(t - begin, 3), epoch, list(ranks)] for t, epoch, ranks in life.members],
        "steps": [[round(t - begin, 3), step, round(loss, 4)] for t, step, _, loss in life.steps],
    }
