"""One run of a job under a plan of faults: start the workers, do to them what the plan says, watch who suffers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gossamer.lab.chaos.log import LogReader, ProcessLog
from gossamer.lab.chaos.plan import SLOW_LINK, SLOWER, Fault
from gossamer.lab.chaos.worker import ChaosJob
from gossamer.lab.cluster import LabCluster
from gossamer.lab.cpu import CpuMeter
from gossamer.lab.workers import Worker, WorkerPool

HANG = 20.0  # seconds without a step, beyond compute and faults of one's own, that count as hanging
LEAVING = 25.0  # seconds to return after the end of the run
AGAIN = 2.0  # seconds until a worker that ended of itself is started again
POLL = 0.05
Watch = Callable[
    [float, str, Sequence[ProcessLog]], None
]  # seconds since the start, what happens, who has come how far


@dataclass
class CarriedOut:
    """A fault as it was carried out; times are seconds since the start of the run."""

    fault: Fault
    at: float
    until: float | None = None


@dataclass
class JobRecord:
    """A run that is over."""

    begin: float
    seconds: float
    lives: list[ProcessLog] = field(default_factory=list)
    done: list[CarriedOut] = field(default_factory=list)
    hung: list[dict[str, Any]] = field(default_factory=list)
    ended: list[dict[str, Any]] = field(default_factory=list)  # processes that nobody had told to end
    values: dict[int, dict[str, Any]] = field(default_factory=dict)  # what each rank's last process returned
    began: bool = False  # all have made a first step
    orphans: int = 0  # processes that could not be ended
    cpu_use: float | None = None
    saturated: bool = False

    @property
    def end(self) -> float:
        return self.begin + self.seconds


class _Run:
    def __init__(
        self, cluster: LabCluster, pool: WorkerPool, job: ChaosJob, fn: Callable[..., Any], watch: Watch, replace: bool
    ) -> None:
        self.cluster, self.pool, self.job, self.fn, self.watch, self.replace = cluster, pool, job, fn, watch, replace
        self.reader = LogReader(Path(job.folder))
        self.ran = JobRecord(time.monotonic(), job.seconds)
        self.suffering: dict[int, int] = {}  # rank -> faults that hold it now
        self.again: dict[int, float] = {}  # rank -> when to start who ended of itself
        self.released: dict[int, float] = {}  # rank -> when the last fault of its own ended

    def await_first_steps(self) -> None:
        """The run begins when everybody has made a step; who does not within a minute hangs."""
        deadline = time.monotonic() + self.job.timeout
        while time.monotonic() < deadline and not self.ran.ended:
            self.note_ends()
            self.reader.update()
            if sum(bool(life.steps) for life in self.reader.lives.values()) == self.cluster.n:
                self.ran.begin, self.ran.began = time.monotonic(), True
                beside = self.job.start_signal.with_suffix(".new")
                beside.write_text(repr(self.ran.begin))
                beside.replace(self.job.start_signal)
                return
        for worker in list(self.pool.running):
            self.hangs(worker, f"made no first step within {self.job.timeout:g} s")
            self.pool.kill(worker.rank)
        self.ran.seconds = 0.0  # there is nothing to go on with

    def carry_out(self, plan: Sequence[Fault]) -> None:
        due: list[tuple[float, bool, Fault]] = [(f.at, True, f) for f in plan] + [(f.until, False, f) for f in plan]
        due.sort(key=lambda d: d[0])
        shown = 0.0
        while (now := time.monotonic()) < self.ran.end:
            while due and self.ran.begin + due[0][0] <= now:
                _, begins, fault = due.pop(0)
                if begins:
                    self.begin(fault)
                else:
                    self.undo(fault)
            self.note_ends()
            for rank in [r for r, at in self.again.items() if at <= now]:
                del self.again[rank]
                if not self.suffering.get(rank):  # else its fault's end fills the place
                    self.released[rank] = now
                    self.put(rank)
            if now - shown > 1.0:
                shown = now
                self.reader.update()
                self.look_for_hangs(now)
                self.watch(now - self.ran.begin, "", self.reader.ordered())
            if not self.replace and not self.pool.running:
                return

    def begin(self, fault: Fault) -> None:
        self.watch(time.monotonic() - self.ran.begin, str(fault), ())
        for rank in fault.victims:
            self.suffering[rank] = self.suffering.get(rank, 0) + 1
        self.ran.done.append(CarriedOut(fault, time.monotonic() - self.ran.begin))
        if fault.kind == "cut":
            assert fault.node is not None
            self.cluster.cut(fault.node, silently=fault.how == "packets lost")
        elif fault.kind == "slow" and fault.how == "link":
            assert fault.node is not None
            rate = self.cluster.links.default
            self.cluster.slow(fault.node, (rate or 1e9) * SLOW_LINK)
        for rank in fault.victims:
            if fault.kind == "kill":
                self.pool.kill(rank)
            elif fault.kind == "stop":
                self.pool.stop(rank)
            elif fault.kind == "join":
                self.job.wish(rank, "leave").touch()
            elif fault.kind == "slow" and fault.how == "compute":
                self.job.wish(rank, "slow").write_text(str(SLOWER))

    def undo(self, fault: Fault) -> None:
        if fault.kind == "cut":
            assert fault.node is not None
            self.cluster.mend(fault.node)
        elif fault.kind == "slow" and fault.how == "link":
            assert fault.node is not None
            self.cluster.slow(fault.node, None)
        for rank in fault.victims:
            if fault.kind in ("kill", "join"):
                self.put(rank)
            elif fault.kind == "stop":
                self.pool.resume(rank)
            elif fault.kind == "slow":
                self.job.wish(rank, "slow").unlink(missing_ok=True)
        now = time.monotonic()
        for rank in fault.victims:
            self.suffering[rank] -= 1
            self.released[rank] = now
        next(d for d in self.ran.done if d.fault is fault).until = now - self.ran.begin
        self.watch(now - self.ran.begin, f"{fault}: over", ())

    def put(self, rank: int) -> None:
        """A process into a rank's place, if that is free and the launcher replaces the dead."""
        before = self.pool.current(rank)
        if before is not None and before.running:
            deadline = time.monotonic() + LEAVING
            while before.running and time.monotonic() < deadline:
                self.note_ends()  # it may just be leaving; others may end meanwhile
            if before.running:
                self.hangs(before, "did not leave when it was told to")
                self.pool.kill(rank)
                while before.running:
                    self.note_ends()
        self.job.wish(rank, "leave").unlink(missing_ok=True)  # now that nobody is there to whom it was said
        if self.replace:
            self.pool.start(rank, self.fn, self.job, 0 if before is None else before.generation + 1)

    def note_ends(self) -> None:
        for worker in self.pool.poll(POLL):
            told = worker.killed or self.job.wish(worker.rank, "leave").exists()
            if told or (worker.ending == "returned" and time.monotonic() >= self.ran.end):
                continue
            self.ran.ended.append(
                {
                    "worker": worker.rank,
                    "generation": worker.generation,
                    "at": (worker.ended or 0.0) - self.ran.begin,
                    "ending": worker.ending,
                    "why": worker.why or worker.output(),
                }
            )
            if self.replace and self.ran.began and not self.suffering.get(worker.rank):
                self.again[worker.rank] = time.monotonic() + AGAIN

    def look_for_hangs(self, now: float) -> None:
        hung = {(h["worker"], h["generation"]) for h in self.ran.hung}
        for worker in self.pool.running:
            if self.suffering.get(worker.rank) or (worker.rank, worker.generation) in hung:
                continue
            life = self.reader.lives.get((worker.rank, worker.generation))
            heard = max(worker.started, self.released.get(worker.rank, 0.0), (life and life.last) or 0.0)
            if now - heard > HANG + self.job.compute * SLOWER:
                self.hangs(worker, f"no step for {now - heard:.1f} s")

    def hangs(self, worker: Worker, why: str) -> None:
        self.ran.hung.append(
            {
                "worker": worker.rank,
                "generation": worker.generation,
                "at": time.monotonic() - self.ran.begin,
                "why": why,
                "stack": self.pool.stack(worker.rank),
            }
        )

    def finish(self) -> JobRecord:
        """Wait for all to return; who does not hangs."""
        deadline = self.ran.end + LEAVING
        while self.pool.running and time.monotonic() < deadline:
            self.note_ends()
        for worker in list(self.pool.running):
            self.hangs(worker, f"did not return within {LEAVING:g} s of the end of the run")
            self.pool.kill(worker.rank)
        self.ran.orphans = len(self.pool.wait_gone(10.0))
        for rank in range(self.cluster.n):
            last = self.pool.current(rank)
            if last is not None and last.ending == "returned":
                self.ran.values[rank] = last.value
        self.reader.update()
        self.ran.lives = self.reader.ordered()
        return self.ran


def run_job(
    cluster: LabCluster,
    job: ChaosJob,
    fn: Callable[..., Any],
    plan: Sequence[Fault],
    *,
    env: dict[str, str],
    watch: Watch = lambda *_: None,
    replace: bool = True,
) -> JobRecord:
    """Run `fn(rank, job, generation)` on every worker of the cluster while the plan is carried out.

    With `replace`, killed workers are replaced when their fault is over, and those that end of themselves soon after;
    without it (DDP) the run ends with the last worker.
    """
    with cluster.pool(env=env) as pool, CpuMeter() as meter:
        run = _Run(cluster, pool, job, fn, watch, replace)
        for rank in range(cluster.n):
            pool.start(rank, fn, job, 0)
        run.await_first_steps()
        run.carry_out(plan)
        ran = run.finish()
    ran.cpu_use, ran.saturated = meter.use, meter.saturated
    return ran
