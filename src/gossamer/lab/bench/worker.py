"""What a worker of a benchmark does: train the emulated model by one method and tell what it took.

All workers start together at a barrier; the warm-up (connections, buffers, and the waits of a steady state) is not
counted, and there is no second barrier, which would grant gossip a head start. Asynchronous workers warm up until all
have exchanged, and go on after their window until all are done: at no time of it is a partner missing. Times are
`time.monotonic()`, one clock for all workers of the machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gossamer
from gossamer.comm import PrefixStore, baseline, default_store, world
from gossamer.errors import GossamerError
from gossamer.lab.bench.setup import DECENT_DP, Setup, emulated
from gossamer.lab.cpu import CpuTimes
from gossamer.lab.emulate import FORWARD, EmulatedModel
from gossamer.predict.methods import Method
from gossamer.trace import TraceWriter

Watch = Callable[[str, float, float, dict[str, Any]], None]  # category, start, end (perf_counter), attributes


@dataclass(frozen=True)
class MethodRun:
    """One run of one method. `seconds_of[rank]` are a worker's compute times, one for each step, warm-up included."""

    method: Method
    setup: Setup
    seconds_of: tuple[tuple[float, ...], ...]
    steps: int
    warmup: int
    seconds: float | None = None  # run for this long instead of `steps`
    timeout: float = 120.0  # how long a worker waits for another
    bucket_mb: float | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of the algorithm's policy
    trace: str | None = None


@dataclass
class BenchTrainer:
    """A method at work: call `step()`. `counters()` only grow; `close()` is collective."""

    forward: nn.Module
    model: EmulatedModel
    optimizer: torch.optim.Optimizer | None  # None: the package steps inside backward
    gossip: Any = None
    finish: Callable[[], Any] = lambda: None
    watch: Watch | None = None
    cause: str = "exchange"
    late: float = 0.0
    taken: int = 0

    def step(self) -> None:
        start = time.perf_counter()
        loss = self.forward()
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        computed = min(end, middle + (1 - FORWARD) * self.model.step_seconds)
        self.late += end - computed
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.watch is not None:
            here = {"step": self.taken}
            self.watch("forward", start, middle, here)
            self.watch("backward", middle, computed, here)
            self.watch("wait", computed, end, here)
            self.watch("step", end, time.perf_counter(), here)
        self.taken += 1

    def exchanging(self) -> bool:
        """Whether this worker has exchanged, or has nobody to exchange with."""
        stats = self.gossip.stats()
        return stats["rounds"] > 0 or not stats["bytes_sent_by_peer"]

    def counters(self) -> dict[str, float]:
        """Seconds waited by cause, as `wait:CAUSE`, and bytes by destination, as `sent:RANK`."""
        if self.gossip is None:
            return {f"wait:{self.cause}": self.late}
        stats = self.gossip.stats()
        waits = {f"wait:{link}": s for link, s in stats["seconds_waited_by_link"].items()}
        other = stats["seconds_waited"] - sum(waits.values())
        sent = {f"sent:{peer}": float(b) for peer, b in stats["bytes_sent_by_peer"].items()}
        rounds = {"rounds": float(stats["rounds"]), "skipped": float(stats["skipped_mixes"])}
        return {**waits, "wait:own machine": max(0.0, other), **sent, **rounds}


def optimizer_of(name: str, parameters: Any, lr: float = 1e-3) -> torch.optim.Optimizer:
    """The optimizer that a method's family names; every package gets the same one."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, fused=True)
    if name == "accumadam":
        return gossamer.AccumAdam(parameters, lr=lr, accumulate=4)
    return torch.optim.Adam(parameters, lr=lr, fused=True)


def trainer(task: MethodRun, model: EmulatedModel, watch: Watch | None) -> BenchTrainer:
    method = task.method
    if method.package == "decent-dp":
        return _decent_dp(task, model, watch)
    optimizer = optimizer_of(method.optimizer, model.parameters())
    if method.algorithm == "ddp":

        def sent(start: float, end: float, size: int) -> None:
            assert watch is not None
            watch("exchange", start, end, {"bytes": size})

        wrapped = baseline.ddp(model, bucket_mb=task.bucket_mb, wire=method.wire, sent=sent if watch else None)
        return BenchTrainer(wrapped, model, optimizer, watch=watch, cause="all-reduce")
    gossip = gossamer.decentralize(
        model,
        optimizer,
        topology=method.topology or "aer",
        algorithm=gossamer.algorithm(method.algorithm, **task.options),
        wire=method.wire,
        exchange=gossamer.Exchange(bucket_mib=task.bucket_mb),
        timeout=task.timeout,
        trace=task.trace,
    )
    return BenchTrainer(model, model, optimizer, gossip, gossip.close)


def _decent_dp(task: MethodRun, model: EmulatedModel, watch: Watch | None) -> BenchTrainer:
    from decent_dp.ddp import DecentralizedDataParallel

    assert task.method.topology is not None
    wrapped = DecentralizedDataParallel(
        model,
        lambda named: optimizer_of(task.method.optimizer, [p for _, p in named]),
        topology=DECENT_DP[task.method.topology],
        bucket_size_in_mb=25 if task.bucket_mb is None else task.bucket_mb,  # MiB; fractions work
    )
    return BenchTrainer(
        wrapped, model, None, finish=wrapped.global_avg, watch=watch
    )  # global_avg waits for what is in flight


def work(rank: int, task: MethodRun) -> dict[str, Any]:
    """Train, and return `begin`, `end`, `steps`, what the window between them cost, and the steps `warmed` before."""
    torch.set_num_threads(1)
    _, size = world.join_world()
    writer, watch = _recorder(task, rank, size)
    model = emulated(task.setup, list(task.seconds_of[rank]))
    training = trainer(task, model, watch)
    world.wait_for_all()
    warm = time.monotonic()
    for _ in range(task.warmup):
        training.step()
    everyone = _Everyone(size, task.timeout) if task.method.asynchronous else None
    if everyone is not None:
        everyone.step_until(training, "exchanging", training.exchanging)
        model.step = task.warmup - 1  # however long it took: all methods are measured with the same compute times
    warmed = training.taken
    steps, deadline = _until(task, training, warm)
    before, begin = _readings(training), time.monotonic()
    taken = 0
    while taken < steps if deadline is None else time.monotonic() < deadline:
        training.step()
        taken += 1
    end = time.monotonic()
    after = _readings(training)
    if everyone is not None:
        everyone.step_until(training, "done", lambda: True)
    training.finish()
    if writer is not None:
        writer.close()
    world.leave_world()
    return {"begin": begin, "end": end, "steps": taken, "warmed": warmed, **_spent(before, after)}


class _Everyone:
    """Asynchronous workers that wait for each other without standing still, by counters in the job's store."""

    def __init__(self, size: int, timeout: float) -> None:
        self._size, self._timeout = size, timeout
        store = default_store().clone()  # type: ignore[attr-defined]  # others may block on theirs
        self._store = PrefixStore("gossamer/bench", store)

    def step_until(self, training: BenchTrainer, what: str, ready: Callable[[], bool]) -> None:
        """Step until all workers are ready; they see it within a step of each other."""
        said, since = False, time.monotonic()
        while True:
            if not said and ready():
                self._store.add(what, 1)
                said = True
            missing = self._size - self._store.add(what, 0)
            if not missing:
                return
            if time.monotonic() - since > self._timeout:
                raise GossamerError(
                    f"{missing} of {self._size} workers were not {what} after {self._timeout:.0f} s of steps; "
                    "use a smaller model or faster links"
                )
            training.step()


def _until(task: MethodRun, training: BenchTrainer, warm: float) -> tuple[int, float | None]:
    """How many steps, or until when. Synchronous packages must agree on a number; Gossamer's workers need not."""
    if task.seconds is None:
        return task.steps, None
    if training.gossip is None:
        each = world.largest((time.monotonic() - warm) / task.warmup)
        return max(1, round(task.seconds / each)), None
    return 0, time.monotonic() + task.seconds


def _recorder(task: MethodRun, rank: int, size: int) -> tuple[TraceWriter | None, Watch | None]:
    """The peers' spans; Gossamer writes its own."""
    if task.trace is None or task.method.package == "gossamer":
        return None, None
    nodes = [node for node, count in enumerate(task.setup.per_node) for _ in range(count)]
    writer = TraceWriter(Path(task.trace), rank, nodes)
    shift = writer.now() - time.perf_counter()

    def watch(category: str, start: float, end: float, attrs: dict[str, Any]) -> None:
        writer.record(category, start + shift, end + shift, **attrs)

    return writer, watch


@dataclass(frozen=True)
class _Readings:
    cpu: CpuTimes | None
    own: float
    nic: tuple[int, int] | None
    counters: dict[str, float]


def _readings(training: BenchTrainer) -> _Readings:
    return _Readings(CpuTimes.now(), time.process_time(), interface_bytes(), training.counters())


def _spent(before: _Readings, after: _Readings) -> dict[str, Any]:
    counted = {k: v - before.counters.get(k, 0.0) for k, v in after.counters.items()}
    nic = None
    if before.nic is not None and after.nic is not None:
        nic = {"sent": after.nic[0] - before.nic[0], "received": after.nic[1] - before.nic[1]}
    return {
        "cpu_use": before.cpu.use_until(after.cpu) if before.cpu and after.cpu else None,
        "own_cpu_seconds": after.own - before.own,
        "interface": nic,
        "waited": {k[5:]: v for k, v in counted.items() if k.startswith("wait:")},
        "sent": {int(k[5:]): v for k, v in counted.items() if k.startswith("sent:")},
        "rounds": counted.get("rounds"),
        "skipped_mixes": counted.get("skipped"),
    }


def interface_bytes() -> tuple[int, int] | None:
    """Bytes that left and reached this worker's node so far, headers included; None on loopback."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    try:
        lines = Path("/proc/self/net/dev").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        device, _, numbers = line.partition(":")
        if device.strip() == name and name != "lo":
            values = numbers.split()
            return int(values[8]), int(values[0])
    return None
