"""Run one training job under a plan of faults, and record what happened to its workers."""

from __future__ import annotations

import signal
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

HANG = 20.0  # seconds without a step, beyond compute time and the worker's own faults, that count as a hang
LEAVING = 25.0  # seconds that a worker may take to return after the end of the run
RESTART = 2.0  # seconds until a worker that ended unexpectedly is started again
POLL = 0.05
# Called with the seconds since the start, an event (empty: none) and the logs of all processes (empty with an event).
Watch = Callable[[float, str, Sequence[ProcessLog]], None]


@dataclass
class FaultRecord:
    """A fault as it was carried out; times are seconds since the start of the run."""

    fault: Fault
    at: float
    until: float | None = None


@dataclass
class JobRecord:
    """What happened in a run."""

    begin: float  # time.monotonic()
    seconds: float
    logs: list[ProcessLog] = field(default_factory=list)
    faults: list[FaultRecord] = field(default_factory=list)
    hung: list[dict[str, Any]] = field(default_factory=list)
    ended: list[dict[str, Any]] = field(default_factory=list)  # processes that ended unexpectedly
    values: dict[int, dict[str, Any]] = field(default_factory=dict)  # what the last process of each rank returned
    began: bool = False  # every worker has made its first step
    orphans: int = 0  # processes that could not be ended
    cpu_use: float | None = None
    saturated: bool = False

    @property
    def end(self) -> float:
        return self.begin + self.seconds


class _JobRun:
    def __init__(
        self, cluster: LabCluster, pool: WorkerPool, job: ChaosJob, fn: Callable[..., Any], watch: Watch, replace: bool
    ) -> None:
        self.cluster, self.pool, self.job, self.fn, self.watch, self.replace = cluster, pool, job, fn, watch, replace
        self.reader = LogReader(Path(job.folder))
        self.record = JobRecord(time.monotonic(), job.seconds)
        self.active_faults: dict[int, int] = {}  # rank -> number of faults that affect it now
        self.restarts: dict[int, float] = {}  # rank -> when to restart a worker that ended unexpectedly
        self.released: dict[int, float] = {}  # rank -> when the last fault that affected it ended
        self.leaving: set[int] = set()  # ranks whose worker was asked to leave

    def wait_for_first_steps(self) -> None:
        """Start the clock of the run when every worker has made a step; a worker that makes none in time hangs."""
        deadline = time.monotonic() + self.job.timeout
        while time.monotonic() < deadline and not self.record.ended:
            self.note_ends()
            self.reader.update()
            if sum(bool(log.steps) for log in self.reader.logs.values()) == self.cluster.n:
                self.record.begin, self.record.began = time.monotonic(), True
                new = self.job.start_signal.with_suffix(".new")  # renamed, so that no worker reads half of it
                new.write_text(repr(self.record.begin))
                new.replace(self.job.start_signal)
                return
        for worker in list(self.pool.running):
            self.note_hang(worker, f"made no first step within {self.job.timeout:g} s")
            self.pool.kill(worker.rank)
        self.record.seconds = 0.0  # the run ends here

    def carry_out(self, plan: Sequence[Fault]) -> None:
        due: list[tuple[float, bool, Fault]] = [(f.at, True, f) for f in plan] + [(f.until, False, f) for f in plan]
        due.sort(key=lambda d: d[0])
        looked = 0.0
        while (now := time.monotonic()) < self.record.end:
            while due and self.record.begin + due[0][0] <= now:
                _, begins, fault = due.pop(0)
                if begins:
                    self.begin_fault(fault)
                else:
                    self.end_fault(fault)
            self.note_ends()
            for rank in [r for r, at in self.restarts.items() if at <= now]:
                del self.restarts[rank]
                if not self.active_faults.get(rank):  # otherwise the end of the fault starts a worker
                    self.released[rank] = now
                    self.start_replacement(rank)
            if now - looked > 1.0:
                looked = now
                self.reader.update()
                self.look_for_hangs(now)
                self.watch(now - self.record.begin, "", self.reader.ordered())
            if not self.replace and not self.pool.running:
                return

    def begin_fault(self, fault: Fault) -> None:
        self.watch(time.monotonic() - self.record.begin, str(fault), ())
        for rank in fault.victims:
            self.active_faults[rank] = self.active_faults.get(rank, 0) + 1
        self.record.faults.append(FaultRecord(fault, time.monotonic() - self.record.begin))
        if fault.kind == "cut":
            assert fault.node is not None
            self.cluster.cut(fault.node, silently=fault.how == "packets lost")
        elif fault.kind == "pair":
            assert fault.node is not None
            assert fault.other_node is not None
            self.cluster.cut_pair(fault.node, fault.other_node)
        elif fault.kind == "slow" and fault.how == "link":
            assert fault.node is not None
            rate = self.cluster.links.default
            self.cluster.slow(fault.node, (rate or 1e9) * SLOW_LINK)
        for rank in fault.victims:
            if fault.kind == "kill":
                self.pool.kill(rank)
            elif fault.kind == "stop":
                self.pool.stop(rank)
            elif fault.kind in ("join", "term"):
                self.leaving.add(rank)
                self.ask_to_leave(rank, by_signal=fault.kind == "term")
            elif fault.kind == "slow" and fault.how == "compute":
                self.job.request(rank, "slow").write_text(str(SLOWER))

    def ask_to_leave(self, rank: int, *, by_signal: bool) -> None:
        worker = self.pool.current(rank)
        if by_signal and worker is not None:
            worker.signal(signal.SIGTERM)
        else:
            self.job.request(rank, "leave").touch()

    def end_fault(self, fault: Fault) -> None:
        if fault.kind == "cut":
            assert fault.node is not None
            self.cluster.mend(fault.node)
        elif fault.kind == "pair":
            self.cluster.mend_pair()
        elif fault.kind == "slow" and fault.how == "link":
            assert fault.node is not None
            self.cluster.slow(fault.node, None)
        for rank in fault.victims:
            if fault.kind in ("kill", "join", "term"):
                self.start_replacement(rank)
            elif fault.kind == "stop":
                self.pool.resume(rank)
            elif fault.kind == "slow":
                self.job.request(rank, "slow").unlink(missing_ok=True)
        now = time.monotonic()
        for rank in fault.victims:
            self.active_faults[rank] -= 1
            self.released[rank] = now
        next(r for r in self.record.faults if r.fault is fault).until = now - self.record.begin
        self.watch(now - self.record.begin, f"{fault}: over", ())

    def start_replacement(self, rank: int) -> None:
        """Start a new worker of a rank once the previous one has ended (only with `replace`)."""
        before = self.pool.current(rank)
        if before is not None and before.running:
            deadline = time.monotonic() + LEAVING
            while before.running and time.monotonic() < deadline:
                self.note_ends()  # it may be leaving right now, and other workers may end meanwhile
            if before.running:
                self.note_hang(before, "did not leave when it was asked to")
                self.pool.kill(rank)
                self.note_ends()
        self.leaving.discard(rank)
        self.job.request(rank, "leave").unlink(missing_ok=True)  # it was meant for the previous worker
        if self.replace:
            self.pool.start(rank, self.fn, self.job, 0 if before is None else before.generation + 1)

    def note_ends(self) -> None:
        for worker in self.pool.poll(POLL):
            over = worker.rank in self.leaving or time.monotonic() >= self.record.end
            if worker.killed or (worker.ending == "returned" and over):
                continue
            self.record.ended.append(
                {
                    "worker": worker.rank,
                    "generation": worker.generation,
                    "at": (worker.ended or 0.0) - self.record.begin,
                    "ending": worker.ending,
                    "why": worker.why or worker.output(),
                }
            )
            if self.replace and self.record.began and not self.active_faults.get(worker.rank):
                self.restarts[worker.rank] = time.monotonic() + RESTART

    def look_for_hangs(self, now: float) -> None:
        hung = {(h["worker"], h["generation"]) for h in self.record.hung}
        for worker in self.pool.running:
            if self.active_faults.get(worker.rank) or (worker.rank, worker.generation) in hung:
                continue
            log = self.reader.logs.get((worker.rank, worker.generation))
            last = max(worker.started, self.released.get(worker.rank, 0.0), (log and log.last) or 0.0)
            if now - last > HANG + self.job.compute * SLOWER:
                self.note_hang(worker, f"no step for {now - last:.1f} s")

    def note_hang(self, worker: Worker, why: str) -> None:
        self.record.hung.append(
            {
                "worker": worker.rank,
                "generation": worker.generation,
                "at": time.monotonic() - self.record.begin,
                "why": why,
                "stack": self.pool.stack(worker.rank),
            }
        )

    def finish(self) -> JobRecord:
        """Wait until all workers have returned; a worker that does not return hangs."""
        deadline = self.record.end + LEAVING
        while self.pool.running and time.monotonic() < deadline:
            self.note_ends()
        for worker in list(self.pool.running):
            self.note_hang(worker, f"did not return within {LEAVING:g} s of the end of the run")
            self.pool.kill(worker.rank)
        self.record.orphans = len(self.pool.wait_gone(10.0))
        for rank in range(self.cluster.n):
            last = self.pool.current(rank)
            if last is not None and last.ending == "returned":
                self.record.values[rank] = last.value
        self.reader.update()
        self.record.logs = self.reader.ordered()
        return self.record


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
    """Run `fn(rank, job, generation)` on every worker of the cluster while the faults of the plan are carried out.

    With `replace`, a killed worker is replaced when its fault ends, and a worker that ended unexpectedly soon after.
    Without it (DDP), the run is over when the last worker has ended.
    """
    with cluster.pool(env=env) as pool, CpuMeter() as meter:
        run = _JobRun(cluster, pool, job, fn, watch, replace)
        for rank in range(cluster.n):
            pool.start(rank, fn, job, 0)
        run.wait_for_first_steps()
        run.carry_out(plan)
        record = run.finish()
    record.cpu_use, record.saturated = meter.use, meter.saturated
    return record
